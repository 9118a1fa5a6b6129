// mbarriers in shared memory, and named barriers (bar.sync, bar.arrive).
//
// A phase of an mbarrier completes once all expected arrivals and all announced transaction bytes have come. A waiting
// thread passes the parity of the phase it waits for.
// In CPU tests tests/ops/cuda_on_cpu/ptx/mbarrier.cuh stands in for this file: names and signatures must match.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// Initialize `mbar` to complete a phase after this many arrivals.
__device__ __forceinline__ void mbarrier_init(uint64_t* mbar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbar)), "r"(arrivals));
}

// Make initialized mbarriers visible to the cluster and the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and announce this many transaction bytes.
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* mbar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbar)), "r"(bytes)
               : "memory");
}

// Wait until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* mbar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(mbar)),
      "r"(parity)
      : "memory");
}

// True if the phase of this parity has completed; does not block.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* mbar, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(mbar)), "r"(parity)
      : "memory");
  return done;
}

// Arrive at mbar's counterpart in the CTA of this rank of the cluster.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* mbar, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(mbar)),
      "r"(rank)
      : "memory");
}

// Wait at named barrier `id` for this many threads of the CTA, threads that only arrive included.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive at named barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive at an mbarrier of this CTA.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* mbar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(mbar)) : "memory");
}

// Step to the next of kDepth pipeline stages; `phase` is the parity of that stage's barriers.
template <int kDepth>
__device__ __forceinline__ void advance(int& stage, int& phase) {
  if (++stage == kDepth) {
    stage = 0;
    phase ^= 1;
  }
}

}  // namespace alignkit
