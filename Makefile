# Each target makes .venv by itself; it is rebuilt when the pins or the dependencies change.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

.PHONY: demo test check fix
demo: $(STAMP)
	$(BIN)/lorafleet demo

test: $(STAMP)
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
