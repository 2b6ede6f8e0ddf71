# SPDX-License-Identifier: BSD-3-Clause
# `make demo` and `make test` need g++ 12 or newer, make, git and Python 3.11 or newer with its headers
# and venv; everything else is installed into .venv at pinned versions. A second run installs and
# compiles nothing.
#
#   PYTHON=python3.12        interpreter for .venv
#   TORCHFUSE_WITH_CUDA=ON   also builds the CUDA kernels (needs nvcc); default: where a GPU is found
#   CTEST_ARGS, PYTEST_ARGS  further arguments
#   PYTEST_WORKERS=4         processes that share the Python tests; 0: one, with its output at once

PYTHON ?= python3
# With and without CUDA: a folder each. AUTO takes CUDA where torch and nvcc are fit for it.
WITH_CUDA := $(or $(TORCHFUSE_WITH_CUDA),$(if $(wildcard /dev/nvidia[0-9]*),AUTO,OFF))
BUILD := build/$(if $(filter-out OFF off 0 NO no FALSE false,$(WITH_CUDA)),dev-cuda,dev)
HAS_CUDA := ! grep -q '"cuda": ""' python/torchfuse/build_info.json
PREFIX := $(CURDIR)/build/prefix
VENV_PYTHON := $(CURDIR)/.venv/bin/python
# The newest torch that is supported; requirements-demo.txt names the oldest.
NEWEST_TORCH := 2.15.0
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
endif

# Parts that run one after another whatever becomes of the others: tools/run_lanes.py.
CHECK_LANES := test-types test-layers test-cpp test-python-quick
TEST_LANES := test-cpp test-python test-consumer
CI_LANES := lint test-types test-layers $(TEST_LANES) test-cuda-on-cpu test-pretended-cuda-eager test-doctests
# What the others leave out. docs/testing.md says which change runs which.
REST_LANES := test-python-whole test-machinery docs test-consumer-whole test-integrations coverage test-tsan \
  test-headers test-pretended-cuda test-mutations test-cubins test-host-path test-walkthrough \
  test-packaging test-newest-torch test-aarch64 test-under-load

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo distributed-demo sharded-demo images images-cpp tutorials bench bench-peers clean \
  build prefix package wheel programs pretended-cuda gpu-bundle check test ci test-all $(sort $(CHECK_LANES) $(CI_LANES) $(REST_LANES)) \
  test-asan doxygen-is-here aarch64-is-here results-of-aarch64 results-of-kernels \
  build-for-torch test-torch test-torch-cpp test-torch-python

help:
	@echo "make demo            train a digit classifier in Python and in C++"
	@echo "make distributed-demo | sharded-demo  the same in two processes; a language model that processes share"
	@echo "make images | images-cpp | tutorials  image files in both languages; mixed precision, with pictures"
	@echo "make check           types, layers, C++ and Python tests without processes: while you work"
	@echo "make test            C++ and Python tests, and a program of a user: before a commit"
	@echo "make ci              what .ci/run runs (needs nvcc): $(CI_LANES)"
	@echo "make test-all        that and all other proofs: hours. Each runs alone too:"
	@echo "  $(wordlist 1,7,$(REST_LANES))"
	@echo "  $(wordlist 8,99,$(REST_LANES))"
	@echo "make test-torch VERSION=2.14.0  build and test with another torch"
	@echo "make wheel           dist/: one wheel for torch 2.11 to 2.15 and every Python whose headers are here"
	@echo "make package | docs  the C++ package as an archive; the documentation site"
	@echo "make gpu-bundle      build/gpu: what tools/gpu_run.sh needs on a machine with a GPU (needs nvcc, Python 3.12)"
	@echo "make bench | bench-peers | lint | clean"

# --- Environment -------------------------------------------------------------------------------------

.venv/bin/python:
	$(PYTHON) -m venv .venv

# What builds and the demo need, and what tests add.
.venv/.requirements-demo: requirements-demo.txt | .venv/bin/python
	@echo "installing torch and what else is needed into .venv: a few minutes"
	$(VENV_PYTHON) -m pip install --quiet -r requirements-demo.txt
	touch $@

.venv/.requirements: requirements-dev.txt .venv/.requirements-demo
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
build/torch-%/.requirements: requirements-demo.txt requirements-dev.txt
	$(PYTHON) -m venv build/torch-$*
	sed -e 's/^torch==.*/torch==$*/' -e '/^# examples/,/^tqdm/d' -e '/^-r/d' $^ \
	  > build/torch-$*/requirements.txt
	build/torch-$*/bin/python -m pip install --quiet -r build/torch-$*/requirements.txt
	touch $@

