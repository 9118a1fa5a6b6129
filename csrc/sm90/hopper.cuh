// What the kernels need of compute capability 9.0, an instruction a function.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace alignkit {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

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

// Kernels that follow each other in a stream, where the later one was launched to begin before the end of the one before.

// The kernel before is done, and what it wrote is there.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// When all blocks are here, the next kernel may begin wherever there is room.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Host: a launch that may begin before the end of the kernel before it, for which it then waits itself.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                         const Arguments&... arguments) {
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

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

// Clusters.

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

// Registers of a group of four warps.

template <int count>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// The tensor core.

// An operand in shared memory as the copy engine leaves it, in rows of 128 bytes, swizzled. They are rows of 64 of k, or, if
// kTransposed, rows of 64 of the other dimension, a row a k, where the next 64 lie 64 rows further.
template <bool kTransposed>
__device__ __forceinline__ uint64_t operand(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffff) >> 4)            // address
         | static_cast<uint64_t>(kTransposed ? 64 * 128 >> 4 : 1) << 16       // to the next 64
         | static_cast<uint64_t>(8 * 128 >> 4) << 32                          // from eight rows to the next eight
         | static_cast<uint64_t>(1) << 62;                                    // 128-byte swizzle
}

// What to add to an operand for the next 16 of k.
template <bool kTransposed>
constexpr int kNext = (kTransposed ? 16 * 128 : 16 * 2) >> 4;

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the last `pending` groups of products are done.
template <int pending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// What reads sums stays behind the wait for them.
template <int kCount>
__device__ __forceinline__ void products_taken(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// multiply: d [64, n] = a [64, 16] . b [n, 16]^T, plus d if `add`; d is of n / 2 floats. Of d a thread holds, for j < n / 8 and
// e < 2, columns 8 j + 2 (lane % 4) + e of the rows lane / 4 (at 4 j + e) and lane / 4 + 8 (at 4 j + 2 + e) of its warp's 16.

#define ALIGNKIT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ALIGNKIT_D8(i) ALIGNKIT_D4(i), ALIGNKIT_D4(i + 4)
#define ALIGNKIT_D16(i) ALIGNKIT_D8(i), ALIGNKIT_D8(i + 8)
#define ALIGNKIT_D32(i) ALIGNKIT_D16(i), ALIGNKIT_D16(i + 16)
#define ALIGNKIT_D64(i) ALIGNKIT_D32(i), ALIGNKIT_D32(i + 32)
#define ALIGNKIT_D128(i) ALIGNKIT_D64(i), ALIGNKIT_D64(i + 64)
#define ALIGNKIT_L4 "%0, %1, %2, %3"
#define ALIGNKIT_L8 \
  ALIGNKIT_L4 \
  ", %4, %5, %6, %7"
#define ALIGNKIT_L16 \
  ALIGNKIT_L8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ALIGNKIT_L32 \
  ALIGNKIT_L16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ALIGNKIT_L64 \
  ALIGNKIT_L32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ALIGNKIT_L128 \
  ALIGNKIT_L64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The numbers that follow the sums' are those of a, b, add, and whether a and b are transposed.
#define ALIGNKIT_MULTIPLY(count, columns, a_, b_, add_, a_transposed_, b_transposed_)                               \
  template <bool kATransposed, bool kBTransposed>                                                                   \
  __device__ __forceinline__ void multiply(float (&d)[count], uint64_t a, uint64_t b, bool add) {                   \
    asm volatile(                                                                                                   \
        "{\n"                                                                                                       \
        ".reg .pred add;\n"                                                                                         \
        "setp.ne.b32 add, %" #add_ ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" ALIGNKIT_L##count "}, %" #a_ ", %" #b_     \
        ", add, 1, 1, %" #a_transposed_ ", %" #b_transposed_ ";\n"                                                  \
        "}\n"                                                                                                       \
        : ALIGNKIT_D##count(0)                                                                                      \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kATransposed), "n"(kBTransposed));                        \
  }

ALIGNKIT_MULTIPLY(4, 8, 4, 5, 6, 7, 8)
ALIGNKIT_MULTIPLY(8, 16, 8, 9, 10, 11, 12)
ALIGNKIT_MULTIPLY(16, 32, 16, 17, 18, 19, 20)
ALIGNKIT_MULTIPLY(32, 64, 32, 33, 34, 35, 36)
ALIGNKIT_MULTIPLY(64, 128, 64, 65, 66, 67, 68)
ALIGNKIT_MULTIPLY(128, 256, 128, 129, 130, 131, 132)

}  // namespace alignkit
