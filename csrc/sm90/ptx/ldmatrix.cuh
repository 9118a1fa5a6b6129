// ldmatrix and stmatrix: matrices of 8 by 8 between shared memory and registers.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// Four matrices of 8 rows of 16 bytes. Lane l names row l % 8 of matrix l / 8; of matrix i a thread has in m[i] the
// numbers 2 (l % 4) and the next of row l / 4, or, kTransposed, of column l / 4.

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  if (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
}

// A matrix of 8 by 8 as threads have it, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t m) {
  uint32_t to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(m));
  return to;
}

}  // namespace alignkit
