# Every target makes what it needs; a second call reuses .venv and .releases.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OLD_RELEASES := 0.16.9 0.17.6 0.18.5 0.19.2
RELEASES := $(addprefix .releases/,$(addsuffix /.installed,$(OLD_RELEASES)))

.PHONY: all install demo test releases lint schema clean

all: demo

install: $(VENV)/.installed

# torch first and alone: constraints.txt pins it, and DeepSpeed's set-up looks for it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "zeroguard needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt pip setuptools wheel
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt --no-build-isolation deepspeed
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/plain_loop.py

releases: $(RELEASES)

# Older DeepSpeed releases, without dependencies, each in a folder of its own.
.releases/%/.installed: | $(VENV)/.installed
	rm -rf .releases/$*
	$(PIP) install -q --no-deps --no-build-isolation --target .releases/$* deepspeed==$*
	touch $@

# Two workers on two cores; a module (or a DeepSpeed release) stays on one of them, and reuses its processes.
test: install releases
	$(BIN)/ruff check zeroguard tests examples
	$(BIN)/python -m pytest -n 2 --dist loadscope

lint: install
	$(BIN)/ruff check zeroguard tests examples
	$(BIN)/ruff format --check zeroguard tests examples
	$(BIN)/mypy zeroguard

schema: install
	$(BIN)/python -m zeroguard schema --out docs/guard-config.schema.json

clean:
	rm -rf $(VENV) .releases build dist *.egg-info
