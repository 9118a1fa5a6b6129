// The CPU kernels for AVX-512 (F, DQ, BW, VL): 16 fp32 lanes.
// ISA is a value of ALIGNKIT_CPU_ISA and the prefix of the table that prelude.h declares.
#include "prelude.h"
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define ISA avx512
#define VL 16
#include "kernels.inl"
#endif
