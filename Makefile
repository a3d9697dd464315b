# Two commands for a newcomer, `make demo` and `make test`; each sets up .venv by itself.
PYTHON ?= python3
BIN := .venv/bin

.venv/.ready: pyproject.toml constraints.txt src/hasslefree/__init__.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

.PHONY: demo test nightly lint docs links dist bench
demo: .venv/.ready
	$(BIN)/hasslefree demo

# One thread a process: the tests are many and small.
test: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Tests of the benchmarks, slow tests, and cases that were never seen before, where `make test` takes the same 100 every
# time.
nightly: .venv/.ready
	OMP_NUM_THREADS=1 HASSLEFREE_FUZZ=2000 $(BIN)/python -m pytest tests/test_fuzz.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly

# The appendix's table of single layers, from scratch.
bench: .venv/.ready
	$(BIN)/python benchmarks/layers.py curves --anew
	$(BIN)/python benchmarks/readme.py

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Packages that build the site, apart, so that `make demo` and `make test` need none of them.
.venv/.docs: .venv/.ready
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	touch $@

# The tables of README.md and docs/ are what the results give, and no method is missing; no benchmark is run. Then the
# site, in build/docs/html, without a warning and without a network. The notebooks of the tutorials are run, and kept in
# build/docs/notebooks for the next time.
docs: .venv/.docs
	$(BIN)/python benchmarks/readme.py --check
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs/html

# Whether links to other sites lead somewhere. This needs a network.
links: .venv/.docs
	$(BIN)/python -m sphinx -q -b linkcheck docs build/docs/links

# The source archive, the wheel built from it, and whether the wheel holds every file of the package.
dist: .venv/.ready
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python scripts/check_dist.py
