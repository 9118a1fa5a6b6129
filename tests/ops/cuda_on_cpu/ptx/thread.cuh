#pragma once
#include "../machine.h"
namespace alignkit {
inline uint32_t thread_again() { return machine::current; }
inline uint64_t again(uint64_t operand) { return operand; }

}  // namespace alignkit
