# make demo | test | check | bench: each sets up what it needs in .venv (once), without root. `make help` lists all.
#
# PYTHON=/path/to/python3.11 chooses the interpreter of a new .venv; ARGS="tests/core -k placement" goes to pytest, the demo or the benchmark.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test check format bench sim soak gpu-check setup-demo setup-test clean distclean

PY := .venv/bin/python
ARGS ?=

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup-demo:
	@tools/setup_venv.sh demo

setup-test:
	@tools/setup_venv.sh test

demo: setup-demo ## a small training run that loses a rank and goes on
	@$(PY) examples/demo.py $(ARGS)

test: setup-test ## all tests: pure ones in parallel, those with processes one by one
	@tools/run_tests.sh $(ARGS)

check: setup-test ## lint, format, types, layers
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy --strict
	@.venv/bin/lint-imports

format: setup-test ## put the code into its form
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .

bench: setup-test ## side by side with torchrun and NVRx
	@$(PY) bench/run.py $(ARGS)

sim: setup-test ## as many simulated days as fit into FT_SIM_S seconds (60), on all cores; SEED=n: from this seed on
	@$(PY) tools/sim_many.py

soak: setup-test ## the long tests
	@FT_ETCD=$$(tools/etcd.sh) $(PY) -m pytest -q -m soak $(ARGS)

gpu-check: setup-test ## the tests that need a GPU
	@$(PY) -m pytest -q -m gpu $(ARGS)

clean: ## remove what runs and tests leave, keep .venv
	@rm -rf .demo .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist ft_logs
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	@rm -rf .venv *.egg-info
