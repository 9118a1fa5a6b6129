"""One faulty kernel per tool of ``sanitize.py``, as a self-test of the tool: ``python planted.py TOOL``.

Each kernel is named after its tool.
"""

from __future__ import annotations

import sys

import torch

SOURCE = r"""
extern "C" __global__ void memcheck(const float *in, float *out) {
  out[blockDim.x] = in[threadIdx.x];  // out of bounds: one past the end
}
extern "C" __global__ void racecheck(const float *in, float *out) {
  __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x ^ 32];  // written by the other warp; __syncthreads() is missing
}
extern "C" __global__ void initcheck(const float *in, float *out) {
  out[threadIdx.x] = out[threadIdx.x] + in[threadIdx.x];  // `out` is uninitialized
}
"""


def main(tool: str) -> None:
    x = torch.ones(64, device="cuda")
    kernel = torch.cuda._compile_kernel(SOURCE, tool)
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, torch.empty_like(x)])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
