"""Engines in processes of their own: random models, rollout and training workers, and their execution.

`alignkit check`, `alignkit bisect`, the benchmarks and the tests use this folder. Not a Python API. `execute` starts
jobs; on a CPU the processes are forks (forks.py). The workers are `rollout` (vLLM) and `train` (Megatron-core).
"""
