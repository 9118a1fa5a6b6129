// mbarrier and bar: barriers in shared memory, and those with numbers.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// Barriers in shared memory. A phase ends when all arrivals and all announced bytes are there; who waits names the parity
// of the phase that must have ended.

__device__ __forceinline__ void barrier_init(uint64_t* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* b, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}

// Whether barrier_wait would go on at once.
__device__ __forceinline__ bool barrier_ended(uint64_t* b, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(b)), "r"(parity)
      : "memory");
  return done;
}

// Arrives at the barrier that lies here in the block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(uint64_t* b, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(b)),
      "r"(rank)
      : "memory");
}

// Waits for `threads` threads of the block, among which those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Arrives at a barrier of this block.
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// From one stage of a ring to the next: `phase` is the parity that its barriers are in.
template <int kDepth>
__device__ __forceinline__ void step(int& stage, int& phase) {
  if (++stage == kDepth) {
    stage = 0;
    phase ^= 1;
  }
}

}  // namespace alignkit
