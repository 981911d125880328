# A bare clone needs Python 3.11 or newer, make and a C compiler. Everything else goes into .venv.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements/lock.txt
PYTHON_IS_NEW := import sys; sys.exit(sys.version_info < (3, 11))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help quickstart test check kill-check scale-check ablation audit-clean llama-check export-check fuzz fuzz-serve real-constraints soak ship
.PHONY: format docs lock clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

quickstart: $(STAMP)  ## run the whole path on a small model; ARGS="..." is passed on
	@$(BIN)/ar2diff quickstart $(ARGS)

check: $(STAMP)  ## lint, format, types and import directions
	@echo "checking lint, format, types and import directions ..."
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "run 'make format'" >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo pyproject.toml

# One thread a test process: the tests are small, and sums then do not depend on the machine.
test: check  ## check, then every test with branch coverage
	@echo "running the tests ..."
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=15 --cov $(ARGS)

kill-check: $(STAMP)  ## kill a saving trainer, and one of two ranks, at 50 random moments each and recover each time
	@echo "killing a saving trainer at 50 random moments ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/train/kill_check.py 50
	@OMP_NUM_THREADS=1 $(BIN)/python tests/train/kill_check.py 50 --ranks 2

ablation: $(STAMP)  ## what each part of the conversion buys; ARGS="--base MODEL --work FOLDER", or ARGS=--quick
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ablation.py $(ARGS)

audit-clean: $(STAMP)  ## make and audit 22 honest runs with other seeds and settings
	@echo "making and auditing 22 honest runs ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/audit/clean_runs.py 22 benchmarks/results/audit_clean.json

llama-check: $(STAMP)  ## compare llama.cpp's ids with ours; ARGS="--run runs/quickstart", or ARGS=--quick
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/llama_check.py $(ARGS)

export-check: $(STAMP)  ## let LMDeploy's and SGLang's own classes read an exported folder (downloads both)
	@echo "installing LMDeploy and SGLang into a throw-away environment ..."
	@$(BIN)/python benchmarks/export_check.py $(ARGS)

ship: $(STAMP)  ## put the adapter of a finished run into the package; RUN=FOLDER NAME=NAME
	@[ -n "$(RUN)" ] && [ -n "$(NAME)" ] || { echo "error: no run or name. Use 'make ship RUN=runs/... NAME=...'" >&2; exit 1; }
	@$(BIN)/python -m ar2diff.cli.ship "$(RUN)" "$(NAME)"

fuzz: $(STAMP)  ## decode 10000 random request mixes together and compare with each request alone
	@echo "decoding 10000 random request mixes ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/engine/fuzz_batches.py 10000

real-constraints: $(STAMP)  ## constrained answers of a converted model, each checked; MODEL=FOLDER, ARGS="MINUTES [RESULTS]"
	@[ -n "$(MODEL)" ] || { echo "error: no model. Use 'make real-constraints MODEL=runs/quickstart/...'" >&2; exit 1; }
	@echo "answering under a schema, an expression and a tool's form ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/engine/real_constraints.py "$(MODEL)" $(ARGS)

fuzz-serve: $(STAMP)  ## send 10000 random requests to a server; none may be a fault of it
	@echo "sending 10000 random requests ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/serve/fuzz_requests.py 10000 $(ARGS)

soak: $(STAMP)  ## keep a server at saturation for 30 minutes and look for growth and leaks; ARGS="--minutes 5"
	@echo "serving at saturation ..."
	@OMP_NUM_THREADS=1 $(BIN)/python tests/serve/soak.py $(ARGS)

scale-check:  ## prepare data with workers, nodes and two local Ray workers, compare every byte (downloads Ray)
	@# An environment of its own: beside the tests' libraries, each of Ray's processes imports for seconds and Ray gives up.
	@[ -x $(VENV)-scale/bin/python ] || $(PYTHON) -m venv $(VENV)-scale
	@sed '/^xxhash==/d' $(LOCK) > $(VENV)-scale/constraints.txt  # datatrove needs an older one
	@$(VENV)-scale/bin/python -m pip install -qq --constraint $(VENV)-scale/constraints.txt --editable '.[scale]' pytest
	@echo "preparing the same data in four ways ..."
	@OMP_NUM_THREADS=1 $(VENV)-scale/bin/python tests/data/scale_check.py

format: $(STAMP)  ## rewrite the sources in the house format
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

docs: $(STAMP)  ## write docs/cli.md from the help texts
	@echo "writing docs/cli.md ..."
	@$(BIN)/python -m ar2diff.cli.help_text docs/cli.md

lock:  ## resolve requirements/lock.txt anew from pyproject.toml
	@PYTHON="$(PYTHON)" bash requirements/lock.sh $(LOCK)

clean:  ## remove .venv, caches and build leftovers
	@echo "removing .venv, caches and build leftovers ..."
	@rm -rf $(VENV) $(VENV)-scale build dist .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(LOCK) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here. Install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c '$(PYTHON_IS_NEW)' || { echo "error: ar2diff needs Python 3.11 or newer (given: $$($(PYTHON) -V 2>&1)). Use 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@echo "setting up .venv from $(LOCK) (some minutes the first time) ..."
	@$(BIN)/python -c 'import pip; $(PYTHON_IS_NEW)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq -r $(LOCK)
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@
