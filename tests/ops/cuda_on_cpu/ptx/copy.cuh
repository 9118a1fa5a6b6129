#pragma once
#include "barrier.cuh"

using CUresult = int;
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
constexpr CUresult CUDA_SUCCESS = 0;

struct CUtensorMap {
  const uint8_t* data;
  uint64_t size[4], stride[4];  // bytes
  uint32_t box[4];
};

namespace alignkit {

inline void shared_written() {}

inline void copy_bytes(void* to, const void* from, int bytes, uint64_t* b) {
  if (shared_address(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
    machine::fail("not whole vectors");
  std::memcpy(to, from, bytes);
  barrier_copied(b, bytes);
}

// A thread's copies of 16 bytes are made when it waits for them.
inline void copy_vector(void* to, const void* from, bool here) {
  machine::fibers[machine::current].copies.back().push_back({to, from, here});
}
inline void copies_end() { machine::fibers[machine::current].copies.emplace_back(); }
template <int pending>
void copies_wait() {
  auto& groups = machine::fibers[machine::current].copies;
  for (; groups.size() > pending + 1; groups.erase(groups.begin()))
    for (const machine::Copy& c : groups.front()) {
      std::memset(c.to, 0, 16);
      if (c.here) std::memcpy(c.to, c.from, 16);
    }
}

inline void copy_box(void* to, const CUtensorMap* map, int x, int y, int z, int u, uint64_t* b) {
  uint32_t address = shared_address(to);
  if (address % 1024) machine::fail("a box begins within a pattern of the swizzle");
  int begin[4] = {x, y, z, u}, bytes = 0;
  for (uint32_t l = 0; l < map->box[3]; ++l)
    for (uint32_t k = 0; k < map->box[2]; ++k)
      for (uint32_t j = 0; j < map->box[1]; ++j)
        for (uint32_t i = 0; i < map->box[0]; ++i, bytes += 2) {
          uint32_t at[4] = {i, j, k, l};
          const uint8_t* from = map->data;
          bool inside = true;
          for (int d = 0; d < 4; ++d) {
            int64_t c = int64_t{begin[d]} + at[d];
            inside &= c >= 0 && c < static_cast<int64_t>(map->size[d]);
            from += c * static_cast<int64_t>(map->stride[d]);
          }
          uint16_t v = 0;
          if (inside) std::memcpy(&v, from, 2);
          std::memcpy(swizzled(address + bytes), &v, 2);
        }
  barrier_copied(b, bytes);
}

inline CUresult encode_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data, const cuuint64_t* size,
                           const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  map->data = static_cast<const uint8_t*>(data);
  if (reinterpret_cast<uintptr_t>(data) % 16 || box[0] * 2 > 128) return 1;
  for (int d = 0; d < 4; ++d) {
    map->size[d] = size[d];
    map->stride[d] = d ? stride[d - 1] : 2;
    map->box[d] = box[d];
    if ((d && map->stride[d] % 16) || box[d] > 256 || size[d] == 0) return 1;
  }
  return CUDA_SUCCESS;
}
inline auto encode() { return &encode_map; }

}  // namespace alignkit
