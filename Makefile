# Every target does all of its own set-up: Python >= 3.11, make and a C compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONTROL := assets/emoji64_edges

.PHONY: help env demo test test-slow test-mutations lint types clean

help:
	@echo "make demo            sample from the shipped checkpoints into out/demo/"
	@echo "make test            environment, lint, types, tests"
	@echo "make test-slow       the long proofs"
	@echo "make test-mutations  small wrong changes, each of which a test must notice"

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "visgen needs Python >= 3.11, $(PYTHON) is %d.%d; use make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and what else visgen needs into $(VENV): once, some minutes, several GB"
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install -e '.[dev]'
	@touch $@

demo: env
	$(BIN)/python sample.py configs/sample/demo.yaml --out out/demo
ifneq ($(wildcard $(CONTROL)/config.yaml),)
	$(BIN)/python sample.py configs/sample/demo_canny.yaml --checkpoint $(CONTROL) --out out/demo/canny
endif

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile

test-slow: env
	$(BIN)/python -m pytest -m slow

test-mutations: env
	$(BIN)/python tests/mutations.py

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
