# Every target works alone on a fresh clone: each one sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
AXE_VERSION := 4.10.3

.PHONY: setup browser demo check test test-engines pytest lint bench clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	touch $@

# What the tests of the page drive; without it they are skipped.
browser:
	@command -v chromedriver >/dev/null || \
		(test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -qq --yes chromium chromium-driver >/dev/null) || \
		echo "there is no chromedriver here, and it cannot be installed: the page is not tested"
	@test -f build/node_modules/axe-core/axe.min.js || \
		(command -v npm >/dev/null && npm install --silent --no-save --prefix build axe-core@$(AXE_VERSION)) || \
		echo "there is no axe-core here, and npm cannot install it: the page's accessibility is not tested"

demo: setup
	$(BIN)/dsi generate "Once upon a time" --max-new-tokens 160
	$(BIN)/dsi simulate --algorithm nonsi,si,pearl,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4 --tokens 50 --repeats 100
	$(BIN)/dsi timeline --algorithm nonsi,si,pearl,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4 --tokens 20 --seed 3
	$(BIN)/dsi compare --repeats 2 --max-new-tokens 64

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The fast two thirds, for all day.
check: setup
	$(MAKE) --no-print-directory --jobs 2 lint pytest SELECT='-m "not slow and not engines"'

test: setup
	$(MAKE) --no-print-directory --jobs 2 lint pytest

pytest: setup
	$(BIN)/pytest -n 2 --dist worksteal $(SELECT)

# vLLM on CPUs, in an environment of its own of about 3 GB under build/, and what every engine must hold.
test-engines: setup
	$(BIN)/python benchmarks/vllm_cpu.py
	$(BIN)/pytest -m engines -n 0 tests/test_engines.py

# All that need no GPU.
BENCHMARKS := core threads grid forwards tree_forwards packed_forwards peers parallel budget orchestration stale runner_ups \
	adaptive vocabularies rules tree_rules unbiased serve engines cluster ray_cluster

bench: setup
	set -e; for name in $(BENCHMARKS); do echo "benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py; done

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
