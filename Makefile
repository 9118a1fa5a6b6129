# make check: the drift check on this machine's CPU.  make test: the tests.  make test-slow: the slowest tests.
# make lint: ruff, pyright, spelling and wording.  make docs: the documentation site.  make tables: its generated tables.
# These targets set up .venv first.  The gpu-* targets and make kernels use the installed python3 instead.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
REQUIREMENTS = requirements/cpu-py$(VERSION).txt
STAMP = $(VENV)/.installed
CHECK_ARGS ?=
TEST_ARGS ?=
# Number of test files that run at the same time; 0 runs all in one process.
TEST_JOBS ?= 2
FUZZ_ARGS ?= --calls 10000 --rank-faults 1000 --out benchmarks/results/cpu/fuzz.jsonl
ENGINES = build/engines
FRAMEWORKS = build/frameworks-py$(VERSION)

.PHONY: check test test-slow lint docs fuzz gpu-test gpu-check gpu-e2e gpu-versions gpu-cost gpu-long gpu-logp gpu-matmul gpu-gdn gpu-rms gpu-qk gpu-moe gpu-attention gpu-tree-sum gpu-where-drift gpu-verl gpu-sanitize gpu-figures kernels setup tables screenshots clean
check: setup
	$(VENV)/bin/alignkit check $(CHECK_ARGS)

test: SLOW = not slow
test-slow: SLOW = slow
test test-slow: setup $(ENGINES)/.fetched $(FRAMEWORKS)/.fetched
	ALIGNKIT_WHEELS=$(CURDIR)/$(ENGINES) ALIGNKIT_FRAMEWORKS=$(CURDIR)/$(FRAMEWORKS) $(VENV)/bin/python -m pytest \
	  -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m "$(SLOW)" $(TEST_ARGS)

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

# Random calls of the ops, and random faults on one of two tensor-parallel ranks. The tests include a short run.
fuzz: setup
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_ARGS)

# The gpu-* targets run on a machine with Hopper GPUs on which torch, triton, pytest, vLLM (0.24 to 0.26) and Megatron-core 0.19.2
# are installed. They use no network and no virtual environment, and write JSON to $(RESULTS), whichever Hopper GPU runs
# them. In a checkout without git history, ALIGNKIT_COMMIT names the commit.
RESULTS = benchmarks/results/h200
GPU = PYTHONPATH=$(CURDIR):$$PYTHONPATH python3
gpu-test gpu-check gpu-e2e gpu-versions gpu-cost gpu-long gpu-logp gpu-matmul gpu-gdn gpu-rms gpu-qk gpu-moe gpu-attention gpu-tree-sum gpu-where-drift gpu-verl gpu-sanitize: kernels

kernels:
	python3 setup.py --quiet build_ext --inplace

# Tests of the ops and of both engines on CUDA.
gpu-test:
	$(GPU) benchmarks/gpu_tests.py $(TEST_ARGS)

# The drift check, same as on the CPU.
gpu-check:
	$(GPU) -m alignkit.cli check $(CHECK_ARGS) --out check-results
	mkdir -p $(RESULTS) && cp check-results/check.json check-results/run.json $(RESULTS)

# Rollout against training, pair by pair, at a realistic size and TP up to 4.
gpu-e2e:
	$(GPU) benchmarks/e2e.py $(E2E_ARGS)

# The installed versions of both engines against each other, with a small model. Runs on a CPU too.
gpu-versions:
	$(GPU) benchmarks/versions.py $(VERSIONS_ARGS)

# Rollout throughput and training step time, stock and aligned, with a profile.
gpu-cost:
	$(GPU) benchmarks/cost.py $(COST_ARGS)

# Prefill and decode of stock and aligned engines, from one short request to many long ones, TP 1 and 2.
gpu-long:
	$(GPU) benchmarks/long.py $(LONG_ARGS)

# linear_logp compared with every installed peer and with the bare GEMM.
gpu-logp:
	$(GPU) benchmarks/linear_logp.py $(LOGP_ARGS)

# GEMMs of the linear layers compared with cuBLAS and others.
gpu-matmul:
	$(GPU) benchmarks/matmul.py $(MATMUL_ARGS)

# The backward pass of the gated delta rule's state compared with flash-linear-attention.
gpu-gdn:
	$(GPU) benchmarks/gated_delta_rule.py $(GDN_ARGS)

# RMSNorm, forward and backward, compared with peers and with a copy.
gpu-rms:
	$(GPU) benchmarks/rms_norm.py $(RMS_ARGS)

# The fused QK norm and rotary embedding compared with the separate ops and peers.
gpu-qk:
	$(GPU) benchmarks/qk_norm_rope.py $(QK_ARGS)

# Mixture of experts compared with peers.
gpu-moe:
	$(GPU) benchmarks/moe.py $(MOE_ARGS)

# Attention, decode and packed, compared with FlashAttention 3 and cuDNN.
gpu-attention:
	$(GPU) benchmarks/attention.py $(ATTENTION_ARGS)

# Sums over tensor-parallel ranks compared with NCCL.
gpu-tree-sum:
	$(GPU) benchmarks/tree_sum.py $(TREE_SUM_ARGS)

# The origin of the drift of stock engines, its growth by layer, and each op's share.
gpu-where-drift:
	$(GPU) benchmarks/where_drift.py $(WHERE_DRIFT_ARGS)

# verl's GRPO with and without alignkit. Needs verl, Ray and TransformerEngine.
gpu-verl:
	$(GPU) benchmarks/verl_grpo.py $(VERL_ARGS)

# All measurements of one GPU, one after the other. Without a target: benchmarks/attention_schedules.py, fit_linear.py.
gpu-figures: gpu-rms gpu-qk gpu-attention gpu-matmul gpu-logp gpu-moe gpu-gdn gpu-where-drift gpu-cost gpu-long

# The tests of the ops under compute-sanitizer.
gpu-sanitize:
	$(GPU) benchmarks/sanitize.py $(SANITIZE_ARGS)

# Sources of the other engine versions whose hook points the tests resolve. They are read, never installed.
$(ENGINES)/.fetched: tests/fetch_engines.py | setup
	$(VENV)/bin/python tests/fetch_engines.py $(ENGINES)
	touch $@

# verl and its imports, in a folder that only its tests use.
$(FRAMEWORKS)/.fetched: requirements/frameworks.txt | setup
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(FRAMEWORKS) -r requirements/frameworks.txt
	touch $@

# The tables of README.md and docs, and the plots, generated from benchmarks/results.
tables: setup
	$(VENV)/bin/python benchmarks/tables.py

# The pictures of docs/bisect.md and docs/monitor.md. Needs chromium.
screenshots: setup
	$(VENV)/bin/python -m tests.bisection.screenshot
	$(VENV)/bin/python -m tests.watch.screenshot

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py alignkit/_sources.py requirements/*.txt $(wildcard csrc/*.h csrc/cpu/* csrc/sm90/*.* csrc/sm90/*/*)
	@test -n "$(PYTHON)" || { echo "alignkit needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --no-deps -r $(REQUIREMENTS) -r requirements/docs.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info alignkit/_cpu*.so alignkit/_sm90.so check-results
