// The gradient of the gated delta rule's state, back over chunks of 64 rows: alignkit/ops/gated_delta_rule/__init__.py.
//
// The state D [K, V] is kept transposed, 64 or 32 of V by all of K to a group of four warps, in fp32 sums of the tensor
// core.
// What leaves a product is laid out as the next one's left operand, so the chain over chunks never goes through memory:
//
//   dv2^T = D^T k^T    D rounded, in registers; k [64, K] in shared memory
//   D^T += do^T q      do, scaled before; q [64, K] in shared memory; it runs while dv2 is finished
//   D^T -= dv2^T w     dv2 rounded, in registers; w [64, K] in shared memory
//
// Columns of V do not meet. A block holds 128 of V (two groups), 64 or 32, and a cluster as many blocks as V takes. Of
// 32, if only so all states fit on the device at once, it holds half or a quarter as many, and clusters share a state.
// Which of these is a matter of speed alone. Of 32, a warp has 8: the other 8 of its 16 rows of the left operands may
// be anything, and nobody reads their sums. Products take as long as those of 64, but all else that is done for V's
// columns is half.
//
// Blocks of a cluster read q, k and w together, each a part of the rows for all. Of four more warps of a block one
// copies in, one for each group copies out, and the rest compute the factors of the gates and scale do. Clusters stay
// and take parts of states: in turn, or, where lengths differ, the next when they are done.
#include <mutex>

#include "../../interface.h"
#include "../ptx/barrier.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/wgmma.cuh"

// The arguments, as alignkit/ops/gated_delta_rule/cuda.py fills them. Strides are in elements.
struct AlignkitDelta {
  const void *q, *k, *w, *d_o, *dv;
  int64_t strides[5][3];  // of these: batch, row, head
  const float *g, *gk, *dht;
  const void* cu_seqlens;  // null: not packed
  void* dh;
  float* dh0;
  void* dv2;
  unsigned* taken;  // how many parts of states are taken, without the clusters' first; scratch. Null: not packed
  int batch, rows, heads, key_heads, key_dim, value_dim, sequences, chunks;  // chunks: of a batch
  float scale, unit;  // unit: what makes a gate a logarithm to base 2
  int wide, half, v_first, columns;  // of cu_seqlens, 64 bits; fp16; states [V, K]; of V, of a block, 0: as is best
};
ALIGNKIT_LAYOUT(AlignkitDelta, q, k, w, d_o, dv, strides, g, gk, dht, cu_seqlens, dh, dh0, dv2, taken, batch, rows,
                heads, key_heads, key_dim, value_dim, sequences, chunks, scale, unit, wide, half, v_first, columns)

namespace alignkit {
namespace {

constexpr int kChunk = 64;
constexpr int kBox = kChunk * 128;  // bytes of 64 columns

constexpr int groups_of(int columns) { return columns > 64 ? 2 : 1; }

enum Part { kOfK, kOfQ, kOfW, kParts };

template <class T, int K, int kGroups, int kSlice>
struct DeltaStage {
  T k[kChunk * K], q[kChunk * K], w[kChunk * K];
  T dv[kGroups][kChunk * kSlice], d_o[kGroups][kChunk * kSlice];
};

template <int K>
struct Factors {
  float decay[K], of_do[kChunk], of_dv[kChunk];
};

constexpr int kMostSorted = 256;
constexpr int kAhead = 4;  // of states, how many a cluster may take before all its warps know the first

// Packed sequences, and which of them is longest, next, and so on.
struct Sorted {
  int begin[kMostSorted], rows[kMostSorted], first_chunk[kMostSorted];
  uint16_t sequence[kMostSorted];
};

template <class T, int K, int kColumns, int kDepth_>
struct DeltaShared {
  static constexpr int kGroups = groups_of(kColumns), kSlice = kColumns / kGroups, kDepth = kDepth_;
  DeltaStage<T, K, kGroups, kSlice> stage[kDepth];
  T dh[kGroups][kSlice * K], dv2[kGroups][kChunk * kSlice];  // on their way out
  Factors<K> factors[kDepth];
  uint64_t full[kDepth][kParts], empty[kDepth][kParts], prepared[kDepth], prepared_empty[kDepth];
  uint64_t next_full[kAhead], next_empty[kAhead];  // empty: for all blocks, in the first
  int next[kAhead];  // states that the cluster takes
  Sorted sorted;
};

constexpr int kMostShared = 227 * 1024 - 1024;  // to begin at a multiple of 1024

template <class T, int K, int kColumns>
constexpr int delta_depth() {
  constexpr int one = sizeof(DeltaShared<T, K, kColumns, 1>), two = sizeof(DeltaShared<T, K, kColumns, 2>);
  return 1 + (kMostShared - one) / (two - one);
}

template <class T, int K, int kColumns>
using DeltaSharedOf = DeltaShared<T, K, kColumns, delta_depth<T, K, kColumns>()>;

struct Sequence {
  int batch, begin, rows, first_chunk;

