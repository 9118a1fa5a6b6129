// Any processor: std::fma, correct everywhere, fast where the compiler has a scalar fused multiply-add.
#include "prelude.h"
#define ISA generic
#define VL 4
#include "kernels.inl"