# An environment on top of .venv, which stays as it is.
ABOVE_VENV := build/integrations/.requirements build/peers/.requirements
$(ABOVE_VENV): build/%/.requirements: requirements-%.txt .venv/.requirements
	$(VENV_PYTHON) -m venv --clear build/$*
	echo "import site; site.addsitedir('$$($(VENV_PYTHON) $(PURELIB))')" \
	  > "$$(build/$*/bin/python $(PURELIB))/venv_below.pth"
	build/$*/bin/python -m pip install --quiet setuptools -c requirements-demo.txt
	build/$*/bin/python -m pip install --quiet -r $< -c requirements-demo.txt $(PIP_FLAGS_$*)
	touch $@

# DeepSpeed asks torch when it is built, by the setuptools of this environment: a new one has those of
# Python, which are too old to make a wheel.
PIP_FLAGS_peers := --no-build-isolation

# --- Build -------------------------------------------------------------------------------------------

# pip configures the build folder and makes the package importable. Later runs only need ninja.
$(BUILD)/.installed: .venv/.requirements-demo setup.py pyproject.toml VERSION CMakePresets.json
	TORCHFUSE_BUILD_DIR=$(BUILD) TORCHFUSE_WITH_CUDA=$(WITH_CUDA) CMAKE_ARGS="--preset dev $(CMAKE_ARGS)" \
	  $(VENV_PYTHON) -m pip install --verbose --no-build-isolation --no-deps --editable .
	touch $@

# The component "python" alone goes beside the .py files; the rest is the C++ package.
build: $(BUILD)/.installed
	cmake --build $(BUILD) --target torchfuse torchfuse_C
	@cmake --install $(BUILD) --prefix python/torchfuse > $(BUILD)/install.log
	@cmake --install $(BUILD) --prefix python/torchfuse --component python >> $(BUILD)/install.log
	@if $(HAS_CUDA); then echo "torchfuse: built for the CPU and CUDA in $(BUILD)"; else \
	  echo "torchfuse: built for the CPU in $(BUILD); TORCHFUSE_WITH_CUDA=ON adds CUDA"; fi

prefix: build
	@cmake --install $(BUILD) --prefix $(PREFIX) > $(BUILD)/install-prefix.log

# --- Tests -------------------------------------------------------------------------------------------

# `make check` meets a broken .cu where there is an nvcc, and not first in continuous integration.
check: export TORCHFUSE_WITH_CUDA := $(or $(TORCHFUSE_WITH_CUDA),$(if $(shell command -v nvcc),AUTO,$(WITH_CUDA)))
ci test-all: export TORCHFUSE_WITH_CUDA := ON
check: LANES = $(CHECK_LANES)
test: LANES = $(TEST_LANES)
ci: LANES = $(CI_LANES)
# Three parts of `make ci` are parts of the whole ones.
test-all: LANES = $(filter-out test-python test-consumer test-pretended-cuda-eager,$(CI_LANES)) $(REST_LANES)
check test ci test-all:
	@$(PYTHON) tools/run_lanes.py "make $@" $(LANES)

# The kernels on the CPU, the ops, and the classes; in a build with CUDA also the kernels on a GPU, if there
# is one.
CUDA_TESTS := $$($(HAS_CUDA) && echo torchfuse_cuda_kernel_tests torchfuse_toolkit_conversion_tests)
test-cpp: build
	cmake --build $(BUILD) --target torchfuse_kernel_tests torchfuse_api_tests $(CUDA_TESTS)
	GTEST_BRIEF=1 ctest --test-dir $(BUILD) -L '^(kernels|api|cuda)$$' --output-on-failure --no-tests=error $(CTEST_ARGS)

# The CUDA kernels' own source, compiled by g++, with their accesses counted.
test-cuda-on-cpu: build
	cmake --build $(BUILD) --target torchfuse_cuda_on_cpu_tests torchfuse_cuda_on_cpu_self_tests \
	  $(CUDA_TESTS)
	ctest --test-dir $(BUILD) -L cuda_on_cpu --output-on-failure --no-tests=error $(CTEST_ARGS)

# Every header compiles when it is included alone.
test-headers: build
	cmake --build $(BUILD) --target all_verify_interface_header_sets

# Two processes, each with whole files. Threads that wait for work do not spin: they share the cores with
# the tests.
PYTEST_WORKERS ?= 2
# The longest test takes seven minutes on two slow cores. One that hangs is named, and the others run.
TEST_SECONDS ?= 900
PYTEST_IN_PARALLEL := -n $(PYTEST_WORKERS) --dist loadfile \
  -o faulthandler_timeout=$(TEST_SECONDS) -o faulthandler_exit_on_timeout=true