  __device__ int steps() const { return max((rows + kChunk - 1) / kChunk, 1); }
  __device__ int of_chunk(int chunk) const { return min(rows - chunk * kChunk, kChunk); }
};

__device__ __forceinline__ int start_of(const AlignkitDelta& p, int i) {
  int64_t at = p.wide ? static_cast<const int64_t*>(p.cu_seqlens)[i] : static_cast<const int32_t*>(p.cu_seqlens)[i];
  return static_cast<int>(min(max(at, int64_t{0}), static_cast<int64_t>(p.rows)));
}

__device__ __forceinline__ int chunks_of(int rows) { return (rows + kChunk - 1) / kChunk; }

__device__ __forceinline__ bool sorts(const AlignkitDelta& p) { return p.cu_seqlens && p.sequences <= kMostSorted; }

// Called by a warp.
__device__ Sequence sequence_of(const Sorted& by, const AlignkitDelta& p, int i) {
  if (!p.cu_seqlens) return {i, 0, p.rows, i * p.chunks};
  if (sorts(p)) return {0, by.begin[i], by.rows[i], by.first_chunk[i]};
  int before = 0;
  for (int j = threadIdx.x % 32; j < i; j += 32) before += chunks_of(max(start_of(p, j + 1) - start_of(p, j), 0));
  int begin = start_of(p, i);
  return {0, begin, max(start_of(p, i + 1) - begin, 0), static_cast<int>(__reduce_add_sync(~0u, before))};
}

// Called by all threads of a block.
__device__ void sort(Sorted& by, const AlignkitDelta& p) {
  for (int i = threadIdx.x; i < p.sequences; i += blockDim.x) {
    int begin = start_of(p, i);
    by.begin[i] = begin;
    by.rows[i] = max(start_of(p, i + 1) - begin, 0);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.sequences; i += blockDim.x) {
    int place = 0, before = 0, rows = by.rows[i];
    for (int j = 0; j < p.sequences; ++j) {
      place += by.rows[j] > rows || (by.rows[j] == rows && j < i);
      before += j < i ? chunks_of(by.rows[j]) : 0;
    }
    by.sequence[place] = static_cast<uint16_t>(i);
    by.first_chunk[i] = before;
  }
}

// Blocks of a cluster, clusters that share a state, and which of its cluster's blocks this one is.
struct Cluster {
  int blocks, parts, rank;
};

// The parts of states of a cluster, for each of its warps: sequence, head, state, and which of V's blocks this one is.
// The first has the cluster's number; if lengths differ, the next are those that its copy_in takes.
template <class Sh, class Function>
__device__ __forceinline__ void for_each_state(Sh& sh, const AlignkitDelta& p, const Cluster& c,
                                               const Function& function) {
  int count = p.sequences * p.heads * c.parts, slot = 0, phase = 0;
  for (int i = blockIdx.x / c.blocks; i < count;) {
    int state = i / c.parts, part = i - state * c.parts, sequence = state / p.heads, head = state - sequence * p.heads;
    if (sorts(p)) sequence = sh.sorted.sequence[sequence];
    function(sequence_of(sh.sorted, p, sequence), head, sequence * p.heads + head, part * c.blocks + c.rank);
    if (p.taken) {
      barrier_wait(&sh.next_full[slot], phase);
      i = sh.next[slot];
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&sh.next_empty[slot], 0);
      step<kAhead>(slot, phase);
    } else {
      i += gridDim.x / c.blocks;
    }
  }
}

struct DeltaMaps {
  CUtensorMap k, q, w, d_o, dv, dh, dv2;
};

template <int K, class Sh>
__device__ void copy_in(Sh& sh, const DeltaMaps& maps, const AlignkitDelta& p, const Cluster& c) {
  constexpr int groups = Sh::kGroups;
  constexpr int bytes = sizeof(sh.stage[0].k), slices = sizeof(sh.stage[0].dv);
  int stage = 0, phase = 0, lane = threadIdx.x % 32, rows_each = kChunk / c.blocks;
  int takes_at = p.taken && c.rank == 0 ? 0 : -1;  // the chunk before which it takes the next part, if it does
  unsigned taken = 0;
  int next_slot = 0, next_phase = 0;
  auto tile = [&](auto* to, const CUtensorMap* map, int head, int row, int batch, uint64_t* full) {
    to += c.rank * rows_each * 64;
    row += c.rank * rows_each;
    for (int x = 0; x < K; x += 64)
      if (c.blocks == 1)
        copy_box(to + x * kChunk, map, x, head, row, batch, full);
      else
        copy_box_to((1 << c.blocks) - 1, to + x * kChunk, map, x, head, row, batch, full);
  };
  auto slice = [&](auto& to, const CUtensorMap* map, int block, int head, int row, int batch, uint64_t* full) {
    for (int i = 0; i < groups; ++i) copy_box(to[i], map, (block * groups + i) * Sh::kSlice, head, row, batch, full);
  };
  for_each_state(sh, p, c, [&](const Sequence& s, int head, int, int block) {
    int key_head = head / (p.heads / p.key_heads);
    for (int chunk = s.steps() - 1; chunk >= 0; --chunk, step<Sh::kDepth>(stage, phase)) {
      if (lane) continue;
      // It is on its way meanwhile; for atomicAdd the compiler would wait. As many are taken as there are.
      if (chunk == takes_at) taken = atomicInc(p.taken, p.sequences * p.heads * c.parts - 1);
      int row = s.begin + chunk * kChunk;
      uint64_t *full = sh.full[stage], *empty = sh.empty[stage];
      auto& to = sh.stage[stage];
      if (s.rows == 0) {
        for (int part = 0; part < kParts; ++part) {
          barrier_wait(&empty[part], phase ^ 1);
          barrier_arrive(&full[part]);
        }
        continue;
      }
      barrier_wait(&empty[kOfK], phase ^ 1);
      barrier_expect(&full[kOfK], bytes + slices);
      tile(to.k, &maps.k, key_head, row, s.batch, &full[kOfK]);
      slice(to.dv, &maps.dv, block, head, row, s.batch, &full[kOfK]);
      barrier_wait(&empty[kOfQ], phase ^ 1);
      barrier_expect(&full[kOfQ], bytes + slices);
      tile(to.q, &maps.q, key_head, row, s.batch, &full[kOfQ]);
      slice(to.d_o, &maps.d_o, block, head, row, s.batch, &full[kOfQ]);
      barrier_wait(&empty[kOfW], phase ^ 1);
      barrier_expect(&full[kOfW], bytes);
      tile(to.w, &maps.w, head, row, s.batch, &full[kOfW]);
    }
    __syncwarp();
    if (p.taken) {
      bool alone = c.blocks == 1;  // and so without another's address
      if (lane == 0 && !alone) barrier_expect(&sh.next_full[next_slot], sizeof(int));
      if (c.rank == 0) {
        barrier_wait(&sh.next_empty[next_slot], next_phase ^ 1);
        int next = gridDim.x / c.blocks + __shfl_sync(~0u, taken, 0);
        if (alone && lane == 0) {
          sh.next[next_slot] = next;
          barrier_arrive(&sh.next_full[next_slot], 0);
        }
        if (!alone && lane < c.blocks)
          send_there(address_in(&sh.next[next_slot], lane), next, address_in(&sh.next_full[next_slot], lane));
      }
      __syncwarp();
      step<kAhead>(next_slot, next_phase);
    }
  });
  // Nobody leaves while another block may still write here: all that others arrive at has its last phase.
  for (int i = 0; i < Sh::kDepth; ++i, step<Sh::kDepth>(stage, phase))
    for (uint64_t& empty : sh.empty[stage]) barrier_wait(&empty, phase ^ 1);
  if (p.taken && c.rank == 0)
    for (int i = 0; i < kAhead; ++i, step<kAhead>(next_slot, next_phase))
      barrier_wait(&sh.next_empty[next_slot], next_phase ^ 1);
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The gates of a chunk, as a lane of the warp `share` among kWarps reads them: of some rows, of the last row, and of some
// channels of K.
template <int K, int kWarps>
struct Gates {
  static constexpr int kRows = 2 / kWarps, kChannels = K / 32 / kWarps;
  float g[kRows], last, of_k[kChannels];

  static __device__ __forceinline__ int row(int share, int i) { return (share * kRows + i) * 32 + threadIdx.x % 32; }
  static __device__ __forceinline__ int channel(int share, int i) {
    return (share * 32 + threadIdx.x % 32) * kChannels + i;
  }

  static __device__ __forceinline__ int64_t first(const AlignkitDelta& p, const Sequence& s, int chunk, int head) {
    return (static_cast<int64_t>(s.batch) * p.rows + s.begin + chunk * kChunk) * p.heads + head;
  }

  // To the L2 cache: while memory is busy, what `read` reads takes longer than a chunk. Of a chunk that is not the last.
  static __device__ __forceinline__ void fetch(const AlignkitDelta& p, const Sequence& s, int chunk, int head, int share) {
    auto fetch_from = [](const float* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); };
    int64_t from = first(p, s, chunk, head);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (p.g) fetch_from(p.g + from + static_cast<int64_t>(row(share, i)) * p.heads);
    if (p.gk) fetch_from(p.gk + (from + static_cast<int64_t>(kChunk - 1) * p.heads) * K + channel(share, 0));
  }

  __device__ __forceinline__ void read(const AlignkitDelta& p, const Sequence& s, int chunk, int head, int share) {
    int end = s.of_chunk(chunk) - 1;
    bool here = end >= 0;
    int64_t from = first(p, s, chunk, head), at_end = from + static_cast<int64_t>(end) * p.heads;
#pragma unroll
    for (int i = 0; i < kRows; ++i)  // beyond the end, anything finite: the rows are zeros
      g[i] = p.g && here ? p.g[from + static_cast<int64_t>(min(row(share, i), end)) * p.heads] : 0.0f;
    last = p.g && here ? p.g[at_end] : 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) of_k[i] = p.gk && here ? p.gk[at_end * K + channel(share, i)] : 0.0f;
  }

