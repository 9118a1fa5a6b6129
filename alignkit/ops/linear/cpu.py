"""C++: outputs in blocks of registers, k ascending in each."""
from ...native import gemm as matmul

__all__ = ["matmul"]
