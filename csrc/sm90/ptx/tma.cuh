// Asynchronous copies: cp.async (16 bytes per thread) and the TMA (cp.async.bulk, tensor maps, multicast).
// In CPU tests tests/ops/cuda_on_cpu/ptx/tma.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda.h>

#include "shared_address.cuh"

namespace alignkit {

// Prefetch `bytes` of global memory to L2; address and size are multiples of 16.
__device__ __forceinline__ void prefetch(const void* p, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// Start a copy of 16 bytes to shared memory; writes zeros unless `valid`.
__device__ __forceinline__ void cp_async_zfill(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

// Close the group of this thread's cp.async copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all but the last `pending` cp.async groups of this thread have completed.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Make this thread's shared-memory writes visible to the async proxy (TMA and wgmma).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copy `bytes` to shared memory and complete them on `mbar`; size and both addresses are multiples of 16.
__device__ __forceinline__ void tma_load_1d(void* dst, const void* src, int bytes, uint64_t* mbar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(dst)),
               "l"(src), "r"(bytes), "r"(shared_address(mbar))
               : "memory");
}

// tma_load: copy one box of a 2D, 3D or 4D tensor to shared memory, completing on `mbar`. (x, y, ...) is the box's
// first element, innermost dimension first; elements outside the tensor are zero.
//
// tma_load_multicast: the same to every CTA of the cluster whose bit is set in `cta_mask`, at the same shared offsets
// of box and mbarrier.

__device__ __forceinline__ void tma_load(void* dst, const CUtensorMap* map, int x, int y, uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(mbar))
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(uint16_t cta_mask, void* dst, const CUtensorMap* map, int x, int y,
                                                   uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(mbar)), "h"(cta_mask)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* dst, const CUtensorMap* map, int x, int y, int z, uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(mbar))
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(uint16_t cta_mask, void* dst, const CUtensorMap* map, int x, int y,
                                                   int z, uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(mbar)), "h"(cta_mask)
      : "memory");
}

__device__ __forceinline__ void tma_load(void* dst, const CUtensorMap* map, int x, int y, int z, int u,
                                         uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(shared_address(mbar))
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(uint16_t cta_mask, void* dst, const CUtensorMap* map, int x, int y,
                                                   int z, int u, uint64_t* mbar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(shared_address(mbar)), "h"(cta_mask)
      : "memory");
}

// tma_store: copy one box from shared memory to a 3D or 4D tensor; elements outside the tensor are not written.

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* src, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(shared_address(src))
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* src, int x, int y, int z, int u) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(x),
               "r"(y), "r"(z), "r"(u), "r"(shared_address(src))
               : "memory");
}

// Close the group of this thread's TMA stores.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all but the last `pending` store groups have read their shared memory, which may then be reused.
template <int pending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Host: the driver's cuTensorMapEncodeTiled, looked up at run time so that the library does not link to libcuda.
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Return the driver's encoder, or null if the driver has none.
inline EncodeTiled tensor_map_encoder() {
  static EncodeTiled encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function) : nullptr;
  }();
  return encoder;
}

}  // namespace
}  // namespace alignkit
