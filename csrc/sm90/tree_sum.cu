// The sum over ranks, by the balanced tree of rank order, of fp32 values that each rank has in memory that all of them can
// read; plus a bias in fp32, rounded. One kernel on every rank, which may be captured in a graph.
//
// Block b of a rank works with block b of the others and no other block, so the same grid must run on all. Blocks meet twice:
// before anyone reads, and after all have read. What keeps memory in order:
//
// - Sums were written by kernels before this one in the stream. They are read after the first meeting.
// - They are overwritten by kernels after this one, which ends once all its blocks met the others a second time; by then the
//   others have read everything.
// - Rounded values are written after the first meeting, for which the others came out of the kernel before, in which they read
//   the values before. They are read after the second.
//
// To meet is to write a number to the other rank's memory, and to wait for its number in one's own: the release and the
// acquire of the system's scope, with the block's barrier on both sides, order all that the two blocks did. The numbers of a
// block go up by one with each meeting, by a count that is kept on the device, as the host knows nothing of a graph that is
// replayed. All ranks count alike, and none gets further ahead of another than a meeting.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace alignkit {
namespace {

constexpr int kMostRanks = 8, kThreads = 512;
constexpr int kMostBlocks = 64;  // enough for NVLink; they wait, so other kernels must have multiprocessors left
constexpr int kHeadBytes = 4096;

// A rank's memory begins with this, zeros at first. Then there are the sums, `capacity` of them, and the rounded values.
struct Head {
  uint32_t meetings[kMostBlocks][kMostRanks];  // of a block: the number that each rank wrote
  uint32_t count[kMostBlocks];                 // of a block: meetings that it has had
};
static_assert(sizeof(Head) <= kHeadBytes);

// What a rank adds: everything; its slice; a share, and reads those of the others.
enum class Form { kWhole, kSlice, kShared };

template <int kRanks>
struct Ranks {
  uint8_t* memory[kRanks];
  int own;

  __device__ __forceinline__ Head* head(int rank) const { return reinterpret_cast<Head*>(memory[rank]); }
  __device__ __forceinline__ float4* sums(int rank) const { return reinterpret_cast<float4*>(memory[rank] + kHeadBytes); }
};

// Reads of other ranks' memory are strong: no cache but that of the memory's own device holds what they read.

__device__ __forceinline__ void load(float4& to, const float4* p) {
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(to.x), "=f"(to.y), "=f"(to.z), "=f"(to.w)
               : "l"(p)
               : "memory");
}

__device__ __forceinline__ void load(uint2& to, const uint2* p) {
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(to.x), "=r"(to.y) : "l"(p) : "memory");
}

// Block b of all ranks: each goes on when all have come.
template <int kRanks>
__device__ __forceinline__ void meet(const Ranks<kRanks>& ranks, uint32_t number) {
  __syncthreads();
  int rank = threadIdx.x;
  if (rank < kRanks) {
    uint32_t* there = &ranks.head(rank)->meetings[blockIdx.x][ranks.own];
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(there), "r"(number) : "memory");
    const uint32_t* here = &ranks.head(ranks.own)->meetings[blockIdx.x][rank];
    uint32_t seen;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(here) : "memory");
    } while (static_cast<int32_t>(seen - number) < 0);  // it may be one ahead
  }
  __syncthreads();
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Four values as they are stored.
template <class Out>
struct Rounded;

template <>
struct Rounded<float> {
  using Quad = float4;
  static __device__ __forceinline__ Quad of(const float4& x) { return x; }
};

template <>
struct Rounded<__nv_bfloat16> {
  using Quad = uint2;
  static __device__ __forceinline__ Quad of(const float4& x) {
    __nv_bfloat162 low{__float2bfloat16_rn(x.x), __float2bfloat16_rn(x.y)};
    __nv_bfloat162 high{__float2bfloat16_rn(x.z), __float2bfloat16_rn(x.w)};
    return {reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
  }
};

struct Bias {
  const void* values;  // or null
  bool bf16;
  int columns;

  __device__ __forceinline__ float at(int column) const {
    return bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(values)[column])
                : static_cast<const float*>(values)[column];
  }

  // To the four values from `first` on, counted over rows.
  __device__ __forceinline__ void add(float4& x, int first) const {
    if (!values) return;
    int column = first % columns;
    float* parts[4] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
    for (float* part : parts) {
      *part += at(column);
      column = column + 1 == columns ? 0 : column + 1;
    }
  }
};

// y, of `count` values, at its quad i.
template <class Out>
__device__ __forceinline__ void store(Out* y, int count, int i, const typename Rounded<Out>::Quad& quad) {
  if (4 * i + 4 <= count) {
    reinterpret_cast<typename Rounded<Out>::Quad*>(y)[i] = quad;
    return;
  }
  const Out* values = reinterpret_cast<const Out*>(&quad);
#pragma unroll
  for (int j = 0; j < 3; ++j)
    if (4 * i + j < count) y[4 * i + j] = values[j];
}

