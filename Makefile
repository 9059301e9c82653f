# make run: environment, dependencies, the whole pipeline. make test: all checks. make help: the rest.
PYTHON ?= python3
# The build of torch: cpu, the address of an index, a folder of wheels, or default, which is what pip finds. Unset, it is
# that of the environment in .venv.
TORCH ?=
PORT ?= 5000
DOCS_PORT ?= 0

# With the default shell the make of macOS looks for programs in its own PATH, not in the one exported below.
SHELL := /bin/bash
BIN := .venv/bin
INSTALLED := .venv/.installed

export RLHF_SHELL_PATH := $(PATH)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DVC_NO_ANALYTICS := 1
export DO_NOT_TRACK := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run up down test test-slow check docs mlflow lock clean git
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

run: $(INSTALLED) git ## run every stage whose inputs, code or parameters changed
	@rlhf run

up: $(INSTALLED) git ## start the service: Prefect and MLflow dashboards, worker, deployments (rlhf up)
	@rlhf up

down: $(INSTALLED) ## stop the service; runs in progress save their state (rlhf down)
	@rlhf down

test: $(INSTALLED) check ## all checks and the tests
	@OMP_NUM_THREADS=1 python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --timeout 600 --timeout-method thread

test-slow: $(INSTALLED) ## the tests that take minutes
	@python -m pytest -m slow

check: $(INSTALLED) ## format, lint, types
	@ruff format --check .
	@ruff check .
	@mypy

mlflow: $(INSTALLED) ## the dashboard on this machine; PORT=5000
	@rlhf mlflow --port $(PORT)

docs: $(INSTALLED) ## build the documentation and serve it on this machine; DOCS_PORT=8000
	@python -m docs.generator
	@python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs .rlhf/docs
	@python -u -m http.server $(DOCS_PORT) --bind 127.0.0.1 --directory .rlhf/docs

lock: $(INSTALLED) ## write infra/requirements.lock for pyproject.toml; versions that still fit stay
	@uv pip compile pyproject.toml --extra dev --extra docs --universal --python-version 3.11 --no-annotate --quiet \
	  --custom-compile-command "make lock" --output-file infra/requirements.lock

clean: ## remove the environment and the tools' caches; no data, no checkpoint, no run
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache *.egg-info

ifneq ($(TORCH),)
ifneq ($(TORCH),$(shell cat .venv/.torch 2>/dev/null))
.PHONY: $(INSTALLED)
endif
endif

ifeq ($(origin PYTHON)$(wildcard $(BIN)/python)$(filter clean,$(MAKECMDGOALS)),command line$(BIN)/python)
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
ifneq ($(shell $(PYTHON) $(VERSION)),$(shell $(BIN)/python $(VERSION)))
$(error .venv has Python $(shell $(BIN)/python $(VERSION)), and not that of PYTHON=$(PYTHON): 'make clean' removes it)
endif
endif

$(INSTALLED): infra/requirements.lock pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) or sys.platform == "win32")' || \
	  { echo "Python 3.11 to 3.14 on Linux, macOS or WSL is needed, $(PYTHON) is another one or missing; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@$(BIN)/python infra/install.py
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

git:
	@git rev-parse --is-inside-work-tree >/dev/null 2>&1 || \
	  { echo "DVC works in a git repository, and this folder is in none: run 'git init' here once, then make again" >&2; exit 2; }
