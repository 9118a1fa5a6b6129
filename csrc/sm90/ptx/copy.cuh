// cp.async and cp.async.bulk: copies of vectors by a thread, and of boxes of tensors by the copy engine.
#pragma once
#include <cuda.h>

#include "shared_address.cuh"

namespace alignkit {

// `bytes` of memory to the L2 cache; a multiple of 16, as is the address.
__device__ __forceinline__ void prefetch(const void* p, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// Copies of 16 bytes to shared memory, which a thread starts in groups and waits for itself. If not `here`, they are zeros.

__device__ __forceinline__ void copy_vector(void* to, const void* from, bool here) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(here ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last `pending` groups of this thread's copies are there.
template <int pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and the tensor core, once they are told to go.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The copy engine: `bytes` to shared memory; a multiple of 16, as are both addresses.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(b))
               : "memory");
}

// The copy engine: a box of a matrix to shared memory; outside of the matrix it reads zeros.

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int x, int y, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(b))
      : "memory");
}

// To the same place in every block of the cluster whose bit is set in `blocks`, and to the barrier there.
__device__ __forceinline__ void copy_box_to(uint16_t blocks, void* to, const CUtensorMap* map, int x, int y,
                                            uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(b)), "h"(blocks)
      : "memory");
}

// The copy engine: a box of a tensor of three or four dimensions to shared memory; outside of the tensor it reads zeros.

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(b))
      : "memory");
}

__device__ __forceinline__ void copy_box_to(uint16_t blocks, void* to, const CUtensorMap* map, int x, int y, int z,
                                            uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(b)), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int x, int y, int z, int u, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(shared_address(b))
      : "memory");
}

__device__ __forceinline__ void copy_box_to(uint16_t blocks, void* to, const CUtensorMap* map, int x, int y, int z,
                                            int u, uint64_t* b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(shared_address(b)), "h"(blocks)
      : "memory");
}

// And back; what lies outside of the tensor is not written.

__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(shared_address(from))
               : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int x, int y, int z, int u) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(u), "r"(shared_address(from))
               : "memory");
}

// The stores of this thread since the last such mark are a group.
__device__ __forceinline__ void stores_end() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Of all but the last `pending` groups, shared memory has been read.
template <int pending>
__device__ __forceinline__ void stores_taken() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Host: what makes the map by which the copy engine knows a tensor, a function of the driver.
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline Encode encode() {
  static Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

}  // namespace
}  // namespace alignkit
