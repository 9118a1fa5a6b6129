// Vectors of a thread's own in memory, by way of the L2 cache.
#pragma once

namespace alignkit {

__device__ __forceinline__ float4 load_own(const float4* p) { return __ldcg(p); }

__device__ __forceinline__ void store_own(float4* p, float4 v) { __stcg(p, v); }

// An address that others are found from by adding a constant.
__device__ __forceinline__ float4* fixed(float4* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// What reads memory later is not read before this: the compiler would, where no registers are for it.
__device__ __forceinline__ void nothing_ahead() { asm volatile("" ::: "memory"); }

}  // namespace alignkit
