# One door to everything. `make demo` and `make test` set up what they need; CI calls these very targets.
# PYTHON: the interpreter the environment is made with (3.11 or newer).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CODE   := src tests examples benchmarks docs/hooks.py

.PHONY: help venv demo test lint format docs bench clean

help:
	@echo "make demo    train all seven methods on digits with 20% wrong labels and compare them"
	@echo "make test    run all tests"
	@echo "make lint    formatting, lint and types"
	@echo "make format  rewrite files as make lint wants them"
	@echo "make docs    build the documentation into site/; every warning is an error"
	@echo "make bench   cost and memory of a step, time of a report"
	@echo "make clean   remove the environment and all caches"

# Torch goes first and alone: what follows then takes the version that is there and never picks another.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

venv: $(READY)

# With a fifth of the labels wrong, more rho than on clean data pays; that of ASAM, in units of the weights, is larger.
demo: $(READY)
	$(BIN)/tiltsam compare digits --rho 0.5 --methods erm sam asam:rho=5 esam2 pgn rsam tsam --seeds 2 --epochs 40 \
		--out runs/demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# What is silenced is told here: Material for MkDocs ends in May 2027; its successor, Zensical, reads the same mkdocs.yml.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/bench_overhead.py
	$(BIN)/python benchmarks/bench_sam.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_report.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site
