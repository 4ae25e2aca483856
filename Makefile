# Both `make train` and `make test` set everything up; they need Python and make only.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE # to compile tests once, not in every process of every run
PYTEST := $(BIN)/pytest --numprocesses auto --dist worksteal

# $(1): options for pytest. mypy runs at the same time; its output follows that of pytest.
define check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo '$(PYTEST) $(1)'; $(BIN)/mypy > .venv/mypy 2>&1 & mypy=$$!; \
	$(PYTEST) $(1); tests=$$?; \
	wait $$mypy; types=$$?; \
	echo $(BIN)/mypy; cat .venv/mypy; \
	exit $$((tests || types))
endef

.PHONY: train test test-all format golden pictures clean help

train: .venv/ready ## train a small GPT on Python's own sources with WPipe, one rank per core; two minutes on two cores
	$(BIN)/weft train

test: .venv/ready ## lint, types, and all tests but the slow ones; five minutes on two cores
	$(call check,-m "not slow")

test-all: .venv/ready ## lint, types, and every test; what a release needs
	$(call check)

format: .venv/ready ## fix lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: .venv/ready ## regenerate the golden schedules; read the diff before you commit it
	$(BIN)/pytest tests/schedule/test_golden.py --write-golden

pictures: .venv/ready ## redraw the pictures of the README and of docs/weave.md
	$(BIN)/weft draw wpipe --stages 4 --microbatches 4 --until 18.5 -o docs/wpipe.svg
	$(BIN)/weft draw weave --stages 4 --microbatches 4 --slack 0 --until 18 -o docs/weave.svg
	$(BIN)/weft draw weave --stages 4 --microbatches 4 --latency 0.5 --until 18.5 -o docs/weave-hops.svg
	$(BIN)/weft draw weave --stages 4 --microbatches 6 --slack 0 --no-split --until 22 -o docs/weave-whole.svg

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

clean: ## delete everything that make created
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
