// All-reduce (or reduce-scatter) of fp32 values over tensor-parallel ranks through symmetric memory, plus a bias in
// fp32, rounded. One kernel per rank and call; it may be captured in a CUDA graph.
// Called by alignkit/dist/symmetric.py.
//
// - Order of summation (docs/contract.md, "Linear"): the balanced tree of rank order; then the bias; then one rounding.
// - Launch: up to 64 CTAs of 512 threads, the same grid on all ranks, because CTA b synchronizes only with CTA b of the
//   other ranks.
//
// Barrier between ranks: each CTA writes a number to the other ranks' memory and waits for their numbers in its own.
// System-scope release and acquire, with __syncthreads on both sides, order all accesses of the two CTAs. A CTA's
// number increases by one per barrier. The count is kept on the device, because the host does not know about graph
// replays. All ranks count alike and no rank is more than one barrier ahead, so two words suffice, one for even and one
// for odd numbers.
//
// A two-barrier sum has a barrier before the first read and one after the last:
//
// - Inputs were written by earlier kernels in the stream, and are read after the first barrier.
// - Inputs are overwritten by later kernels in the stream. These start after this kernel has passed its second barrier,
//   when all ranks have read everything.
// - Rounded values are written after the first barrier, when the other ranks have left the previous sum, in which they
//   read the previous values. They are read after the second barrier.
//
// A sum of several pieces alternates between two buffers, so that the GEMM of the next piece can write while this piece
// is added. The GEMM waits for the sum before the last.
//
// A one-barrier sum is for small sums within a graph, such as a decoding step's, because a barrier takes about as long
// as the reads. Such sums alternate between two buffers of their own, and the first sum of a graph has two barriers.
// The other ranks read the inputs that a sum overwrites in a kernel before the last sum's. They had left that kernel
// before the last sum's barrier.
//
// Errors stop the device, and so the process, with a message (tests/ops/test_tp_faults_cuda.py reads it), instead of a
// hang or a wrong sum:
//
// - A rank does not reach the barrier: the wait times out.
// - Ranks add different things: a digest of the sum travels with the number.
// - Sums of one rank overlap on streams that do not wait for each other: a running CTA marks its count as taken.
// - Sums on such streams run in another order than captured, without overlap: a sum in a graph knows the sum captured
//   before it, and checks that this sum ran last.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "../../interface.h"
#include "alignkit/runtime/kernels.h"

namespace alignkit {
namespace {

constexpr int kMaxRanks = 8;   // schedule: limit, in ranks, of Head and of the launcher's cases
constexpr int kThreads = 512;  // schedule: threads per CTA
constexpr unsigned long long kTaken = ~0ull;  // schedule: mark in place of a running CTA's count

// The start of a rank's memory, zeroed at first. Two buffers of kSumMaxOneBarrier values for one-barrier sums follow,
// then `capacity` values for two-barrier sums, then the rounded values.
struct Head {
  // Per CTA, barrier parity and rank: the word that the rank wrote, the sum's digest above the barrier's number.
  uint64_t signals[kSumMaxBlocks][2][kMaxRanks];
  // Per CTA: the last sum's ticket above the number of barriers so far.
  unsigned long long counts[kSumMaxBlocks];
};
static_assert(sizeof(Head) <= kSumHeadBytes);

// Arguments of one sum.
struct Sum {
  uint32_t digest;      // hash of the arguments that all ranks must share
  uint32_t ticket;      // identifies this sum
  uint32_t before;      // ticket that the preceding sum must have; 0: any
  uint64_t timeout_ns;  // longest wait for a rank
  int count;            // values per rank
  int64_t begin;        // offset of the inputs, in values after the head
};

constexpr int64_t kTwoBarrierBegin = 2 * kSumMaxOneBarrier;  // offset of the inputs of two-barrier sums

// The addresses of all ranks' memory, and this rank.
template <int kRanks>
struct Ranks {
  uint8_t* memory[kRanks];
  int own;

  __device__ __forceinline__ Head* head(int rank) const { return reinterpret_cast<Head*>(memory[rank]); }
  __device__ __forceinline__ float4* sums(int rank, int64_t begin) const {
    return reinterpret_cast<float4*>(memory[rank] + kSumHeadBytes) + begin / 4;
  }
};

// Loads from other ranks' memory are relaxed.sys: no cache but that of the memory's own device may hold the data.

__device__ __forceinline__ void load(float4& value, const float4* p) {
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(p)
               : "memory");
}

__device__ __forceinline__ void load(uint2& value, const uint2* p) {
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(p) : "memory");
}

// Delay all CTAs but CTA 0 before a trap, so that one of them prints the message.
__device__ __forceinline__ void let_cta_0_report() {
  if (blockIdx.x)
#pragma unroll 1
    for (int i = 0; i < 1000; ++i) __nanosleep(1000000);
}

