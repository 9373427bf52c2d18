# make serve   install what is needed and serve MODEL (default: the small embedded one) on 127.0.0.1:8000
# make test    install what is needed and run every check: format, lint, types, tests
#
#   make serve MODEL=/models/llama ARGS="--port 9000 --max-num-seqs 64"
#   make test PYTEST_ARGS="tests/engine_core -x"

PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGES := protocol api_server engine_core worker kernels

# Without an NVIDIA GPU its libraries would be gigabytes for nothing, so the CPU build comes first. Where the package
# index has no CPU build under this version, say where it is: make serve CPU_TORCH="--index-url URL torch==2.13.0"
CPU_TORCH ?= torch==2.13.0
HAS_NVIDIA_GPU := $(shell { test -e /dev/nvidiactl || nvidia-smi -L; } >/dev/null 2>&1 && echo yes)

.PHONY: serve test lint clean

serve: $(VENV)/.installed
	@exec $(BIN)/octavo serve $(MODEL) $(ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV)/typing && MYPYPATH=. ../bin/mypy --config-file ../../pyproject.toml -p octavo.protocol -p octavo.engine_core

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
ifneq ($(HAS_NVIDIA_GPU),yes)
	@echo "installing torch for the CPU"
	@$(PIP) install $(CPU_TORCH)
endif
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py $(wildcard kernels/cpu/csrc/*)
	@echo "installing octavo"
	@$(PIP) install --editable .
	@touch $@

# mypy does not follow the import hook that maps the folders under `octavo`, so it gets them as links.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the checks need"
	@$(PIP) install --editable '.[dev]'
	@mkdir -p $(VENV)/typing/octavo
	@for package in $(PACKAGES); do ln -sfn ../../../$$package $(VENV)/typing/octavo/$$package; done
	@touch $@