  __device__ __forceinline__ void write(Factors<K>& to, float scale, float unit, int share) const {
    float whole = exp2_of(last * unit);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to.of_do[row(share, i)] = scale * exp2_of(g[i] * unit);
      to.of_dv[row(share, i)] = exp2_of((last - g[i]) * unit);
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) to.decay[channel(share, i)] = whole * exp2_of(of_k[i] * unit);
  }
};

// Rows `from` to `end` of `tile`, of kSlice columns, become those rows times their factors, rounded; by a warp.
template <int kSlice, class T>
__device__ __forceinline__ void scale_rows(T* tile, const float* factors, int from, int end) {
  constexpr int kAtOnce = 4, kUnits = kSlice / 8, kRows = 32 / kUnits;
  for (int r = from + threadIdx.x % 32 / kUnits; r < end; r += kRows * kAtOnce) {
    // In whatever order they lie in the row.
    uint4* units = reinterpret_cast<uint4*>(tile + r * kSlice) + threadIdx.x % kUnits;
    uint4 v[kAtOnce];
    float factor[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = units[i * 32];
      factor[i] = factors[r + i * kRows];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      for (uint32_t* pair : {&v[i].x, &v[i].y, &v[i].z, &v[i].w}) {
        float2 x = unpack<T>(*pair);
        *pair = pack<T>(x.x * factor[i], x.y * factor[i]);
      }
      units[i * 32] = v[i];
    }
  }
}