# What Python tests start or import. One that is older than the library would see other objects.
PROGRAMS := torchfuse_programs torchfuse_synchronous_gloo
programs: build
	cmake --build $(BUILD) --target $(PROGRAMS)

# Of the files that start processes these, each with one group of ranks or one program.
SOME_PROCESSES := $(addprefix tests/python/,amp/test_grad_scaler_group.py \
  apex/test_apex_bert_program.py checkpoint/test_checkpoint_ranks.py optimizers/test_dtensor.py \
  optimizers/test_fsdp.py optimizers/test_norm_groups.py optimizers/test_shared_between_processes.py \
  parallel/test_distributed.py \
  parallel/test_sharded_program.py parallel/test_sync_batch_norm_group.py \
  parallel/test_torch_ddp_fsdp.py)
MACHINERY := tests/python/tools tests/python/benchmarks
PYTEST := OMP_WAIT_POLICY=PASSIVE TORCHFUSE_BUILD_DIR=$(BUILD) $(VENV_PYTHON) -m pytest $(PYTEST_IN_PARALLEL)
test-python: programs .venv/.requirements
	$(PYTEST) $(addprefix --ignore ,$(MACHINERY)) --processes-of "$(SOME_PROCESSES)" $(PYTEST_ARGS)

# Without what starts programs or several processes.
test-python-quick: build .venv/.requirements
	$(PYTEST) $(addprefix --ignore ,$(MACHINERY)) -m "not slow and not processes" $(PYTEST_ARGS)

# With all processes, and all combinations of what the generated tests vary.
test-python-whole: programs .venv/.requirements
	$(PYTEST) $(addprefix --ignore ,$(MACHINERY)) --combinations=all $(PYTEST_ARGS)

# The tools, and the benchmarks' own arithmetic.
test-machinery: programs .venv/.requirements
	$(PYTEST) $(MACHINERY) $(PYTEST_ARGS)

test-doctests: build .venv/.requirements
	$(VENV_PYTHON) -m pytest --doctest-modules python/torchfuse -o doctest_optionflags=NORMALIZE_WHITESPACE

# What several processes or threads do together, twice beside work that keeps all cores busy. TIMES=20
# looks for rarer failures.
UNDER_LOAD := tests/python/parallel tests/python/optimizers/test_dtensor.py \
  tests/python/optimizers/test_threads.py tests/python/amp/test_grad_scaler_dtensor.py \
  tests/python/apex/test_apex_ddp_program.py

test-under-load: programs .venv/.requirements
	tools/under_load.sh $(or $(TIMES),2) env $(PYTEST) -q $(UNDER_LOAD) $(PYTEST_ARGS)

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

# The machine code of a build for every architecture. Needs no GPU.
test-cubins: .venv/.requirements
	cmake --preset release -DTORCHFUSE_WITH_CUDA=ON -DTORCHFUSE_WERROR=ON -DPython_EXECUTABLE=$(VENV_PYTHON)
	cmake --build --preset release --target torchfuse_kernels_library
	$(VENV_PYTHON) tools/check_cubins.py --library build/release/csrc/kernels/libtorchfuse_kernels.so

# The device of tests/pretended_cuda, which takes the place of CUDA's runtime: a build with CUDA, whatever
# the machine has. What it can show is in tests/pretended_cuda/README.md.
ifeq ($(BUILD),build/dev)
pretended-cuda test-pretended-cuda test-pretended-cuda-eager test-host-path:
	@$(MAKE) --no-print-directory TORCHFUSE_WITH_CUDA=ON $@
else
pretended-cuda: build
	cmake -S . -B $(BUILD) -DTORCHFUSE_PRETENDED_CUDA=ON
	cmake --build $(BUILD) --target pretended_cuda

# Four devices, for as many ranks.
ON_PRETENDED_CUDA := OMP_WAIT_POLICY=PASSIVE PRETENDED_CUDA_DEVICES=4 TORCHFUSE_BUILD_DIR=$(BUILD) tools/on_pretended_cuda.sh \
  $(VENV_PYTHON) -m pytest $(PYTEST_IN_PARALLEL) -m "cuda and not slow"

# Steps, the scaler, norms, batch norm, graphs, streams and NCCL, each once and at once.
EAGER := tests/python/cuda $(addprefix tests/python/,amp/test_grad_scaler.py optimizers/test_fused_adam.py \
  parallel/test_sync_batch_norm.py parallel/test_distributed.py ops test_clip_grad.py)
test-pretended-cuda-eager: pretended-cuda .venv/.requirements
	$(ON_PRETENDED_CUDA) --combinations=values $(EAGER) $(PYTEST_ARGS)

