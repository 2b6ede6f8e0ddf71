# SPDX-License-Identifier: BSD-3-Clause
# `make demo` and `make test` need g++ 12 or newer, make, git and Python 3.11 or newer with its headers
# and venv; everything else is installed into .venv at pinned versions. A second run installs and
# compiles nothing.
#
#   PYTHON=python3.12      interpreter for .venv
#   TORCHFUSE_WITH_CUDA=OFF  as in README.md; read when the build folder is configured first
#   CTEST_ARGS, PYTEST_ARGS  further arguments
#   PYTEST_WORKERS=4       processes that share the Python tests; 0: one, with its output at once

PYTHON ?= python3
BUILD := build/dev
PREFIX := $(CURDIR)/build/prefix
VENV_PYTHON := $(CURDIR)/.venv/bin/python
# The newest torch that is supported; requirements-dev.txt names the oldest.
NEWEST_TORCH := 2.15.0
# What is built, in CMakePresets.json: for one CUDA architecture.
PRESET ?= dev
# Where an interpreter's packages lie.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
TORCH_ENV = $(CURDIR)/build/torch-$(VERSION)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process of the tests would compile them anew.
unexport PYTHONDONTWRITEBYTECODE
# One compiler per processor; Ninja alone would start more, each with a gigabyte of memory.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export CTEST_PARALLEL_LEVEL ?= 2
# Compilers walk through gigabytes. Huge pages for malloc spare them address translations, which are
# dear in virtual machines.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# A compiler cache, where there is one: the kernels do not depend on torch, and another version of it need
# not compile them again. Build folders at the same depth below sources share objects: paths are relative,
# and neither the folder nor whether warnings are errors counts. An object that gave a warning gives it
# again.
ifneq ($(shell command -v ccache),)
  export CCACHE_BASEDIR ?= $(CURDIR)
  export CCACHE_NOHASHDIR ?= 1
  export CCACHE_IGNOREOPTIONS ?= -Werror -Werror=all-warnings -Xcompiler=-Werror
  export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
  export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
  # Every build of `make test-all` that needs kernels finds those of the first one.
  ALL_PRESET := dev-all
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo distributed-demo sharded-demo images images-cpp test bench lint clean build \
  coverage docs \
  doxygen-is-here gpu-bundle \
  package prefix pretended-cuda programs \
  aarch64-is-here test-aarch64 results-of-aarch64 results-of-kernels \
  test-api test-asan test-consumer test-cpp test-cubins test-host-path test-integrations test-layers \
  test-mutations test-newest-torch test-pretended-cuda test-consumer-whole \
  all-needed check test-all test-headers test-packaging test-python test-python-quick \
  test-python-whole test-some-on-pretended-cuda \
  test-in-turn test-consumer-in-turn test-headers-in-turn test-mutations-in-turn \
  test-newest-torch-in-turn test-python-in-turn \
  build-for-torch test-torch test-torch-cpp test-torch-python \
  test-tsan test-types test-under-load test-walkthrough tutorials

