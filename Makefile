# Every command of the README and of .ci/run. Needs Python 3.11 to 3.13 and make, nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# Files alone whose hashes are listed, and nothing that would have to be built first.
LOCKED := $(PIP) --require-hashes --no-deps --only-binary :all:

# Model hubs are never needed: the default model comes as a package.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo examples wheel test coverage test-clients test-install test-slow test-portable test-kernels lint format schema dashboard docs figures pictures chaos fuzz lock clean

help:
	@echo "make demo          the loop on real text: index, calibrate, guard, watch"
	@echo "make examples      every script in examples/"
	@echo "make test          the tests"
	@echo "make coverage      the tests, and which lines they run: takes twice as long"
	@echo "make test-slow     the long simulations as well"
	@echo "make test-portable the parts that need no model, as on macOS"
	@echo "make test-clients  frameworks and clients of the rerank service, by their own code"
	@echo "make test-install  the README's installation lines in empty environments"
	@echo "make test-kernels  the numeric tests with a plainer processor's arithmetic"
	@echo "make lint          ruff, mypy, import contracts"
	@echo "make format        rewrite the sources in the house style"
	@echo "make docs          the documentation as a site, in build/site"
	@echo "make chaos         every fault against the real components, with its accounting"
	@echo "make fuzz          a million odd inputs against every surface: an hour or two"
	@echo "make wheel         the package, in dist/"
	@echo "make clean         remove what was made"

# Where the build for processors cannot be fetched: a torch that the Python in use has, or PyPI's.
ANY_TORCH = { echo "  the CPU build of torch could not be fetched ($$(tail -n 1 $(VENV)/.torch))"; \
  found=$$($(PYTHON) -c "import os, torch; print(os.path.dirname(torch.__path__[0]))" 2>/dev/null) && \
  echo "  using the torch of $$found" && \
  echo "$$found" > $$($(BIN)/python -c "import site; print(site.getsitepackages()[0])")/torch_of_the_base.pth || \
  { echo "  installing PyPI's instead: on Linux that is several GB" && $(PIP) "torch>=2.6"; }; }

# One environment per set of packages, made when what it is made from changes.
$(VENV)/.packages: pyproject.toml locks/torch.txt locks/all.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ctxguard (a minute or two, once) …"
	@$(LOCKED) -r locks/torch.txt 2>$(VENV)/.torch || $(ANY_TORCH)
	@$(LOCKED) -r locks/all.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.packages locks/dev.txt
	@echo "installing what the tests need …"
	@$(LOCKED) -r locks/dev.txt
	@touch $@

# Apart from the others: clients hold back versions of what ctxguard uses.
CLIENTS := $(VENV)-clients/bin/python -m pip --disable-pip-version-check --quiet install --no-deps

$(VENV)-clients/.made: pyproject.toml locks/clients.txt
	@test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	@echo "installing frameworks and clients of the rerank service …"
	@$(CLIENTS) --require-hashes --only-binary :all: -r locks/clients.txt
	@$(CLIENTS) --no-build-isolation -e .
	@touch $@

# Clients leave connections open, and call what their libraries call outdated.
PYTEST_CLIENTS := $(addprefix -W ignore::,ResourceWarning DeprecationWarning UserWarning \
  pytest.PytestUnraisableExceptionWarning)

test-clients: $(VENV)-clients/.made
	@$(VENV)-clients/bin/python -m pytest -q $(PYTEST_CLIENTS) tests/server/clients
	@$(VENV)-clients/bin/python -m pytest -q tests/integrations

# Minutes for each Python, and some gigabytes for as long as it runs.
PYTHONS ?= $(BIN)/python

test-install: $(VENV)/.dev
	@PYTHONS="$(PYTHONS)" $(BIN)/python -m pytest -q tests/docs/test_install.py

demo: $(VENV)/.packages
	@$(BIN)/ctxguard demo

examples: $(VENV)/.packages
	@set -e; for script in $(sort $(wildcard examples/*.py)); do \
	  echo "$$script"; $(BIN)/python "$$script"; \
	done

# A process for each part: where tests of models have left native threads behind, a test that forks
# is warned by Python 3.12 and later, and warnings are errors. The longest parts begin first, so that
# no long one is left over at the end.
LONGEST := monitor retrieval cli calibration server fuzz docs chaos benchmarks
PARTS := $(notdir $(patsubst %/,%,$(sort $(dir $(wildcard tests/*/test_*.py)))))
PARTS := $(filter $(PARTS),$(LONGEST)) $(filter-out $(LONGEST),$(PARTS))

part-%:
	@echo "$(or $(FOLDERS),tests/$*)"
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} COVERAGE_FILE=.coverage.$* \
	  $(BIN)/python -m pytest -q $(PYTEST) $(or $(FOLDERS),tests/$*) || \
	{ echo "failed: $(or $(FOLDERS),tests/$*)" >> $(VENV)/.failed; exit 1; }

part-doctests: FOLDERS := ctxguard calibration

