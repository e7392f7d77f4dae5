# `make report` builds the evidence page, `make test` checks the project; `make help` lists the rest.
# Every target creates .venv if it is missing and installs the versions pinned in constraints.txt.
PYTHON ?= python3
# Parallel test processes: one per core.
JOBS ?= auto
BIN := .venv/bin
NATIVE := src/bmfa/attention/kernels/native
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist worksteal

# Some processors advertise AMX without granting it, and oneDNN's bf16 products then crash.
# The variable keeps oneDNN from using AMX; it has no effect on other processors.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help setup report test test-slow test-all test-install lint docs dist clean

help:
	@echo "make report        the evidence page, in report/"
	@echo "make test          ruff, mypy and the tests, without the slow ones"
	@echo "make test-all      the same and the slow tests"
	@echo "make test-install  the tests that build packages, compile with sanitizers, and run the notebooks"
	@echo "make docs          the tables of the texts from records, and the manual in build/site/"
	@echo "make dist          sdist and wheel, in dist/"
	@echo "make setup         .venv with the pinned versions of everything"
	@echo "make clean         removes .venv and everything that was built"

setup: .venv/.tools .venv/.repaired .venv/.compiled

# What `make report` needs.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "bmfa needs Python 3.11 or newer; $(PYTHON) is older. Run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[report]'
	touch $@

# Models, tests, linters and the manual.
.venv/.tools: .venv/.installed
	$(PIP) --editable '.[test]'
	touch $@

# torchvision does not import beside a CPU build of torch that it was not built for.
.venv/.repaired: .venv/.tools tools/torchvision_operators.py
	$(BIN)/python tools/torchvision_operators.py
	touch $@

# The C++ kernels. Everything works without them; the next make tries again.
.venv/.compiled: .venv/.installed $(NATIVE)/compile.py $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h)
	@if $(BIN)/python $(NATIVE)/compile.py; then touch $@; fi

report: .venv/.installed .venv/.compiled
	$(BIN)/bmfa report

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

test-slow: setup
	$(PYTEST) -m "slow and not install"

test-all: test test-slow

test-install: setup
	$(PYTEST) -m install

docs: setup
	$(BIN)/python tools/tables.py
	$(BIN)/mkdocs build --strict

dist: setup
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build

clean:
	rm -rf .venv report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(NATIVE)/tiles-*.so $(NATIVE)/build-failure.txt
