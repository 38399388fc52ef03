# The commands of this project; `make` alone lists them. The first use sets up everything in .venv.
#
# PyTorch 2.13.0 is pinned for development, because the extension is built for one minor version, the tests run bodies
# of PyTorch's own suite, and figures are compared between runs. Users may have any supported minor
# (ark_torch/_support.py).
TORCH := torch==2.13.0
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ark-setup
PYTEST := $(PY) -m pytest
PIP := $(PY) -m pip install -q --disable-pip-version-check

# Debian package names: C++ compiler, CPython's headers and venv, CMake; GoogleTest for the C++ tests. ccache and
# Ninja speed up rebuilds; iproute2 creates the network namespaces of one test.
SYSTEM_PACKAGES := g++ make python3-dev python3-venv cmake ninja-build libgtest-dev ccache iproute2

SOURCES := CMakeLists.txt $(shell find csrc ark_torch/kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.cuh')
BUILT := ark_torch/_build_info.py

.PHONY: help setup build demo test test-quick test-nightly test-cpp test-cpp-plain test-cpp-thread test-cpp-address
.PHONY: test-gpu docs bench bench-gpu lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) build ## creates .venv with all that is needed, and builds the extension

$(STAMP): pyproject.toml requirements/dev.txt Makefile ark_torch/_version.py
	@test -n "$(PYTHON)" || { echo "No python3 found: install Python 3.10 or newer (Debian: apt-get install python3 python3-venv python3-dev)."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is too old: ark_torch needs Python 3.10 or newer (make setup PYTHON=/path/to/python3)."; exit 1; }
	@missing=""; if command -v dpkg-query >/dev/null; then \
	  for p in $(SYSTEM_PACKAGES); do \
	    dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
	  if [ -n "$$missing" ]; then \
	    if [ "$$(id -u)" = 0 ]; then \
	      echo "Installing$$missing"; \
	      { apt-get install -qq -y --no-install-recommends $$missing || { apt-get update -qq && \
	        apt-get install -qq -y --no-install-recommends $$missing; }; } >/dev/null || exit 1; \
	    else echo "Please run: sudo apt-get install$$missing"; exit 1; fi; fi; \
	else for c in c++ cmake make; do command -v $$c >/dev/null || { echo "Please install $$c (Debian names of all that is needed: $(SYSTEM_PACKAGES))."; exit 1; }; done; fi
	@test -x $(PY) || { echo "Creating $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing $(TORCH) and the tools of development"
	@$(PIP) "$(TORCH)" "ninja>=1.11"
	@$(PY) setup.py -q build_ext --inplace & build=$$!; \
	  $(PIP) -r requirements/dev.txt; tools=$$?; wait $$build && exit $$tools
	@$(PIP) --no-build-isolation --no-deps -e .
	@touch $(BUILT) $@

# Builds the extension if a source is newer. Ninja decides file by file what to compile.
build: $(BUILT)

$(BUILT): $(SOURCES) | $(STAMP)
	@echo "Building ark_torch._C"
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

demo: setup ## trains a small GPT on two processes over ark and over Gloo, and compares
	$(PY) examples/train_gpt.py --output demo-output

JOBS ?= $(shell nproc)

# Processes of pytest. Many tests wait: for a limit, for a rank that is stopped, for a compiler.
WORKERS ?= $(JOBS)
test: setup test-cpp-gate ## the tests of every change (ten minutes on two cores); WORKERS=3: processes of pytest
	$(PYTEST) -n $(WORKERS) --dist loadgroup

test-quick: setup ## the fast tests, none of which is `alone` (two minutes)
	$(PYTEST) -n $(JOBS) --dist loadgroup -m quick

# A shard takes up to 25 minutes on two cores. The first of several includes the C++ tests. Tests that share the cores
# come first, then those that run alone (tests/conftest.py). pytest's exit code 5 means that there are none.
SHARD ?= 1/1
test-nightly: setup $(if $(filter 1/%,$(SHARD)),test-cpp) ## every test, long and short; SHARD=2/6: every sixth, from the second on
	$(PYTEST) -n $(JOBS) --dist loadgroup -m "not alone" --night --shard $(SHARD)
	$(PYTEST) -m alone --night --shard $(SHARD) || test $$? = 5

# These tests fail where they cannot run. Without a GPU nothing is collected, which fails, too. Most of a test's time is
# its processes' start, so a few run at once and share the GPUs.
GPU_JOBS ?= 3
test-gpu: export NCCL_NVLS_ENABLE = 0
test-gpu: export TORCH_SYMM_MEM_DISABLE_MULTICAST = 1
test-gpu: setup ## the tests on GPUs; SHARD=2/3: every third, from the second on; ARK_TEST_RANKS=2: ranks share one
	$(PYTEST) -n $(GPU_JOBS) --dist loadgroup -m "not alone" --night --shard $(SHARD) tests/gpu
	$(PYTEST) -m alone --night --shard $(SHARD) tests/gpu || test $$? = 5

.PHONY: test-torch test-mutations wheels
test-torch: setup ## the fast tests and PyTorch's own suite with another PyTorch: VERSION=2.14.1
	tools/test_torch.sh $(VERSION)

test-mutations: setup ## small faults put in one by one: what notices each (a night)
	$(PY) tests/mutations.py

VERSIONS ?= 2.13.0 2.14.1 2.15.0
wheels: setup ## manylinux wheels, one for each PyTorch minor, each installed and tried; VERSIONS="2.14.1": of which
	$(PY) tools/build_wheels.py --torch $(VERSIONS)

.PHONY: test-gpu-long test-gpu-sanitizer
test-gpu-long: setup ## on GPUs: 10^5 random operations against NCCL, and five minutes of mixed load
	ARK_TEST_OPERATIONS=50000 ARK_TEST_SOAK_SECONDS=300 $(PYTEST) --night tests/gpu/test_against_nccl.py tests/gpu/test_endurance.py

test-gpu-sanitizer: setup ## every family of kernels under compute-sanitizer (of the CUDA Toolkit)
	$(PYTEST) tests/gpu/test_sanitizer.py

.PHONY: test-rdma
test-rdma: setup ## RDMA over soft-RoCE in a virtual machine, no NIC needed (ten minutes on two cores): PART=engine or ranks
	tests/rdma/run.sh $(PART)

.PHONY: test-kernels
test-kernels: setup ## every instantiation of every CUDA kernel for six architectures, without a GPU (half an hour on two cores)
	$(PY) -m ark_torch.tools.compile_kernels --every --all

test-cpp test-cpp-plain test-cpp-thread test-cpp-address: export ARK_TEST_NIGHT := 1
test-cpp: test-cpp-plain test-cpp-thread test-cpp-address ## C++ tests: the library as built alone, ThreadSanitizer, Address and UB Sanitizer

# In the build folder of the extension, whose objects they link; the tests are compiled folder by folder. The longest tests run at night, and
# so do most random cases (tests/csrc/support/night.hpp).
test-cpp-gate: CTEST_FLAGS := -E "(RandomOperations|AllKindsInMany).*/[4-8](Plain|Registered)|AThousandGroups|KilledAtAnyTime|CostsTest.(Damage|OfEach|Equal|Plausible)|AttentionTest.WorkersDo|[.]Night/"
test-cpp-gate: setup
	@export ARK_TEST_CXX="$$(PYTHONPATH=tests $(PY) -m support.precompiled)"; \
	$(call cpp_tests,extension,-DARK_BUILD_TESTS=ON -DARK_GATE=ON)
	@$(call cpp_tests,cpp-thread,-DARK_SANITIZE=thread -DARK_PLAIN_CORE="$(abspath build/extension/libark_core.a)")

# Compiles each file separately, so that none depends on another's includes, with libark_torch and a program that uses
# it.
test-cpp-plain: setup
	@$(call cpp_tests,cpp-plain,-DARK_UNITS=OFF -DCMAKE_PREFIX_PATH="$$($(PY) -c 'import torch; print(torch.utils.cmake_prefix_path)')")
	@ln -sf build/cpp-plain/compile_commands.json compile_commands.json

test-cpp-thread: setup
	@$(call cpp_tests,cpp-thread,-DARK_SANITIZE=thread -DARK_PLAIN_CORE=)

test-cpp-address: setup
	@$(call cpp_tests,cpp-address,-DARK_SANITIZE=address)

define cpp_tests
echo "C++ tests, $(1)"; \
PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B build/$(1) -G Ninja $(2) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
cmake --build build/$(1) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
ctest --test-dir build/$(1) --output-on-failure -j $$(($(JOBS) + 1)) $(CTEST_FLAGS)
endef

docs: setup ## the documentation as web pages, in build/site
	@$(PIP) -r requirements/docs.txt
	$(PY) -m mkdocs build --strict

bench: setup ## the collectives against Gloo (and MPI where mpi4py is installed)
	$(PY) benchmarks/collectives.py
	$(PY) benchmarks/ddp_step.py
	$(PY) tools/renew_docs.py

GPUS ?= 2
bench-gpu: setup ## the benchmarks on GPUs; GPUS="2 4": on how many (half an hour and renewed tables)
	$(PY) benchmarks/cuda_collectives.py --ranks $(GPUS)
	$(PY) benchmarks/interference.py --ranks $(GPUS) --seconds 300
	$(PY) benchmarks/training.py --ranks $(GPUS) --models bert-large gpt2-xl --modes graph ddp fsdp2 --seconds 1200
	$(PY) benchmarks/dma.py
	$(PY) tools/renew_docs.py

CXX_FILES = $(shell git ls-files 'csrc/*.cpp' 'csrc/*.hpp' 'ark_torch/kernels/*.hpp' 'ark_torch/kernels/*.cuh' 'tests/*.cpp' 'tests/*.hpp' 'examples/*.cpp' 'benchmarks/*.cpp' 'benchmarks/*.cuh')

lint: $(STAMP) ## ruff, clang-format, mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/mypy

format: $(STAMP) ## rewrites the sources as `make lint` wants them
	$(VENV)/bin/ruff check --fix -q .
	$(VENV)/bin/ruff format -q .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean: ## removes what was built; keeps .venv
	rm -rf build dist demo-output compile_commands.json *.egg-info ark_torch/_C.*.so ark_torch/prebuilt $(BUILT)
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
