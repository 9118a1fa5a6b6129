// Beside hopper.cuh: boxes of tensors of more dimensions, both ways; matrices of 8 by 8 between shared memory and
// registers; products whose left operand lies in registers; bf16 and fp16.
#pragma once
#include <cuda_fp16.h>

#include "hopper.cuh"

namespace alignkit {

// Arrives at a barrier of this block.
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// What this thread wrote to shared memory is seen by the copy engine and the tensor core, once they are told to go.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The copy engine: a box of a tensor of four dimensions to shared memory; outside of the tensor it reads zeros.

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

// Two numbers, rounded to T, in 32 bits, the first in the low half; and back.

template <class T>
__device__ __forceinline__ uint32_t pack(float a, float b);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float a, float b) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float a, float b) {
  __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<uint32_t*>(&pair);
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

// Four matrices of 8 rows of 16 bytes. Lane l names row l % 8 of matrix l / 8; of matrix i a thread has in m[i] the
// numbers 2 (l % 4) and the next of row l / 4, or, kTransposed, of column l / 4.

template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  if (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
                 "r"(m[2]), "r"(m[3])
                 : "memory");
}

// multiply: d [64, n] = a [64, 16] . b [n, 16]^T, plus d if `add`; kNegated: minus the product. Of a, a thread holds
// the pairs at columns 2 (lane % 4) of rows lane / 4 and lane / 4 + 8 of its warp's 16, then those 8 columns further:
// as it holds 16 columns of d.

// The numbers that follow the sums' are those of a, b, add, the sign of a, and whether b is transposed.
#define ALIGNKIT_MULTIPLY_HELD(type, name, count, columns, a0_, a1_, a2_, a3_, b_, add_, sign_, b_transposed_)      \
  template <bool kNegated, bool kBTransposed>                                                                       \
  __device__ __forceinline__ void multiply(type, float (&d)[count], const uint32_t (&a)[4], uint64_t b, bool add) { \
    asm volatile(                                                                                                   \
        "{\n"                                                                                                       \
        ".reg .pred add;\n"                                                                                         \
        "setp.ne.b32 add, %" #add_ ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #name "." #name " {" ALIGNKIT_L##count             \
        "}, {%" #a0_ ", %" #a1_ ", %" #a2_ ", %" #a3_ "}, %" #b_ ", add, %" #sign_ ", 1, %" #b_transposed_ ";\n"     \
        "}\n"                                                                                                       \
        : ALIGNKIT_D##count(0)                                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kNegated ? -1 : 1),   \
          "n"(kBTransposed));                                                                                       \
  }

ALIGNKIT_MULTIPLY_HELD(__nv_bfloat16, bf16, 32, 64, 32, 33, 34, 35, 36, 37, 38, 39)
ALIGNKIT_MULTIPLY_HELD(__nv_bfloat16, bf16, 64, 128, 64, 65, 66, 67, 68, 69, 70, 71)
ALIGNKIT_MULTIPLY_HELD(__nv_bfloat16, bf16, 128, 256, 128, 129, 130, 131, 132, 133, 134, 135)
ALIGNKIT_MULTIPLY_HELD(__half, f16, 32, 64, 32, 33, 34, 35, 36, 37, 38, 39)
ALIGNKIT_MULTIPLY_HELD(__half, f16, 64, 128, 64, 65, 66, 67, 68, 69, 70, 71)
ALIGNKIT_MULTIPLY_HELD(__half, f16, 128, 256, 128, 129, 130, 131, 132, 133, 134, 135)

}  // namespace alignkit
