# Everything that is done to this checkout. `make` alone prints what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := build/.tests-compiled
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=

# One lane of tests: several at once on two cores, because most long tests only wait; then those that measure time: some at once
# in the fast lane, where they have bounds in seconds, and one by one in the slow lane, where some are ratios.
# build/tests/*.xml records what each took. tests/lanes.py says more.
LANE = $(BIN)/python -m pytest -q --lane $(1) --junit-xml=build/tests/$(1).xml $(PYTEST_ARGS)
lane = $(call LANE,$(1)) -n $(2) --dist loadgroup && $(call LANE,$(1)-alone) -n $(3) --dist loadgroup

# Whatever the environment says, bytecode is kept: otherwise every process of a lane would compile all tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all compile-tests check check-python check-page bench soak wheel clean packages promtool generators page-tools tools

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## make .venv with everything that demo, test and check use

# What git ignores and a build fetches: without it the page does not work, so a file that is missing is fetched again.
PINS := server/gpulease_server/dashboard/libraries.json
LIBRARIES := $(shell sed -n 's/.*"as": "\(.*\)",*/$(subst /,\/,$(dir $(PINS)))page\/vendor\/\1/p' $(PINS))
$(LIBRARIES): ;

# torch first and pinned: left to the resolver it may fetch another release, or gigabytes of CUDA where there is no GPU.
$(STAMP): pyproject.toml constraints.txt $(PINS) $(LIBRARIES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpulease needs Python 3.11 or newer, and $(PYTHON) is older. Say which: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing torch and the tools into $(VENV): 1.5 GB, a few minutes, only this once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would take one processor; some are not for this Python
	@touch $@

demo: $(STAMP) ## three DDP training runs share four GPUs: see them held, waited for and given back
	@$(BIN)/python examples/demo.py

test: $(COMPILED) packages promtool ## the fast lane: each promise, command and endpoint, in less than 10 minutes
	$(call lane,fast,6,4)

test-slow: $(COMPILED) packages promtool generators page-tools tools ## the slow lane: documents, browser, launchers, storms, outages, image; less than 20 minutes
	$(call lane,slow,6,0)

test-all: test test-slow ## both lanes

# Once in a clone, one process compiles all tests. Otherwise each of six would, at the same time.
compile-tests: $(COMPILED)
$(COMPILED): $(STAMP) | packages
	@mkdir -p $(@D)
	@$(BIN)/python -m pytest -qq --collect-only -n 0 >$@.log || { cat $@.log; exit 1; }
	@mv $@.log $@

check: check-python check-page ## lint, format, types, import rule, migration drift

check-python: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples integrations/*/*_*
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 0 tests/store -k drift

check-page: page-tools
	bash tests/dashboard/check.sh $(VENV)/page-tools

bench: $(STAMP) packages ## how fast it is, beside limits and peers; needs a quiet machine, see bench/README.md
	$(BIN)/python -m bench $(BENCH_ARGS)

soak: $(STAMP) packages promtool tools ## the long rounds that try to break the promises
	$(call LANE,soak) -n 2 --dist loadgroup --timeout 3600 && $(call LANE,soak-alone) -n 0 --timeout 3600

wheel: $(STAMP) ## build dist/*.tar.gz, and dist/*.whl from that
	$(BIN)/python -m build --no-isolation

clean: ## remove .venv and everything built or cached
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

packages:
	@bash tests/packages.sh

# What checks the modules of the dashboard, and axe-core for the tests of the page.
page-tools: $(STAMP) packages
	@bash tests/dashboard/install.sh $(VENV)/page-tools || \
		echo "No checks of the dashboard: they come from npm." >&2

# What makes clients of the OpenAPI document.
generators: $(STAMP) packages
	@bash tests/generated/install.sh $(VENV)/generators || \
		echo "No generators: tests of generated clients will fail. They come from PyPI and npm." >&2

# What hands out GPUs in docs/tools: Hydra, Ray, submitit, notebooks.
tools: $(STAMP) packages
	@bash tests/tools/install.sh $(VENV)/tools || \
		echo "No sweep tools: tests/tools will fail. They come from PyPI." >&2

# Tests check metrics, alerts and the dashboard with Prometheus' own tool. Only that one program is taken out of Debian's
# package, because the package would start a server.
promtool: $(STAMP)
	@test -x $(BIN)/promtool || command -v promtool >/dev/null || { \
		place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT && chmod 755 "$$place" && \
		{ [ "$$(id -u)" != 0 ] || apt-get update -qq; } && \
		(cd "$$place" && apt-get -qq -o APT::Sandbox::User="$$(id -un)" download prometheus >/dev/null) && \
		dpkg-deb --fsys-tarfile "$$place"/prometheus_*.deb | tar -x -C "$$place" ./usr/bin/promtool && \
		install "$$place"/usr/bin/promtool $(BIN)/promtool; \
	} || echo "No promtool: tests of metrics will fail. Put it into PATH; Debian's package prometheus has it." >&2
