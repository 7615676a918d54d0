# lohan: everything a contributor runs. Needs Python 3.11 or newer, a C/C++ compiler, make and git.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TEST_DIRS := $(wildcard tests/unit tests/conformance tests/parity tests/cuda)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

.PHONY: demo setup lint test test-slow test-faults soak bench clean

# Threads that wait for each other sleep instead of spinning: a step takes a third longer, but on a machine that does other
# things as well it takes a seventh.
demo: setup
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m demo.run

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt lohan/native/kernels.cpp lohan/native/xxh3.h
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "lohan needs Python 3.11 or newer; name one with make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lohan

test: lint
	$(PYTEST) -m "not slow and not faults" $(TEST_DIRS)

test-slow: setup
	$(PYTEST) -m slow tests

# FAULTS=10 makes all the injections that a release is held to; the default is a tenth. Needs root, strace and loop devices.
FAULTS ?= 1
test-faults: setup
	FAULTS=$(FAULTS) $(PYTEST) tests/faults

# One run that is killed, starved, slowed down and lied to for half an hour, and must come out as if nothing had been.
MINUTES ?= 30
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak --minutes $(MINUTES)

bench: setup
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .bench
	rm -f lohan/native/*.so
	find lohan tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
