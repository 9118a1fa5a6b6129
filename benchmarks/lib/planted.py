"""A kernel with an error for each tool of ``sanitize.py`` to find: ``python planted.py TOOL``."""

from __future__ import annotations

import sys

import torch

SOURCE = r"""
extern "C" __global__ void memcheck(const float *in, float *out) {
  out[blockDim.x] = in[threadIdx.x];  // the element after the last
}
extern "C" __global__ void racecheck(const float *in, float *out) {
  __shared__ float s[64];
  s[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x ^ 32];  // of the other warp, not waited for
}
extern "C" __global__ void initcheck(const float *in, float *out) {
  out[threadIdx.x] = out[threadIdx.x] + in[threadIdx.x];  // `out` was never written
}
"""


def main(tool: str) -> None:
    x = torch.ones(64, device="cuda")
    kernel = torch.cuda._compile_kernel(SOURCE, tool)
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, torch.empty_like(x)])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
