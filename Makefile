# Everything happens in a virtual environment, which the first target that needs it makes; only test-gpu makes none.
# Other versions: make test PYTHON=python3.13 VENV=.venv-3.13; make test TORCH=2.9.1 (or TORCH=newest).
PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# The constraints pin the build's own tools too.
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
# Files in their order: sorted by their numbers of tests, a few long tests would come last and one process wait for them.
PYTEST := -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo docs test test-all test-gpu test-browser torture lint clean

demo: $(VENV)/.package
	$(BIN)/deephoyer run demo

test: lint
	$(BIN)/python $(PYTEST) -m "not slow and not browser"

test-all: lint
	$(BIN)/python $(PYTEST)

test-browser: $(VENV)/.dev
	$(BIN)/python -m pytest -m browser tests

test-gpu:
	$(PYTHON) benchmarks/on_gpu.py $(if $(JOBS),--jobs $(JOBS))

torture: $(VENV)/.dev
	$(BIN)/python benchmarks/torture.py

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	@echo "docs/_build/index.html"

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
ifeq ($(TORCH),)
	$(BIN)/mypy  # against the pinned torch alone: 2.9's own types have no Module.to(memory_format=…)
endif

$(VENV)/.package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(TORCH),)
	grep -vE '^(torch|torchvision|torchao|triton|nvidia-.*|cuda-.*)==' constraints.txt > $(CONSTRAINTS)
	$(if $(filter-out newest,$(TORCH)),echo 'torch==$(TORCH)' >> $(CONSTRAINTS))
	$(if $(filter 2.9%,$(TORCH)),echo 'torchao==0.14.1' >> $(CONSTRAINTS))  # later ones need a later torch
endif
	@echo "installing deephoyer into $(VENV) (torch is large: a minute or more)"
	$(PIP) --editable ".[lab]"
	touch $@

$(VENV)/.dev: $(VENV)/.package
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable ".[lab,export,docs,hosts,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
