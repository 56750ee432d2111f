# Every target does its own set-up. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
ARGS ?=
# More than one OpenMP thread on a busy machine makes small models a hundred times slower.
export OMP_NUM_THREADS := 1
# Files go to two workers, each to one as a whole, in order: fixtures are made once, and long files do not come last.
PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup slim test test-slow test-next opinfo lint demo bench bench-startup bench-cache bench-setup docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## make .venv/ (a few minutes the first time, nothing after that)
	@tools/setup.sh

slim: setup ## make .venv-slim/: what serving from a cache needs, without any compiler
	@tools/setup_slim.sh

test: setup ## run the suite, without the long matrices
	$(PYTHON) -m pytest $(PARALLEL) $(ARGS)

test-slow: setup ## run the long matrices
	$(PYTHON) -m pytest $(PARALLEL) -m slow $(ARGS)

test-next: setup ## run what meets vLLM on the release after the pinned one
	@tools/setup_next.sh
	PYTHONPATH=$(CURDIR)/.venv-next $(PYTHON) -m pytest tests/model tests/graphs tests/execute tests/serve tests/jobs/test_compile_only.py tests/jobs/test_warm_start.py $(ARGS)

opinfo: setup ## run torch's own operator tests by both routes (about an hour), and count what became of them
	$(PYTHON) -m tools.opinfo $(ARGS)

lint: setup ## check style, format and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy -p vllm_neuron -p tools -p benchmarks

demo: setup ## compile a model without its weights, serve it strictly from the cache, ask it a question
	$(PYTHON) -m tools.demo $(ARGS)

bench: setup bench-setup ## measure ours, eager PyTorch and stock vLLM side by side
	$(PYTHON) -m benchmarks.bench $(ARGS)

bench-startup: setup bench-setup ## measure start-up until the first token, ours and stock vLLM side by side
	$(PYTHON) -m benchmarks.startup $(ARGS)

bench-cache: setup ## measure what a hit costs, and a fetch from a remote folder next to cp of the same bytes
	$(PYTHON) -m benchmarks.cache $(ARGS)

bench-setup: ## make .venv-stock/: stock vLLM for CPUs, for comparison only
	@benchmarks/setup_stock.sh

docs: setup ## write the generated reference pages
	$(PYTHON) -m tools.generate_variable_reference
	$(PYTHON) -m tools.generate_error_reference

clean: ## remove what the targets made, but the environments
	rm -rf .demo .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
