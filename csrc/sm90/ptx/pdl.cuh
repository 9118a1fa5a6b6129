// Programmatic dependent launch (PDL): a kernel may start before its predecessor in the stream has ended.
// CPU tests include tests/ops/cuda_on_cpu/ptx/pdl.cuh instead; names and signatures must match.
#pragma once
#include <cuda_runtime.h>

namespace alignkit {

// Wait until the preceding kernel has completed and its writes are visible.
__device__ __forceinline__ void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next kernel to start on free SMs once all CTAs have called this or exited.
__device__ __forceinline__ void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Host: launch with programmatic stream serialization. Rules for the kernel:
// - It calls griddep_wait before it reads what its predecessor wrote, and before it writes what its predecessor may
//   use.
// - Every kernel waits at some point, so that its completion implies that of all earlier kernels.
// - A kernel that overlaps its predecessor (gemm.cuh: kOverlap; attention/backward.cuh: dK/dV) waits at its end. Its
//   predecessor must call griddep_launch_dependents after griddep_wait.
template <class... Parameters, class... Arguments>
cudaError_t launch_pdl(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                       const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace alignkit