constexpr int kFetched = 6;  // how many chunks ahead gates are on their way to the L2 cache

// By kWarps warps, each its share: a chunk's factors, and do times its own, where it lies.
template <int K, int kWarps, class Sh>
__device__ void prepare(Sh& sh, const AlignkitDelta& p, int share, const Cluster& c) {
  int stage = 0, phase = 0, from = share * (kChunk / kWarps);
  for_each_state(sh, p, c, [&](const Sequence& s, int head, int, int) {
    int chunk = s.steps() - 1;
    Gates<K, kWarps> now, next;
    now.read(p, s, chunk, head, share);
    if (chunk > 0) next.read(p, s, chunk - 1, head, share);
    for (; chunk >= 0; --chunk, step<Sh::kDepth>(stage, phase)) {
      Gates<K, kWarps> later = next;
      if (chunk >= kFetched) Gates<K, kWarps>::fetch(p, s, chunk - kFetched, head, share);
      if (chunk > 1) later.read(p, s, chunk - 2, head, share);  // on its way while the others are used
      barrier_wait(&sh.prepared_empty[stage], phase ^ 1);
      now.write(sh.factors[stage], p.scale, p.unit, share);
      __syncwarp();
      barrier_wait(&sh.full[stage][kOfQ], phase);
      for (auto& tile : sh.stage[stage].d_o)
        scale_rows<Sh::kSlice>(tile, sh.factors[stage].of_do, from, from + kChunk / kWarps);
      shared_written();  // before the copy engine writes there again
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&sh.prepared[stage]);
      now = next;
      next = later;
    }
  });
}

// Named barriers between a group and the warp that copies out for it, and of all groups.
enum Name { kOutFull = 1, kOutEmpty, kNames = 2, kGroupsMeet = 2 * kNames + 1 };
constexpr int kGroupAndWarp = 128 + 32;

// How many of a warp's 16 rows of a left operand are columns of V; the rows after them may be anything.
template <int kSlice>
constexpr int kOwn = kSlice / 4;

// Where a lane finds its row of four matrices in swizzled rows of kSlice columns: its warp's columns of 16 rows from
// `row` on, or, where it has 8, of 32. Loaded or stored transposed they are a left operand, or two operands' own rows,
// the second's where the first has its other rows.
template <int kSlice>
__device__ __forceinline__ uint32_t matrices_at(uint32_t tile, int row) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  row += lane / 16 * 8 + lane % 8;
  if (kSlice == 64) return tile + row * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
  return tile + (row + lane / 8 % 2 * 16) * 64 + ((warp ^ (lane % 8 / 2)) << 4);
}

// Left operands of 8 own rows, two by two, to four matrices each; and back.

__device__ __forceinline__ void gather(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    a[i][1] = a[i + 1][0];
    a[i][3] = a[i + 1][2];
  }
}

__device__ __forceinline__ void scatter(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    a[i + 1][0] = a[i][1];
    a[i + 1][2] = a[i][3];
  }
}

template <class T, int K, class Sh>
__device__ void copy_out(Sh& sh, const DeltaMaps& maps, const AlignkitDelta& p, int group, const Cluster& c) {
  constexpr int slice = Sh::kSlice, units = slice / 8;
  int lane = threadIdx.x % 32, names = group * kNames;
  for_each_state(sh, p, c, [&](const Sequence& s, int head, int, int block) {
    int first = (block * Sh::kGroups + group) * slice;
    for (int chunk = s.steps() - 1; chunk >= 0; --chunk) {
      if (lane == 0) stores_taken<0>();
      __syncwarp();
      named_barrier_arrive(names + kOutEmpty, kGroupAndWarp);
      named_barrier_sync(names + kOutFull, kGroupAndWarp);
      int row = s.begin + chunk * kChunk, rows = s.of_chunk(chunk), at = (s.first_chunk + chunk) * p.heads + head;
      if (lane == 0 && rows > 0) {
        shared_written();  // by the group, whose time is dearer
        if (p.v_first)
          for (int x = 0; x < K; x += 64) store_box(&maps.dh, sh.dh[group] + x * slice, x, first, at);
        else
          store_box(&maps.dh, sh.dh[group], first, 0, at);
        if (rows == kChunk) store_box(&maps.dv2, sh.dv2[group], first, head, row, s.batch);
        stores_end();
      }
      if (rows == kChunk) continue;
      // The rows that follow may be another sequence's.
      int64_t from = (static_cast<int64_t>(s.batch) * p.rows + row) * p.heads + head;
      T* to = static_cast<T*>(p.dv2) + from * p.value_dim + first + lane % units * 8;
      for (int r = lane / units; r < rows; r += 32 / units)
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(r) * p.heads * p.value_dim) =
            *reinterpret_cast<const uint4*>(sh.dv2[group] + r * slice + (lane % units ^ r / (8 / units) % units) * 8);
    }
  });
  if (lane == 0) stores_taken<0>();
}

