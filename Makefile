# Each target does its own set-up on a machine that has Python 3.11 or newer and make. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINKED := $(VENV)/.linked
TORCH := $(VENV)/.torch
DOCS := $(VENV)/.docs
FOLDERS := $(shell find broker islands merger ops -type d -not -name __pycache__)
# One more than there are cores, because a test that waits leaves its core idle, and 4 at most, because each loads all tests.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
ARGS ?=
# uv installs in a fifth of the time that pip takes. It does not read pip's settings, such as another index: then pip does it.
# Nothing is compiled beforehand: Python compiles a file when it is first imported, and two thirds of the files never are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
install = { $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) 2> /dev/null || $(PIP) $(1); }
# Python keeps what it compiles, whatever the environment says. Without it, each process of a test compiles all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-all storm soak deploy docs lint format lock clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 18

train: $(LINKED)  ## the main job: islands train one model through Redis, on real text
	$(BIN)/archipelago up $(ARGS)

test: $(LINKED)  ## the quick tests, on fakeredis and on a real server
	$(PYTEST) -m "not full" $(ARGS)

test-all: $(LINKED) $(TORCH)  ## all tests: crash points, takeovers, the browser, long storms, more examples of properties, too
	ARCHIPELAGO_TESTS=full $(PYTEST) $(ARGS)

storm: $(LINKED)  ## a minute of faults on real processes, always the same; fails when an invariant breaks
	$(BIN)/archipelago chaos --run storm --seconds 60 --fault-seed 683 --mean-seconds-between 20 --no-undisturbed --settle-seconds 60 \
		--standbys 1 --kinds kill stop partition reset half-open throttle delay disk $(ARGS)

soak: $(LINKED)  ## simulated storms on all cores, with new seeds, until one fails; it prints that seed
	@for first in $$(seq 10000 100 10000000); do \
		ARCHIPELAGO_FIRST_SEED=$$first ARCHIPELAGO_SEEDS=100 $(PYTEST) -q -m "not full" tests/simulation/test_storms.py::test_storms || exit 1; done

deploy: $(LINKED)  ## the files of ops/deploy on a real Slurm and as an image (root on Debian; CI does not run it)
	@for program in slurmctld munged podman debootstrap; do command -v $$program > /dev/null || \
		{ echo "error: $$program is missing: apt-get install slurm-wlm munge podman debootstrap" >&2; exit 2; }; done
	PATH=$(CURDIR)/$(BIN):$$PATH ops/deploy/slurm/check_requeue.sh
	ops/deploy/check_image.sh

docs: $(LINKED) $(DOCS)  ## the pages that follow from the code, and the site in the folder site; fails at a dead link
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The lock names every package that is needed. pip must not look for more (--no-deps): pip before 23.3 takes the newest
# release where a package asks for an extra, such as coverage[toml], and then finds no hash for it.
$(READY): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@sed -n '/^uv==/,/# via/p' requirements.lock > $(VENV)/uv.lock
	$(PIP) --require-hashes -r $(VENV)/uv.lock
	@$(call install,--no-deps --require-hashes -r requirements.lock)
	@touch $@

# PyTorch is not in the lock, because a machine with an accelerator needs another build of it than one without. The tests
# train with transformers, Lightning, accelerate, TRL, peft and Tunix, and run the scripts of docs/examples as they are. Tunix asks for
# many packages that its trainer does not import, so only those that it does are installed. moto is the S3
# server of the tests; botocore is pinned because s3fs needs one of few versions. The last three check ops/deploy.
# pip takes PyTorch, because its settings may name another build. compileall does on all cores what pip does on one; one file of
# PyTorch is for a newer Python than ours.
$(TORCH): $(READY) Makefile
	@if $(PIP) --no-compile torch==2.13.0 && $(call install,torch==2.13.0 transformers==5.23.0 peft==0.21.2 \
		accelerate==1.15.0 lightning==2.6.6 trl==1.16.0 datasets==5.2.0 nbclient==0.11.0 ipykernel==7.4.0 \
		equinox==0.13.8 grain==0.2.18 scikit-learn==1.9.1 \
		s3fs==2026.9.0 aiobotocore==3.10.0 botocore==1.43.117 boto3==1.43.117 moto==5.2.5 py-partiql-parser==0.6.3 \
		flask==3.1.3 flask-cors==6.0.5 \
		kubernetes-validate==1.37.0 podman-compose==1.6.0 compose-spec==0.2.1) && \
		$(call install,--no-deps google-tunix==0.1.7 \
		google-metrax==0.2.4 clu==0.0.12 perfetto==0.59.1 sentencepiece==0.2.3 pillow==13.0.0); \
	then touch $@; $(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3*/site-packages/torch > /dev/null || true; else \
		echo "warning: PyTorch cannot be installed, so its tests are skipped; in CI they fail" >&2; fi

# What makes the site is not in the lock, because neither a run nor a test needs it.
$(DOCS): $(READY) Makefile
	@$(call install,mkdocs-material==9.8.2 mkdocstrings-python==2.0.11)
	@touch $@

# The build links each file into one package, so it runs again when a folder gains or loses a file.
$(LINKED): $(READY) pyproject.toml $(FOLDERS)
	@rm -rf build
	@$(call install,--no-deps --no-build-isolation --config-settings editable_mode=strict --editable .)
	@touch $@