// Called after every 1024 polls, about a millisecond. Return the time of the first call, which later calls pass as
// `start`; trap after the timeout.
__device__ __noinline__ uint64_t check_timeout(uint64_t start, uint64_t timeout_ns, int count, int own, int rank,
                                               int second) {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  if (!start) return now;
  if (now - start < timeout_ns) return start;
  let_cta_0_report();
  printf("alignkit: rank %d waited %.0f s for rank %d at the %s barrier of a tensor-parallel sum (%d values): that "
         "rank died, hangs, or did not call this sum. ALIGNKIT_SYMMETRIC_TIMEOUT sets the longest wait, in seconds\n",
         own, static_cast<double>(now - start) * 1e-9, rank, second ? "second" : "first", count);
  __trap();
}

// Report ranks that called different sums, and trap.
__device__ __noinline__ void fail_mismatch(int count, int own, int rank) {
  let_cta_0_report();
  printf("alignkit: ranks %d and %d called different tensor-parallel sums: rows, columns, dtype, form and bias must be "
         "the same (%d values on rank %d)\n", own, rank, count, own);
  __trap();
}

// Report sums of one rank that are not serialized, and trap.
__device__ __noinline__ void fail_overlapping(int own, bool taken) {
  let_cta_0_report();
  printf("alignkit: rank %d runs tensor-parallel sums of one group on two streams at once: a sum %s. Replay CUDA "
         "graphs on the stream of the group's other sums, or make the streams wait for each other\n", own,
         taken ? "started while another was running" : "ran between two sums of a CUDA graph");
  __trap();
}

// Order all earlier writes that this thread has made or observed before its later writes to other ranks.
__device__ __forceinline__ void release() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Barrier between this CTA and the CTAs of the same index on all ranks; thread r < kRanks synchronizes with rank r and
// must have called `release`.
template <int kRanks>
__device__ __forceinline__ void barrier(const Ranks<kRanks>& ranks, uint32_t number, const Sum& sum, bool second) {
  int rank = threadIdx.x;
  if (rank < kRanks) {
    uint64_t* remote = &ranks.head(rank)->signals[blockIdx.x][number % 2][ranks.own];
    uint64_t word = static_cast<uint64_t>(sum.digest) << 32 | number;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(remote), "l"(word) : "memory");
    const uint64_t* local = &ranks.head(ranks.own)->signals[blockIdx.x][number % 2][rank];
    uint64_t received, start = 0;
    for (uint32_t polls = 1;; ++polls) {
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(received) : "l"(local) : "memory");
      if (static_cast<uint32_t>(received) == number) break;
      if (polls % 1024 == 0) start = check_timeout(start, sum.timeout_ns, sum.count, ranks.own, rank, second);
    }
    if (static_cast<uint32_t>(received >> 32) != sum.digest) fail_mismatch(sum.count, ranks.own, rank);
  }
  __syncthreads();
}

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Four values rounded to the output type.
template <class Out>
struct Rounded;

template <>
struct Rounded<float> {
  using Quad = float4;
  static __device__ __forceinline__ Quad round(const float4& x) { return x; }
};