# Its own tests, and all tests marked cuda, in two to four orders of time.
test-pretended-cuda: pretended-cuda programs .venv/.requirements
	cmake --build $(BUILD) --target pretended_cuda_tests
	ctest --test-dir $(BUILD) -L pretended_cuda --output-on-failure --no-tests=error
	$(ON_PRETENDED_CUDA) -m "not slow" tests/pretended_cuda
	$(ON_PRETENDED_CUDA) --combinations=pairs --orders-of-time $(PYTEST_ARGS)

# What a step costs the host, counted in instructions: load and clock do not change it. The baseline is that
# of a build with CUDA.
test-host-path: build .venv/.requirements
	$(VENV_PYTHON) benchmarks/host_path.py --check
endif

# The script calls `make build`; here it has the compiler cache.
gpu-bundle:
	tools/gpu_bundle.sh

test-mutations: .venv/.requirements
	$(VENV_PYTHON) -m pytest tests/mutations $(PYTEST_ARGS)

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

# The README's C++ program, against the package that `make build` installed.
test-consumer: build .venv/.requirements
	TORCHFUSE_BUILD_DIR=$(BUILD) $(VENV_PYTHON) -m pytest tests/packaging/cpp/test_readme.py $(PYTEST_ARGS)

# Every program and example, and built without Python, as an archive and in a subdirectory.
test-consumer-whole: build .venv/.requirements
	TORCHFUSE_BUILD_DIR=$(BUILD) $(VENV_PYTHON) -m pytest tests/packaging/cpp $(PYTEST_ARGS)

# Every way to install the Python package, into environments below build/packaging, and the machine code
# that `pip install` made.
test-packaging: .venv/.requirements-packaging
	$(VENV_PYTHON) -m pytest tests/packaging/python $(PYTEST_ARGS)
	$(VENV_PYTHON) tools/check_cubins.py \
	  --library build/packaging/checkout/build/*-release/csrc/kernels/libtorchfuse_kernels.so

# With another torch, in an environment of its own.
build-for-torch:
	@test -n "$(VERSION)" || { echo "make test-torch: expected VERSION=2.15.0, got none"; exit 2; }
	$(MAKE) --no-print-directory build/torch-$(VERSION)/.requirements
	TORCHFUSE_BUILD_DIR=$(TORCH_ENV)-cmake TORCHFUSE_WITH_CUDA=$(WITH_CUDA) CMAKE_ARGS="--preset dev $(CMAKE_ARGS)" \
	  $(TORCH_ENV)/bin/python -m pip install --verbose --no-build-isolation --no-deps .

# The tests that depend on torch.
test-torch: test-torch-cpp test-torch-python

test-torch-cpp: build-for-torch
	$(TORCH_ENV)/bin/cmake --build $(TORCH_ENV)-cmake --target torchfuse_api_tests
	GTEST_BRIEF=1 $(TORCH_ENV)/bin/ctest --test-dir $(TORCH_ENV)-cmake -L api --verbose \
	  --no-tests=error

test-torch-python: build-for-torch
	$(TORCH_ENV)/bin/cmake --build $(TORCH_ENV)-cmake --target torchfuse_programs
	OMP_WAIT_POLICY=PASSIVE TORCHFUSE_BUILD_DIR=$(TORCH_ENV)-cmake $(TORCH_ENV)/bin/python -m pytest $(PYTEST_IN_PARALLEL) \
	  $(addprefix --ignore ,tests/python/tools $(wildcard tests/python/test_packaging_*.py)) $(PYTEST_ARGS)

test-newest-torch:
	@$(MAKE) --no-print-directory test-torch VERSION=$(NEWEST_TORCH)

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

# One wheel for all supported versions of torch, with CUDA unless TORCHFUSE_WITH_CUDA=OFF: half an hour.
# PYTHONS and TORCHES choose: tools/build_wheel.py.
wheel: .venv/.requirements-packaging
	$(VENV_PYTHON) tools/build_wheel.py

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
# The same text in C++, by ZeRO. What CMake makes stays from one run to the next.
SHARDED_LM_TEXT = $$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
SHARDED_LM_CPP = build/sharded_lm/sharded_lm "$(SHARDED_LM_TEXT)" --out build/sharded/cpp

sharded-demo: prefix
	rm -rf build/sharded
	$(TORCHRUN) $(SHARDED_LM) --stop-after 120
	OMP_NUM_THREADS=1 $(VENV_PYTHON) $(SHARDED_LM) --resume --stop-after 200
	$(TORCHRUN) $(SHARDED_LM) --resume --parallel zero
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
