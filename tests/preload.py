"""Modules that the fork server of tests/forks.py imports for every test process."""

import os

# OpenMP threads do not survive a fork, and a process that waits for them hangs. A process starts its own later.
os.environ["OMP_NUM_THREADS"] = "1"

import alignkit.ops
import alignkit.testing

assert alignkit
