# Everything happens in .venv, which the first target that needs it makes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The constraints pin the build's own tools too.
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet

.PHONY: demo test lint bench clean

demo: $(VENV)/.package
	$(BIN)/deephoyer run demo

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/training_step.py

$(VENV)/.package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing deephoyer into $(VENV) (torch is large: a minute or more)"
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable ".[vision,export,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
