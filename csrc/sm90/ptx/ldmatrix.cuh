// ldmatrix and stmatrix: four 8x8 matrices of 16-bit elements between shared memory and a warp's registers.
// In CPU tests tests/ops/cuda_on_cpu/ptx/ldmatrix.cuh stands in for this file: names and signatures must match.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// Both functions: lane l passes as row_address the shared address of row l % 8 (16 bytes) of matrix l / 8. m[i] of lane
// l holds two elements of matrix i: columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or rows and columns exchanged if
// kTransposed.

// Load four matrices.
template <bool kTransposed>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&m)[4], uint32_t row_address) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row_address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row_address)
                 : "memory");
}

// Store four matrices.
template <bool kTransposed>
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&m)[4]) {
  if (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

}  // namespace alignkit
