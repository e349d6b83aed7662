# Each target works on a fresh clone: it makes .venv first if that is not there yet.
#
#   make serve        install, then serve the embedded model at http://127.0.0.1:8000
#   make test         every test that needs no accelerator
#   make check        format, lint, types, architecture (CONTRIBUTING.md)
#   make bench        offline throughput beside Transformers, into benchmarks/results/; ARGS=serving for a server's costs
#   make bench-peers  the same workloads beside vLLM and OpenVINO, each installed once into .cache/peers (5 GB)
#   make bench-gpu    on a machine with a GPU: check every kernel and the engine, then time them, into benchmarks/results/
#   make test-long    the slow tests
#   make attack       hostile requests, files and connections against a server, one after the other (tests/attacks)
#   make sanitize     the CPU's kernels under the address and undefined-behaviour sanitizers (two minutes)
#   make soak         ten minutes of random load on a server; ARGS="--seconds 60" for less
#   make install      only make .venv
#   make clean        remove .venv and caches

HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

# One known build of torch. On Linux the plain one brings CUDA; for a machine without a GPU, smaller:
#   make install TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

# The first Python from 3.11 to 3.13 that can make a venv; name another with PYTHON=...
SUITS := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c '$(SUITS)' >/dev/null 2>&1 && echo $(p))))

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install serve test test-long attack sanitize soak check check-types check-architecture format bench bench-peers clean

install: $(INSTALLED)

# pyproject.toml changed, or nothing is there: bring .venv up to date. A half-made .venv has no stamp.
$(INSTALLED): pyproject.toml
	@$(BIN)/python -c '' 2>/dev/null || test -n "$(PYTHON)" || \
	  { echo "Python 3.11, 3.12 or 3.13 with venv is needed; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

serve: install
	$(BIN)/quire serve --host $(HOST) --port $(PORT) $(ARGS)

test: install
	$(BIN)/python -m pytest -q -m "not slow and not attack" -n 2 -p tests.xdist_schedule --max-worker-restart=0 $(ARGS)

test-long: install
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=3600 $(ARGS)

attack: install
	$(BIN)/python -m pytest -m attack -o faulthandler_timeout=3600 tests $(ARGS)

sanitize: install
	$(BIN)/python tests/ops/sanitize/run.py $(ARGS)

soak: install
	$(BIN)/python tests/processes/soak.py $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-architecture

check-types:
	$(BIN)/mypy

check-architecture:
	$(BIN)/python -m pytest -q tests/architecture

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

.cache/peers/.installed:
	$(BIN)/python benchmarks/peers/install.py --torch "$(TORCH)"
	@touch $@

bench-peers: install .cache/peers/.installed
	$(BIN)/python -m benchmarks peers $(ARGS)

# With the Python that has a CUDA build of torch: make bench-gpu GPU_PYTHON=python3; again: what is still to do;
# SECTIONS="steps serving": these, once more
GPU_PYTHON ?= $(BIN)/python
bench-gpu:
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m benchmarks gpu $(if $(SECTIONS),--only $(SECTIONS)) $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
