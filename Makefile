# Everything that is done to this checkout. `make` alone prints what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench soak wheel clean cc faketime readers

help: ## print this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(STAMP) ## make .venv with everything that demo, test and check use

# torch first and pinned: left to the resolver it may fetch another release, or gigabytes of CUDA where there is no GPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpulease needs Python 3.11 or newer, and $(PYTHON) is older. Say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing torch and the tools into $(VENV): 1.5 GB, a few minutes, only this once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## three DDP trainings share four GPUs: see them held, waited for and given back
	@$(BIN)/python examples/demo.py

test: $(STAMP) cc faketime readers ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not soak' $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types, import rule, migration drift
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 0 tests/store -k drift

bench: $(STAMP) cc ## measure; results and what they are compared with are in bench/README.md
	$(BIN)/python -m bench $(BENCH_ARGS)

soak: $(STAMP) cc faketime ## the long rounds that try to break the promises
	$(BIN)/python -m pytest -n 2 -m soak --timeout 3600 $(PYTEST_ARGS)

wheel: $(STAMP) ## build dist/*.tar.gz, and dist/*.whl from that
	$(BIN)/python -m build --no-isolation

clean: ## remove .venv and everything built or cached
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Tests build stand-ins for the NVML and CUDA libraries, and deepspeed one of its own parts: in C and in C++.
cc:
	@{ command -v cc && command -v c++; } >/dev/null || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq gcc g++ libc6-dev >/dev/null; \
		else \
			echo "No C and C++ compiler: tests against stand-ins, and of deepspeed, will fail. Install gcc and g++." >&2; \
		fi; }

# Tests let the wall clock of a real daemon jump.
faketime:
	@ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq faketime >/dev/null; \
		else \
			echo "No libfaketime: tests of clock jumps will fail. Install the package faketime." >&2; \
		fi; }

# Tests do what the documents say, each page in a network of its own, and have systemd read the units.
readers:
	@for program in curl jq node ip systemd-analyze; do command -v $$program >/dev/null || missing=1; done; test -z "$$missing" || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq --no-install-recommends curl jq nodejs iproute2 systemd >/dev/null; \
		else \
			echo "Tests of the documents and units will fail. Install curl, jq, nodejs, iproute2 and systemd." >&2; \
		fi; }