help:
	@echo "make demo            train a digit classifier in Python and in C++"
	@echo "make distributed-demo  the same in two processes, with synchronized batch normalization"
	@echo "make sharded-demo    a language model that processes share, resumed in other layouts, in both languages"
	@echo "make images | images-cpp  an image classifier, in Python and in C++: build/images"
	@echo "make tutorials       mixed precision on real data, with pictures: build/tutorials"
	@echo "make check           types, layers, C++ and Python tests, on what is built: while one works"
	@echo "make test            tests of the code: C++, Python, sanitizers, layers, a program of a user"
	@echo "make test-all        the parts below too: hours on two cores"
	@echo "make test-in-turn    all of them, of the longest a share, another one at each commit: as in CI"
	@echo "make test-cpp | test-api | test-python | test-asan | test-tsan | test-layers | test-consumer"
	@echo "make test-types      mypy and stubtest"
	@echo "make test-host-path  instructions of optimizer steps against a baseline (needs valgrind)"
	@echo "make test-cubins     machine code of the CUDA kernels: registers, spills, vector accesses"
	@echo "make test-aarch64    the CPU kernels for aarch64, under emulation (needs a cross compiler and qemu)"
	@echo "make test-mutations  planted errors in the CUDA kernels must be caught (a small set)"
	@echo "make coverage        test-asan, and lines of the CUDA kernels that it executed"
	@echo "make test-headers    every header compiles alone"
	@echo "make test-python-whole  the Python tests with all combinations of what they vary"
	@echo "make test-packaging  every way to install the Python package"
	@echo "make test-consumer-whole  every way to build and find the C++ package"
	@echo "make test-torch VERSION=2.14.0 | test-newest-torch   build and test with another torch"
	@echo "make test-pretended-cuda  the tests marked cuda, on a device that is pretended (needs nvcc)"
	@echo "make test-under-load  processes and threads, 20 times on a busy machine: about an hour"
	@echo "make test-integrations  with Lightning, accelerate, Hugging Face Trainer, timm, Megatron-Core"
	@echo "make test-walkthrough  docs/adding_an_optimizer.md, applied to a copy, built and tested"
	@echo "make package         the C++ package as an archive: build/package/torchfuse-*.tar.gz"
	@echo "make docs            the documentation site, with its doctests and examples: build/docs/html"
	@echo "make gpu-bundle      build/gpu: what tools/gpu_run.sh needs on a machine with a GPU (needs nvcc, Python 3.12)"
	@echo "make bench | bench-peers  the suites fused_adam, and peers with DeepSpeed"
	@echo "make lint | clean"

# --- Environment -------------------------------------------------------------------------------------

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.requirements: requirements-dev.txt | .venv/bin/python
	$(VENV_PYTHON) -m pip install --quiet -r requirements-dev.txt
	touch $@

.venv/.requirements-lint: requirements-lint.txt .venv/.requirements
	$(VENV_PYTHON) -m pip install --quiet -r requirements-lint.txt
	touch $@

.venv/.requirements-docs: requirements-docs.txt .venv/.requirements
	$(VENV_PYTHON) -m pip install --quiet -r requirements-docs.txt
	touch $@

.venv/.requirements-packaging: requirements-packaging.txt .venv/.requirements
	$(VENV_PYTHON) -m pip install --quiet -r requirements-packaging.txt
	touch $@

# The same requirements with another torch, and without those of the examples.
build/torch-%/.requirements: requirements-dev.txt
	$(PYTHON) -m venv build/torch-$*
	sed -e 's/^torch==.*/torch==$*/' -e '/^# examples/,$$d' requirements-dev.txt \
	  > build/torch-$*/requirements.txt
	build/torch-$*/bin/python -m pip install --quiet -r build/torch-$*/requirements.txt
	touch $@

# An environment on top of .venv, which stays as it is.
ABOVE_VENV := build/integrations/.requirements build/peers/.requirements
$(ABOVE_VENV): build/%/.requirements: requirements-%.txt .venv/.requirements
	$(VENV_PYTHON) -m venv --clear build/$*
	echo "import site; site.addsitedir('$$($(VENV_PYTHON) $(PURELIB))')" \
	  > "$$(build/$*/bin/python $(PURELIB))/venv_below.pth"
	build/$*/bin/python -m pip install --quiet setuptools -c requirements-dev.txt
	build/$*/bin/python -m pip install --quiet -r $< -c requirements-dev.txt $(PIP_FLAGS_$*)
	touch $@

# DeepSpeed asks torch when it is built, by the setuptools of this environment: a new one has those of
# Python, which are too old to make a wheel.
PIP_FLAGS_peers := --no-build-isolation

# --- Build -------------------------------------------------------------------------------------------

# pip configures the build folder and makes the package importable. Later runs only need ninja.
$(BUILD)/.installed: .venv/.requirements setup.py pyproject.toml VERSION CMakePresets.json
	TORCHFUSE_BUILD_DIR=$(BUILD) CMAKE_ARGS="--preset $(PRESET) $(CMAKE_ARGS)" \
	  $(VENV_PYTHON) -m pip install --verbose --no-build-isolation --no-deps --editable .
	touch $@

