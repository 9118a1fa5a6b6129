"""Mutations of kernels, and the golden cases and trials that notice them: the proof that the self-test can fail.

- ``python -m tests.ops.mutations cpu``: mutate the C++ kernels and the reference; test_mutations.py runs these too.
- ``python -m tests.ops.mutations cuda``: mutate the Triton and the CUDA kernels, on a GPU.
- ``python -m tests.ops.mutations build FILE.tar.xz``: build the mutated CUDA libraries, without a GPU.
- ``python -m tests.ops.mutations cuda --libraries FILE.tar.xz``: use them instead of building them.

Each mutation is a change of text in a copy of the package. The command prints a table, and fails if a case that must
notice a mutation does not.
"""
