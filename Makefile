# Everything runs in .venv, which the first target that needs it builds. PYTHON chooses the interpreter.
PYTHON ?= python3
GPU_PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
# Where this is set, each process of a test compiles all its sources again.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := sluice engine gateway history kernels migrations producer protocol worker tests benchmarks tools

.PHONY: demo demo-web pictures screenshots profile test test-long test-engine-process test-browser test-clients test-models test-vllm test-gpu-versions check-kubernetes bench-check soak overload mutation-test crash-points test-network check format lint types imports rules fuzz fuzz-hostile audit-dependencies setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,embedded,gateway,dev]'
	touch $@

demo: setup ## A bulk file, a killed worker whose jobs another one completes, and the latency table.
	@$(BIN)/python -m tools.demo

demo-web: setup ## Serve OpenAI's API with the small model until Ctrl-C; prints how to call it.
	@$(BIN)/python -m tools.demo_web

pictures: setup ## Record the demo and draw the comparison for the README; run it on a quiet machine.
	@$(BIN)/python -m tools.pictures

screenshots: setup ## Take the README's pictures of the gateway's page; needs Chromium and some minutes.
	@$(BIN)/python -m tools.screenshots

test: setup ## The fast suite; .durations has its slowest tests and folders. `make check` runs the rules.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal -m "not long and not gpu" --ignore tests/rules -p tests.durations --record-durations .durations

test-long: setup ## Full parameter grids, all examples of property tests, long faults. Over an hour; NEMESIS_MINUTES=5 shortens it.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and not gpu and not clients and not vllm and not models" --timeout 1800 -o faulthandler_timeout=2000
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" --hypothesis-profile long --timeout 1800 -o faulthandler_timeout=2000 $$(grep -rlE --include='test_*.py' 'max_examples=examples\(' tests)

test-engine-process: setup ## Worker processes again, with the engine in a process of its own. Two minutes.
	OMP_NUM_THREADS=1 TEST_ENGINE_PROCESS=on $(BIN)/python -m pytest -n 4 -m "not long" tests/end_to_end tests/topologies

test-browser: setup ## The gateway's page in a real Chromium, which must be installed: apt install chromium. Minutes.
	OMP_NUM_THREADS=1 SLUICE_TESTS_NEED_BROWSER=1 $(BIN)/python -m pytest -n 0 -m browser --timeout 600 -o faulthandler_timeout=700 tests/gateway/ui

test-clients: setup ## Clients of others against the gateway, each installed by itself: minutes and 6 GB the first time.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m clients --timeout 1800 -o faulthandler_timeout=2000 tests/clients

test-models: setup ## Real models in GGUF with our engine, as transformers and llama.cpp read them, and killed amid their work: minutes, 1 GB.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m models -o faulthandler_timeout=1000 tests/end_to_end/real_model

test-vllm: setup ## A real model with each registered engine, killed amid its work; makes the model the first time: minutes.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m vllm --timeout 1200 -o faulthandler_timeout=1400 tests/end_to_end/real_model

test-gpu-versions: setup ## The GPU's code on this CPU under the versions of a GPU's machine (GPU_PYTHON=python3.12): half an hour, 6 GB the first time.
	$(BIN)/python -m tools.gpu_versions --python $(GPU_PYTHON)

check-kubernetes: setup ## Validate deploy/kubernetes; installs kustomize and validators the first time: some minutes.
	$(BIN)/python -m tools.kubernetes.check
	$(BIN)/python -m pytest -q -n 0 -m clients --timeout 600 -o faulthandler_timeout=700 tests/kubernetes

bench-check: setup ## Has anything become slower? Ratios inside one run, so that a busy machine may run it. Some minutes.
	@$(BIN)/python -m benchmarks gate

mutation-test: setup ## Break each guard of the protocol in turn; its tests must fail. Minutes.
	@$(BIN)/python -m tests.chaos.mutation.run

crash-points: setup ## Each fault at each crash point, with fifty jobs. Five to thirty minutes; CRASH_SEED chooses where exactly.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long tests/chaos/test_crash_points.py

soak: setup ## A hundred thousand jobs and a thousand kills, then the real engine; about half an hour. SEED=n repeats one.
	$(BIN)/python -m tests.chaos.soak $(if $(SEED),--seed $(SEED))

fuzz: setup ## A million inputs through every decoder; COUNT and SEED choose others.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

fuzz-hostile: setup ## Ten minutes of a user who may submit and writes at random, while jobs of others run. SEED=n repeats one.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.hostile --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

audit-dependencies: setup ## Known vulnerabilities of what constraints.txt names; asks a network service.
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

test-network: setup ## Cut and worsen each link between hosts, step their clocks; as root, an hour. SEED=n repeats one.
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.network $(if $(SEED),--seed $(SEED))

overload: setup ## Ten times more jobs than a worker can do, for ten minutes: memory and latency.
	$(BIN)/python -m tests.chaos.overload --minutes 10

profile: setup ## Where a step's time goes, operation by operation, compared with its bound.
	$(BIN)/python -m benchmarks engine --sections profile

check: format lint types imports rules ## Formatting, lint, types, import rules, rules of code and documents.

format: setup
	$(BIN)/ruff format --check $(SOURCES)

lint: setup
	$(BIN)/ruff check $(SOURCES)

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: setup
	$(BIN)/lint-imports

rules: setup
	$(BIN)/python -m pytest -q -n 2 -m "not long" tests/rules

clean:
	rm -rf $(VENV) .demo .demo-web .pytest_cache .ruff_cache .hypothesis .import_linter_cache
