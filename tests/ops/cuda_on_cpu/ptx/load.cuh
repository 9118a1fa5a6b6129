#pragma once
#include "../machine.h"
namespace alignkit {
inline void load_or_zero(float* to, const float4* from, bool here) {
  float4 v = here ? *from : float4{};
  std::memcpy(to, &v, sizeof(v));
}
}  // namespace alignkit
