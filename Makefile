# make check: the drift check on this machine's CPU.  make test: the tests.  make test-slow: those that take longest.
# make lint: ruff and pyright.  All set up .venv first.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
REQUIREMENTS = requirements/cpu-py$(VERSION).txt
STAMP = $(VENV)/.installed
CHECK_ARGS ?=
TEST_ARGS ?=
# Test files at a time; 0: all in one process.
TEST_JOBS ?= 2
FUZZ_ARGS ?= --calls 10000 --rank-faults 1000 --out benchmarks/results/cpu/fuzz.json
ENGINES = build/engines
FRAMEWORKS = build/frameworks-py$(VERSION)

.PHONY: check test test-slow lint fuzz gpu-test gpu-check gpu-e2e gpu-versions gpu-cost gpu-long gpu-logp gpu-matmul gpu-gdn gpu-rms gpu-qk gpu-moe gpu-attention gpu-tree-sum gpu-where-drift gpu-verl gpu-sanitize gpu-figures kernels setup tables screenshots clean
check: setup
	$(VENV)/bin/alignkit check $(CHECK_ARGS)

test: SLOW = not slow
test-slow: SLOW = slow
test test-slow: setup $(ENGINES)/.fetched $(FRAMEWORKS)/.fetched
	ALIGNKIT_WHEELS=$(CURDIR)/$(ENGINES) ALIGNKIT_FRAMEWORKS=$(CURDIR)/$(FRAMEWORKS) $(VENV)/bin/python -m pytest \
	  -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m "$(SLOW)" $(TEST_ARGS)

# Mistakes, layout, types. `.venv/bin/ruff check --fix` and `.venv/bin/ruff format` mend what can be mended.
lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Drawn calls of the ops, and drawn faults on one of two tensor-parallel ranks. The tests hold a short form.
fuzz: setup
	$(VENV)/bin/python -m tests.fuzz $(FUZZ_ARGS)

# The gpu-* targets are for a machine with Hopper GPUs that already holds torch, triton, pytest and the engines (vLLM 0.24 to 0.26,
# Megatron-core 0.19.2): no network, no virtual environment. Each leaves JSON under $(RESULTS). Where the checkout has no
# history with it, ALIGNKIT_COMMIT says which commit it is.
RESULTS = benchmarks/results/h200
GPU = PYTHONPATH=$(CURDIR):$$PYTHONPATH python3
gpu-test gpu-check gpu-e2e gpu-versions gpu-cost gpu-long gpu-logp gpu-matmul gpu-gdn gpu-rms gpu-qk gpu-moe gpu-attention gpu-tree-sum gpu-where-drift gpu-verl gpu-sanitize: kernels

kernels:
	python3 setup.py --quiet build_ext --inplace

# Of the ops, and of the engines on CUDA.
gpu-test:
	$(GPU) benchmarks/gpu_tests.py $(TEST_ARGS)

# The drift check, as on the CPU.
gpu-check:
	$(GPU) -m alignkit.cli check $(CHECK_ARGS) --out check-results
	mkdir -p $(RESULTS) && cp check-results/check.json check-results/run.json $(RESULTS)

# Rollout against training, pair by pair, at a real size and TP up to 4.
gpu-e2e:
	$(GPU) benchmarks/e2e.py $(E2E_ARGS)

# The installed versions of both engines against each other, small. It runs on a CPU too.
gpu-versions:
	$(GPU) benchmarks/versions.py $(VERSIONS_ARGS)

# Rollout throughput and training step, stock and aligned, and where the time goes.
gpu-cost:
	$(GPU) benchmarks/cost.py $(COST_ARGS)

# Prefill and decoding of stock and aligned engines, from one short request to many long ones, TP 1 and 2.
gpu-long:
	$(GPU) benchmarks/long.py $(LONG_ARGS)

# linear_logp beside every peer that python3 finds, and the bare product.
gpu-logp:
	$(GPU) benchmarks/linear_logp.py $(LOGP_ARGS)

# The linear layers' products beside stock cuBLAS and others.
gpu-matmul:
	$(GPU) benchmarks/matmul.py $(MATMUL_ARGS)

# The gated delta rule's backward of the state beside flash-linear-attention's.
gpu-gdn:
	$(GPU) benchmarks/gated_delta_rule.py $(GDN_ARGS)

# RMSNorm, forward and backward, beside its peers and a copy.
gpu-rms:
	$(GPU) benchmarks/rms_norm.py $(RMS_ARGS)

# Norms of queries and keys and their rotation, in one op, beside the separate ops and peers.
gpu-qk:
	$(GPU) benchmarks/qk_norm_rope.py $(QK_ARGS)

# Mixture of experts beside its peers.
gpu-moe:
	$(GPU) benchmarks/moe.py $(MOE_ARGS)

# Attention, decoding and packed, beside FlashAttention 3 and cuDNN.
gpu-attention:
	$(GPU) benchmarks/attention.py $(ATTENTION_ARGS)

# Sums over tensor-parallel ranks beside NCCL's.
gpu-tree-sum:
	$(GPU) benchmarks/tree_sum.py $(TREE_SUM_ARGS)

# Where the drift of stock engines begins, how it grows, and which op makes how much of it.
gpu-where-drift:
	$(GPU) benchmarks/where_drift.py $(WHERE_DRIFT_ARGS)

# verl's GRPO with and without the line that aligns it. It needs verl, Ray and TransformerEngine too.
gpu-verl:
	$(GPU) benchmarks/verl_grpo.py $(VERL_ARGS)

# The figures of one GPU, one after the other.
gpu-figures: gpu-rms gpu-qk gpu-attention gpu-matmul gpu-logp gpu-moe gpu-gdn gpu-where-drift gpu-cost gpu-long

# The op tests under compute-sanitizer.
gpu-sanitize:
	$(GPU) benchmarks/sanitize.py $(SANITIZE_ARGS)

# Sources of the other engine versions whose seams the tests resolve; read, never installed.
$(ENGINES)/.fetched: tests/fetch_engines.py | setup
	$(VENV)/bin/python tests/fetch_engines.py $(ENGINES)
	touch $@

# verl and what it imports, in a folder that its tests alone look into.
$(FRAMEWORKS)/.fetched: requirements/frameworks.txt | setup
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(FRAMEWORKS) -r requirements/frameworks.txt
	touch $@

# The tables of README.md and docs, and the plots, from the files under benchmarks/results.
tables: setup
	$(VENV)/bin/python benchmarks/tables.py

# The pictures of docs/bisect.md and docs/monitor.md; they need chromium.
screenshots: setup
	$(VENV)/bin/python -m tests.bisection.screenshot
	$(VENV)/bin/python -m tests.watch.screenshot

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py alignkit/_sources.py requirements/*.txt $(wildcard csrc/*.h csrc/cpu/* csrc/sm90/*.* csrc/sm90/*/*)
	@test -n "$(PYTHON)" || { echo "alignkit needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --no-deps -r $(REQUIREMENTS)
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info alignkit/_cpu*.so alignkit/_sm90.so check-results
