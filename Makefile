# Everything runs in a virtual environment in this folder; the first use of a target installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/.train
	rm -rf runs/demo
	$(BIN)/randombatch compare digits --out runs/demo
	@echo "plot: runs/demo/comparison.png"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.train
	$(BIN)/randombatch bench attention
	$(BIN)/randombatch bench epoch
	$(BIN)/randombatch bench particles
	$(BIN)/randombatch bench ranks
	$(BIN)/randombatch bench store

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,hf,dev]"
	@touch $@ $(VENV)/.train
