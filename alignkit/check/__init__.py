"""`alignkit check`: logprobs of real engines, each in its own process, compared before and after patching.

On a CPU the processes are forks (forks.py). Entry point: run.py. Not a Python API.
"""
