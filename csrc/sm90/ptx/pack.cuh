// Packed conversion between two fp32 values and two 16-bit values (bf16 or fp16) in one register.
// In CPU tests tests/ops/cuda_on_cpu/ptx/pack.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace alignkit {

// Round a and b to T and pack them, a in the low half.
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

// Unpack two values of T, the low half first.
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

}  // namespace alignkit
