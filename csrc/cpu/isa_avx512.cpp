// The CPU kernels for AVX-512 (F, DQ, BW, VL): 16 fp32 lanes.
#include "prelude.h"
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define ISA avx512
#define VL 16
#include "kernels.inl"
#endif
