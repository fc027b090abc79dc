# Every command of the README and of .ci/run. Needs Python 3.11 to 3.13 and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Model hubs are never needed: the default model comes as a package.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo test test-slow lint format schema dashboard chaos clean

help:
	@echo "make demo       the loop on real text: index, calibrate, guard, watch"
	@echo "make test       the tests, with coverage"
	@echo "make test-slow  the long simulations as well"
	@echo "make lint       ruff, mypy, import contracts"
	@echo "make format     rewrite the sources in the house style"
	@echo "make chaos      every fault against the real components, with its accounting"
	@echo "make clean      remove what was made"

# One environment per set of packages, made when what it is made from changes.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ctxguard (a minute or two, once) …"
	@$(PIP) install -c constraints.txt -e ".[all]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need …"
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.run
	@$(BIN)/ctxguard demo

# A process for each part: tests that fork and signal do not meet the native threads that tests of
# models and indexes leave behind.
TESTS := benchmarks calibration chaos cli core demo guard monitor retrieval

test: $(VENV)/.dev
	@$(BIN)/coverage erase
	@set -e; for part in $(TESTS:%=tests/%) "ctxguard calibration"; do \
	  echo "$$part"; \
	  $(BIN)/python -m pytest -q -m "not slow" --cov --cov-append --cov-report= $$part; \
	done
	@$(BIN)/coverage report

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: $(VENV)/.run
	@$(BIN)/python tests/chaos

# The committed dashboard, after a change of what builds it.
dashboard: $(VENV)/.dev
	$(BIN)/python -m ctxguard.monitor.prometheus.dashboard > ctxguard/monitor/prometheus/dashboard.json

schema: $(VENV)/.run
	$(BIN)/python -m ctxguard.profile > ctxguard/profile.schema.json

clean:
	rm -rf $(VENV) build dist .demo .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
