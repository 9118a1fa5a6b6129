// Programmatic dependent launch (PDL): a kernel may start before its predecessor in the stream has ended.
// In CPU tests tests/ops/cuda_on_cpu/ptx/pdl.cuh stands in for this file: names and signatures must match.
#pragma once
#include <cuda_runtime.h>

namespace alignkit {

// Wait until the preceding kernel has completed and its writes are visible.
__device__ __forceinline__ void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next kernel to start on free SMs once all CTAs have called this or exited.
__device__ __forceinline__ void griddep_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Host: launch with programmatic stream serialization; the kernel must call griddep_wait before it reads its inputs.
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