// Rows of a tile of kBoxes boxes [64, kWidth] from `rows` on are set to zero, by threads 0 to kThreads - 1.
template <int kWidth, int kBoxes, int kThreads, class T>
__device__ __forceinline__ void zero_rows(T* tile, int rows, int thread) {
  constexpr int units = kWidth / 8, box = kChunk * units;
#pragma unroll
  for (int i = 0; i < kBoxes * box; i += kThreads)
    if (i % box + thread >= rows * units) reinterpret_cast<uint4*>(tile)[i + thread] = make_uint4(0, 0, 0, 0);
}

// Of a thread's part of a state, the sums and where they lie in memory.
template <int K, int kSlice, class Function>
__device__ __forceinline__ void for_each_sum(const AlignkitDelta& p, int state, int first, const Function& function) {
  int lane = threadIdx.x % 32, v = first + threadIdx.x / 32 % 4 * kOwn<kSlice> + lane / 4, k = 2 * (lane % 4);
  int64_t next_v = p.v_first ? K : 1, next_k = p.v_first ? 1 : p.value_dim;
  int64_t from = static_cast<int64_t>(state) * K * p.value_dim + v * next_v + k * next_k;
#pragma unroll
  for (int i = 0; i < K / 2; ++i)
    if (i / 2 % 2 * 8 < kOwn<kSlice>) function(i, from + i / 2 % 2 * 8 * next_v + (i / 4 * 8 + i % 2) * next_k);
}

