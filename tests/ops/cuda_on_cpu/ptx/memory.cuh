// Stand-in for csrc/sm90/ptx/memory.cuh: plain loads and stores; compiler barriers do nothing.
#pragma once

namespace alignkit {

inline float4 load_cg(const float4* p) { return *p; }
inline void store_cg(float4* p, float4 v) { *p = v; }
inline float4* opaque(float4* p) { return p; }
inline void compiler_fence() {}

}  // namespace alignkit
