// The CPU kernels for any processor: scalar fma, in hardware where the baseline target has it, else the C library's.
#include "prelude.h"
#define ISA generic
#define VL 4
#include "kernels.inl"
