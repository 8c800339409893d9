# Each target makes .venv by itself; it is rebuilt when the pins or the dependencies change.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[dev]'
	touch $@

.PHONY: demo test check fix
demo: $(STAMP)
	$(BIN)/lorafleet demo

# what starts a whole server takes all cores by itself; of the rest, one file a core
test: $(STAMP)
	$(BIN)/pytest -n logical --dist loadfile --no-loadscope-reorder --ignore tests/cluster
	$(BIN)/pytest tests/cluster

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
