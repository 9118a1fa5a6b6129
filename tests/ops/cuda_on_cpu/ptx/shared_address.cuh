#pragma once
#include "../machine.h"

namespace alignkit {

inline uint32_t shared_address(const void* p) {
  auto offset = static_cast<const uint8_t*>(p) - machine::shared;
  if (offset < 0 || offset >= machine::kSharedBytes) machine::fail("not shared memory");
  return static_cast<uint32_t>(offset);
}

// Where the swizzle of rows of 128 bytes puts a byte.
inline uint8_t* swizzled(uint32_t address) { return machine::shared + (address ^ (address >> 7 & 7) << 4); }

}  // namespace alignkit
