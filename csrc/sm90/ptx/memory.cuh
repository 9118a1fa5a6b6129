// Global loads and stores cached in L2 only (.cg), and compiler barriers.
// In CPU tests tests/ops/cuda_on_cpu/ptx/memory.cuh stands in for this file: names and signatures must match.
#pragma once

namespace alignkit {

// Load 16 bytes, bypassing L1.
__device__ __forceinline__ float4 load_cg(const float4* p) { return __ldcg(p); }

// Store 16 bytes, bypassing L1.
__device__ __forceinline__ void store_cg(float4* p, float4 v) { __stcg(p, v); }

// Return p as a value the compiler cannot trace, so that addresses derived from p become constant offsets to one
// register.
__device__ __forceinline__ float4* opaque(float4* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Keep the compiler from hoisting later memory reads above this point, where no registers are free for the values.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace alignkit