template <>
struct Rounded<__nv_bfloat16> {
  using Quad = uint2;
  static __device__ __forceinline__ Quad round(const float4& x) {
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

  // Add the bias to the four values that start at flat index `first`.
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

// Store quad i of y, which has `count` values.
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

// The kernel; y has `count` values, or a slice's. kOneBarrier: a one-barrier sum (Form::kWhole), instantiated
// separately to keep the code small: other kernels evict it from the instruction cache between two sums.
template <int kRanks, class Out, bool kOneBarrier>
__global__ void __launch_bounds__(kThreads)
    tree_sum(const __grid_constant__ Ranks<kRanks> ranks, const __grid_constant__ Sum sum, Form any_form,
             int64_t capacity, const Bias bias, Out* y) {
  using Quad = typename Rounded<Out>::Quad;
  constexpr int kBatch = kOneBarrier ? 2 : 16 / kRanks;  // schedule: quads per rank that a thread loads before it adds
  Form form = kOneBarrier ? Form::kWhole : any_form;
  __shared__ uint32_t last;  // number of the CTA's last barrier
  int count = sum.count;
  unsigned long long* count_word = &ranks.head(ranks.own)->counts[blockIdx.x];
  if (threadIdx.x < kRanks) release();  // concurrently with the atomic, in another warp
  if (threadIdx.x == 32) {
    unsigned long long previous = atomicExch(count_word, kTaken);
    // Only CTA 0 takes part in every sum.
    if (previous == kTaken || (sum.before && blockIdx.x == 0 && previous >> 32 != sum.before))
      fail_overlapping(ranks.own, previous == kTaken);
    last = static_cast<uint32_t>(previous);
  }
  __syncthreads();
  uint32_t number = last + 1;
  barrier(ranks, number, sum, false);

  auto rounded = [&](int rank) { return reinterpret_cast<Quad*>(ranks.sums(rank, kTwoBarrierBegin + capacity)); };
  int quads = (count + 3) / 4, share = (quads + kRanks - 1) / kRanks;
  int begin = form == Form::kWhole ? 0 : min(ranks.own * share, quads);
  int end = form == Form::kWhole ? quads : min(begin + share, quads);
  int thread = blockIdx.x * kThreads + threadIdx.x, stride = gridDim.x * kThreads;
  for (int base = begin + thread; base < end; base += kBatch * stride) {
    float4 parts[kBatch][kRanks];
#pragma unroll
    for (int a = 0; a < kBatch; ++a)
      if (base + a * stride < end)
#pragma unroll
        for (int r = 0; r < kRanks; ++r) load(parts[a][r], ranks.sums(r, sum.begin) + base + a * stride);
#pragma unroll
    for (int a = 0; a < kBatch; ++a) {
      int i = base + a * stride;
      if (i >= end) break;
#pragma unroll
      for (int step = 1; step < kRanks; step *= 2)
#pragma unroll
        for (int r = 0; r < kRanks; r += 2 * step) parts[a][r] = parts[a][r] + parts[a][r + step];
      float4 total = parts[a][0];
      bias.add(total, 4 * i);
      Quad quad = Rounded<Out>::round(total);
      if (form == Form::kSlice) {
        store(y, count / kRanks, i - begin, quad);
      } else {
        store(y, count, i, quad);
      }
      if (form == Form::kShared) rounded(ranks.own)[i - begin] = quad;
    }
  }

  __syncthreads();
  if (!kOneBarrier) {
    if (threadIdx.x < kRanks) release();
    barrier(ranks, ++number, sum, true);
  }
  if (form == Form::kShared) {
    for (int base = thread; base < share; base += kBatch * stride) {
      Quad others[kBatch][kRanks - 1];
      auto index = [&](int a, int r) { return (ranks.own + 1 + r) % kRanks * share + base + a * stride; };
      auto valid = [&](int a, int r) { return base + a * stride < share && index(a, r) < quads; };
#pragma unroll
      for (int a = 0; a < kBatch; ++a)
#pragma unroll
        for (int r = 0; r < kRanks - 1; ++r)
          if (valid(a, r)) load(others[a][r], rounded((ranks.own + 1 + r) % kRanks) + base + a * stride);
#pragma unroll
      for (int a = 0; a < kBatch; ++a)
#pragma unroll
        for (int r = 0; r < kRanks - 1; ++r)
          if (valid(a, r)) store(y, count, index(a, r), others[a][r]);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *count_word = static_cast<unsigned long long>(sum.ticket) << 32 | number;
}

// Fields of `order`, the state that the host keeps between sums of one workspace: graph capture, ticket and one-barrier
// buffer of the last sum.
enum OrderField { kCapture, kTicket, kBuffer };

// Set `capture` to the id of the graph capture that the stream is in, or 0.
cudaError_t capture_id(cudaStream_t stream, unsigned long long& capture) {
  cudaStreamCaptureStatus status;
  cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture);
  if (status != cudaStreamCaptureStatusActive) capture = 0;
  return e;
}

// Return the buffer, 1 or 2, of a one-barrier sum; 0 for a two-barrier sum.
int choose_buffer(int form, int count, unsigned long long capture, const uint64_t* order) {
  bool one_barrier = capture && capture == order[kCapture] && static_cast<Form>(form) == Form::kWhole &&
                     count <= kSumMaxOneBarrier;
  return one_barrier ? 1 + (order[kBuffer] == 1) : 0;
}

int64_t buffer_begin(int buffer) { return buffer ? (buffer - 1) * kSumMaxOneBarrier : kTwoBarrierBegin; }

// Hash the values.
uint32_t make_digest(std::initializer_list<int64_t> values) {
  uint64_t mixed = 0;
  for (int64_t value : values) {
    mixed = (mixed ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    mixed ^= mixed >> 32;
  }
  return static_cast<uint32_t>(mixed);
}

template <int kRanks, class Out>
cudaError_t launch(void* const* memory, int rank, Form form, const Sum& sum, int64_t capacity, const Bias& bias,
                   void* y, int max_ctas, cudaStream_t stream) {
  Ranks<kRanks> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.memory[r] = static_cast<uint8_t*>(memory[r]);
  ranks.own = rank;
  int64_t quads = (sum.count + 3) / 4, own_quads = form == Form::kWhole ? quads : (quads + kRanks - 1) / kRanks;
  int ctas = static_cast<int>(std::min<int64_t>((own_quads + kThreads - 1) / kThreads, max_ctas));
  auto kernel = sum.begin < kTwoBarrierBegin ? tree_sum<kRanks, Out, true> : tree_sum<kRanks, Out, false>;
  kernel<<<ctas, kThreads, 0, stream>>>(ranks, sum, form, capacity, bias, static_cast<Out*>(y));
  return cudaGetLastError();
}

template <int kRanks>
cudaError_t launch(void* const* memory, int rank, Form form, const Sum& sum, int64_t capacity, const Bias& bias,
                   void* y, bool bf16, int max_ctas, cudaStream_t stream) {
  return bf16 ? launch<kRanks, __nv_bfloat16>(memory, rank, form, sum, capacity, bias, y, max_ctas, stream)
              : launch<kRanks, float>(memory, rank, form, sum, capacity, bias, y, max_ctas, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// y = the sum over ranks of `count` fp32 values, plus the bias, rounded. All ranks must pass the same arguments except
// rank, bias, y and the addresses. Returns a cudaError_t.
//
// - memory: addresses, on this device, of all ranks' memory. ranks: 2, 4 or 8.
// - form: 0 one-shot, 1 reduce-scatter (y is this rank's equal slice, a multiple of 4 values), 2 two-shot; see Form.
// - capacity: values for which each rank's memory has room, besides the buffers of one-barrier sums.
// - begin: offset of the inputs, as alignkit_tree_sum_begin returned it; a two-barrier sum may add an offset within
//   capacity.
// - bias: bf16 or fp32 [columns], or null; a slice starts at its first value. y: bf16 or fp32, 16-byte aligned.
// - order: three words, zero at first, that the launcher keeps between calls with this memory.
// - timeout_ns: longest wait for a rank. blocks: CTAs at most, up to 64, one per SM.
//
// The device traps with a message if a rank does not come in time, if ranks pass different arguments, or if sums of
// this rank are not serialized.
extern "C" int alignkit_tree_sum(void* const* memory, int ranks, int rank, int form, int count, int64_t capacity,
                                 int64_t begin, const void* bias, int bias_bf16, int columns, void* y, int y_bf16,
                                 uint64_t* order, uint64_t timeout_ns, int blocks, cudaStream_t stream) {
  Form f = static_cast<Form>(form);
  if (count < 1 || blocks < 1 || blocks > kSumMaxBlocks || capacity % (4 * kMaxRanks) || rank < 0 || rank >= ranks ||
      (bias && columns < 1) || (f == Form::kSlice ? count % (4 * ranks) : f != Form::kWhole && f != Form::kShared))
    return cudaErrorInvalidValue;
  unsigned long long capture;
  if (cudaError_t e = capture_id(stream, capture)) return e;
  static std::atomic<uint32_t> last{0};
  uint32_t ticket = ++last;
  if (!ticket) ticket = ++last;
  uint32_t before = capture && capture == order[kCapture] ? static_cast<uint32_t>(order[kTicket]) : 0;
  int buffer = choose_buffer(form, count, capture, order);
  bool valid = buffer ? begin == buffer_begin(buffer)
                      : begin >= kTwoBarrierBegin && begin % 4 == 0 && begin + count <= kTwoBarrierBegin + capacity;
  if (!valid) return cudaErrorInvalidValue;
  order[kCapture] = capture, order[kTicket] = ticket;
  if (buffer) order[kBuffer] = buffer;

  Bias b{bias, bias_bf16 != 0, columns};
  int has_bias = bias ? 1 + (bias_bf16 != 0) : 0;
  Sum sum{make_digest({ranks, form, begin, count, capacity, columns, has_bias, y_bf16 != 0, blocks}),
          ticket,
          before,
          timeout_ns,
          count,
          begin};
  switch (ranks) {
    case 2: return launch<2>(memory, rank, f, sum, capacity, b, y, y_bf16 != 0, blocks, stream);
    case 4: return launch<4>(memory, rank, f, sum, capacity, b, y, y_bf16 != 0, blocks, stream);
    case 8: return launch<8>(memory, rank, f, sum, capacity, b, y, y_bf16 != 0, blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Set *begin to the offset, in values after the head, of the inputs of the next call with this form, count and stream.
// For a two-barrier sum it is the start of their buffer. Returns a cudaError_t.
extern "C" int alignkit_tree_sum_begin(int form, int count, const uint64_t* order, int64_t* begin,
                                       cudaStream_t stream) {
  unsigned long long capture;
  if (cudaError_t e = capture_id(stream, capture)) return e;
  *begin = buffer_begin(choose_buffer(form, count, capture, order));
  return cudaSuccess;
}

ALIGNKIT_FUNCTION(alignkit_tree_sum)
ALIGNKIT_FUNCTION(alignkit_tree_sum_begin)