# The component "python" alone goes beside the .py files; the rest is the C++ package.
build: $(BUILD)/.installed
	cmake --build $(BUILD) --target torchfuse torchfuse_C
	@cmake --install $(BUILD) --prefix python/torchfuse > $(BUILD)/install.log
	@cmake --install $(BUILD) --prefix python/torchfuse --component python >> $(BUILD)/install.log

prefix: build
	@cmake --install $(BUILD) --prefix $(PREFIX) > $(BUILD)/install-prefix.log

# --- Tests -------------------------------------------------------------------------------------------

# Each lane runs to its end whatever became of the others, and says what it cost. What a lane of
# `make test` proves is proven again by none of `make test-all`, but for the build.
CHECK_LANES := test-layers test-types test-cpp test-python-quick
# `make test` runs the tests of the kernels once, under the sanitizers.
TEST_LANES := test-layers test-types test-api test-python test-asan test-consumer \
  test-some-on-pretended-cuda
# The first one makes what all need.
ALL_LANES := all-needed lint test-layers test-types test-host-path test-cpp docs \
  test-consumer-whole test-python-whole test-integrations coverage test-packaging \
  test-newest-torch test-pretended-cuda test-walkthrough test-tsan test-headers test-mutations
# Continuous integration has the same, and of the longest a share. Those that build the library once more
# come last, and begin with another one at each commit: docs/decisions/0041-lanes-that-take-turns.md.
EACH_COMMIT_LANES := all-needed lint test-layers test-types test-cpp docs test-consumer \
  test-python-in-turn test-pretended-cuda test-integrations
IN_TURN_LANES := coverage test-host-path test-newest-torch-in-turn test-consumer-in-turn \
  test-packaging test-tsan test-walkthrough test-headers-in-turn test-mutations-in-turn

check:
	@$(PYTHON) tools/run_lanes.py --name "make $@" $(CHECK_LANES)

test:
	@$(PYTHON) tools/run_lanes.py --name "make $@" $(TEST_LANES)

test-all test-in-turn: export PRESET := $(or $(ALL_PRESET),$(PRESET))
test-all:
	@$(PYTHON) tools/run_lanes.py --name "make $@" $(ALL_LANES)

test-in-turn:
	@$(PYTHON) tools/run_lanes.py --name "make $@" $(EACH_COMMIT_LANES) --turn $(TURN) \
	  --if-time $(IN_TURN_LANES)

all-needed: .venv/.requirements-lint .venv/.requirements-docs .venv/.requirements-packaging build

# Ops and classes of C++.
test-api: build
	cmake --build $(BUILD) --target torchfuse_api_tests
	GTEST_BRIEF=1 ctest --test-dir $(BUILD) -L api --verbose --no-tests=error $(CTEST_ARGS)

# These, and the kernels: as they are released, and counting the accesses of the CUDA kernels' source.
test-cpp: test-api
	cmake --build $(BUILD) --target all
	ctest --test-dir $(BUILD) -LE api --output-on-failure --no-tests=error $(CTEST_ARGS)

# Every header compiles when it is included alone.
test-headers: build
	cmake --build $(BUILD) --target all_verify_interface_header_sets

# Of proofs that cost much, `make test-in-turn` has a part, and at the next commit another one.
TURN = $(or $(shell git rev-list --count HEAD 2>/dev/null),0)
# Of so many parts of the lines of a pipe, the one whose turn it is.
in_turn = awk 'NR % $(1) == $(TURN) % $(1)'
VERIFY := torchfuse_verify_interface_header_sets

# A third of the public headers, and all of the kernels'.
test-headers-in-turn: build
	cmake --build $(BUILD) --target torchfuse_kernels_verify_interface_header_sets \
	  $$(ninja -C $(BUILD) -t targets all | sed -n 's|^\(.*/$(VERIFY).dir/.*\.o\): .*|\1|p' | sort \
	    | $(call in_turn,3))

