# The verbs that people, hooks and CI share.  PYTHON chooses the interpreter of .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup format check test test-gpu bench demo serve

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv, or update it to pyproject.toml

$(READY): pyproject.toml scripts/environment.py
	@$(PYTHON) scripts/environment.py

format: $(READY)  ## format the code and fix what the linter can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: $(READY)  ## check format, lint, types and import rules; print the size of the code
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/code_lines.py

test: $(READY)  ## run all tests for a CPU, except the slow ones
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-gpu: $(READY)  ## run the tests marked gpu, with the first python that has a CUDA device
	@for python in $(BIN)/python $(PYTHON); do \
	    if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	        exec $$python -m pytest -m 'gpu or multi_gpu' --slow; \
	    fi; \
	done; \
	echo 'test-gpu: neither $(BIN)/python nor $(PYTHON) sees a CUDA device; run it on a GPU machine' >&2; exit 1

bench: $(READY)  ## measure steps of the engine
	@$(BIN)/deepinfer bench steps

serve: $(READY)  ## serve nano, the small model in the package, at http://127.0.0.1:8000
	@$(BIN)/deepinfer serve

demo: $(READY)  ## answer a question and continue a text with nano, the small model in the package
	$(BIN)/deepinfer chat 'What is 23 + 45?' --temperature 0
	$(BIN)/deepinfer generate 'To install the package, ' --temperature 0 --max-tokens 32
