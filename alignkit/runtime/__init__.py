"""Runtime of the ops.

- families.py: device families; dispatch.py: kernel selection; launch.py, operands.py: Triton kernel launches.
- native.py, cuda.py, built.py: the compiled libraries and their consistency checks.
- shared.py, kernels.h: constants that the kernels share with Python.
- validated.py: validation of the installed versions by golden bits.
"""