# Two processes, each with whole files. Threads that wait for work do not spin: they share two cores
# with the tests.
PYTEST_WORKERS ?= 2
# The longest test takes seven minutes on two slow cores. One that hangs is named, and the others run.
TEST_SECONDS ?= 900
PYTEST_IN_PARALLEL := -n $(PYTEST_WORKERS) --dist loadfile \
  -o faulthandler_timeout=$(TEST_SECONDS) -o faulthandler_exit_on_timeout=true

# What Python tests start or import. One that is older than the library would see other objects.
PROGRAMS := torchfuse_programs torchfuse_synchronous_gloo torchfuse_bench_data_parallel
programs: build
	cmake --build $(BUILD) --target $(PROGRAMS)

test-python: programs
	OMP_WAIT_POLICY=PASSIVE $(VENV_PYTHON) -m pytest $(PYTEST_IN_PARALLEL) $(PYTEST_ARGS)

# Without what starts programs or several processes.
test-python-quick: PYTEST_ARGS += -m "not slow and not processes"
test-python-quick: test-python

# All combinations of what the generated tests vary; test-python takes every pair of values once.
test-python-whole: PYTEST_ARGS += --combinations=all
test-python-whole: test-python

# Of the files that start processes, a third.
test-python-in-turn: export TORCHFUSE_TURN = $(TURN)
test-python-in-turn: test-python-whole

# What several processes or threads do together, twenty times beside work that keeps all cores busy.
UNDER_LOAD := tests/python/parallel tests/python/optimizers/test_dtensor.py \
  tests/python/optimizers/test_threads.py tests/python/amp/test_grad_scaler_dtensor.py \
  tests/python/apex/test_apex_ddp_program.py

test-under-load: programs
	OMP_WAIT_POLICY=PASSIVE tools/under_load.sh $(or $(TIMES),20) \
	  $(VENV_PYTHON) -m pytest -q $(PYTEST_IN_PARALLEL) $(UNDER_LOAD) $(PYTEST_ARGS)

build/asan-ubsan/build.ninja build/tsan/build.ninja: build/%/build.ninja: CMakePresets.json
	cmake --preset $*

test-asan: .venv/.requirements
	$(MAKE) --no-print-directory build/asan-ubsan/build.ninja
	cmake --build --preset asan-ubsan
	find build/asan-ubsan -name '*.gcda' -delete
	ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1 ctest --preset asan-ubsan

# The thread sanitizer cannot map its shadow under the widest address randomization.
test-tsan: .venv/.requirements
	$(MAKE) --no-print-directory build/tsan/build.ninja
	cmake --build --preset tsan
	setarch --addr-no-randomize ctest --preset tsan

