// Memory of a GPU that other processes of the host read and write, by CUDA's IPC.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// An error is told by what returns it; nothing later finds it.
cudaError_t told(cudaError_t e) {
  if (e) cudaGetLastError();
  return e;
}

}  // namespace

// Memory of the current device, of `bytes`, the first `zeros` of them zero, and its handle, for
// alignkit_shared_memory_open. Waits for the stream. Returns a cudaError_t.
extern "C" int alignkit_shared_memory_make(void** memory, int64_t bytes, int64_t zeros, cudaIpcMemHandle_t* handle,
                                           cudaStream_t stream) {
  if (cudaError_t e = cudaMalloc(memory, bytes)) return told(e);
  cudaError_t e = cudaMemsetAsync(*memory, 0, zeros, stream);
  if (!e) e = cudaStreamSynchronize(stream);
  if (!e) e = cudaIpcGetMemHandle(handle, *memory);
  if (e) cudaFree(*memory);
  return told(e);
}

// What another process made on its device, at an address for the current device. Returns a cudaError_t.
extern "C" int alignkit_shared_memory_open(void** memory, const cudaIpcMemHandle_t* handle, cudaStream_t) {
  return told(cudaIpcOpenMemHandle(memory, *handle, cudaIpcMemLazyEnablePeerAccess));
}
