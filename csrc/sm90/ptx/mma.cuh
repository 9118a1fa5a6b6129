// mma.sync: warp-level matrix multiply-accumulate with operands in registers.
// No stand-in in tests/ops/cuda_on_cpu: the kernels that the CPU tests run do not include this file.
#pragma once
#include <cstdint>

namespace alignkit {

// d [16, 8] += a [16, 16] . b [8, 16]^T, bf16 with fp32 accumulators. A lane holds rows lane / 4 and lane / 4 + 8 of a
// and d, and row lane / 4 of b; columns 2 (lane % 4) and the next of each, and in a and b also those 8 columns further.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace alignkit
