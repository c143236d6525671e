# `make demo` and `make test` set themselves up: a virtual environment, this package, torch and jax for the CPU's sake.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One exact version: any range would also be met by builds with gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0

.PHONY: demo test test-full lint clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[cuda,tpu,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks.demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-full: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m ''

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) demo build dist *.egg-info
