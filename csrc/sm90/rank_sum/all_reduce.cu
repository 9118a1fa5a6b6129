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
// A sum of several pieces has each piece in another place than the one before, so that the next product is written while this
// one is added: a caller's product waits for the end of the sum before the last.
//
// Small sums within a graph, of which a decoding step has many, meet once, as a meeting takes about as long as the reading.
// They lie by turns in two places of their own, and in a graph the first sum meets twice. So what a sum overwrites was read by
// the others in a kernel before the last one's, and for the last one's first meeting they had come out of that.
//
// To meet is to write a number to the other rank's memory, and to wait for its number in one's own: the release and the
// acquire of the system's scope, with the block's barrier on both sides, order all that the two blocks did. The numbers of a
// block go up by one with each meeting, by a count that is kept on the device, as the host knows nothing of a graph that is
// replayed. All ranks count alike, and none gets further ahead of another than a meeting, so two words are enough, for even
// numbers and for odd ones.
//
// What goes wrong stops the device with a message, and so the process, rather than that it waits without an end or adds what
// does not belong together:
//
// - A rank that does not come: there is an end to waiting.
// - Ranks that add different things: beside the number travels a digest of what is added.
// - Sums of one rank that overlap, where their streams do not wait for each other: a block that runs has taken its count.
// - Such sums that happen not to overlap: one in a graph knows the one captured before it, and no other may have come between.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

namespace alignkit {
namespace {

constexpr int kMostRanks = 8, kThreads = 512;
constexpr int kMostBlocks = 64;  // they wait, so other kernels must have multiprocessors left
constexpr int kHeadBytes = 16384;
constexpr int kMostOnce = 1 << 19;  // values of a sum that meets once, at most
constexpr unsigned long long kTaken = ~0ull;  // in place of a block's count, which is even between sums

// A rank's memory begins with this, zeros at first. Then there are the two places of sums that meet once, of kMostOnce values each,
// the others' sums, `capacity` of them, and the rounded values.
struct Head {
  uint64_t meetings[kMostBlocks][2][kMostRanks];  // of a block: what each rank wrote, the sum's digest above the number
  unsigned long long count[kMostBlocks];          // of a block: the last sum's ticket above the meetings that it has had
};
static_assert(sizeof(Head) <= kHeadBytes);

// One sum.
struct Sum {
  uint32_t digest;          // of what is added, the same on all ranks
  uint32_t ticket, before;  // its own, and that of the sum which must be the last before it; 0: any may be
  uint64_t patience;        // nanoseconds to wait for a rank
  int count;                // of values of each rank
  int64_t begin;            // where they are, in values after the head
};

constexpr int64_t kOthers = 2 * kMostOnce;  // where those begin that meet twice

// What a rank adds: everything; its slice; a share, and reads those of the others.
enum class Form { kWhole, kSlice, kShared };

template <int kRanks>
struct Ranks {
  uint8_t* memory[kRanks];
  int own;

