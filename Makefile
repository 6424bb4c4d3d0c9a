# SPDX-License-Identifier: Apache-2.0
# Everything a contributor runs. Needs python3 with venv and a C++17 compiler; with nvcc in CUDA_HOME
# the core gets its kernels. Stamp files in $(VENV) keep a second run from installing anything again.
#
#   PYTHON      the interpreter that makes the environment
#   TORCH       what pip installs as torch, options included
#   VENV_FLAGS  e.g. --system-site-packages with TORCH=torch: use the machine's own torch
#   MAX_JOBS    compiler processes (left out: ninja decides)
#   MINORS      the minors of torch that `make matrix` builds and tests
#   WHEELS      what `make wheels` builds: PYTHON:TORCH, with :cuda for a core with kernels
#   LANES       what `make test` runs: tests, other (the other release) or both; both by default
#   PYTEST_FLAGS  further arguments of pytest, in every lane
#   MUTANTS     of `make mutants`: texts of the file or the test of a fault; all by default
#   SOAK        options of `make soak`; ten minutes from a seed of the time by default
#   PARTS       what `make gpu` runs: some of ops, bank, megatron, ranks, commands; all by default
PYTHON ?= python3
TORCH ?= torch==2.11.0
VENV ?= .venv
VENV_FLAGS ?=
LANES ?=
MUTANTS ?=
SOAK ?= --seconds 600 --seed $(shell date +%s)
PYTEST_FLAGS ?=
MINORS ?= 2.11 2.12 2.13 2.14 2.15

# One with kernels if nvcc is there.
WHEELS ?= $(MINORS:%=3.12:%) 3.10:2.11 3.11:2.11 3.13:2.11 $(if $(shell command -v nvcc $(CUDA_HOME)/bin/nvcc),3.12:2.11:cuda)

# Two releases of megatron-core are tested: one installed, the other from an unpacked wheel.
# 0.19.2 installs on Python 3.12 and newer only, but works unpacked on older ones.
NEW_PYTHON := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info >= (3, 12) else "")')
CORE := $(if $(NEW_PYTHON),0.19.2,0.16.1)
OTHER_CORE := $(if $(NEW_PYTHON),0.16.1,0.19.2)
OTHER_CORE_DIR := .deps/megatron_core-$(OTHER_CORE)
# Of which tests take the adapters alone; the package asks for many others.
BRIDGE := 0.3.1
BRIDGE_DIR := .deps/megatron_bridge-$(BRIDGE)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BUILD_TOOLS := "setuptools>=77,<82" wheel ninja pybind11 numpy
# uv fetches and unpacks side by side, in half of pip's time. It does not see the machine's own
# packages, nor what pip alone is told of an index: then it is pip's turn.
install = $(if $(VENV_FLAGS),false,$(1)/python -m uv pip install --quiet --no-cache --python $(1)/python $(2)) || \
    $(1)/python -m pip --disable-pip-version-check --quiet install $(2)
CORE_SOURCES := setup.py $(shell find csrc -type f 2>/dev/null)
PYTHON_SOURCES = $(shell find megagraph -name '*.py' ! -name _build_info.py)
CPP_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
LINTS := lint-ruff lint-mypy lint-imports lint-cpp lint-spelling lint-docs lint-stubs lint-tidy

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: .venv-torch-%/.ready .venv-torch-%/core/.ready
.PHONY: help environment build demo docs test nightly mutants soak sizes gpu matrix matrix-newest environment-newest wheel-newest sdist wheels sanitize lint $(LINTS) format bench clean

help:
	@echo "make demo | test | gpu | sdist | wheels | matrix | lint | docs | format | bench | sanitize | build | clean"
	@echo "make nightly | mutants | soak: what takes too long for every change; make sizes: how large the project is"

# ---- environment: each stamp is one step ----

$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) install --upgrade "pip>=25.1" uv
	$(call install,$(BIN),$(BUILD_TOOLS) $(TORCH))
	@touch $@

# Installed once; later edits of the core go through setup.py, which compiles only what changed.
$(VENV)/.built: $(CORE_SOURCES) | $(VENV)/.torch
	if test -e $(VENV)/.installed; then \
	    $(BIN)/python setup.py --quiet build_ext --inplace; \
	else \
	    $(PIP) install megatron-core==$(CORE) && \
	    $(PIP) install --no-build-isolation -e ".[megatron]" && \
	    touch $(VENV)/.installed; \
	fi
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.torch
	$(call install,$(BIN),--group lint)
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.torch
	$(call install,$(BIN),--group docs)
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.torch
	$(call install,$(BIN),--group test)
	@touch $@

$(OTHER_CORE_DIR)/.unpacked: | $(VENV)/.torch
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) download --no-deps --only-binary=:all: --python-version 3.12 \
	    --platform manylinux_2_28_$$(uname -m) -d .deps/wheels megatron-core==$(OTHER_CORE)
	$(BIN)/python -m zipfile -e .deps/wheels/megatron_core-$(OTHER_CORE)-*.whl $(@D)
	@touch $@

$(BRIDGE_DIR)/.unpacked: | $(VENV)/.torch
	rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) download --no-deps --only-binary=:all: -d .deps/wheels megatron-bridge==$(BRIDGE)
	$(BIN)/python -m zipfile -e .deps/wheels/megatron_bridge-$(BRIDGE)-*.whl $(@D)
	@touch $@

