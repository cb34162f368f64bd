# Everything a newcomer needs: `make demo`, `make test`. Both set up .venv first, once. (`make gpu-check`
# sets up nothing: a machine with a GPU may have no network.)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.moeserve-setup
CHECKPOINT ?= checkpoints/tiny
EP ?= 2
PORT ?= 8000
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-dist test-kernels test-namespaces test-slurm lint format type bench gpu-check clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1|/' \
	  | awk -F'|' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Make .venv and install everything (skipped when done)

$(STAMP): pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV)
	@touch $@

demo: $(STAMP)  ## Two ranks serve the bundled model; real requests; load and memory shown
	@$(BIN)/python -m launch.demo

serve: $(STAMP)  ## Serve CHECKPOINT (checkpoints/tiny) on EP ranks at PORT
	@$(BIN)/moeserve serve $(CHECKPOINT) --ep $(EP) --port $(PORT)

test: $(STAMP)  ## All tests a CPU can run
	@bash scripts/test.sh $(BIN) $(PYTEST_ARGS)

test-dist: $(STAMP)  ## Only the tests that start real ranks
	@bash scripts/test.sh $(BIN) -m dist $(PYTEST_ARGS)

test-kernels: $(STAMP)  ## Only the GPU kernels in triton's interpreter
	@bash scripts/test.sh $(BIN) tests/interpreter $(PYTEST_ARGS)

test-slurm: $(STAMP)  ## Jobs on a Slurm and an ssh server that really run here (root, Debian)
	@bash scripts/slurm_world.sh install
	@$(BIN)/python -m pytest -q tests/slurm $(PYTEST_ARGS)

test-namespaces: $(STAMP)  ## Machines as network namespaces: all cases (root)
	@MOESERVE_TEST_NAMESPACES=1 bash scripts/test.sh $(BIN) tests/dist/test_namespaces.py $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff, formatting included
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(STAMP)  ## Let ruff mend what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

type: $(STAMP)  ## mypy (strict on ep, dispatch, moeserve, launch)
	@$(BIN)/mypy

bench: $(STAMP)  ## Decode and prefill speed of CHECKPOINT (BENCH_ARGS="--batch 1,8 --ep 2")
	@$(BIN)/moeserve bench offline $(CHECKPOINT) $(BENCH_ARGS)

gpu-check:  ## All that wants a GPU: a table, gpu-check.json (no setup; GPU_CHECK_ARGS="--only checks")
	@bash scripts/gpu_check.sh $(BIN) $(PYTHON) $(GPU_CHECK_ARGS)

clean:  ## Remove .venv and all that was built
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
