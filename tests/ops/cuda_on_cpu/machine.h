// A multiprocessor for tests: the threads of a block are fibers that take turns, and what they do together (shuffles,
// barriers, the tensor core, the copy engine) is done by plain code. It knows the layouts and orders of the real
// machine, not its speed: a product is computed when it is waited for, from what registers and shared memory hold then.
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
#define __shared__ static  // blocks run one after the other
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
    uint32_t of = __float_as_uint(v);
    bits = std::isnan(v) ? 0x7fff : (of + 0x7fff + (of >> 16 & 1)) >> 16;
    return *this;
  }
};
using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9, cudaErrorNotSupported = 801;
constexpr int cudaDevAttrMultiProcessorCount = 16, cudaFuncAttributeMaxDynamicSharedMemorySize = 8;
constexpr int cudaFuncAttributePreferredSharedMemoryCarveout = 9, cudaSharedmemCarveoutMaxShared = 100;

namespace machine {

constexpr int kSharedBytes = 232448, kStackBytes = 256 << 10;
inline int processors = 3;
alignas(1024) inline uint8_t shared[kSharedBytes];

struct Product {
  float* d;
  int columns;
  const uint32_t* a;  // null: in shared memory
  uint64_t a_shared, b;
  bool transposed, add;
};

struct Copy {
  void* to;
  const void* from;
  bool here;
};

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf here;        // and where it stays: jumps, unlike changes of context, are no calls of the kernel
  bool begun = false, done = false;
  std::vector<Product> products;
  std::vector<size_t> groups;  // where each begins that has ended but has not been waited for
  size_t group_begin = 0;
  std::vector<std::vector<Copy>> copies{1};  // by groups, of which the last has not ended
};

inline std::vector<Fiber> fibers;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline jmp_buf scheduler;
inline int current;
inline dim3 block, grid;
inline int threads;
inline int64_t moves;  // things that others may be waiting for
inline std::function<void()> body;

inline void yield() {
  if (!_setjmp(fibers[current].here)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(int i) {
  current = i;
  if (_setjmp(scheduler)) return;
  if (fibers[i].begun) _longjmp(fibers[i].here, 1);
  fibers[i].begun = true;
  setcontext(&fibers[i].context);
}

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
  while (stacks.size() < fibers.size()) stacks.emplace_back(new char[kStackBytes]);
  for (size_t i = 0; i < fibers.size(); ++i) {
    ucontext_t& context = fibers[i].context;
    getcontext(&context);
    context.uc_stack = {stacks[i].get(), 0, kStackBytes};
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  int left = threads, idle = 0;
  while (left) {
    int64_t before = moves;
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      ++left;
      resume(i);
    }
    idle = moves == before ? idle + 1 : 0;
    if (left && idle > 3) fail("everybody waits");
  }
}

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, dim3 blocks, int of_block, const Arguments&... arguments) {
  grid = blocks;
  threads = of_block;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block = dim3(x, y);
      run_block([&] { kernel(arguments...); });
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

inline void __syncwarp() { machine::meet(); }
inline void __syncthreads() { machine::whole.wait(machine::threads); }

template <class T>
T __shfl_sync(unsigned, T v, int from, int width = 32) {
  std::memcpy(machine::given[machine::warp()][machine::lane()], &v, sizeof(T));
  machine::meet();
  from = machine::lane() / width * width + from % width;
  std::memcpy(&v, machine::given[machine::warp()][from], sizeof(T));
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
inline bool __any_sync(unsigned all, bool v) { return __ballot_sync(all, v); }
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
  *value = machine::processors;
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
