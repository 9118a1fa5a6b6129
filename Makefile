# make check: the drift check on this machine's CPU.  make test: the tests.  Both set up .venv first.
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
VERSION = $(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])')
REQUIREMENTS = requirements/cpu-py$(VERSION).txt
STAMP = $(VENV)/.installed
CHECK_ARGS ?=
TEST_ARGS ?=
ENGINES = build/engines

.PHONY: check test gpu-test gpu-check setup tables clean
check: setup
	$(VENV)/bin/alignkit check $(CHECK_ARGS)

test: setup $(ENGINES)/.fetched
	ALIGNKIT_WHEELS=$(CURDIR)/$(ENGINES) $(VENV)/bin/python -m pytest $(TEST_ARGS)

# On a machine with a Hopper GPU that already holds torch, triton and pytest: no network, no virtual environment.
gpu-test:
	python3 setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR) ALIGNKIT_TEST_DEVICE=cuda python3 -m pytest tests/ops $(TEST_ARGS)

# The drift check on that machine, where vLLM 0.26 and Megatron-core 0.19.2 can be imported too.
gpu-check:
	python3 setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR):$$PYTHONPATH python3 -m alignkit.cli check $(CHECK_ARGS)

# Sources of the other engine versions whose seams the tests resolve; read, never installed.
$(ENGINES)/.fetched: tests/fetch_engines.py | setup
	$(VENV)/bin/python tests/fetch_engines.py $(ENGINES)
	touch $@

# The tables of README.md, from the files under benchmarks/results.
tables: setup
	$(VENV)/bin/python benchmarks/tables.py

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements/*.txt $(wildcard csrc/cpu/*)
	@test -n "$(PYTHON)" || { echo "alignkit needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --no-deps -r $(REQUIREMENTS)
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info alignkit/_cpu*.so check-results