aarch64-is-here:
	@for program in aarch64-linux-gnu-g++ qemu-aarch64; do \
	  command -v $$program > /dev/null || { \
	    echo "make test-aarch64: expected $$program on PATH, got none. Install Debian's packages: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; \
	    exit 1; }; done

# The tests of the CPU kernels for the other architecture, and whether they compute there what they compute
# here: tests/cpp/kernels/recorded_results.h.
RECORDED = $(CURDIR)/build/$*/results
test-aarch64: aarch64-is-here results-of-kernels results-of-aarch64
	$(VENV_PYTHON) tools/check_layers.py --build-dir build/aarch64
	@diff -rq build/kernels/results build/aarch64/results || { \
	  echo "$@: expected the same results from both architectures, got those above. Each line of a file is a checksum: tests/cpp/kernels/recorded_results.h." >&2; \
	  exit 1; }
	@echo "$@: the results of $$(cat build/kernels/results/*.txt | wc -l) recorded arrays are the same on both architectures"

results-of-kernels results-of-aarch64: results-of-%: .venv/.requirements
	cmake --preset $*
	cmake --build --preset $*
	rm -rf $(RECORDED) && mkdir $(RECORDED)
	TORCHFUSE_RECORDED_RESULTS=$(RECORDED) ctest --preset $*

# The machine code of a build for every architecture. Needs no GPU. In `make test-all` the build is that
# of test-packaging.
test-cubins: .venv/.requirements
	cmake --preset release -DPython_EXECUTABLE=$(VENV_PYTHON)
	cmake --build --preset release --target torchfuse
	$(VENV_PYTHON) tools/check_cubins.py --library build/release/csrc/libtorchfuse.so

# The device of tests/pretended_cuda; from then on it is kept up to date with the rest.
pretended-cuda: build
	cmake -S . -B $(BUILD) -DTORCHFUSE_PRETENDED_CUDA=ON
	cmake --build $(BUILD) --target pretended_cuda

# Four devices, for as many ranks.
PYTEST_ON_PRETENDED_CUDA := OMP_WAIT_POLICY=PASSIVE TORCHFUSE_BUILD_DIR=$(BUILD) \
  PRETENDED_CUDA_DEVICES=4 tools/on_pretended_cuda.sh $(VENV_PYTHON) -m pytest $(PYTEST_IN_PARALLEL)

test-pretended-cuda: pretended-cuda
	cmake --build $(BUILD) --target pretended_cuda_tests
	ctest --test-dir $(BUILD) -L pretended_cuda --output-on-failure --no-tests=error
	$(PYTEST_ON_PRETENDED_CUDA) tests/pretended_cuda
	$(PYTEST_ON_PRETENDED_CUDA) --orders-of-time -m "cuda and not slow" $(PYTEST_ARGS)

# A few of them for `make test`.
test-some-on-pretended-cuda: build
	@if grep -q '"cuda": ""' python/torchfuse/build_info.json; then \
	  echo "$@: built without CUDA, there is no host code to run on the pretended device"; \
	else \
	  $(MAKE) --no-print-directory pretended-cuda && \
	  $(PYTEST_ON_PRETENDED_CUDA) --orders-of-time -m "cuda and not slow" \
	    tests/python/cuda/test_graph_programs.py tests/python/cuda/test_streams.py; \
	fi

# The script calls `make build`; here it has the compiler cache.
gpu-bundle:
	tools/gpu_bundle.sh

test-mutations: .venv/.requirements
	$(VENV_PYTHON) -m pytest tests/mutations -m small_set $(PYTEST_ARGS)

# Half of them.
test-mutations-in-turn: export TORCHFUSE_TURN = $(TURN)
test-mutations-in-turn: test-mutations

# Every line of the CUDA kernels is executed by the tests of test-asan; one that cannot be says
# GCOVR_EXCL_LINE, and why.
coverage: test-asan
	gcovr --filter csrc/kernels/cuda/ --merge-mode-functions=merge-use-line-min --merge-lines \
	  --fail-under-line 100 build/asan-ubsan

# The package, examples, benchmarks and tools under mypy's strict rules, and the stub of the native
# module against the module.
test-types: .venv/.requirements-lint build
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m mypy.stubtest torchfuse._C --allowlist tools/stubtest_allowlist.txt

test-layers: build
	$(VENV_PYTHON) tools/check_layers.py --build-dir $(BUILD)
	$(VENV_PYTHON) tools/check_sizes.py

# What a step costs the host, counted in instructions: load and clock do not change it.
test-host-path: build
	$(VENV_PYTHON) benchmarks/host_path.py --check

# The C++ package as a program finds it: that of the README.
CONSUMER := $(patsubst %,tests/packaging/cpp/test_%.py,readme find_package messages symbols)
test-consumer: build
	$(VENV_PYTHON) -m pytest $(CONSUMER) $(PYTEST_ARGS)

# Every program and example, and built without Python, as an archive and in a subdirectory.
test-consumer-whole: build
	$(VENV_PYTHON) -m pytest tests/packaging/cpp $(PYTEST_ARGS)

# A third of what this adds.
REST_OF_CONSUMER = $(filter-out $(CONSUMER),$(sort $(wildcard tests/packaging/cpp/test_*.py)))
test-consumer-in-turn: build
	$(VENV_PYTHON) -m pytest $$(printf '%s\n' $(REST_OF_CONSUMER) | $(call in_turn,3)) $(PYTEST_ARGS)

# Every way to install the Python package, into environments below build/packaging, and the machine code
# that `pip install` made.
test-packaging: .venv/.requirements-packaging
	$(VENV_PYTHON) -m pytest tests/packaging/python $(PYTEST_ARGS)
	$(VENV_PYTHON) tools/check_cubins.py \
	  --library build/packaging/checkout/build/*-release/csrc/libtorchfuse.so

# With another torch, in an environment of its own.
build-for-torch:
	@test -n "$(VERSION)" || { echo "make test-torch: expected VERSION=2.15.0, got none"; exit 2; }
	$(MAKE) --no-print-directory build/torch-$(VERSION)/.requirements
	TORCHFUSE_BUILD_DIR=$(TORCH_ENV)-cmake CMAKE_ARGS="--preset $(PRESET) $(CMAKE_ARGS)" \
	  $(TORCH_ENV)/bin/python -m pip install --verbose --no-build-isolation --no-deps .

# The tests that depend on torch.
test-torch: test-torch-cpp test-torch-python

test-torch-cpp: build-for-torch
	$(TORCH_ENV)/bin/cmake --build $(TORCH_ENV)-cmake --target torchfuse_api_tests
	GTEST_BRIEF=1 $(TORCH_ENV)/bin/ctest --test-dir $(TORCH_ENV)-cmake -L api --verbose \
	  --no-tests=error

FILES_OF_TORCH = find tests/python -name 'test_*.py' ! -name 'test_packaging_*' \
  ! -path 'tests/python/tools/*' | LC_ALL=C sort
test-torch-python: build-for-torch
	$(TORCH_ENV)/bin/cmake --build $(TORCH_ENV)-cmake --target torchfuse_programs
	OMP_WAIT_POLICY=PASSIVE TORCHFUSE_BUILD_DIR=$(TORCH_ENV)-cmake \
	  $(TORCH_ENV)/bin/python -m pytest $(PYTEST_IN_PARALLEL) --combinations=values \
	  $$($(FILES_OF_TORCH)) $(PYTEST_ARGS)

test-newest-torch:
	@$(MAKE) --no-print-directory test-torch VERSION=$(NEWEST_TORCH)

# C++, or a third of the files in Python.
test-newest-torch-in-turn:
	@$(MAKE) --no-print-directory VERSION=$(NEWEST_TORCH) \
	  FILES_OF_TORCH="$(FILES_OF_TORCH) | $(call in_turn,3)" \
	  test-torch-$$(printf 'cpp\npython\n' | $(call in_turn,2))

# Other people's training loops with our scaler and optimizers.
test-integrations: build/integrations/.requirements build
	OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 build/integrations/bin/python -m pytest \
	  tests/integrations $(PYTEST_ARGS)

# The optimizer of docs/adding_an_optimizer.md, added to a copy of the tree.
test-walkthrough: .venv/.requirements
	tools/test_walkthrough.sh .venv/bin/python

# The C++ package for torch's present minor version as one archive, to be unpacked anywhere.
package: .venv/.requirements
	cmake --preset package -DPython_EXECUTABLE=$(VENV_PYTHON)
	cmake --build --preset package
	@ls build/package/torchfuse-*.tar.gz

# --- Demo and benchmarks -----------------------------------------------------------------------------

demo: prefix
	$(VENV_PYTHON) examples/python/train_digits.py --export build/demo/digits --out build/demo
	cmake -S examples/cpp/train_digits -B build/demo/cpp -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_PREFIX_PATH=$(PREFIX)
	cmake --build build/demo/cpp
	build/demo/cpp/train_digits build/demo/digits

# Two processes on this machine. More machines: docs/beyond_one_machine.md; NCCL: docs/sync_batch_norm.md.
TORCHRUN := OMP_NUM_THREADS=1 $(VENV_PYTHON) -m torch.distributed.run --nproc-per-node 2

distributed-demo: prefix
	$(TORCHRUN) examples/python/distributed_digits.py --out build/distributed --precision bf16
	cmake -S examples/cpp/distributed_digits -B build/distributed/cpp -G Ninja \
	  -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=$(PREFIX)
	cmake --build build/distributed/cpp
	$(VENV_PYTHON) examples/python/export_digits.py build/distributed/digits
	$(TORCHRUN) --no-python build/distributed/cpp/distributed_digits build/distributed/digits \
	  build/distributed --precision bf16

# One run in three layouts of processes, each of which goes on from the checkpoint of the one before.
SHARDED_LM := examples/python/sharded_lm.py --out build/sharded
# The same text in C++, by ZeRO 2. What CMake makes stays from one run to the next.
SHARDED_LM_TEXT = $$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
SHARDED_LM_CPP = build/sharded_lm/sharded_lm "$(SHARDED_LM_TEXT)" --out build/sharded/cpp

sharded-demo: prefix
	rm -rf build/sharded
	$(TORCHRUN) $(SHARDED_LM) --stop-after 120
	OMP_NUM_THREADS=1 $(VENV_PYTHON) $(SHARDED_LM) --resume --stop-after 200
	$(TORCHRUN) $(SHARDED_LM) --resume --parallel zero2
	cmake -S examples/cpp/sharded_lm -B build/sharded_lm -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_PREFIX_PATH=$(PREFIX)
	cmake --build build/sharded_lm
	$(TORCHRUN) --no-python $(SHARDED_LM_CPP) --stop-after 120
	OMP_NUM_THREADS=1 $(SHARDED_LM_CPP) --resume --stop-after 200
	$(TORCHRUN) --no-python $(SHARDED_LM_CPP) --resume
	$(VENV_PYTHON) examples/python/sharded_lm_report.py build/sharded/cpp/log.jsonl

# On image files, in both languages; the report compares the precisions, and devices once the results of
# other machines lie in build/images.
IMAGES_PRECISIONS ?= fp32 bf16

build/images/data: | .venv/.requirements
	rm -rf $@.part
	$(VENV_PYTHON) examples/python/image_folder.py $@.part
	mv $@.part $@

images: build build/images/data
	@set -e; for precision in $(IMAGES_PRECISIONS); do \
	  $(VENV_PYTHON) examples/python/train_images.py build/images/data --precision $$precision; done
	$(VENV_PYTHON) examples/python/image_report.py build/images

images-cpp: prefix build/images/data
	cmake -S examples/cpp/train_images -B build/images/cpp -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_PREFIX_PATH=$(PREFIX)
	cmake --build build/images/cpp
	@set -e; for precision in $(IMAGES_PRECISIONS); do \
	  build/images/cpp/train_images build/images/data build/images --precision $$precision; done
	$(VENV_PYTHON) examples/python/image_report.py build/images

TUTORIALS := mixed_precision_loop why_loss_scaling why_master_weights precision_and_size \
  loss_scale_history

tutorials: prefix
	@set -e; for name in $(TUTORIALS); do echo "--- $$name"; \
	  $(VENV_PYTHON) examples/python/$$name.py --out build/tutorials/$$name; done
	cmake -S examples/cpp/mixed_precision_loop -B build/tutorials/cpp -G Ninja \
	  -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=$(PREFIX)
	cmake --build build/tutorials/cpp
	$(VENV_PYTHON) examples/python/export_digits.py build/tutorials/digits
	build/tutorials/cpp/mixed_precision_loop build/tutorials/digits

bench: build
	$(VENV_PYTHON) benchmarks/run.py --suite fused_adam $(BENCH_ARGS)

bench-peers: build/peers/.requirements build
	TORCH_EXTENSIONS_DIR=build/peers/extensions \
	  build/peers/bin/python benchmarks/run.py --suite peers $(BENCH_ARGS)

# --- Documentation -----------------------------------------------------------------------------------

doxygen-is-here:
	@command -v doxygen > /dev/null || { \
	  echo "make docs: expected doxygen on PATH, got none. Install Debian's package: apt-get install doxygen" >&2; \
	  exit 1; }

docs: doxygen-is-here .venv/.requirements-docs prefix
	$(VENV_PYTHON) docs/build_site.py

# --- Housekeeping ------------------------------------------------------------------------------------

lint: .venv/.requirements-lint
	tools/lint.sh

clean:
	rm -rf build dist python/torchfuse.egg-info python/torchfuse/lib python/torchfuse/include
	rm -f python/torchfuse/_C.*.so
