// wgmma: asynchronous warpgroup matrix multiply-accumulate, bf16 and fp16 with fp32 accumulators; and setmaxnreg.
// In CPU tests tests/ops/cuda_on_cpu/ptx/wgmma.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shared_address.cuh"

namespace alignkit {

// Raise the warpgroup's register limit to `count` per thread; waits until they are free.
template <int count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Lower the warpgroup's register limit to `count` per thread and release the rest.
template <int count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// Matrix descriptor of an operand that the TMA wrote with the 128-byte swizzle: 64 elements of k per 128-byte row.
// kTransposed (MN-major): one k per row, 64 elements of the M or N dimension wide; the next 64 of these follow `rows`
// rows further.
template <bool kTransposed>
__device__ __forceinline__ uint64_t smem_descriptor(const void* p, int rows = 64) {
  return static_cast<uint64_t>((shared_address(p) & 0x3ffff) >> 4)         // start address
         | static_cast<uint64_t>(kTransposed ? rows * 128 >> 4 : 1) << 16  // leading-dimension byte offset
         | static_cast<uint64_t>(8 * 128 >> 4) << 32                       // stride between 8-row groups
         | static_cast<uint64_t>(1) << 62;                                 // 128-byte swizzle
}

// Increment of a descriptor to the next 16 of k.
template <bool kTransposed>
constexpr int kDescriptorStep = (kTransposed ? 16 * 128 : 16 * 2) >> 4;

// Order register and shared-memory accesses before the wgmmas that follow (wgmma.fence).
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Close the current wgmma group.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until all but the last `pending` wgmma groups have completed.
template <int pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keep the compiler from reading accumulators before the preceding warpgroup_wait.
template <int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma with both operands in shared memory (SS): d [64, n] = a [64, 16] . b [n, 16]^T, plus d if `add`.
//
// Accumulator fragment: a thread holds n / 2 floats. For j < n / 8 and e < 2, d[4 j + e] is row lane / 4 of its warp's
// 16 rows and d[4 j + 2 + e] is row lane / 4 + 8, both at column 8 j + 2 (lane % 4) + e.

#define ALIGNKIT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ALIGNKIT_D8(i) ALIGNKIT_D4(i), ALIGNKIT_D4(i + 4)
#define ALIGNKIT_D16(i) ALIGNKIT_D8(i), ALIGNKIT_D8(i + 8)
#define ALIGNKIT_D32(i) ALIGNKIT_D16(i), ALIGNKIT_D16(i + 16)
#define ALIGNKIT_D36(i) ALIGNKIT_D32(i), ALIGNKIT_D4(i + 32)
#define ALIGNKIT_D48(i) ALIGNKIT_D32(i), ALIGNKIT_D16(i + 32)
#define ALIGNKIT_D52(i) ALIGNKIT_D48(i), ALIGNKIT_D4(i + 48)
#define ALIGNKIT_D64(i) ALIGNKIT_D32(i), ALIGNKIT_D32(i + 32)
#define ALIGNKIT_D68(i) ALIGNKIT_D64(i), ALIGNKIT_D4(i + 64)
#define ALIGNKIT_D128(i) ALIGNKIT_D64(i), ALIGNKIT_D64(i + 64)
#define ALIGNKIT_L4 "%0, %1, %2, %3"
#define ALIGNKIT_L8 \
  ALIGNKIT_L4       \
  ", %4, %5, %6, %7"
#define ALIGNKIT_L16 \
  ALIGNKIT_L8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ALIGNKIT_L32 \
  ALIGNKIT_L16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ALIGNKIT_L36 \
  ALIGNKIT_L32       \
  ", %32, %33, %34, %35"
#define ALIGNKIT_L48 \
  ALIGNKIT_L32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define ALIGNKIT_L52 \
  ALIGNKIT_L48       \
  ", %48, %49, %50, %51"
#define ALIGNKIT_L64                                                                 \
  ALIGNKIT_L32                                                                       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ALIGNKIT_L68 \
  ALIGNKIT_L64       \
  ", %64, %65, %66, %67"
#define ALIGNKIT_L128                                                                            \
  ALIGNKIT_L64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// asm operand numbers after the accumulators: a, b, add, a transposed, b transposed.
#define ALIGNKIT_WGMMA_SS(count, columns, a_, b_, add_, a_transposed_, b_transposed_)                             \
  template <bool kATransposed, bool kBTransposed>                                                                 \
  __device__ __forceinline__ void wgmma(float (&d)[count], uint64_t a, uint64_t b, bool add) {                    \
    asm volatile(                                                                                                 \
        "{\n"                                                                                                     \
        ".reg .pred add;\n"                                                                                       \
        "setp.ne.b32 add, %" #add_ ", 0;\n"                                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" ALIGNKIT_L##count "}, %" #a_ ", %" #b_ \
        ", add, 1, 1, %" #a_transposed_ ", %" #b_transposed_ ";\n"                                                \
        "}\n"                                                                                                     \
        : ALIGNKIT_D##count(0)                                                                                    \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kATransposed), "n"(kBTransposed));                      \
  }

ALIGNKIT_WGMMA_SS(4, 8, 4, 5, 6, 7, 8)
ALIGNKIT_WGMMA_SS(8, 16, 8, 9, 10, 11, 12)
ALIGNKIT_WGMMA_SS(16, 32, 16, 17, 18, 19, 20)
ALIGNKIT_WGMMA_SS(32, 64, 32, 33, 34, 35, 36)
ALIGNKIT_WGMMA_SS(48, 96, 48, 49, 50, 51, 52)
ALIGNKIT_WGMMA_SS(64, 128, 64, 65, 66, 67, 68)
ALIGNKIT_WGMMA_SS(128, 256, 128, 129, 130, 131, 132)

// wgmma_zero: the same with d starting from zero; d's registers are outputs only, so the compiler need not initialize
// them.

#define ALIGNKIT_E4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define ALIGNKIT_E8(i) ALIGNKIT_E4(i), ALIGNKIT_E4(i + 4)
#define ALIGNKIT_E16(i) ALIGNKIT_E8(i), ALIGNKIT_E8(i + 8)
#define ALIGNKIT_E32(i) ALIGNKIT_E16(i), ALIGNKIT_E16(i + 16)
#define ALIGNKIT_E64(i) ALIGNKIT_E32(i), ALIGNKIT_E32(i + 32)
#define ALIGNKIT_WGMMA_ZERO(count, columns, a_, b_, a_transposed_, b_transposed_)                                 \
  template <bool kATransposed, bool kBTransposed>                                                                 \
  __device__ __forceinline__ void wgmma_zero(float (&d)[count], uint64_t a, uint64_t b) {                         \
    asm volatile(                                                                                                 \
        "{\n"                                                                                                     \
        ".reg .pred add;\n"                                                                                       \
        "mov.pred add, 0;\n"                                                                                      \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" ALIGNKIT_L##count "}, %" #a_ ", %" #b_ \
        ", add, 1, 1, %" #a_transposed_ ", %" #b_transposed_ ";\n"                                                \
        "}\n"                                                                                                     \
        : ALIGNKIT_E##count(0)                                                                                    \
        : "l"(a), "l"(b), "n"(kATransposed), "n"(kBTransposed));                                                  \
  }

ALIGNKIT_WGMMA_ZERO(64, 128, 64, 65, 66, 67)

// wgmma with a in registers (RS): d [64, n] = a [64, 16] . b [n, 16]^T, or its negative if kNegated, plus d if `add`.
//
// a's fragment is that of 16 columns of d, packed in pairs: columns 2 (lane % 4) and the next of rows lane / 4 and
// lane / 4 + 8, then the same 8 columns further.

// asm operand numbers after the accumulators: a (four registers), b, add, sign of a, b transposed.
#define ALIGNKIT_WGMMA_RS(type, name, count, columns, a0_, a1_, a2_, a3_, b_, add_, sign_, b_transposed_)         \
  template <bool kNegated, bool kBTransposed>                                                                     \
  __device__ __forceinline__ void wgmma(type, float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add) {  \
    asm volatile(                                                                                                 \
        "{\n"                                                                                                     \
        ".reg .pred add;\n"                                                                                       \
        "setp.ne.b32 add, %" #add_ ", 0;\n"                                                                       \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #name "." #name " {" ALIGNKIT_L##count            \
        "}, {%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}, %" #b_ ", add, %" #sign_ ", 1, %" #b_transposed_ ";\n"  \
        "}\n"                                                                                                     \
        : ALIGNKIT_D##count(0)                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kNegated ? -1 : 1), \
          "n"(kBTransposed));                                                                                     \
  }

ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 32, 64, 32, 33, 34, 35, 36, 37, 38, 39)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 36, 72, 36, 37, 38, 39, 40, 41, 42, 43)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 48, 96, 48, 49, 50, 51, 52, 53, 54, 55)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 52, 104, 52, 53, 54, 55, 56, 57, 58, 59)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 68, 136, 68, 69, 70, 71, 72, 73, 74, 75)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 64, 128, 64, 65, 66, 67, 68, 69, 70, 71)
ALIGNKIT_WGMMA_RS(__nv_bfloat16, bf16, 128, 256, 128, 129, 130, 131, 132, 133, 134, 135)
ALIGNKIT_WGMMA_RS(__half, f16, 32, 64, 32, 33, 34, 35, 36, 37, 38, 39)
ALIGNKIT_WGMMA_RS(__half, f16, 64, 128, 64, 65, 66, 67, 68, 69, 70, 71)
ALIGNKIT_WGMMA_RS(__half, f16, 128, 256, 128, 129, 130, 131, 132, 133, 134, 135)

// d [64, 264]: one wgmma with b, 256 columns, and one with `more`, the next 8 columns.
template <bool kNegated, bool kBTransposed>
__device__ __forceinline__ void wgmma(__nv_bfloat16, float (&d)[132], const uint32_t (&a)[4], uint64_t b, uint64_t more,
                                      bool add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %138, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" ALIGNKIT_L128
      "}, {%132, %133, %134, %135}, %136, add, %139, 1, %140;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%128, %129, %130, %131}"
      ", {%132, %133, %134, %135}, %137, add, %139, 1, %140;\n"
      "}\n"
      : ALIGNKIT_D128(0), ALIGNKIT_D4(128)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "l"(more), "r"(static_cast<int>(add)),
        "n"(kNegated ? -1 : 1), "n"(kBTransposed));
}

}  // namespace alignkit