template <class T, int K, class Sh>
__device__ void go_back(Sh& sh, const AlignkitDelta& p, int group, const Cluster& cluster) {
  constexpr int slice = Sh::kSlice, at_once = 64 / slice;  // left operands, to four matrices
  constexpr int parts = K / 64, held = parts > 2 ? 1 : parts;  // of 64 of K; those whose rounded state is held
  int thread = threadIdx.x, lane = thread % 32, names = group * kNames;
  int stage = 0, phase = 0, pair = 2 * (lane % 4);
  float d[parts][32] = {};
  uint32_t a[held][4][4];  // D, rounded: the left operand of the first product, and dh
  uint32_t out_dh = shared_address(sh.dh[group]), out_dv2 = shared_address(sh.dv2[group]);
  auto round = [&](int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += at_once) {
        int at = 8 * i + 2 * r;
        a[part % held][i][r] = pack<T>(d[part][at], d[part][at + 1]);
      }
    if (slice < 64) gather(a[part % held]);
  };
  auto stage_dh = [&](int from) {
#pragma unroll
    for (int part = from; part < from + held; ++part)
#pragma unroll
      for (int i = 0; i < 4; i += at_once)
        if (p.v_first) {
          int row = thread / 32 % 4 * kOwn<slice> + (slice == 64 ? lane / 8 % 2 * 8 : 0) + lane % 8;
          int unit = 2 * i + lane / 16 + (slice == 64 ? 0 : lane / 8 % 2 * 2);
          store_matrices<false>(out_dh + part * (slice * 128) + row * 128 + ((unit ^ (lane % 8)) << 4),
                                a[part % held][i]);
        } else {
          store_matrices<true>(matrices_at<slice>(out_dh, part * 64 + i * 16), a[part % held][i]);
        }
  };
  for_each_state(sh, p, cluster, [&](const Sequence& s, int, int state, int block) {
    int first = (block * Sh::kGroups + group) * slice;
    if (p.dht)
      for_each_sum<K, slice>(p, state, first, [&](int i, int64_t at) { d[i / 32][i % 32] = p.dht[at]; });
    else
      for_each_sum<K, slice>(p, state, first, [&](int i, int64_t) { d[i / 32][i % 32] = 0.0f; });
#pragma unroll
    for (int part = 0; part < held; ++part) round(part);
    int steps = s.steps(), rows = s.of_chunk(steps - 1);
    if (rows < kChunk) {  // what was read beyond the end is not the sequence's
      for (uint64_t& full : sh.full[stage]) barrier_wait(&full, phase);
      barrier_wait(&sh.prepared[stage], phase);
      auto& in = sh.stage[stage];
      constexpr int threads = Sh::kGroups * 128;
      zero_rows<64, parts, threads>(in.k, rows, thread);
      zero_rows<64, parts, threads>(in.q, rows, thread);
      zero_rows<64, parts, threads>(in.w, rows, thread);
      zero_rows<slice, Sh::kGroups, threads>(in.dv[0], rows, thread);
      zero_rows<slice, Sh::kGroups, threads>(in.d_o[0], rows, thread);
      shared_written();
      named_barrier_sync(kGroupsMeet, threads);
    }
    barrier_wait(&sh.full[stage][kOfK], phase);
    for (; steps > 0; --steps) {
      uint64_t *full = sh.full[stage], *empty = sh.empty[stage];
      auto& in = sh.stage[stage];
      const auto& factors = sh.factors[stage];
      auto release = [&](Part which) {
        __syncwarp();
        if (lane < cluster.blocks) barrier_arrive(&empty[which], lane);
      };

      // dv2^T = D^T k^T.
      float x[32];
      uint64_t of_k = operand<false>(in.k);
      products_wait<0>();  // there are none; without it the compiler waits for these, when it meets D again
#pragma unroll
      for (int from = 0; from < parts; from += held) {
        if (from > 0) {
          if (from == held) named_barrier_sync(names + kOutEmpty, kGroupAndWarp);
          stage_dh(from - held);
          products_wait<0>();
#pragma unroll
          for (int part = from; part < from + held; ++part) round(part);
        }
        products_begin();
#pragma unroll
        for (int part = from; part < from + held; ++part)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            multiply<false, false>(T{}, x, a[part % held][i], of_k + part * (kBox >> 4) + i * kNext<false>,
                                   part + i > 0);
        products_end();
      }

      uint32_t c[4][4];
      uint32_t dv = shared_address(in.dv[group]);
#pragma unroll
      for (int i = 0; i < 4; i += at_once) load_matrices<true>(c[i], matrices_at<slice>(dv, 16 * i));
      if (slice < 64) scatter(c);

      // D^T = decay D^T + do^T q, meanwhile.
      barrier_wait(&sh.prepared[stage], phase);  // so q is there, too
#pragma unroll
      for (int j = 0; j < K / 8; ++j) {
        float2 decay = *reinterpret_cast<const float2*>(&factors.decay[8 * j + pair]);
        float* sums = &d[j / 8][j % 8 * 4];
        sums[0] *= decay.x;
        sums[1] *= decay.y;
        if (slice < 64) continue;
        sums[2] *= decay.x;
        sums[3] *= decay.y;
      }
      uint32_t b[4][4];
      uint32_t d_o = shared_address(in.d_o[group]);
#pragma unroll
      for (int i = 0; i < 4; i += at_once) load_matrices<true>(b[i], matrices_at<slice>(d_o, 16 * i));
      if (slice < 64) scatter(b);
      uint64_t of_q = operand<true>(in.q);
      products_begin();
#pragma unroll
      for (int part = 0; part < parts; ++part)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          multiply<false, true>(T{}, d[part], b[i], of_q + part * (kBox >> 4) + i * kNext<true>, true);
      products_end();

      if (parts > held) stage_dh(parts - held);  // there is no room to hold it for longer

      // dv2^T is finished.
      float2 of_dv[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) of_dv[i] = *reinterpret_cast<const float2*>(&factors.of_dv[8 * i + pair]);
      barrier_wait(&full[kOfW], phase);
      products_wait<1>();
      products_taken(x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; r += at_once) {
          float2 factor = of_dv[2 * i + r / 2], v = unpack<T>(c[i][r]);
          int at = 8 * i + 2 * r;
          c[i][r] = pack<T>(__fmaf_rn(factor.x, x[at], v.x), __fmaf_rn(factor.y, x[at + 1], v.y));
        }
      // Of operands that it moves to other registers, as it does here, ptxas makes a wrong negative: of a whole number.
      uint32_t minus[4][4];
      if (slice < 64) {
        gather(c);
#pragma unroll
        for (int i = 0; i < 16; ++i) minus[i / 4][i % 4] = c[i / 4][i % 4] ^ 0x80008000;
      }

      // D^T -= dv2^T w, 64 of K after the other: the first are rounded while the others are computed.
      uint64_t of_w = operand<true>(in.w);
      products_begin();
#pragma unroll
      for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if constexpr (slice == 64)
            multiply<true, true>(T{}, d[part], c[i], of_w + part * (kBox >> 4) + i * kNext<true>, true);
          else
            multiply<false, true>(T{}, d[part], minus[i], of_w + part * (kBox >> 4) + i * kNext<true>, true);
        products_end();
      }
      release(kOfK);
      if (lane == 0) barrier_arrive(&sh.prepared_empty[stage]);

      // dh and dv2 leave, and the next chunk's k is waited for, meanwhile.
      if (parts == held) {
        named_barrier_sync(names + kOutEmpty, kGroupAndWarp);
        stage_dh(0);
      }
#pragma unroll
      for (int i = 0; i < 4; i += at_once) store_matrices<true>(matrices_at<slice>(out_dv2, 16 * i), c[i]);
      named_barrier_arrive(names + kOutFull, kGroupAndWarp);
      products_wait<parts>();
      release(kOfQ);
      step<Sh::kDepth>(stage, phase);
      products_wait<parts - 1>();
      products_taken(d[0]);
      round(0);
      if (steps > 1) barrier_wait(&sh.full[stage][kOfK], phase);
      products_wait<0>();
#pragma unroll
      for (int part = 1; part < parts; ++part) products_taken(d[part]);
#pragma unroll
      for (int part = 1; part < held; ++part) round(part);
      release(kOfW);
    }
    if (p.dh0) for_each_sum<K, slice>(p, state, first, [&](int i, int64_t at) { p.dh0[at] = d[i / 32][i % 32]; });
  });
}

