# Each target installs what it needs into $(VENV). CI calls the same targets.
# PYTHON: the interpreter of the environment (3.11 or newer).
# TORCH: a version of torch such as 2.11, or newest; by default the one in constraints.txt. Others get their own
# environment.
PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(TORCH:%=-torch%)
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
FLOOR  := $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)"\]/\1/p' pyproject.toml)
CODE   := src tests examples benchmarks docs/hooks.py

.PHONY: help venv demo test test-fast test-range lint format docs bench release-check clean

help:
	@echo "make demo    compare SAM, TSAM, averages and a tilt over examples on digits with 20% noisy labels"
	@echo "make test    run all tests; make test-fast leaves out the slow ones"
	@echo "make test-range  run all tests with the oldest supported torch and with the newest; make test TORCH=2.12 with any"
	@echo "make lint    formatting, lint, types, spelling and style of prose"
	@echo "make format  rewrite files as make lint wants them"
	@echo "make docs    build the documentation into site/; every warning is an error"
	@echo "make bench   cost and memory of a step, time of a report"
	@echo "make release-check  build wheel and sdist, and try each in an environment that has nothing but torch"
	@echo "make clean   remove the environment and all caches"

PINS    := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)

# Torch is installed first and alone, so that no other package chooses its version.
$(DEMO): pyproject.toml constraints.txt
	@echo "1/3 creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),sed '/^torch==/d' constraints.txt > $(PINS))
	@$(if $(filter-out newest,$(TORCH)),echo 'torch==$(TORCH).*' >> $(PINS))
	@echo "2/3 installing torch $(TORCH)"
	@$(INSTALL) torch
	@echo "3/3 installing tiltsam with its lab"
	@$(INSTALL) -e ".[lab,plots,sweep]"
	@touch $@

$(READY): $(DEMO)
	@echo "installing what tests, linters and docs use"
	@$(INSTALL) -e ".[dev]"
	@touch $@

venv: $(READY)

demo: $(DEMO)
	$(BIN)/tiltsam demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-range:
	$(MAKE) test TORCH=$(FLOOR) VENV=.venv-torch$(FLOOR)
	$(MAKE) test TORCH=newest VENV=.venv-torchnewest

test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/codespell $(CODE) .ci docs *.md
	$(BIN)/proselint check docs *.md benchmarks/*.md benchmarks/records/*/*.md

format: $(READY)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# The silenced warning: Material for MkDocs ends in May 2027; its successor, Zensical, reads the same mkdocs.yml.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY)
	$(BIN)/python benchmarks/bench_overhead.py
	$(BIN)/python benchmarks/bench_sam.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_scale.py
	$(BIN)/python benchmarks/bench_report.py

release-check: $(READY)
	.ci/release-check $(abspath $(BIN))/python

clean:
	rm -rf $(VENV) .venv-torch* .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site
