# The two commands of the README (run, test) make the environment, install, and do their job. PYTHON picks the
# interpreter; constraints.txt pins what gets installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test docs torture fuzz lint format clean anew

run: $(VENV)/.installed
	$(BIN)/steppe run pmnist fs-dgpm

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest

# Into site/. A link or an anchor that leads nowhere is a warning, and warnings are errors, as long as they are printed:
# not with --quiet. The variable keeps out a notice about other programs.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

torture: $(VENV)/.installed-dev
	$(BIN)/python tests/stress/torture.py --kills 300 --out results/reliability/torture.json
	$(BIN)/python -W ignore tests/stress/threads_torture.py --calls 10000 --out results/reliability/threads.json
	$(BIN)/python tests/stress/torture_workers.py --kills 200 --out results/reliability/workers.json
	$(BIN)/python -W ignore tests/stress/interrupt_torture.py --interrupts 2000 --out results/reliability/interrupts.json

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/stress/fuzz_readers.py --inputs 100000 --out results/reliability/fuzz.json

# The environment is made anew where its interpreter is gone, where making it broke off, and for another PYTHON.
ASKED := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
USED := $(shell test -x $(BIN)/python && cat $(VENV)/.made 2>/dev/null)
STALE := $(if $(USED),$(if $(ASKED),$(filter-out $(USED),$(ASKED))),yes)

$(VENV)/.made: $(if $(STALE),anew)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"Python %d.%d is too old, 3.11 or newer is needed: make PYTHON=python3.12, or where it is." % sys.version_info[:2])'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	echo $(PYTHON) > $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[figures]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[figures,docs,dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
