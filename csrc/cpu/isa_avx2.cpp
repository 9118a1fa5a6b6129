// The CPU kernels for AVX2 and FMA: 8 fp32 lanes.
// ISA is a value of ALIGNKIT_CPU_ISA and the prefix of the table that prelude.h declares.
#include "prelude.h"
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define ISA avx2
#define VL 8
#include "kernels.inl"
#endif
