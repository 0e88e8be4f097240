# Every target works alone on a fresh clone: each one sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup browser demo test lint bench clean

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

demo: setup
	$(BIN)/dsi generate "Once upon a time" --max-new-tokens 160
	$(BIN)/dsi compare --repeats 2 --max-new-tokens 64
	$(BIN)/dsi simulate --algorithm nonsi,si,pearl,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4 --tokens 50 --repeats 100
	$(BIN)/dsi timeline --algorithm nonsi,si,pearl,dsi --target-ms 20 --drafter-ms 2 --acceptance 0.8 --sp 4 --tokens 20 --seed 3

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

bench: setup
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/grid.py
	$(BIN)/python benchmarks/pair_cpu.py
	$(BIN)/python benchmarks/budget.py
	$(BIN)/python benchmarks/orchestration.py
	$(BIN)/python benchmarks/stale.py
	$(BIN)/python benchmarks/vocabularies.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/cluster.py
	$(BIN)/python benchmarks/ray_cluster.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
