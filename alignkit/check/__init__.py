"""`alignkit check`: logprobs of real engines, each in its own process, compared before and after patching.

Entry point: run.py. Not a Python API. The comparison of logprobs itself is in `alignkit.drift`; this folder starts
engines, and `alignkit bisect` and the benchmarks start theirs with it. On a CPU the processes are forks (forks.py).
"""
