# Everything goes through the virtual environment $(VENV), which the first target that needs it sets up.
#
#   make VENV=/tmp/v311 PYTHON=python3.11 test     another place, another interpreter
#   make test ARGS="-x tests/test_grid.py"         more arguments for pytest

VENV ?= .venv
PYTHON ?=
ARGS ?=
export VENV PYTHON

# An environment that PYTHON names has a stamp of its own, so that another interpreter means another environment.
READY := $(VENV)/.ready$(subst /,_,$(PYTHON))
RUN := $(VENV)/bin/python

# TensorFlow greets on standard error, and takes a machine without a GPU for an error; exceptions come all the same.
export TF_CPP_MIN_LOG_LEVEL ?= 3
unexport PYTHONHOME PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow bench docs lint format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Find a Python, make the environment, install everything into it

$(READY): setup.py scripts/setup-env
	scripts/setup-env

demo: $(READY) ## From real rasters to TFRecords, a trained model and a map
	$(RUN) apps/demo.py $(ARGS)

test: $(READY) ## Run the quick tests
	$(RUN) -m pytest -q --hypothesis-profile=ci -m "not slow" $(ARGS)

test-slow: $(READY) ## Run the slow tests
	$(RUN) -m pytest -q --hypothesis-profile=ci -m slow $(ARGS)

bench: $(READY) ## Measure speed beside a baseline, as ratios
	$(RUN) -m benchmarks $(ARGS)

docs: $(READY) ## Build the documentation into site/
	$(RUN) -m mkdocs build --quiet --strict

lint: $(READY) ## Check style, format and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(READY) ## Put the code into the form that lint asks for
	$(RUN) -m ruff check --fix-only
	$(RUN) -m ruff format

clean: ## Remove what the other targets wrote, except the environment
	rm -rf site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find apps benchmarks otbtf_lite tests -name __pycache__ -type d -prune -exec rm -rf {} +
