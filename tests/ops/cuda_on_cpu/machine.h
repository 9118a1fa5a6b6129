// SM emulator for tests: it runs the .cu files of csrc/sm90 on a CPU. The threads of a CTA are fibers, scheduled
// round-robin; CTAs run one after another. Plain code stands in for shuffles, barriers, tensor core and TMA.
//
// test_attention_on_cpu.py and test_rms_norm_on_cpu.py copy this folder over csrc/sm90, so that ptx/ replaces its
// headers. This file has the CUDA names that these kernels use, with CUDA's signatures; each ptx/NAME.cuh has the
// functions of csrc/sm90/ptx/NAME.cuh, with the same signatures. A kernel that uses a new name needs it here too, or it
// fails to compile. Clusters and __half are left out.
//
// The emulator has the layouts and the order of operations of the hardware, not its timing. A wgmma is computed at the
// warpgroup_wait for its group, from the registers and shared memory as they are then. Fibers switch only where a
// thread waits, so deadlocks are found and many races are not.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static  // one copy suffices: CTAs run one after another
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1) : x(x), y(y) {}
};
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16& operator=(float v) {
    uint32_t u = __float_as_uint(v);
    bits = std::isnan(v) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
    return *this;
  }
};
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9,
              cudaErrorNotSupported = 801;
constexpr int cudaDevAttrMultiProcessorCount = 16, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr int cudaFuncAttributePreferredSharedMemoryCarveout = 9, cudaSharedmemCarveoutMaxShared = 100;

namespace machine {

constexpr int kSharedBytes = 232448;    // hardware: maximum dynamic shared memory of a CTA on sm_90
constexpr int kStackBytes = 256 << 10;  // schedule: stack of a fiber
inline int sm_count = 3;
alignas(1024) inline uint8_t shared[kSharedBytes];

// One issued wgmma, not yet computed.
struct Wgmma {
  float* d;
  int columns;
  const uint32_t* a;  // registers; null: a_shared is the descriptor of a
  uint64_t a_shared, b;
  bool transposed, add;
};

// One issued cp.async, not yet performed.
struct Copy {
  void* dst;
  const void* src;
  bool valid;
};

struct Fiber {
  ucontext_t context;    // entry point
  jmp_buf resume_point;  // longjmp instead of swapcontext: a jump makes no system call
  bool started = false, done = false;
  std::vector<Wgmma> wgmmas;   // issued, in order
  std::vector<size_t> groups;  // start in `wgmmas` of each committed group not yet waited for
  size_t group_begin = 0;      // start of the open group
  std::vector<std::vector<Copy>> copies{1};  // cp.async groups; the last is open
};

inline std::vector<Fiber> fibers;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline jmp_buf scheduler;
inline int current;
inline dim3 block, grid;
inline int threads;
inline int64_t progress;  // count of events that may unblock another fiber
inline std::function<void()> body;

// Switch from the current fiber to the scheduler.
inline void yield() {
  if (!_setjmp(fibers[current].resume_point)) _longjmp(scheduler, 1);
}

// Run fiber i until it yields.
__attribute__((noinline)) inline void resume(int i) {
  current = i;
  if (_setjmp(scheduler)) return;
  if (fibers[i].started) _longjmp(fibers[i].resume_point, 1);
  fibers[i].started = true;
  setcontext(&fibers[i].context);
}

// Print the error and abort.
[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "thread %d of CTA %u: %s\n", current, block.x, message);
  std::abort();
}

// Barrier of the lanes of a warp or the threads of a CTA.
struct Barrier {
  int arrived = 0;
  int64_t round = 0;
  void wait(int count) {
    int64_t own_round = round;
    ++progress;
    if (++arrived == count) {
      arrived = 0;
      ++round;
    } else {
      while (round == own_round) yield();
    }
  }
};
inline Barrier cta, warps[32];
inline uint64_t exchange[32][32][4];  // [warp][lane]: values that a lane passes to its warp

inline int lane() { return current % 32; }
inline int warp() { return current / 32; }
inline void sync_warp() { warps[warp()].wait(32); }

// A fiber's entry point.
inline void enter() {
  body();
  fibers[current].done = true;
  ++progress;
  yield();
}

// Run f in every thread of one CTA. Aborts if no fiber makes progress.
inline void run_cta(std::function<void()> f) {
  std::memset(shared, 0xff, sizeof(shared));
  body = std::move(f);
  fibers.clear();
  fibers.resize(threads);
  cta = {};
  for (auto& w : warps) w = {};
  while (stacks.size() < fibers.size()) stacks.emplace_back(new char[kStackBytes]);
  for (size_t i = 0; i < fibers.size(); ++i) {
    ucontext_t& context = fibers[i].context;
    getcontext(&context);
    context.uc_stack = {stacks[i].get(), 0, kStackBytes};
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  int unfinished = threads, idle = 0;
  while (unfinished) {
    int64_t before = progress;
    unfinished = 0;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      ++unfinished;
      resume(i);
    }
    idle = progress == before ? idle + 1 : 0;
    if (unfinished && idle > 3) fail("deadlock: every thread waits");
  }
}

// Run every CTA of a grid.
template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, dim3 grid_dim, int block_dim, const Arguments&... arguments) {
  grid = grid_dim;
  threads = block_dim;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block = dim3(x, y);
      run_cta([&] { kernel(arguments...); });
    }
  return cudaSuccess;
}

}  // namespace machine

struct ThreadIndex {
  struct {
    operator unsigned() const { return machine::current; }
  } x;
};
inline ThreadIndex threadIdx;
#define blockIdx machine::block
#define gridDim machine::grid
#define blockDim (dim3(machine::threads))

inline void __syncwarp() { machine::sync_warp(); }
inline void __syncthreads() { machine::cta.wait(machine::threads); }

template <class T>
T __shfl_sync(unsigned, T v, int source, int width = 32) {
  std::memcpy(machine::exchange[machine::warp()][machine::lane()], &v, sizeof(T));
  machine::sync_warp();
  source = machine::lane() / width * width + source % width;
  std::memcpy(&v, machine::exchange[machine::warp()][source], sizeof(T));
  machine::sync_warp();
  return v;
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T v, int mask) {
  return __shfl_sync(lanes, v, machine::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool v) {
  machine::exchange[machine::warp()][machine::lane()][0] = v;
  machine::sync_warp();
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<unsigned>(machine::exchange[machine::warp()][i][0]) << i;
  machine::sync_warp();
  return votes;
}
inline bool __any_sync(unsigned lanes, bool v) { return __ballot_sync(lanes, v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }

inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline void __threadfence() {}
inline int atomicAdd(int* p, int v) { return std::exchange(*p, *p + v); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, const T& v) {
  *p = v;
}

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __uint2float_rn(uint32_t v) { return static_cast<float>(v); }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float bf16(uint16_t v) { return __uint_as_float(uint32_t{v} << 16); }

inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = machine::sm_count;
  return 0;
}
template <class F>
int cudaFuncSetAttribute(F, int, int bytes) {
  return bytes <= machine::kSharedBytes ? 0 : cudaErrorInvalidValue;
}
inline int cudaGetLastError() { return cudaSuccess; }
template <class F>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int, int) {
  return *blocks = 1, cudaSuccess;
}
