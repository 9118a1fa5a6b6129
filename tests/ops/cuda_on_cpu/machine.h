// A multiprocessor for tests: the threads of a block are fibers that take turns, and what they do together (shuffles,
// barriers, the tensor core, the copy engine) is done by plain code. It knows the layouts and orders of the real
// machine, not its speed: a product is computed when it is waited for, from what registers and shared memory hold then.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
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
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};
struct __nv_bfloat16 {
  uint16_t bits;
};
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801;
constexpr int cudaDevAttrMultiProcessorCount = 16, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;

namespace machine {

constexpr int kSharedBytes = 232448, kStackBytes = 256 << 10;
inline int processors = 3;
alignas(1024) inline uint8_t shared[kSharedBytes];

struct Product {
  float* d;
  int columns;
  const uint32_t* a;  // of a thread; null: it lies in shared memory, at `shared_a`
  uint64_t shared_a;
  uint64_t b;
  bool transposed, add;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  std::vector<Product> products;
  std::vector<size_t> groups;  // where each begins that has ended but has not been waited for
  size_t group_begin = 0;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current;
inline dim3 block, grid;
inline int threads;
inline int64_t moves;  // things that others may be waiting for
inline std::function<void()> body;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "thread %d of block %u: %s\n", current, block.x, what);
  std::abort();
}

// What lanes of a warp, or threads of a block, give each other: all arrive, all read, then the next may write.
struct Meeting {
  int arrived = 0;
  int64_t round = 0;
  void wait(int count) {
    int64_t mine = round;
    ++moves;
    if (++arrived == count) {
      arrived = 0;
      ++round;
    } else {
      while (round == mine) yield();
    }
  }
};
inline Meeting whole, warps[32];
inline uint64_t given[32][32][4];

inline int lane() { return current % 32; }
inline int warp() { return current / 32; }
inline void meet() { warps[warp()].wait(32); }

inline void enter() {
  body();
  fibers[current].done = true;
  ++moves;
  yield();
}

inline void run_block(std::function<void()> f) {
  std::memset(shared, 0xff, sizeof(shared));
  body = std::move(f);
  fibers.clear();
  fibers.resize(threads);
  whole = {};
  for (auto& w : warps) w = {};
  for (auto& f : fibers) {
    f.stack.reset(new char[kStackBytes]);
    getcontext(&f.context);
    f.context.uc_stack = {f.stack.get(), 0, kStackBytes};
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  int left = threads, idle = 0;
  while (left) {
    int64_t before = moves;
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      ++left;
      current = i;
      swapcontext(&scheduler, &fibers[i].context);
    }
    idle = moves == before ? idle + 1 : 0;
    if (left && idle > 3) fail("everybody waits");
  }
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

inline void __syncwarp() { machine::meet(); }
inline void __syncthreads() { machine::whole.wait(machine::threads); }

template <class T>
T __shfl_sync(unsigned, T v, int from, int = 32) {
  std::memcpy(machine::given[machine::warp()][machine::lane()], &v, sizeof(T));
  machine::meet();
  std::memcpy(&v, machine::given[machine::warp()][from % 32], sizeof(T));
  machine::meet();
  return v;
}
template <class T>
T __shfl_xor_sync(unsigned all, T v, int mask) {
  return __shfl_sync(all, v, machine::lane() ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool v) {
  machine::given[machine::warp()][machine::lane()][0] = v;
  machine::meet();
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= static_cast<unsigned>(machine::given[machine::warp()][i][0]) << i;
  machine::meet();
  return all;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __uint2float_rn(uint32_t v) { return static_cast<float>(v); }
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
inline float bf16(uint16_t v) {
  uint32_t bits = uint32_t{v} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline int cudaGetDevice(int* device) { return *device = 0; }
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = machine::processors;
  return 0;
}
template <class F>
int cudaFuncSetAttribute(F, int, int bytes) {
  return bytes <= machine::kSharedBytes ? 0 : cudaErrorInvalidValue;
}
