# Each target does its own set-up on a machine that has Python 3.11 or newer and make. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINKED := $(VENV)/.linked
TORCH := $(VENV)/.torch
FOLDERS := $(shell find broker islands merger ops -type d -not -name __pycache__)
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
ARGS ?=

.PHONY: help train test test-all storm soak fuzz lint format lock clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 18

train: $(LINKED)  ## the main job: islands train one model through Redis, on real text
	$(BIN)/archipelago up $(ARGS)

test: $(LINKED)  ## the quick tests, on fakeredis and on a real server
	$(PYTEST) -m "not full" $(ARGS)

test-all: $(LINKED) $(TORCH)  ## the rest: crash points, takeovers, the browser, long storms, and more examples of each property
	ARCHIPELAGO_TESTS=full $(PYTEST) -m "full or hypothesis" $(ARGS)

storm: $(LINKED)  ## two minutes of faults on real processes, always the same; fails when an invariant breaks
	$(BIN)/archipelago chaos --run storm --seconds 120 --fault-seed 6 --mean-seconds-between 40 --no-undisturbed \
		--standbys 1 --kinds kill stop partition reset half-open throttle delay disk $(ARGS)

soak: $(LINKED)  ## simulated storms on all cores, with new seeds, until one fails; it prints that seed
	@$(BIN)/python -m tests.simulation.storm $(ARGS)

fuzz: $(LINKED)  ## hostile bytes, guided by coverage (atheris: Python 3.11 to 3.13, Linux); ARGS=-max_total_time=600
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz.fuzz_wire $(ARGS)

lint: $(LINKED)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## write new pins: versions and hashes for every supported Python, without addresses
	$(PYTHON) -m venv .lock && .lock/bin/pip install --quiet uv
	.lock/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
		--custom-compile-command "make lock" --output-file requirements.lock pyproject.toml > /dev/null
	rm -rf .lock

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

# PyTorch is not in the lock, because a machine with an accelerator needs another build of it than one without. The tests
# train models of transformers and peft beside ours, and run the scripts of docs/examples as they are.
$(TORCH): $(READY) Makefile
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2 \
		equinox==0.13.8 grain==0.2.18 scikit-learn==1.9.1; \
	then touch $@; else \
		echo "warning: PyTorch cannot be installed, so its tests are skipped; in CI they fail" >&2; fi

# The build links each file into one package, so it runs again when a folder gains or loses a file.
$(LINKED): $(READY) pyproject.toml $(FOLDERS)
	@rm -rf build
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=strict --editable .
	@touch $@