# $(call run,PREFIX,PYTEST'S ARGUMENTS,PARTS): some parts at a time, all of them, whatever fails; the
# parts that failed are named at the end.
JOBS ?= 2
define run
@rm -f $(VENV)/.failed; \
$(1) $(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) \
  $(if $(filter output-sync,$(.FEATURES)),--output-sync) PYTEST='$(2)' $(3:%=part-%) || \
{ cat $(VENV)/.failed; exit 1; }
endef

test: $(VENV)/.dev
	$(call run,,-m "not slow",$(PARTS) doctests)

coverage: $(VENV)/.dev
	$(call run,,-m "not slow" --cov --cov-report=,$(PARTS) doctests)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

test-slow: $(VENV)/.dev
	$(call run,,,$(PARTS) doctests)

# The parts that need no model, which CI runs on macOS as well.
PORTABLE := core guard calibration monitor

test-portable: $(VENV)/.dev
	$(call run,,-m "not slow and not model and not shared",$(filter $(PORTABLE),$(PARTS)))

# The files whose outcome can depend on the processor's arithmetic, again with a plainer processor's:
# those that compare, order or choose by what an encoder, BLAS, faiss or scikit-learn computed. Means
# of given scores, files, processes and fakes come out alike on any.
KERNELS_benchmarks := index_update ranker search
KERNELS_calibration := calibrate calibrate_route fit named_signals choice sufficiency
KERNELS_core := corpus_sketch expected_utility fusion metrics policy relevance scores signals \
  sufficiency
KERNELS_retrieval := dense encoder filters hybrid lexical models retriever_contract scifact signals \
  update

part-kernels-%: FOLDERS = $(KERNELS_$(*:kernels-%=%):%=tests/$(*:kernels-%=%)/test_%.py)

test-kernels: $(VENV)/.dev
	$(call run,$(BIN)/python -m tests.kernels,-m "not slow",$(addprefix kernels-,retrieval \
	  calibration benchmarks core))

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin -p ctxguard -p calibration
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A million odd inputs in all, at least 10,000 for each surface: an hour or two. The figures are
# written to benchmarks/results/fuzz.json.
FUZZ ?= 1000000
FUZZ_JOBS ?= 2

fuzz: $(VENV)/.dev
	@$(BIN)/python -m tests.fuzz --inputs $(FUZZ) --jobs $(FUZZ_JOBS)

chaos: $(VENV)/.packages
	@$(BIN)/python tests/chaos

# Apart from the others: it needs nothing of ctxguard but its sources. A link or an anchor that leads
# nowhere fails it.
$(VENV)-docs/.made: locks/docs.txt
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip --disable-pip-version-check --quiet install \
	  --require-hashes --no-deps --only-binary :all: -r locks/docs.txt
	@touch $@

docs: $(VENV)-docs/.made
	@$(VENV)-docs/bin/python -m tools.docs build
	@$(VENV)-docs/bin/zensical build --strict --clean -f build/mkdocs.yml

# The committed dashboards, after a change of what builds them.
dashboard: $(VENV)/.dev
	$(BIN)/python -m tools.dashboard.dashboard > ctxguard/monitor/export/dashboard.json
	$(BIN)/python -m tools.dashboard.dashboard all > ctxguard/monitor/export/dashboard_all.json

# The figures that pages quote, from benchmarks/results/; the README's pictures, with Chromium.
figures: $(VENV)/.dev
	$(BIN)/python -m benchmarks.figures

pictures: $(VENV)/.dev
	$(BIN)/python -m tools.pictures

# The lock files, after a change of pyproject.toml or constraints.txt: every file of PyPI with its hash.
# UPGRADE=--upgrade moves every package to its newest version.
UPGRADE ?=

lock: $(VENV)/.dev
	@for extra in all image dev clients docs; do \
	  $(BIN)/uv pip compile --quiet $(UPGRADE) pyproject.toml --extra $$extra --group build -c constraints.txt \
	    --universal --python-version 3.11 --default-index https://pypi.org/simple --generate-hashes \
	    --no-emit-package torch --no-annotate --custom-compile-command "make lock" \
	    --output-file locks/$$extra.txt || exit 1; \
	done

# The package, and what an empty environment gets of it.
wheel: $(VENV)/.packages
	@rm -rf dist $(VENV)-wheel && $(PYTHON) -m venv $(VENV)-wheel
	@$(BIN)/python -m pip --disable-pip-version-check --quiet wheel --no-deps --no-build-isolation \
	  --wheel-dir dist .
	@$(VENV)-wheel/bin/python -m pip --disable-pip-version-check --quiet install --only-binary :all: \
	  --find-links dist "ctxguard-rag==$$($(BIN)/python -c 'import ctxguard; print(ctxguard.__version__)')"
	@cd dist && ../$(VENV)-wheel/bin/ctxguard doctor

schema: $(VENV)/.packages
	$(BIN)/python -m ctxguard.profile.schema > ctxguard/profile/profile.schema.json

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-docs $(VENV)-wheel build dist .demo .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