template <class T, int K, int kColumns>
__global__ void __launch_bounds__((groups_of(kColumns) + 1) * 128, 1)
    delta_back(const __grid_constant__ DeltaMaps maps, const __grid_constant__ AlignkitDelta p, int blocks, int parts) {
  using Sh = DeltaSharedOf<T, K, kColumns>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  constexpr int kGroups = Sh::kGroups, preparing = 3 - kGroups;  // warps
  Cluster cluster{blocks, kColumns > 32 ? 1 : parts, cluster_rank()};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      for (int part = 0; part < kParts; ++part) {
        barrier_init(&sh.full[i][part], 1);
        barrier_init(&sh.empty[i][part], 4 * kGroups * blocks);  // warps that multiply, in all blocks
      }
      barrier_init(&sh.prepared[i], preparing);
      barrier_init(&sh.prepared_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kAhead; ++i) {
      barrier_init(&sh.next_full[i], 1);
      barrier_init(&sh.next_empty[i], 4 * (kGroups + 1) * blocks);  // all warps of all blocks
    }
    barrier_init_done();
  }
  if (sorts(p)) sort(sh.sorted, p);
  cluster_sync();
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp / 4 == kGroups) {
    if (kGroups == 2) registers_down<72>();
    if (warp % 4 == 0) copy_in<K>(sh, maps, p, cluster);
    if (warp % 4 > 0 && warp % 4 <= kGroups) copy_out<T, K>(sh, maps, p, warp % 4 - 1, cluster);
    if (warp % 4 > kGroups) prepare<K, preparing>(sh, p, warp % 4 - 1 - kGroups, cluster);
  } else {
    if (kGroups == 2) registers_up<216>();
    go_back<T, K>(sh, p, warp / 4, cluster);
  }
  // Nothing comes here: warps that meet again have their products' operands in uniform registers by many detours.
}

// Host.

struct Box {
  const void* data;
  bool half;
  cuuint64_t size[4], stride[3];  // in elements
  cuuint32_t box[4];
  int dimensions;
};

