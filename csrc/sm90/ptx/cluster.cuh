// Thread block clusters: CTA rank, barrier.cluster, and stores to another CTA's shared memory (mapa, st.async).
// No stand-in in tests/ops/cuda_on_cpu: the kernels that the CPU tests run do not include this file.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// The CTA's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Barrier over all threads of the cluster, with release and acquire semantics.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The shared::cluster address of p's counterpart in the CTA of this rank.
__device__ __forceinline__ uint32_t map_shared_rank(const void* p, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(rank));
  return remote;
}

// Store v at a shared::cluster address.
__device__ __forceinline__ void st_shared_cluster(uint32_t remote, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}

// Store v asynchronously at a shared::cluster address; it completes 4 bytes on `mbar`, an mbarrier of the same CTA.
__device__ __forceinline__ void st_async(uint32_t remote, int v, uint32_t mbar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(remote), "r"(v),
               "r"(mbar)
               : "memory");
}

}  // namespace alignkit
