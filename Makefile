# Every target makes and uses VENV. Settings, each as `make TARGET NAME=value`:
#   VENV         where packages are installed, .venv; `make test-torch` takes one of its own for each PyTorch
#   PYTHON       interpreter to build VENV from (3.11 or newer)
#   TORCH        which PyTorch to install, 2.10 to 2.13
#   TRITON       which Triton the tests compile kernels with, where PyTorch comes without one (188 MB, Linux on x86-64 alone)
#   TORCH_INDEX  package index to take PyTorch from: give the address that pytorch.org's install page shows for your
#                ROCm, CUDA or CPU build; empty takes the build your pip is set up for
#   RUN_DIR      where `make quickstart` trains; OVERRIDES are fields of its run file to change
#   JOBS         tests that run at once; auto is one a core
#   GPU_JOBS     processes of `make test-gpu` that share the device
#   BROWSER      the Chromium of `make test-browser`; empty takes the one that is installed
#   SCREENSHOTS  existing folder into which `make test-browser` puts pictures of the pages; empty takes none
#   TESTS        files or folders of tests to run; empty runs all
#   INTERPRETER  runs the tests in place of VENV's, with the packages that it has, as in a container: nothing is installed

VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
TORCH_INDEX ?=
RUN_DIR ?= runs/quickstart
OVERRIDES ?=
JOBS ?= auto
GPU_JOBS ?= 8
INTERPRETER ?=
BROWSER ?=
SCREENSHOTS ?=
TESTS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# A quarter of pip's time for the many packages of tests alone; PyTorch comes by pip, whose settings uv does not read.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
PHALANX := $(BIN)/phalanx
TEST_PYTHON := $(or $(INTERPRETER),$(BIN)/python)
TEST_NEEDS := $(if $(INTERPRETER),,$(VENV)/dev)

.PHONY: quickstart test test-gpu test-faults test-browser test-containers test-guides test-torch lint style types units install dist site clean

quickstart: $(VENV)/installed
	$(PHALANX) data prepare python-stdlib --out data/python-stdlib --vocab-size 2048 --validation-fraction 0.02
	$(PHALANX) train examples/quickstart.yaml --run-dir $(RUN_DIR) $(OVERRIDES)
	$(PHALANX) generate $(RUN_DIR) --prompt "def " --tokens 120 --temperature 0.7 --seed 1
	$(PHALANX) report $(RUN_DIR)

# Types are checked beside the tests: the one takes a single core, and the others wait for each other now and then.
test: style
	$(MAKE) --no-print-directory --jobs 2 --keep-going types units

lint: style types

style: $(VENV)/dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(VENV)/dev
	$(BIN)/mypy

# Modules are compiled once for all processes that tests start, also where the environment asks for no such files.
units: $(TEST_NEEDS)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(TEST_PYTHON) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# On a machine with an accelerator: what only a device can show.
test-gpu: $(TEST_NEEDS)
	OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest -m gpu --numprocesses $(GPU_JOBS) --dist worksteal tests/gpu

# Faults in real training: ranks killed, suspended, slowed. One after the other, since what is measured are times.
test-faults: $(TEST_NEEDS)
	OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest -m faults --numprocesses 0 -s $(or $(TESTS),tests/faults)

# Pages in a real browser: a plan, a run's report (from its server, too), the site. Chromium has to be installed (Debian:
# apt-get install chromium), or BROWSER names it; what drives it comes by pip, from the extra `browser`.
test-browser: $(TEST_NEEDS)
	$(if $(INTERPRETER),,$(PIP) -c constraints.txt -e ".[browser]")
	BROWSER="$(BROWSER)" SCREENSHOTS="$(abspath $(SCREENSHOTS))" OMP_NUM_THREADS=1 \
		$(TEST_PYTHON) -m pytest -m browser --numprocesses 0 $(or $(TESTS),tests/browser)

# The Python layer of each container recipe, built by its own commands from the packages that pip finds.
test-containers: $(TEST_NEEDS)
	OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest -m registry --numprocesses 0 tests/test_containers.py

# The commands of the guides that take long, exactly as they are printed; half an hour on two cores.
test-guides: $(TEST_NEEDS)
	OMP_NUM_THREADS=1 $(TEST_PYTHON) -m pytest -m guides --numprocesses 0 -s tests/cli/test_printed_commands.py

# With another PyTorch, such as TORCH=2.10.0, on the CPU: what meets the most of its private and moving parts, and a short
# quickstart.
TORCH_VERSION = $(patsubst torch==%,%,$(TORCH))
WITH_TORCH = $(MAKE) --no-print-directory VENV=.venv-torch-$(TORCH_VERSION) TORCH=torch==$(TORCH_VERSION) INTERPRETER=
test-torch:
	$(WITH_TORCH) units TESTS="tests/verification tests/checkpoint tests/torch_compat tests/planner/dryrun tests/test_counter_random.py"
	$(WITH_TORCH) quickstart RUN_DIR=runs/torch-$(TORCH_VERSION) \
		OVERRIDES="training.steps=20 evaluation.every=20 evaluation.samples=8"

# Wheel and source archive: checked, installed into an empty environment, and used there outside the repository.
dist: $(VENV)/dev
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" bash containers/try_wheel.sh dist

# The documentation as a site, in site/; links and anchors that lead nowhere are errors.
site: $(VENV)/dev
	$(BIN)/mkdocs build --strict

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) -c constraints.txt -e .
	# What pip would do on one core; the few files that are no Python of this version are left as they are.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# Tests import few of these packages' modules: they are compiled then, not here.
$(VENV)/dev: $(VENV)/installed
	$(PIP) -c constraints.txt uv
	$(UV) -c constraints.txt -e ".[dev]"
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(UV) "$(TRITON); sys_platform == 'linux' and platform_machine == 'x86_64'"
	touch $@

clean:
	rm -rf .venv .venv-* build dist site src/*.egg-info
