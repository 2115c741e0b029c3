# Everything a contributor runs. Each target sets up what it needs; `make` alone lists them.

PYTHON ?= python3
VENV   ?= .venv
# Tests and the demo are checked against this torch. Another one: make setup TORCH='torch==2.14.1'
TORCH  ?= torch==2.13.0
# More arguments for pytest: make test ARGS='-k rope'
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.codetta-installed

# Test workers share the cores; a pool of threads in each would only make them wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test spills mutants gpu memcheck check format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

setup: $(STAMP)  ## create .venv and install codetta with its development tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("codetta needs Python 3.11 or later, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "setting up $(VENV): $(TORCH), codetta and its development tools (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)' -e '.[dev,hopper,flash]'
	@touch $@

demo: $(STAMP)  ## train a small Llama twice, eager and codetta, and compare
	@$(BIN)/codetta demo

test: $(STAMP)  ## run all tests that this machine can run
	@$(ONE_THREAD) $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

spills: $(STAMP)  ## compile every kernel of Llama 1B, 8B and 70B for SM90 and read its spills
	@CODETTA_SPILLS=all $(ONE_THREAD) $(BIN)/python -m pytest -n auto --maxprocesses 8 tests/backends/hopper -k spill

mutants: $(STAMP)  ## put mistakes into the tables, 50 one by one, and see whether the tests notice (some minutes)
	@$(ONE_THREAD) $(BIN)/python benchmarks/mutate.py $(ARGS)

gpu: $(STAMP)  ## run the tests that need a GPU with kernels
	@$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

memcheck: $(STAMP)  ## there too: a small training run under NVIDIA's memory checker, log in benchmarks/results
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
	  --log-file benchmarks/results/memcheck.log $(BIN)/python tests/gpu/memcheck.py; \
	  code=$$?; tail -n 3 benchmarks/results/memcheck.log; exit $$code

check: $(STAMP)  ## formatting, lint, types, house rules
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP)  ## format and fix what can be fixed by a tool
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

clean:  ## remove caches, build results and .venv
	rm -rf $(VENV) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
