# Two commands set everything up on a machine with Python and make: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test format golden pictures clean help

train: .venv/ready ## the main job: a small GPT on Python's own sources, WPipe, a rank for each core; two minutes
	$(BIN)/weft train

test: .venv/ready ## lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

format: .venv/ready ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: .venv/ready ## write the golden schedules anew; read the diff before you commit it
	$(BIN)/pytest tests/schedule/test_golden.py --write-golden

pictures: .venv/ready ## make the pictures of the README anew
	$(BIN)/weft draw wpipe --stages 4 --microbatches 4 --until 18.5 -o docs/wpipe.svg

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile

clean: ## away with all that was made
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
