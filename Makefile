# make serve       build the environment and serve the packaged model on http://127.0.0.1:8000 (ARGS="MODEL --port 9000 ...")
# make test        build the environment and run the tests of most files, in some four minutes
# make test-all    run the tests of all files, without those that repeat a point with other inputs
# make test-cpus   run the tests that depend on the processor as lesser processors would (ARGS="avx2 invented")
# make test-native run the tests of the kernels in C++ with the compiler's sanitizers
# make check       run all tests, also as on lesser processors, and check format, lint and types
# make recipes     install the programs of docs/recipes.md and PEFT into the environment, and run each recipe with its program
# make ray         install Ray and Spark into the environment, and run the tests that need them
# make vllm-check  run vLLM's released tests of pooling servers against whimbrel serve, and write docs/reference/vllm-tests.md
# make format      format the code and repair what ruff can
# make soak        run the slow tests, then mixed load on a real server for SECONDS (300), with a leak detector
# make bench       run the benchmarks of BENCHMARKS.md
# make peers       build the environments of other engines and run them beside ours (benchmarks/peers; ARGS="--rounds 7")
# make models      run the parity tests and write docs/models.md from what they measure
# make docs        build the docs site in site/; a broken link is an error
# make pictures    draw the pictures of README and of the playground anew: docs/pictures
# make lock        resolve the dependencies anew into requirements/
# make clean       remove the environment and caches
#
# With any of these: PYTHON=python3.12 chooses the interpreter, TORCH=cpu takes PyTorch's small CPU build, VENV=path another
# place for the environment (.venv).

VENV ?= .venv
ARGS ?=
SECONDS ?= 300

# Tests start many processes: each would compile Whimbrel anew if Python kept no bytecode.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
NATIVE := $(wildcard src/whimbrel/model/native/*.h src/whimbrel/model/native/*.cpp)

.PHONY: help serve test test-all test-cpus test-native recipes ray vllm-check check check-code format soak bench peers models docs pictures lock clean

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

serve: $(VENV)/.whimbrel-serve
	@exec $(BIN)/whimbrel serve $(ARGS)

test: $(VENV)/.whimbrel-dev
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/.whimbrel-dev
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not extended and not pictures" $(ARGS)

test-cpus: $(VENV)/.whimbrel-dev
	$(BIN)/python tests/support/cpus.py $(ARGS)

recipes: $(VENV)/.whimbrel-dev
	@requirements/environment $(VENV) recipes
	$(BIN)/pytest -n 0 tests/house/test_recipes.py tests/stores/test_stores.py tests/bench/test_mteb.py tests/bench/test_evaluation.py tests/dialects/test_programs.py --recipes $(ARGS)
	$(BIN)/pytest -n 0 tests/model/test_lora.py tests/model/test_jina_v5.py -k peft

ray: $(VENV)/.whimbrel-dev
	@requirements/environment $(VENV) ray
	$(BIN)/pytest -n 0 tests/cluster --recipes $(ARGS)

vllm-check: $(VENV)/.whimbrel-dev
	$(BIN)/python tests/support/vllm_check --page $(ARGS)

test-native: $(VENV)/.whimbrel-dev
	$(BIN)/python tests/support/sanitized.py $(ARGS)

check: check-code test-cpus test-native recipes
	@requirements/environment $(VENV) deploy
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not pictures" $(ARGS)

check-code: docs
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/.whimbrel-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE)

soak: $(VENV)/.whimbrel-dev
	$(BIN)/pytest -m slow
	$(BIN)/pytest tests/faults/test_h1spec.py
	$(BIN)/python tests/support/soak.py --seconds $(SECONDS) $(ARGS)

bench: $(VENV)/.whimbrel-dev
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/overload.py

peers: $(VENV)/.whimbrel-dev
	$(BIN)/python benchmarks/peers --out benchmarks/results/peers.json $(ARGS)

models: $(VENV)/.whimbrel-dev
	$(BIN)/python tests/support/models_page.py $(ARGS)

$(VENV)/.whimbrel-%: FORCE
	@requirements/environment $(VENV) $*

FORCE:

docs: $(VENV)/.whimbrel-dev
	$(BIN)/python docs/site.py

pictures: $(VENV)/.whimbrel-dev
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/pytest -n 0 -m pictures tests/browser

lock:
	requirements/lock

clean:
	@test "$(VENV)" = .venv || test ! -e "$(VENV)" || ls "$(VENV)"/.whimbrel-* > /dev/null 2>&1 || { echo "$(VENV) was not built here; it stays." >&2; exit 1; }
	rm -rf "$(VENV)" build site .pytest_cache .ruff_cache .hypothesis
