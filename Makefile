# make check: the drift check on this machine's CPU.  make test: the tests.  make test-slow: the slowest tests.
# make test-matrix: the other versions, models and mutations.
# make lint: ruff, pyright, spelling and wording.  make docs: the documentation site.  make tables: its generated tables.
# These targets set up .venv first.  The gpu-* targets and make kernels use the installed python3 instead.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
REQUIREMENTS = requirements/cpu-py$(VERSION).txt
# Megatron-Bridge 0.6.2 and verl 0.9.1 are pure Python and declare Python < 3.13.
PIP_PINNED = --quiet --no-deps $(if $(filter 313,$(VERSION)),--ignore-requires-python)
STAMP = $(VENV)/.installed
CHECK_ARGS ?=
TEST_ARGS ?=
# Number of test files that run at the same time; 0 runs all in one process.
TEST_JOBS ?= 2
SOAK_ARGS ?= --schedules 400 --out benchmarks/results/cpu/soak.jsonl
FUZZ_ARGS ?= --calls 10000 --rank-faults 1000 --out benchmarks/results/cpu/fuzz.jsonl
ENGINES = build/engines
FRAMEWORKS = build/frameworks-py$(VERSION)

FIGURES = rms qk attention matmul logp moe gdn where-drift cost long identity
BENCHMARKS = $(FIGURES) tree-sum e2e versions verl test sanitize

.PHONY: check test test-slow test-matrix lint docs fuzz soak mutations gpu-mutations $(BENCHMARKS:%=gpu-%) gpu-check gpu-figures kernels setup tables screenshots clean
check: setup
	$(VENV)/bin/alignkit check $(CHECK_ARGS)

test: MARKS = not slow and not matrix
test-slow: MARKS = slow and not matrix
test-matrix: MARKS = matrix
test test-slow test-matrix: setup $(ENGINES)/.fetched $(FRAMEWORKS)/.fetched
	ALIGNKIT_WHEELS=$(CURDIR)/$(ENGINES) ALIGNKIT_FRAMEWORKS=$(CURDIR)/$(FRAMEWORKS) $(VENV)/bin/python -m pytest \
	  -n $(TEST_JOBS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -m "$(MARKS)" $(TEST_ARGS)

# Errors, layout, types, spelling and wording. `.venv/bin/ruff check --fix` and `.venv/bin/ruff format` fix most findings.
lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/codespell
	$(VENV)/bin/python -m tests.wording

# The documentation site, in build/site. A broken link or an undocumented public name fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

# Mutations of the CPU's kernels, and the golden cases that notice them: the table of docs/notes/self-test.md.
mutations: setup
	$(VENV)/bin/python -m tests.ops.mutations cpu

# Random calls of the ops, and random faults on one of two tensor-parallel ranks. The tests include a short run.
fuzz: setup
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_ARGS)

# Random schedules of requests and weight updates on vLLM engines. The tests include a short run.
soak: setup
	for kind in async mixed server; do $(VENV)/bin/python -m tests.vllm.soak --kind $$kind $(SOAK_ARGS) || exit 1; done

# The gpu-* targets run on a machine with Hopper GPUs on which torch, triton, pytest, vLLM (0.24 to 0.26) and Megatron-core 0.19.2
# are installed. They use no network and no virtual environment, and write JSON Lines to $(RESULTS), whichever Hopper GPU
# runs them. In a checkout without git history, ALIGNKIT_COMMIT names the commit.
RESULTS = benchmarks/results/h200
GPU = PYTHONPATH=$(CURDIR):$$PYTHONPATH python3

kernels:
	python3 setup.py --quiet build_ext --inplace

# A benchmark of `benchmarks/run.py --list`, with the options of its variable: TEST_ARGS, WHERE_DRIFT_ARGS, ...
ARGS_OF = $($(shell echo $(1) | tr a-z- A-Z_)_ARGS)
$(BENCHMARKS:%=gpu-%): gpu-%: kernels
	$(GPU) benchmarks/run.py $* $(call ARGS_OF,$*)

# The drift check, same as on the CPU.
gpu-check: kernels
	$(GPU) -m alignkit.cli check $(CHECK_ARGS) --out check-results
	mkdir -p $(RESULTS) && cp check-results/check.json check-results/run.json $(RESULTS)

# Mutations of the Triton and CUDA kernels, and the golden cases and trials that notice them. `python -m
# tests.ops.mutations build FILE` builds the mutated libraries without a GPU, for MUTATIONS_ARGS="--libraries FILE".
gpu-mutations: kernels
	$(GPU) -m tests.ops.mutations cuda $(MUTATIONS_ARGS)

# All measurements of one GPU, one after the other. Without a target: benchmarks/attention_schedules.py, fit_linear.py,
# before_after.py.
gpu-figures: $(FIGURES:%=gpu-%)

# Sources of the other engine versions whose hook points the tests resolve. They are read, never installed.
$(ENGINES)/.fetched: tests/fetch_engines.py | setup
	$(VENV)/bin/python tests/fetch_engines.py $(ENGINES)
	touch $@

# verl and its imports, in a folder that only its tests use.
$(FRAMEWORKS)/.fetched: requirements/frameworks.txt | setup
	$(VENV)/bin/python -m pip install $(PIP_PINNED) --upgrade --target $(FRAMEWORKS) -r requirements/frameworks.txt
	touch $@

# The tables of README.md and docs, and the plots, generated from benchmarks/results.
tables: setup
	$(VENV)/bin/python benchmarks/tables.py

# The pictures of docs/bisect.md and docs/monitor.md. Needs chromium.
screenshots: setup
	$(VENV)/bin/python -m tests.bisection.screenshot
	$(VENV)/bin/python -m tests.watch.screenshot

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py alignkit/__init__.py alignkit/_sources.py requirements/*.txt alignkit/runtime/kernels.h $(wildcard csrc/*.h csrc/cpu/* csrc/sm90/*.* csrc/sm90/*/*)
	@test -n "$(PYTHON)" || { echo "alignkit needs Python 3.11, 3.12 or 3.13 on the PATH (or: make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install $(PIP_PINNED) -r $(REQUIREMENTS) -r requirements/docs.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info alignkit/_cpu*.so alignkit/_sm90.so check-results
