# Everything happens inside this checkout (.venv, .cache, runs); only pip keeps its own cache elsewhere.
#   make quickstart   install, then train a small real model and show that it learned
#   make sft-then-rl  install, then SFT and GRPO from its weights
#   make test         install, then the fast tests (minutes)
#   make test-all     install, then every check that a change must pass, as CI does
#   make PYTHON=/path/to/python3.12 ...   with a Python of your choice (3.11 or newer)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Tests start hundreds of processes: each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
export LOCKSTEP_CACHE ?= $(CURDIR)/.cache/lockstep
TORCH := torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
STAMP := .venv/.installed
# One more than two cores: tests wait for processes of their own.
WORKERS ?= 3

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help install test test-all coverage mutations lint style format docs constraints lock lock-check quickstart sft-then-rl clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(STAMP)  ## the package and its tools into .venv

# Constraints and declarations decide what is installed; the sources are linked, not copied (-e).
$(STAMP): pyproject.toml constraints.txt Makefile
	@if [ ! -x $(BIN)/python ]; then \
	  for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	  done; \
	  if [ -z "$$python" ]; then \
	    echo "Lockstep needs Python 3.11 or newer: install it, or say where it is: make PYTHON=/path/to/python3.11 install" >&2; \
	    exit 1; \
	  fi; \
	  echo "creating .venv with $$("$$python" --version)"; \
	  "$$python" -m venv .venv; \
	fi
	@echo "installing $(TORCH), then the versions of constraints.txt; the first time this takes minutes"
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e '.[dev,trackers]'
	@touch $@

test: install  ## the fast tests: all but those marked slow
	$(PYTEST) -m 'not slow'

# Types are checked beside the tests, most of which wait for other processes now and then.
test-all: style  ## style, types, layers and all tests, with more random examples; CI runs this
	$(BIN)/mypy & types=$$!; $(PYTEST) --hypothesis-profile full; wait $$types

coverage: install  ## all tests, and which lines none of them runs
	$(PYTEST) --cov --cov-report=term

mutations: install  ## put known mistakes into a copy of the package, one by one; the fast tests must notice each
	$(BIN)/python -m tests.mutations

lint: style
	$(BIN)/mypy

style: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

format: install  ## put the sources into shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: install  ## write the generated pages and tables of docs/ again from the code
	$(BIN)/python -m lockstep.config.help > docs/settings.md
	$(BIN)/lockstep metrics list --markdown > docs/metrics.md
	$(BIN)/python -m tests.docs.pages

constraints: install  ## pin what .venv holds now, after a deliberate upgrade
	{ sed '/^[^#]/,$$d' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

lock:  ## the lock files in requirements/ again, after a change of pyproject.toml (needs uv)
	python3 requirements/lock.py

lock-check:  ## are the lock files what pyproject.toml asks for? (needs uv and the network)
	python3 requirements/lock.py --check

quickstart: install  ## teach SmolLM2-135M to find the largest number; compare before with after
	$(BIN)/lockstep train recipes/quickstart.yaml name=quickstart-$$(date +%Y%m%d-%H%M%S)

sft-then-rl: install  ## teach SmolLM2-135M to box its answers by SFT, then sums by GRPO from those weights
	stamp=$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/lockstep train recipes/sft_boxed.yaml name=sft-boxed-$$stamp; \
	$(BIN)/lockstep train recipes/grpo_after_sft.yaml name=grpo-after-sft-$$stamp warm_start=runs/sft-boxed-$$stamp

clean:  ## remove what the tools left; keeps .venv, .cache and runs
	rm -rf build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