// count: of each rank's sums. y has as many values, or a slice's.
template <int kRanks, class Out>
__global__ void __launch_bounds__(kThreads)
    tree_sum(const __grid_constant__ Ranks<kRanks> ranks, Form form, int count, int64_t capacity, const Bias bias, Out* y) {
  using Quad = typename Rounded<Out>::Quad;
  constexpr int kAtOnce = 16 / kRanks;  // quads of a rank that a thread reads before it adds
  uint32_t* counted = &ranks.head(ranks.own)->count[blockIdx.x];
  uint32_t number = *counted;
  meet(ranks, number + 1);

  auto shared = [&](int rank) { return reinterpret_cast<Quad*>(ranks.sums(rank) + capacity / 4); };
  int quads = (count + 3) / 4, share = (quads + kRanks - 1) / kRanks;
  int begin = form == Form::kWhole ? 0 : min(ranks.own * share, quads);
  int end = form == Form::kWhole ? quads : min(begin + share, quads);
  int thread = blockIdx.x * kThreads + threadIdx.x, stride = gridDim.x * kThreads;
  for (int base = begin + thread; base < end; base += kAtOnce * stride) {
    float4 parts[kAtOnce][kRanks];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a)
      if (base + a * stride < end)
#pragma unroll
        for (int r = 0; r < kRanks; ++r) load(parts[a][r], ranks.sums(r) + base + a * stride);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      int i = base + a * stride;
      if (i >= end) break;
#pragma unroll
      for (int step = 1; step < kRanks; step *= 2)
#pragma unroll
        for (int r = 0; r < kRanks; r += 2 * step) parts[a][r] = parts[a][r] + parts[a][r + step];
      float4 sum = parts[a][0];
      bias.add(sum, 4 * i);
      Quad quad = Rounded<Out>::of(sum);
      if (form == Form::kSlice) {
        store(y, count / kRanks, i - begin, quad);
      } else {
        store(y, count, i, quad);
      }
      if (form == Form::kShared) shared(ranks.own)[i - begin] = quad;
    }
  }

  meet(ranks, number + 2);
  if (threadIdx.x == 0) *counted = number + 2;
  if (form != Form::kShared) return;
  for (int base = thread; base < share; base += kAtOnce * stride) {
    Quad others[kAtOnce][kRanks - 1];
    auto place = [&](int a, int r) { return (ranks.own + 1 + r) % kRanks * share + base + a * stride; };
    auto here = [&](int a, int r) { return base + a * stride < share && place(a, r) < quads; };
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a)
#pragma unroll
      for (int r = 0; r < kRanks - 1; ++r)
        if (here(a, r)) load(others[a][r], shared((ranks.own + 1 + r) % kRanks) + base + a * stride);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a)
#pragma unroll
      for (int r = 0; r < kRanks - 1; ++r)
        if (here(a, r)) store(y, count, place(a, r), others[a][r]);
  }
}

template <int kRanks, class Out>
cudaError_t launch(void* const* memory, int rank, Form form, int count, int64_t capacity, const Bias& bias, void* y,
                   cudaStream_t stream) {
  Ranks<kRanks> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.memory[r] = static_cast<uint8_t*>(memory[r]);
  ranks.own = rank;
  int64_t quads = (count + 3) / 4, mine = form == Form::kWhole ? quads : (quads + kRanks - 1) / kRanks;
  int blocks = static_cast<int>(std::min<int64_t>((mine + kThreads - 1) / kThreads, kMostBlocks));
  tree_sum<kRanks, Out><<<blocks, kThreads, 0, stream>>>(ranks, form, count, capacity, bias, static_cast<Out*>(y));
  return cudaGetLastError();
}

template <int kRanks>
cudaError_t launch(void* const* memory, int rank, Form form, int count, int64_t capacity, const Bias& bias, void* y,
                   bool bf16, cudaStream_t stream) {
  return bf16 ? launch<kRanks, __nv_bfloat16>(memory, rank, form, count, capacity, bias, y, stream)
              : launch<kRanks, float>(memory, rank, form, count, capacity, bias, y, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// y, bf16 or fp32, = the sum over `ranks` (2, 4 or 8) of `count` values of each; `memory` holds the addresses here of all
// ranks' memory, and `capacity` is how many sums each has room for. form: 0, y is all of it and each rank reads all sums; 1, y
// is this rank's equal slice, a multiple of 4 values; 2, as 0, but each rank adds a share and reads those of the others,
// rounded. The bias, bf16 or fp32 or null, has `columns` values, and a slice begins with the first. y lies at a multiple of 16
// bytes. The ranks call it with the same arguments but rank, bias and y. Returns a cudaError_t.
extern "C" int alignkit_tree_sum(void* const* memory, int ranks, int rank, int form, int count, int64_t capacity,
                                 const void* bias, int bias_bf16, int columns, void* y, int y_bf16, cudaStream_t stream) {
  if (count < 1 || count > capacity || capacity % (4 * kMostRanks) || (form == 1 && count % (4 * ranks)))
    return cudaErrorInvalidValue;
  Bias added{bias, bias_bf16 != 0, columns};
  Form f = static_cast<Form>(form);
  switch (ranks) {
    case 2: return launch<2>(memory, rank, f, count, capacity, added, y, y_bf16 != 0, stream);
    case 4: return launch<4>(memory, rank, f, count, capacity, added, y, y_bf16 != 0, stream);
    case 8: return launch<8>(memory, rank, f, count, capacity, added, y, y_bf16 != 0, stream);
    default: return cudaErrorInvalidValue;
  }
}
