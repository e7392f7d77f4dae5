# Two commands: `make report` (the evidence page) and `make test` (ruff, mypy, pytest).
# Each creates .venv where missing and installs the versions pinned in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

# Some processors advertise AMX without granting it; oneDNN's bf16 products then die. Harmless elsewhere.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: setup report test clean

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "bmfa needs Python 3.11 or newer; $(PYTHON) is older. Run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

report: setup
	$(BIN)/bmfa report

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf .venv report build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