# What lint and tests need, so that they can run beside each other.
environment: $(VENV)/.built $(VENV)/.lint $(VENV)/.docs $(VENV)/.test

# ---- what people run ----

build: $(VENV)/.built

demo: $(VENV)/.built
	$(BIN)/megagraph demo

test: $(VENV)/.built $(VENV)/.test $(OTHER_CORE_DIR)/.unpacked $(BRIDGE_DIR)/.unpacked
	$(BIN)/python .ci/tests --other-core $(OTHER_CORE_DIR) $(LANES) -- $(PYTEST_FLAGS)

# The other release with all parameters, other random examples than in each run, and known faults.
nightly: mutants soak
nightly test: export MEGAGRAPH_TEST_BRIDGE = $(abspath $(BRIDGE_DIR))
nightly: $(VENV)/.built $(VENV)/.test $(OTHER_CORE_DIR)/.unpacked $(BRIDGE_DIR)/.unpacked
	$(BIN)/python .ci/tests --other-core $(OTHER_CORE_DIR) other-whole random -- $(PYTEST_FLAGS)

# Puts each fault of tests/mutants.txt into a copy of the tree: its test must fail.
mutants: $(VENV)/.built $(VENV)/.test
	$(BIN)/python .ci/mutants $(MUTANTS)

# Random models, hosts and changes, compared with eager after each event; then on two ranks.
soak: $(VENV)/.built $(VENV)/.test
	$(BIN)/python -m tests.soak $(SOAK)
	$(BIN)/python -m tests.soak $(SOAK) --ranks 2

# How large the project is, beside the bounds that tests/test_architecture.py keeps.
sizes:
	@$(PYTHON) .ci/sizes

# An environment for each minor of torch (5.4 GB each, reused).
.venv-torch-%/.ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --quiet install --upgrade "pip>=25.1" uv
	$(call install,$(@D)/bin,$(BUILD_TOOLS) "torch==$*.*" megatron-core==$(CORE) "rich>=13")
	$(@D)/bin/python -m pip --quiet install --group test
	@touch $@

# A wheel of the sdist, installed beside it: the checkout's own build stays as it is, and out of the path
# (Python 3.11 and newer).
.venv-torch-%/core/.ready: .venv-torch-%/.ready $(CORE_SOURCES) $(PYTHON_SOURCES)
	.ci/sdist $(<D)/bin/python $(@D)
	@touch $@

matrix-%: .venv-torch-%/core/.ready
	CUDA_VISIBLE_DEVICES= PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(<D)):$(abspath .ci) \
	    .venv-torch-$*/bin/python .ci/tests \
	    --out .ci/out/torch-$* torch -- $(PYTEST_FLAGS)

matrix: $(MINORS:%=matrix-%)

matrix-newest: matrix-$(lastword $(MINORS))

environment-newest: .venv-torch-$(lastword $(MINORS))/.ready

wheel-newest: .venv-torch-$(lastword $(MINORS))/core/.ready

# Compiles and links the core with CUDA against that minor; runs nothing.
cuda-%: .venv-torch-%/.ready
	$(<D)/bin/python setup.py --quiet build --build-base $(<D)/build-cuda --build-lib $(<D)/core-cuda

# On a GPU: all tests that run kernels, with the Transformer Engine that is installed there.
gpu: $(VENV)/.built $(VENV)/.test
	$(BIN)/python .ci/gpu $(PARTS)

# On a GPU: the kernels and the graphs under compute-sanitizer. Takes long, and is no part of CI.
sanitize: $(VENV)/.built $(VENV)/.test
	PYTHON=$(BIN)/python .ci/sanitize

# Builds a wheel from the sdist and runs it: compiles the whole core.
sdist: $(VENV)/.torch
	.ci/sdist $(BIN)/python

# The wheels that people install, in dist/: each is built and run in environments of its own.
wheels:
	.ci/wheels $(WHEELS)

# The site, in build/site. A link that leads nowhere is an error; nothing is fetched.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file .ci/mkdocs.yml

bench: $(VENV)/.built
	$(BIN)/python -m benchmarks

# Most of them use one core.
lint: $(VENV)/.built $(VENV)/.lint $(VENV)/.docs
	$(MAKE) --keep-going --jobs=2 --output-sync=target $(LINTS)

lint-ruff: $(VENV)/.lint
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

lint-mypy: $(VENV)/.lint
	$(BIN)/mypy --no-error-summary

# The stub against the compiled module. torch comes first: its libraries are loaded with it.
lint-stubs: $(VENV)/.built $(VENV)/.lint
	$(BIN)/python -c 'import torch, mypy.stubtest as stubtest; raise SystemExit(stubtest.main())' \
	    --concise --mypy-config-file .ci/stubtest.ini \
	    --allowlist .ci/stubtest-allowlist.txt --ignore-unused-allowlist megagraph._C

lint-imports: $(VENV)/.lint
	$(BIN)/lint-imports --no-cache

lint-cpp: $(VENV)/.lint
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

lint-tidy: $(VENV)/.lint
	PYTHON=$(BIN)/python .ci/tidy

lint-docs: docs

lint-spelling: $(VENV)/.lint
	$(BIN)/codespell

format: $(VENV)/.lint
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FILES)

# Leaves the environment ($(VENV)) and the fetched wheels (.deps).
clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f megagraph/*.so megagraph/_build_info.py $(VENV)/.built $(VENV)/.installed
	find megagraph tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
