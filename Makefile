# Each target sets itself up: all that must be there is Python (3.11 or later), make, and what pip needs to install torch.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check venv

demo: .venv/stamp
	$(BIN)/meshwright train examples/demo.toml

test: .venv/stamp
	$(BIN)/python -m pytest -m "not slow"

check: .venv/stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

venv: .venv/stamp

# Made anew, not updated, when what it is made from changes: a left-over package must not make a test pass.
.venv/stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshwright needs Python 3.11 or later, not " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