  __device__ __forceinline__ Head* head(int rank) const { return reinterpret_cast<Head*>(memory[rank]); }
  __device__ __forceinline__ float4* sums(int rank, int64_t begin) const {
    return reinterpret_cast<float4*>(memory[rank] + kHeadBytes) + begin / 4;
  }
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

// Stops the device, and with it every block. All have the same to say, so block 0 says it.
__device__ __forceinline__ void let_block_0_speak() {
  if (blockIdx.x)
#pragma unroll 1
    for (int i = 0; i < 1000; ++i) __nanosleep(1000000);
}

// After every 1024th look at another rank's word, each of which takes about a microsecond: returns the time of the first such
// call, `begun` in those after it, and ends a wait that has been too long.
__device__ __noinline__ uint64_t still_waiting(uint64_t begun, uint64_t patience, int count, int own, int rank, int meeting) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (!begun) return now;
  if (now - begun < patience) return begun;
  let_block_0_speak();
  printf("alignkit: rank %d waited %.0f s for rank %d at the %s meeting of a sum over tensor-parallel ranks (%d values): that "
         "rank has died, hangs, or did not call this sum. ALIGNKIT_SYMMETRIC_TIMEOUT is the longest wait, in seconds\n",
         own, static_cast<double>(now - begun) * 1e-9, rank, meeting ? "second" : "first", count);
  __trap();
}

__device__ __noinline__ void not_the_same_sum(int count, int own, int rank) {
  let_block_0_speak();
  printf("alignkit: ranks %d and %d do not add the same thing: their sums over tensor-parallel ranks differ in rows, columns, "
         "type, form or bias (%d values on rank %d)\n", own, rank, count, own);
  __trap();
}

__device__ __noinline__ void not_alone(int own, bool taken) {
  let_block_0_speak();
  printf("alignkit: rank %d adds over tensor-parallel ranks on two streams at once: a sum %s. A CUDA graph must be replayed on "
         "the stream where other sums of the group run, or be waited for\n", own,
         taken ? "began while another was running" : "of a graph found that another came between it and the graph's sum before");
  __trap();
}

// What this thread, and what it knows to be done, have written comes before what it writes to another rank from here on.
__device__ __forceinline__ void release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Block b of all ranks: each goes on when all have come. The first kRanks threads have called `release`.
template <int kRanks>
__device__ __forceinline__ void meet(const Ranks<kRanks>& ranks, uint32_t number, const Sum& sum, bool second) {
  int rank = threadIdx.x;
  if (rank < kRanks) {
    uint64_t* there = &ranks.head(rank)->meetings[blockIdx.x][number % 2][ranks.own];
    uint64_t word = static_cast<uint64_t>(sum.digest) << 32 | number;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(there), "l"(word) : "memory");
    const uint64_t* here = &ranks.head(ranks.own)->meetings[blockIdx.x][number % 2][rank];
    uint64_t seen, begun = 0;
    for (uint32_t looks = 1;; ++looks) {
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(here) : "memory");
      if (static_cast<uint32_t>(seen) == number) break;
      if (looks % 1024 == 0) begun = still_waiting(begun, sum.patience, sum.count, ranks.own, rank, second);
    }
    if (static_cast<uint32_t>(seen >> 32) != sum.digest) not_the_same_sum(sum.count, ranks.own, rank);
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

// y has as many values as a rank adds, or a slice's. kOnce: where ranks meet once, of Form::kWhole. Other kernels run between two
// of these, so its code comes from memory each time: the little that it needs is a kernel of its own.
template <int kRanks, class Out, bool kOnce>
__global__ void __launch_bounds__(kThreads)
    tree_sum(const __grid_constant__ Ranks<kRanks> ranks, const __grid_constant__ Sum sum, Form asked, int64_t capacity,
             const Bias bias, Out* y) {
  using Quad = typename Rounded<Out>::Quad;
  constexpr int kAtOnce = kOnce ? 2 : 16 / kRanks;  // quads of a rank that a thread reads before it adds
  Form form = kOnce ? Form::kWhole : asked;
  __shared__ uint32_t last;  // the number of the last meeting
  int count = sum.count;
  unsigned long long* counted = &ranks.head(ranks.own)->count[blockIdx.x];
  if (threadIdx.x < kRanks) release();  // which another warp's atomic does not wait for
  if (threadIdx.x == 32) {
    unsigned long long had = atomicExch(counted, kTaken);
    // Only block 0 is in every sum.
    if (had == kTaken || (sum.before && blockIdx.x == 0 && had >> 32 != sum.before)) not_alone(ranks.own, had == kTaken);
    last = static_cast<uint32_t>(had);
  }
  __syncthreads();
  uint32_t number = last + 1;
  meet(ranks, number, sum, false);

  auto shared = [&](int rank) { return reinterpret_cast<Quad*>(ranks.sums(rank, kOthers + capacity)); };
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
        for (int r = 0; r < kRanks; ++r) load(parts[a][r], ranks.sums(r, sum.begin) + base + a * stride);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      int i = base + a * stride;
      if (i >= end) break;
#pragma unroll
      for (int step = 1; step < kRanks; step *= 2)
#pragma unroll
        for (int r = 0; r < kRanks; r += 2 * step) parts[a][r] = parts[a][r] + parts[a][r + step];
      float4 whole = parts[a][0];
      bias.add(whole, 4 * i);
      Quad quad = Rounded<Out>::of(whole);
      if (form == Form::kSlice) {
        store(y, count / kRanks, i - begin, quad);
      } else {
        store(y, count, i, quad);
      }
      if (form == Form::kShared) shared(ranks.own)[i - begin] = quad;
    }
  }

  __syncthreads();
  if (!kOnce) {
    if (threadIdx.x < kRanks) release();
    meet(ranks, ++number, sum, true);
  }
  if (form == Form::kShared) {
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
    __syncthreads();
  }
  if (threadIdx.x == 0) *counted = static_cast<unsigned long long>(sum.ticket) << 32 | number;
}

// What the calls with one memory keep of the last of them.
enum Kept { kCapture, kTicket, kPlace };

// Of the graph that the stream is being captured into; 0: none.
cudaError_t capture_of(cudaStream_t stream, unsigned long long& capture) {
  cudaStreamCaptureStatus status;
  cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture);
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  return e;
}

// 1 or 2, of those of sums that meet once; 0: it meets twice.
int place_of(int form, int count, unsigned long long capture, const uint64_t* order) {
  bool once = capture && capture == order[kCapture] && static_cast<Form>(form) == Form::kWhole && count <= kMostOnce;
  return once ? 1 + (order[kPlace] == 1) : 0;
}

int64_t begin_of(int place) { return place ? (place - 1) * kMostOnce : kOthers; }

