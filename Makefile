# Every target makes what it needs; a second call reuses .venv and .releases.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OLD_RELEASES := 0.16.9 0.17.6 0.18.5 0.19.2 0.19.6
RELEASES := $(addprefix .releases/,$(addsuffix /.installed,$(OLD_RELEASES)))
# The oldest torch that pyproject.toml allows. It and the newest are gigabytes, and no test needs them: make compat alone.
OLD_TORCH := 2.4.0
# The oldest trainers that the integration tests run with; each folder holds what must not be newer there.
LIGHTNING_OLD := lightning==2.4.0 pytorch_lightning==2.4.0
HF_OLD := transformers==4.51.3 accelerate==1.6.0 tokenizers==0.21.4 huggingface_hub==0.36.0 requests==2.32.3 urllib3==2.2.3 \
  charset_normalizer==3.4.0 certifi==2025.1.31

.PHONY: all install demo test releases trainers gallery fuzz lint schema bench compat drift newest scale soak clean

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
	$(BIN)/python examples/lightning_two_losses.py

releases: $(RELEASES)

# Older DeepSpeed releases, without dependencies, each in a folder of its own.
.releases/%/.installed: | $(VENV)/.installed
	rm -rf .releases/$*
	$(PIP) install -q --no-deps --no-build-isolation --target .releases/$* deepspeed==$*
	touch $@

trainers: .releases/lightning-old/.installed .releases/hf-old/.installed

.releases/lightning-old/.installed: | $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) install -q --no-deps --no-build-isolation --target $(@D) $(LIGHTNING_OLD)
	touch $@

.releases/hf-old/.installed: | $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) install -q --no-deps --no-build-isolation --target $(@D) $(HF_OLD)
	touch $@

# Two workers on two cores; a module (or a DeepSpeed release) stays on one of them, and reuses its processes. The gallery of
# faults has a command of its own: one of its programs hangs, on purpose.
test: install releases trainers
	$(BIN)/ruff check zeroguard tests examples
	$(BIN)/python -m pytest -n 2 --dist loadscope --ignore=tests/faults
	LAB_LIGHTNING=$(CURDIR)/.releases/lightning-old $(BIN)/python -m pytest -q -n 2 --dist loadscope \
	  tests/integration/test_lightning.py tests/integration/test_fabric.py
	LAB_PYTHON_PATH=$(CURDIR)/.releases/hf-old $(BIN)/python -m pytest -q -n 2 --dist loadscope \
	  tests/integration/test_transformers.py tests/integration/test_accelerate.py

# Every public fault that is known, on the releases that have it, and docs/faults.md from what was seen.
gallery: install releases
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests/faults
	$(BIN)/python -m tests.faults.table --write

# Random legal programs beside plain PyTorch, for as long as one likes; a failure prints its seed and the shrunk program.
fuzz: install
	FUZZ_EXAMPLES=500 $(BIN)/python -m pytest tests/fuzz -n 2 --dist loadscope

# Which guard does what on which releases, from what is seen here, into docs/compatibility.md.
compat: install releases .releases/torch-$(OLD_TORCH)/.installed .releases/torch-newest/.installed
	$(BIN)/python -m tests.contract.compat --write

# The same on the newest releases that the package index has now, and nothing is written: exit status 1 tells.
drift: install newest
	$(BIN)/python -m tests.contract.compat --deepspeed newest --torch installed newest

newest: install
	rm -rf .releases/newest .releases/torch-newest
	$(PIP) install -q --no-deps --no-build-isolation --target .releases/newest deepspeed
	$(MAKE) .releases/torch-newest/.installed

.releases/torch-%/.installed: | $(VENV)/.installed
	rm -rf $(@D)
	$(PIP) install -q --target $(@D) torch$(if $(filter newest,$*),,==$*)
	touch $@

# 2000 steps with everything on: memory, handles and hooks stay flat, nothing is found, the bits are the unguarded ones.
soak: install
	nice $(BIN)/python -m tests.benchmarks.soak

scale: install
	$(BIN)/python -m tests.benchmarks.scale --write

lint: install
	$(BIN)/ruff check zeroguard tests examples
	$(BIN)/ruff format --check zeroguard tests examples
	$(BIN)/mypy zeroguard

bench: install
	$(BIN)/python -m tests.benchmarks.steps --model tiny
	$(BIN)/python -m tests.benchmarks.reading

schema: install
	$(BIN)/python -m zeroguard schema --out docs/guard-config.schema.json

clean:
	rm -rf $(VENV) .releases build dist *.egg-info
