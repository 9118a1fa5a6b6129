// Stand-in for csrc/sm90/ptx/shared_address.cuh: offsets into machine::shared.
#pragma once
#include "../machine.h"

namespace alignkit {

inline uint32_t shared_address(const void* p) {
  auto offset = static_cast<const uint8_t*>(p) - machine::shared;
  if (offset < 0 || offset >= machine::kSharedBytes) machine::fail("the address is not in shared memory");
  return static_cast<uint32_t>(offset);
}

// The byte that the 128-byte swizzle maps this address to.
inline uint8_t* swizzled(uint32_t address) { return machine::shared + (address ^ (address >> 7 & 7) << 4); }

}  // namespace alignkit
