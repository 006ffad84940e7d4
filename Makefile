# Every target makes the environment it needs; Python and make are enough.

# TensorFlow has wheels for these Python versions.
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10
PYTHON ?= $(shell for p in $(CANDIDATES); do \
  if $$p -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$p; break; fi; done)
PYTHON310 ?= python3.10

# A file stays in one process, so that what it built once serves all its tests.
PYTEST_ARGS ?= -n auto --dist loadfile
DEMO_ARGS ?= --plot digits.png
BENCH_ARGS ?=

VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_WHEEL := .venv-wheel
VENV_TPU_AOT := .venv-tpu-aot
VENV_PEERS := .venv-peers
OLDEST := 'tensorflow==2.16.*' 'keras==3.10.*'

INSTALL := -m pip install --quiet
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# TensorFlow's start-up notes hide what the examples print.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check format test-oldest test-tpu-aot wheel test-wheel bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON, PYTHON310, PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS"

demo: $(VENV)/.examples ## Train on digits three ways and draw digits.png
	$(VENV)/bin/python examples/digits.py $(DEMO_ARGS)

test: $(VENV)/.test ## Run the tests
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.dev ## Lint, check the format and the types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.dev ## Mend the format and what the linter can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

test-oldest: $(VENV_OLDEST)/.test ## Run the tests on TensorFlow 2.16, Keras 3.10, Python 3.10
	$(VENV_OLDEST)/bin/python -m pytest $(PYTEST_ARGS)

test-tpu-aot: $(VENV_TPU_AOT)/.tpu-aot ## Compile a train step for 8 TPU cores, ahead of time
	$(VENV_TPU_AOT)/bin/python -m pytest -m tpu_aot tests/platforms

wheel: $(VENV)/.dev ## Build the sdist and, from it, the wheel into dist/
	@rm -rf dist
	$(VENV)/bin/python -m build --outdir dist .

# The tests are copied away, so that only the installed wheel can be imported.
test-wheel: wheel ## Run the tests from another folder on the installed wheel
	@echo "Installing the wheel into $(VENV_WHEEL)"
	$(VENV)/bin/python -m venv --clear $(VENV_WHEEL)
	wheel=$$(ls dist/*.whl) && $(VENV_WHEEL)/bin/python $(INSTALL) "$$wheel[test]"
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	cp -R tests examples pyproject.toml README.md "$$folder"; \
	python=$$PWD/$(VENV_WHEEL)/bin/python; cd "$$folder"; \
	echo "Testing $$($$python -c 'import keras_accum; print(keras_accum.__file__)')"; \
	$$python -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.examples $(VENV_PEERS)/.peers ## Measure against peers: BENCH_ARGS=--quick for less
	$(VENV)/bin/python -m benchmarks.run --peers_python=$(VENV_PEERS)/bin/python $(BENCH_ARGS)

clean: ## Remove the environments and the builds
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_WHEEL) $(VENV_TPU_AOT) $(VENV_PEERS) build dist *.egg-info

# A stamp per extra of setup.py: installed again when setup.py changes.
$(VENV)/.%: setup.py $(VENV)/pyvenv.cfg
	@echo "Installing keras_accum[$*] into $(VENV) (the first time downloads TensorFlow)"
	$(VENV)/bin/python $(INSTALL) --editable ".[$*]"
	@touch $@

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { \
	  echo "keras_accum needs Python 3.10 to 3.13, for which TensorFlow has wheels."; \
	  echo "None of these is one: $(CANDIDATES)."; \
	  echo "Install one, or name it: make ... PYTHON=/path/to/python3.12"; exit 1; } >&2
	@$(PYTHON) -c '$(SUPPORTED)' || { \
	  echo "keras_accum needs Python 3.10 to 3.13, for which TensorFlow has wheels."; \
	  echo "Received: PYTHON=$(PYTHON), $$($(PYTHON) --version 2>&1)"; exit 1; } >&2
	$(PYTHON) -m venv --clear $(VENV)

$(VENV_OLDEST)/.test: setup.py $(VENV_OLDEST)/pyvenv.cfg
	@echo "Installing keras_accum[test] with $(OLDEST) into $(VENV_OLDEST)"
	$(VENV_OLDEST)/bin/python $(INSTALL) --editable ".[test]" $(OLDEST)
	@touch $@

# GradientAccumulator needs legacy Keras.
$(VENV_PEERS)/.peers: $(VENV)/pyvenv.cfg
	@echo "Installing GradientAccumulator with legacy Keras into $(VENV_PEERS)"
	$(PYTHON) -m venv --clear $(VENV_PEERS)
	$(VENV_PEERS)/bin/python $(INSTALL) tensorflow tf-keras gradient-accumulator==0.4.2
	@touch $@

# JAX with libtpu: in an environment of its own, for it brings 200 MB.
$(VENV_TPU_AOT)/.tpu-aot: setup.py
	@python="$(PYTHON)"; $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "test-tpu-aot needs Python 3.11 or later. Received: PYTHON=$(PYTHON)"; \
	  echo "Name one: make test-tpu-aot PYTHON=/path/to/python3.11"; exit 1; } >&2
	$(PYTHON) -m venv --clear $(VENV_TPU_AOT)
	@echo "Installing keras_accum[tpu-aot] into $(VENV_TPU_AOT) (libtpu is 200 MB)"
	$(VENV_TPU_AOT)/bin/python $(INSTALL) --editable ".[tpu-aot]"
	@touch $@

$(VENV_OLDEST)/pyvenv.cfg:
	@$(PYTHON310) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' 2>/dev/null || { \
	  echo "test-oldest needs Python 3.10. Received: PYTHON310=$(PYTHON310)"; \
	  echo "Install it, or name it: make test-oldest PYTHON310=/path/to/python3.10"; \
	  exit 1; } >&2
	$(PYTHON310) -m venv --clear $(VENV_OLDEST)
