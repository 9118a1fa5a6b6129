// The CPU kernels for any processor: scalar fma, in hardware where the baseline target has it, else the C library's.
// ISA is a value of ALIGNKIT_CPU_ISA and the prefix of the table that prelude.h declares.
#include "prelude.h"
#define ISA generic
#define VL 4
#include "kernels.inl"
