"""Modules that the fork server of tests/forks.py imports before it forks any test process.

tests/fuzz, tests/megatron and tests/vllm have a preload.py each for their engines.
"""

import os

# OpenMP threads do not survive a fork, and a process that waits for them hangs. A process starts its own later.
os.environ["OMP_NUM_THREADS"] = "1"

import alignkit.ops
import alignkit.testing

assert alignkit
