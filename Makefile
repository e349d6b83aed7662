# Each target works on a fresh clone: it makes .venv first if that is not there yet.
#
#   make serve        install, then serve the embedded model at http://127.0.0.1:8000
#   make test         every test that needs no accelerator
#   make test-fast    the tests of the core, in less than a minute
#   make check        format, lint, types, architecture (CONTRIBUTING.md)
#   make bench        offline throughput beside Transformers, into benchmarks/results/; ARGS=serving for a server's costs
#   make bench-peers  the same workloads beside vLLM and OpenVINO, each installed once into .cache/peers (5 GB)
#   make bench-gpu    on a machine with a GPU: check every kernel and the engine, then time them, into benchmarks/results/
#   make test-long    the slow tests
#   make attack       hostile requests, files and connections against a server, one after the other (tests/attacks)
#   make clients      real clients (openai, langchain, lm-eval, ...) against a server, as far as the registry has them
#   make sanitize     the CPU's kernels under the address and undefined-behaviour sanitizers (two minutes)
#   make soak         ten minutes of random load on a server, two of adapters, one of vectors, two of sound, two of pictures, two of faults for each layout; ARGS="--seconds 60" for less
#   make docs         the documentation as a site with search, into site/ (it opens without a server)
#   make wheel        dist/quire-*.whl with the kernels inside, for machines with the same architecture (two minutes)
#   make install      only make .venv, to run Quire; make install-dev: also to test it
#   make constraints  write constraints.txt, the exact versions that these two take, from the newest that pyproject.toml allows
#   make test-oldest  make test with the oldest versions that pyproject.toml allows; make test-latest: with the newest
#   make clean        remove .venv and caches

HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

# One known build of torch. The plain one brings CUDA on Linux, several GB. Without an NVIDIA driver, the build for CPUs
# is taken where its index answers. To choose: make serve TORCH="torch==2.13.0"
CPU_INDEX := https://download.pytorch.org/whl/cpu
NO_DRIVER = test "$$(uname)" = Linux -a ! -e /proc/driver/nvidia/version -a ! -e /dev/dxg
ANSWERS = $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(CPU_INDEX)/torch/", timeout=5)' 2>/dev/null
CPU_BUILD = $(shell $(NO_DRIVER) && $(ANSWERS) && echo --extra-index-url $(CPU_INDEX))
TORCH ?= torch==2.13.0 $(CPU_BUILD)

# The first Python from 3.11 to 3.13 that can make a venv; name another with PYTHON=...
SUITS := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c '$(SUITS)' >/dev/null 2>&1 && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
# The exact versions of everything but torch. Another torch may need others: make serve TORCH="torch==2.12.0" CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python deploy/install/pip_progress.py $(VENV)/pip.log $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# setuptools is there already, in the version of the constraints; pip alone would fetch its newest one for the build.
QUIRE := --no-build-isolation -e
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.PHONY: install install-dev constraints serve docs wheel test test-oldest test-latest test-long attack clients sanitize soak check check-types check-architecture format \
  bench bench-peers bench-gpu clean

install: $(INSTALLED)

install-dev: $(INSTALLED_DEV)

# pyproject.toml changed, or nothing is there: bring .venv up to date. A half-made .venv has no stamp.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(BIN)/python -c '' 2>/dev/null || test -n "$(PYTHON)" || \
	  { echo "Python 3.11, 3.12 or 3.13 with venv is needed; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing Quire into $(VENV), once: 1.2 GB on disk with the CPU build of torch (some 300 MB to download), several GB with CUDA."
	@$(PIP) $(TORCH) "setuptools>=77.0.3"
	@$(PIP) $(QUIRE) .
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@echo "Installing what tests and checks need into $(VENV), once: another 0.9 GB on disk."
	@$(PIP) $(QUIRE) '.[dev]'
	@touch $@

# Each Python resolves for itself, so all three are needed: make constraints PYTHONS="python3.11 /path/to/python3.12 python3.13"
PYTHONS ?= python3.11 python3.12 python3.13
constraints:
	$(firstword $(PYTHONS)) tools/constraints.py write --torch $(firstword $(TORCH)) --pythons $(PYTHONS)

# In an environment of its own; ARGS chooses tests: make test-oldest ARGS=tests/models
test-oldest:
	@mkdir -p .cache
	$(PYTHON) tools/constraints.py oldest > .cache/oldest.txt
	$(MAKE) test VENV=.cache/oldest CONSTRAINTS=.cache/oldest.txt TORCH="torch $(CPU_BUILD)"

test-latest:
	rm -rf .cache/latest
	$(MAKE) test VENV=.cache/latest CONSTRAINTS=

serve: install
	$(BIN)/quire serve --host $(HOST) --port $(PORT) $(ARGS)

docs: install-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "The site is in site/index.html"

wheel: install-dev
	$(BIN)/python deploy/wheel/make_wheel.py dist

test: install-dev
	$(BIN)/python -m pytest -q -m "not slow and not attack and not clients" -n 2 -p tests.xdist_schedule --max-worker-restart=0 $(ARGS)

# The folders whose tests are quick and catch the most: the rules of the tree, configuration, engine, frontend, speculation's controller.
# Left out are files that test the tests, or start many processes.
FAST := tests/architecture tests/config tests/engine tests/speculation/test_controller.py \
  $(addprefix --ignore=tests/,engine/test_mutations.py config/test_as_vllm.py config/test_plugins.py)
test-fast: install-dev
	$(BIN)/python -m pytest -q -m "not slow and not attack and not clients" -n 2 --dist worksteal --max-worker-restart=0 $(FAST) $(ARGS)

test-long: install-dev
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3600 $(ARGS)

attack: install-dev
	$(BIN)/python -m pytest -m attack -o faulthandler_timeout=3600 tests $(ARGS)

# Real clients of other projects, in an environment of their own; what cannot be installed is named and skipped.
clients: install-dev
	$(BIN)/python -m tests.clients.install .cache/clients
	.cache/clients/bin/python -m pytest -q -rs -m clients -o faulthandler_timeout=1800 tests/clients $(ARGS)

sanitize: install-dev
	$(BIN)/python tests/ops/sanitize/run.py $(ARGS)

soak: install-dev
	$(BIN)/python tests/processes/soak.py $(ARGS)
	$(BIN)/python tests/processes/soak_adapters.py $(ARGS)
	$(BIN)/python tests/processes/soak_pooling.py $(ARGS)
	$(BIN)/python tests/processes/soak_sound.py $(ARGS)
	$(BIN)/python tests/processes/soak_pictures.py $(ARGS)
	$(BIN)/python tests/processes/soak_faults.py $(ARGS)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-architecture

check-types:
	$(BIN)/mypy

check-architecture:
	$(BIN)/python -m pytest -q tests/architecture

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install-dev
	$(BIN)/python -m benchmarks $(ARGS)

.cache/peers/.installed:
	$(BIN)/python benchmarks/peers/install.py --torch "$(TORCH)"
	@touch $@

bench-peers: install-dev .cache/peers/.installed
	$(BIN)/python -m benchmarks peers $(ARGS)

# With the Python that has a CUDA build of torch: make bench-gpu GPU_PYTHON=python3; again: what is still to do;
# SECTIONS="steps serving": these, once more
GPU_PYTHON ?= $(BIN)/python
bench-gpu:
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks gpu $(if $(SECTIONS),--only $(SECTIONS)) $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
