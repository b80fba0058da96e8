# Each target does all its own set-up, on a machine that has Python 3.11 or newer, make and a C library.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: train test storm soak fuzz lint format lock clean

train: $(READY)  ## the main job: islands train one model through Redis, on real text
	$(BIN)/archipelago up $(ARGS)

test: $(READY)  ## every test, on fakeredis and on a real server
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

storm: $(READY)  ## two minutes of faults, the same ones each time, on real processes and with a standby; fails when an invariant breaks
	$(BIN)/archipelago chaos --run storm --seconds 120 --fault-seed 6 --mean-seconds-between 40 --no-undisturbed \
		--standbys 1 --kinds kill stop partition reset half-open throttle delay disk $(ARGS)

soak: $(READY)  ## storms without end, on all cores: new seeds until one fails, which is named
	@$(BIN)/python -m tests.simulation.storm $(ARGS)

fuzz: $(READY)  ## hostile bytes led by coverage (atheris: Python 3.11 to 3.13, Linux); ARGS=-max_total_time=600
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz.fuzz_wire $(ARGS)

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## new pins: hashes and no addresses, for every supported Python at once
	$(PYTHON) -m venv .lock && .lock/bin/pip install --quiet uv
	.lock/bin/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
		--custom-compile-command "make lock" --output-file requirements.lock pyproject.toml > /dev/null
	rm -rf .lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
