# Both `make train` and `make test` set everything up; they need Python and make only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test format golden pictures clean help

train: .venv/ready ## train a small GPT on Python's own sources with WPipe, one rank per core; two minutes on two cores
	$(BIN)/weft train

test: .venv/ready ## lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

format: .venv/ready ## fix lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: .venv/ready ## regenerate the golden schedules; read the diff before you commit it
	$(BIN)/pytest tests/schedule/test_golden.py --write-golden

pictures: .venv/ready ## redraw the picture of the README
	$(BIN)/weft draw wpipe --stages 4 --microbatches 4 --until 18.5 -o docs/wpipe.svg

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

clean: ## delete everything that make created
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
