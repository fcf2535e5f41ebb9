# `make demo` and `make test` do all the set-up; `make help` lists the rest. Written for GNU make 3.81, as on macOS.

# auto: the torch in .venv, else a CPU build (see .ci/setup.sh). TORCH="torch==2.14.1" asks for another one.
TORCH = auto
TORCH_CPU_INDEX = https://download.pytorch.org/whl/cpu
# `make bench NAME=hyca ARGS=--quick`, `make test ARGS="-k hyca"`
NAME =
ARGS =

BIN = .venv/bin
# Two threads: tiny models get slower with more.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m pytest
export TORCH TORCH_CPU_INDEX

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check bench docs wheel-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed 's/:.*## /	/' | expand -t 14

setup: ## make .venv, or bring it up to date (every target does)
	@sh .ci/setup.sh

demo: setup ## a diffusion pipeline, plain and with HyCa; writes out/demo/index.html
	$(BIN)/hf-xai demo $(ARGS)

test: setup ## the tests, without the slow ones
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: setup ## all tests that need no accelerator
	$(PYTEST) -m "not gpu" $(ARGS)

check: setup ## formatting, lint, types, import rules, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: setup ## run one benchmark: make bench NAME=hyca [ARGS=--quick]
	@test -n "$(NAME)" || { echo "Which one? make bench NAME=hyca" >&2; exit 2; }
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)

docs: setup ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel-check: setup ## build the wheel and try it in an empty environment
	@sh .ci/wheel_check.sh

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist out site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find src tests benchmarks integrations -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || :
