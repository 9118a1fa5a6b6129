#pragma once
#include "../machine.h"
namespace alignkit {
inline int cluster_rank() { return machine::rank(); }
inline void cluster_sync() { machine::everybody.wait(machine::threads * machine::cluster); }
}  // namespace alignkit
