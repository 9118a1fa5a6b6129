// Stand-in for csrc/sm90/ptx/pdl.cuh: kernels run one after another, so waits do nothing.
#pragma once
#include "../machine.h"
namespace alignkit {
inline void griddep_wait() {}
inline void griddep_launch_dependents() {}
template <class... Parameters, class... Arguments>
cudaError_t launch_pdl(void (*kernel)(Parameters...), dim3 grid, int threads, int, cudaStream_t,
                       const Arguments&... arguments) {
  return machine::launch(kernel, grid, threads, arguments...);
}
}  // namespace alignkit