uint32_t digest_of(std::initializer_list<int64_t> values) {
  uint64_t mixed = 0;
  for (int64_t value : values) {
    mixed = (mixed ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 32;
  }
  return static_cast<uint32_t>(mixed);
}

template <int kRanks, class Out>
cudaError_t launch(void* const* memory, int rank, Form form, const Sum& sum, int64_t capacity, const Bias& bias, void* y,
                   int most, cudaStream_t stream) {
  Ranks<kRanks> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.memory[r] = static_cast<uint8_t*>(memory[r]);
  ranks.own = rank;
  int64_t quads = (sum.count + 3) / 4, mine = form == Form::kWhole ? quads : (quads + kRanks - 1) / kRanks;
  int blocks = static_cast<int>(std::min<int64_t>((mine + kThreads - 1) / kThreads, most));
  auto kernel = sum.begin < kOthers ? tree_sum<kRanks, Out, true> : tree_sum<kRanks, Out, false>;
  kernel<<<blocks, kThreads, 0, stream>>>(ranks, sum, form, capacity, bias, static_cast<Out*>(y));
  return cudaGetLastError();
}

template <int kRanks>
cudaError_t launch(void* const* memory, int rank, Form form, const Sum& sum, int64_t capacity, const Bias& bias, void* y,
                   bool bf16, int most, cudaStream_t stream) {
  return bf16 ? launch<kRanks, __nv_bfloat16>(memory, rank, form, sum, capacity, bias, y, most, stream)
              : launch<kRanks, float>(memory, rank, form, sum, capacity, bias, y, most, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// y, bf16 or fp32, = the sum over `ranks` (2, 4 or 8) of `count` values of each; `memory` holds the addresses here of all
// ranks' memory, `capacity` is how many values each has room for that are not of sums that meet once, and `begin` is where
// alignkit_tree_sum_begin said, or of those as much behind as there is room. form: 0, y is all of it and each rank reads all
// sums; 1, y is this rank's equal slice, a multiple of 4 values; 2, as 0, but each rank adds a share and reads those of the
// others, rounded. The bias, bf16 or fp32 or null, has `columns` values, and a slice begins with the first. y lies at a multiple
// of 16 bytes. blocks: at most, up to 64, each on a multiprocessor of its own. The ranks call it with the same arguments but
// rank, bias and y; where one does not, or does not come within `patience` nanoseconds, or `order` is broken, the device stops
// with a message. order: three numbers, zeros at first, that the calls with this memory keep. Returns a cudaError_t.
extern "C" int alignkit_tree_sum(void* const* memory, int ranks, int rank, int form, int count, int64_t capacity,
                                 int64_t begin, const void* bias, int bias_bf16, int columns, void* y, int y_bf16, uint64_t* order,
                                 uint64_t patience, int blocks, cudaStream_t stream) {
  if (count < 1 || blocks < 1 || blocks > kMostBlocks || capacity % (4 * kMostRanks) || (form == 1 && count % (4 * ranks)))
    return cudaErrorInvalidValue;
  unsigned long long capture;
  if (cudaError_t e = capture_of(stream, capture)) return e;
  static std::atomic<uint32_t> last{0};
  uint32_t ticket = ++last;
  if (!ticket) ticket = ++last;
  uint32_t before = capture && capture == order[kCapture] ? static_cast<uint32_t>(order[kTicket]) : 0;
  int place = place_of(form, count, capture, order);
  bool there = place ? begin == begin_of(place) : begin >= kOthers && begin % 4 == 0 && begin + count <= kOthers + capacity;
  if (!there) return cudaErrorInvalidValue;
  order[kCapture] = capture, order[kTicket] = ticket;
  if (place) order[kPlace] = place;

  Bias added{bias, bias_bf16 != 0, columns};
  int has_bias = bias ? 1 + (bias_bf16 != 0) : 0;
  Sum sum{digest_of({ranks, form, begin, count, capacity, columns, has_bias, y_bf16 != 0, blocks}), ticket, before, patience,
          count, begin};
  Form f = static_cast<Form>(form);
  switch (ranks) {
    case 2: return launch<2>(memory, rank, f, sum, capacity, added, y, y_bf16 != 0, blocks, stream);
    case 4: return launch<4>(memory, rank, f, sum, capacity, added, y, y_bf16 != 0, blocks, stream);
    case 8: return launch<8>(memory, rank, f, sum, capacity, added, y, y_bf16 != 0, blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

// begin: where, in values after the head, the next call with this memory finds what the rank adds: of that form and count, and
// on that stream. Of sums that meet twice it is where their room begins. Returns a cudaError_t.
extern "C" int alignkit_tree_sum_begin(int form, int count, const uint64_t* order, int64_t* begin, cudaStream_t stream) {
  unsigned long long capture;
  if (cudaError_t e = capture_of(stream, capture)) return e;
  *begin = begin_of(place_of(form, count, capture, order));
  return cudaSuccess;
}
