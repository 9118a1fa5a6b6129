// Clusters: mapa, st.async and barrier.cluster.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of what lies here in the block `rank` of the cluster, and a store to such an address.

__device__ __forceinline__ uint32_t address_in(const void* p, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_there(uint32_t there, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
}

// Likewise a number, announced to the barrier at `barrier` in the same block.
__device__ __forceinline__ void send_there(uint32_t there, int v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v),
               "r"(barrier)
               : "memory");
}

}  // namespace alignkit
