// Stand-in for csrc/sm90/ptx/tma.cuh: a TMA copy is performed when issued, a cp.async when waited for. It has the loads
// of attention and rms_norm: 1D, and 4D of bf16 with the 128-byte swizzle. Multicast, stores and prefetch are left out.
#pragma once
#include "mbarrier.cuh"

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

inline void fence_proxy_async() {}

inline void tma_load_1d(void* dst, const void* src, int bytes, uint64_t* b) {
  if (shared_address(dst) % 16 || reinterpret_cast<uintptr_t>(src) % 16 || bytes % 16)
    machine::fail("tma_load_1d: addresses and size must be multiples of 16 bytes");
  std::memcpy(dst, src, bytes);
  mbarrier_complete_tx(b, bytes);
}

inline void cp_async_zfill(void* dst, const void* src, bool valid) {
  machine::fibers[machine::current].copies.back().push_back({dst, src, valid});
}
inline void cp_async_commit() { machine::fibers[machine::current].copies.emplace_back(); }
template <int pending>
void cp_async_wait() {
  auto& groups = machine::fibers[machine::current].copies;
  for (; groups.size() > pending + 1; groups.erase(groups.begin()))
    for (const machine::Copy& c : groups.front()) {
      std::memset(c.dst, 0, 16);
      if (c.valid) std::memcpy(c.dst, c.src, 16);
    }
}

inline void tma_load(void* dst, const CUtensorMap* map, int x, int y, int z, int u, uint64_t* b) {
  uint32_t address = shared_address(dst);
  if (address % 1024) machine::fail("tma_load: a swizzled box must start at a multiple of 1024 bytes");
  int begin[4] = {x, y, z, u}, bytes = 0;
  for (uint32_t l = 0; l < map->box[3]; ++l)
    for (uint32_t k = 0; k < map->box[2]; ++k)
      for (uint32_t j = 0; j < map->box[1]; ++j)
        for (uint32_t i = 0; i < map->box[0]; ++i, bytes += 2) {
          uint32_t offset[4] = {i, j, k, l};
          const uint8_t* src = map->data;
          bool inside = true;
          for (int d = 0; d < 4; ++d) {
            int64_t c = int64_t{begin[d]} + offset[d];
            inside &= c >= 0 && c < static_cast<int64_t>(map->size[d]);
            src += c * static_cast<int64_t>(map->stride[d]);
          }
          uint16_t v = 0;
          if (inside) std::memcpy(&v, src, 2);
          std::memcpy(swizzled(address + bytes), &v, 2);
        }
  mbarrier_complete_tx(b, bytes);
}

// cuTensorMapEncodeTiled, with some of its checks.
inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data, const cuuint64_t* size,
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
inline auto tensor_map_encoder() { return &encode_tiled; }

}  // namespace alignkit
