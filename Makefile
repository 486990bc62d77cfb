PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv
venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --group dev --editable '.[amazon]'
	touch $@