cudaError_t map_of(CUtensorMap* map, Box b) {
  if (!encode()) return cudaErrorNotSupported;
  cuuint32_t one[4] = {1, 1, 1, 1};
  for (cuuint64_t& s : b.stride) s *= 2;
  CUtensorMapDataType type = b.half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUresult made = encode()(map, type, b.dimensions, const_cast<void*>(b.data), b.size, b.stride, b.box, one,
                           CU_TENSOR_MAP_INTERLEAVE_NONE,
                           b.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Rows of `across` columns of a head of a tensor [batch, rows, heads, columns].
cudaError_t rows_of(CUtensorMap* map, const AlignkitDelta& p, const void* data, const int64_t (&strides)[3], int heads,
                    int columns, int across, int rows) {
  using Size = cuuint64_t;
  return map_of(map, {data, p.half != 0,
                      {Size(columns), Size(heads), Size(p.rows), Size(p.batch)},
                      {Size(strides[2]), Size(strides[1]), Size(strides[0])},
                      {cuuint32_t(across), 1, cuuint32_t(rows), 1}, 4});
}

cudaError_t maps_of(DeltaMaps* maps, const AlignkitDelta& p, int slice, int blocks) {
  struct {
    CUtensorMap* map;
    const void* data;
    int heads, columns, across, rows;
  } inputs[5] = {{&maps->q, p.q, p.key_heads, p.key_dim, 64, kChunk / blocks},
                 {&maps->k, p.k, p.key_heads, p.key_dim, 64, kChunk / blocks},
                 {&maps->w, p.w, p.heads, p.key_dim, 64, kChunk / blocks},
                 {&maps->d_o, p.d_o, p.heads, p.value_dim, slice, kChunk},
                 {&maps->dv, p.dv, p.heads, p.value_dim, slice, kChunk}};
  for (int i = 0; i < 5; ++i)
    if (cudaError_t e = rows_of(inputs[i].map, p, inputs[i].data, p.strides[i], inputs[i].heads, inputs[i].columns,
                                inputs[i].across, inputs[i].rows))
      return e;
  int64_t row = int64_t{p.heads} * p.value_dim, dense[3] = {row * p.rows, row, p.value_dim};
  if (cudaError_t e = rows_of(&maps->dv2, p, p.dv2, dense, p.heads, p.value_dim, slice, kChunk)) return e;
  using Size = cuuint64_t;
  Size across = p.v_first ? p.key_dim : p.value_dim, down = p.v_first ? p.value_dim : p.key_dim;
  return map_of(&maps->dh, {p.dh, p.half != 0, {across, down, Size(p.batch) * p.chunks * p.heads, 1},
                            {across, across * down, 0},
                            {cuuint32_t(p.v_first ? 64 : slice), cuuint32_t(p.v_first ? slice : p.key_dim), 1, 1}, 3});
}

// For each of some streams, how many parts of states are taken. As many are taken as there are; then it is zero again.
constexpr int kCounters = 64;
__device__ unsigned counters[kCounters];

// That of a stream, whose launches come one after the other; null if none is left. Also null if the stream is captured:
// graphs run beside each other.
unsigned* counter_of(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static int used = 0;
  static struct {
    int device;
    unsigned long long stream;  // never another's
    unsigned* counter;
  } known[kCounters];
  cudaStreamCaptureStatus captured;
  unsigned long long id;
  if (cudaStreamIsCapturing(stream, &captured) || captured != cudaStreamCaptureStatusNone) return nullptr;
  if (cudaStreamGetId(stream, &id)) return nullptr;
  std::lock_guard lock(mutex);
  for (int i = 0; i < used; ++i)
    if (known[i].device == device && known[i].stream == id) return known[i].counter;
  void* all;
  if (used == kCounters || cudaGetSymbolAddress(&all, counters)) return nullptr;
  known[used] = {device, id, static_cast<unsigned*>(all) + used};
  return known[used++].counter;
}

// Launches it; but if `fits` is given and not all states fit on the device at once, only says so there.
template <class T, int K, int kColumns>
cudaError_t launch_delta(const AlignkitDelta& p, cudaStream_t stream, bool* fits = nullptr) {
  using Sh = DeltaSharedOf<T, K, kColumns>;
  constexpr auto kernel = delta_back<T, K, kColumns>;
  constexpr int bytes = sizeof(Sh) + 1024;
  static_assert(bytes <= 227 * 1024);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = (Sh::kGroups + 1) * 128;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  // Of this kernel, how many clusters of so many blocks the device holds.
  static thread_local int prepared = -1, held[9];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    std::fill(held, held + 9, 0);
    prepared = device;
  }
  auto hold = [&](int blocks) {
    cluster.val.clusterDim.x = blocks;
    config.gridDim = blocks;
    return held[blocks] ? cudaSuccess : cudaOccupancyMaxActiveClusters(&held[blocks], kernel, &config);
  };
  int64_t states = int64_t{p.sequences} * p.heads;
  int whole = p.value_dim / kColumns, blocks = whole;
  if (cudaError_t e = hold(whole)) return e;
  // Small clusters leave fewer multiprocessors over, but each of them reads q, k and w.
  while (kColumns == 32 && blocks > 2 && states * (whole / blocks) > held[blocks])
    if (cudaError_t e = hold(blocks /= 2)) return e;
  bool all = states * (whole / blocks) <= held[blocks];
  if (fits && !(*fits = all)) return cudaSuccess;
  if (!all)
    if (cudaError_t e = hold(blocks = whole)) return e;
  config.gridDim = static_cast<unsigned>((all ? states * (whole / blocks) : held[blocks]) * blocks);
  DeltaMaps maps;
  if (cudaError_t e = maps_of(&maps, p, Sh::kSlice, blocks)) return e;
  AlignkitDelta dealt = p;
  if (all) dealt.taken = nullptr;
  if (dealt.taken) {
    if (unsigned* counter = counter_of(device, stream))
      dealt.taken = counter;
    else if (cudaError_t e = cudaMemsetAsync(dealt.taken, 0, sizeof(*dealt.taken), stream))
      return e;
  }
  return cudaLaunchKernelEx(&config, kernel, maps, dealt, blocks, whole / blocks);
}

// Few states: each over as many blocks as it takes. K = 256 leaves registers for one group of 64 of V.
template <class T, int K>
cudaError_t launch_delta(const AlignkitDelta& p, cudaStream_t stream) {
  if constexpr (K < 256) {
    bool fits = true, wide = p.value_dim > 64;
    if (!p.columns || p.columns == 32) {
      cudaError_t e = launch_delta<T, K, 32>(p, stream, p.columns ? nullptr : &fits);
      if (e || fits) return e;
    }
    if (!p.columns && wide) {
      cudaError_t e = launch_delta<T, K, 64>(p, stream, &fits);
      if (e || fits) return e;
    }
    // Those that wait share the speed of memory with as many as are worked on; a few long ones are done sooner by 64.
    bool long_few = p.cu_seqlens && int64_t{p.sequences} * p.heads <= 512 && p.chunks / 6 >= p.sequences;
    if (wide && (p.columns == 128 || (!p.columns && !long_few))) return launch_delta<T, K, 128>(p, stream);
  }
  return launch_delta<T, K, 64>(p, stream);
}

template <class T>
cudaError_t launch_delta(const AlignkitDelta& p, cudaStream_t stream) {
  if (p.key_dim == 64) return launch_delta<T, 64>(p, stream);
  if (p.key_dim == 128) return launch_delta<T, 128>(p, stream);
  return launch_delta<T, 256>(p, stream);
}

}  // namespace
}  // namespace alignkit

// Returns a cudaError_t. K is 64, 128 or 256, as is V. Inputs have strides that are multiples of 8 and lie at multiples
// of 16 bytes; everything else is dense.
extern "C" int alignkit_delta_back(const AlignkitDelta* p, cudaStream_t stream) {
  using namespace alignkit;
  return p->half ? launch_delta<__half>(*p, stream) : launch_delta<__nv_bfloat16>(*p, stream);
}
