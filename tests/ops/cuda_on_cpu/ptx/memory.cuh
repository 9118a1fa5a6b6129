#pragma once

namespace alignkit {

inline float4 load_own(const float4* p) { return *p; }
inline void store_own(float4* p, float4 v) { *p = v; }
inline float4* fixed(float4* p) { return p; }
inline void nothing_ahead() {}

}  // namespace alignkit
