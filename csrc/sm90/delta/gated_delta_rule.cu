// Gated delta rule, backward: the gradient of the state, last chunk of 64 rows first. The math is in
// alignkit/ops/gated_delta_rule/__init__.py.
//
// The gradient D [K, V] is kept transposed in fp32 accumulators. A consumer warpgroup holds 64 or 32 columns of V by
// all of K. Accumulators, rounded, are the register A operand of the next wgmma, so the chain over chunks never passes
// through memory:
//
//   dv2^T = D^T k^T    D rounded, in registers; k [64, K] in shared memory
//   D^T += do^T q      do scaled before; q [64, K] in shared memory; overlaps with the end of dv2
//   D^T -= dv2^T w     dv2 rounded, in registers; w [64, K] in shared memory
//
// Tile: columns of V are independent. A CTA holds 128 of V (two warpgroups), 64 or 32. A cluster holds the CTAs of one
// state, and multicasts q, k and w to them. With 32 columns per CTA, a cluster may hold half or a quarter of a state,
// if that lets all states fit on the device at once. These choices affect speed alone. With 32 columns a warp owns 8 of
// V. The other 8 of its 16 rows in the A operands are arbitrary, and their accumulators are unused.
//
// Warp specialization: besides the consumers, a CTA has four warps. One loads by TMA, one per consumer warpgroup
// stores, and the rest compute the factors of the gates and scale do.
//
// Order of summation (docs/contract.md, "Gated delta rule"): per chunk, D continues one chain over the rows of q, then
// over the rows of w.
//
// Launch: one persistent CTA per SM, 256 or 384 threads. Clusters take tasks (state, part of V) round-robin, or, for
// packed sequences, from a queue, longest first.
#include <mutex>

#include "../../interface.h"
#include "../ptx/cluster.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/pack.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

// Arguments, filled by alignkit/ops/gated_delta_rule/cuda_backend.py. Strides are in elements.
struct AlignkitDelta {
  const void *q, *k, *w, *d_o, *dv;
  int64_t strides[5][3];  // for each of q, k, w, d_o, dv: batch, row, head
  const float *g, *gk, *dht;
  const void* cu_seqlens;  // null: not packed
  void* dh;
  float* dh0;
  void* dv2;
  unsigned* taken;  // queue counter: tasks taken beyond each cluster's first; scratch. Null: not packed
  int batch, rows, heads, key_heads, key_dim, value_dim, sequences, chunks;  // chunks: per batch entry
  float scale, unit;                 // unit: factor that turns gates into base-2 logarithms
  int wide, half, v_first, columns;  // cu_seqlens is int64; fp16; states are [V, K]; columns of V per CTA, 0: automatic
};
ALIGNKIT_STRUCT(AlignkitDelta, q, k, w, d_o, dv, strides, g, gk, dht, cu_seqlens, dh, dh0, dv2, taken, batch, rows,
                heads, key_heads, key_dim, value_dim, sequences, chunks, scale, unit, wide, half, v_first, columns)

namespace alignkit {
namespace {

constexpr int kChunk = 64;               // contract: rows per chunk
constexpr int kBoxBytes = kChunk * 128;  // a TMA box: 64 rows by 64 columns

constexpr int groups_of(int columns) { return columns > 64 ? 2 : 1; }

enum Operand { kKTile, kQTile, kWTile, kOperands };

template <class T, int K, int kGroups, int kSlice>
struct DeltaStage {
  T k[kChunk * K], q[kChunk * K], w[kChunk * K];
  T dv[kGroups][kChunk * kSlice], d_o[kGroups][kChunk * kSlice];
};

template <int K>
struct Factors {
  float decay[K], do_scale[kChunk], dv_scale[kChunk];
};

constexpr int kMaxSorted = 256;  // schedule: more sequences than this are not sorted
constexpr int kQueueDepth = 4;   // schedule: queue entries that a cluster may be ahead of its slowest warp

// Packed sequences, and their order by decreasing length.
struct SequenceOrder {
  int begin[kMaxSorted], rows[kMaxSorted], first_chunk[kMaxSorted];
  uint16_t sequence[kMaxSorted];
};

template <class T, int K, int kColumns, int kDepth_>
struct DeltaShared {
  static constexpr int kGroups = groups_of(kColumns), kSlice = kColumns / kGroups, kDepth = kDepth_;
  DeltaStage<T, K, kGroups, kSlice> stage[kDepth];
  T dh[kGroups][kSlice * K], dv2[kGroups][kChunk * kSlice];  // staged for TMA stores
  Factors<K> factors[kDepth];
  uint64_t full[kDepth][kOperands], empty[kDepth][kOperands], factors_full[kDepth], factors_empty[kDepth];
  uint64_t queue_full[kQueueDepth], queue_empty[kQueueDepth];  // empty: in rank 0, for all CTAs of the cluster
  int queue[kQueueDepth];                                      // tasks of the cluster
  SequenceOrder order;
};

constexpr int kMaxShared = 227 * 1024 - 1024;  // hardware: shared memory per CTA, less the alignment to 1024 bytes

// Return the number of pipeline stages that fit in shared memory.
template <class T, int K, int kColumns>
constexpr int delta_depth() {
  constexpr int one = sizeof(DeltaShared<T, K, kColumns, 1>), two = sizeof(DeltaShared<T, K, kColumns, 2>);
  return 1 + (kMaxShared - one) / (two - one);
}

template <class T, int K, int kColumns>
using DeltaSharedOf = DeltaShared<T, K, kColumns, delta_depth<T, K, kColumns>()>;

struct Sequence {
  int batch, begin, rows, first_chunk;

  __device__ int steps() const { return max((rows + kChunk - 1) / kChunk, 1); }
  __device__ int rows_of_chunk(int chunk) const { return min(rows - chunk * kChunk, kChunk); }
};

__device__ __forceinline__ int sequence_start(const AlignkitDelta& p, int i) {
  int64_t row = p.wide ? static_cast<const int64_t*>(p.cu_seqlens)[i] : static_cast<const int32_t*>(p.cu_seqlens)[i];
  return static_cast<int>(min(max(row, int64_t{0}), static_cast<int64_t>(p.rows)));
}

__device__ __forceinline__ int chunk_count(int rows) { return (rows + kChunk - 1) / kChunk; }

__device__ __forceinline__ bool is_sorted(const AlignkitDelta& p) { return p.cu_seqlens && p.sequences <= kMaxSorted; }

// Return sequence i. Called by a whole warp.
__device__ Sequence find_sequence(const SequenceOrder& order, const AlignkitDelta& p, int i) {
  if (!p.cu_seqlens) return {i, 0, p.rows, i * p.chunks};
  if (is_sorted(p)) return {0, order.begin[i], order.rows[i], order.first_chunk[i]};
  int before = 0;
  for (int j = threadIdx.x % 32; j < i; j += 32)
    before += chunk_count(max(sequence_start(p, j + 1) - sequence_start(p, j), 0));
  int begin = sequence_start(p, i);
  return {0, begin, max(sequence_start(p, i + 1) - begin, 0), static_cast<int>(__reduce_add_sync(~0u, before))};
}

// Sort the sequences by decreasing length. Called by all threads of a CTA.
__device__ void sort_by_length(SequenceOrder& order, const AlignkitDelta& p) {
  for (int i = threadIdx.x; i < p.sequences; i += blockDim.x) {
    int begin = sequence_start(p, i);
    order.begin[i] = begin;
    order.rows[i] = max(sequence_start(p, i + 1) - begin, 0);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.sequences; i += blockDim.x) {
    int place = 0, before = 0, rows = order.rows[i];
    for (int j = 0; j < p.sequences; ++j) {
      place += order.rows[j] > rows || (order.rows[j] == rows && j < i);
      before += j < i ? chunk_count(order.rows[j]) : 0;
    }
    order.sequence[place] = static_cast<uint16_t>(i);
    order.first_chunk[i] = before;
  }
}

// CTAs per cluster, clusters per state, and the rank of this CTA.
struct Cluster {
  int ctas, splits, rank;
};

// Call function(sequence, head, state, V block of this CTA) for each task of the cluster; every warp runs this loop.
// The first task is the cluster's number. Later ones come from the queue, which load_chunks fills, or round-robin.
template <class Sh, class Function>
__device__ __forceinline__ void for_each_task(Sh& sh, const AlignkitDelta& p, const Cluster& c,
                                              const Function& function) {
  int count = p.sequences * p.heads * c.splits, slot = 0, phase = 0;
  for (int i = blockIdx.x / c.ctas; i < count;) {
    int state = i / c.splits, part = i - state * c.splits;
    int sequence = state / p.heads, head = state - sequence * p.heads;
    if (is_sorted(p)) sequence = sh.order.sequence[sequence];
    function(find_sequence(sh.order, p, sequence), head, sequence * p.heads + head, part * c.ctas + c.rank);
    if (p.taken) {
      mbarrier_wait(&sh.queue_full[slot], phase);
      i = sh.queue[slot];
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&sh.queue_empty[slot], 0);
      advance<kQueueDepth>(slot, phase);
    } else {
      i += gridDim.x / c.ctas;
    }
  }
}

struct DeltaMaps {
  CUtensorMap k, q, w, d_o, dv, dh, dv2;
};

// Load warp: TMA loads of all chunks; rank 0 also fills the task queue of the cluster.
template <int K, class Sh>
__device__ void load_chunks(Sh& sh, const DeltaMaps& maps, const AlignkitDelta& p, const Cluster& c) {
  constexpr int groups = Sh::kGroups;
  constexpr int bytes = sizeof(sh.stage[0].k), slice_bytes = sizeof(sh.stage[0].dv);
  int stage = 0, phase = 0, lane = threadIdx.x % 32, rows_each = kChunk / c.ctas;
  int fetch_chunk = p.taken && c.rank == 0 ? 0 : -1;  // the chunk before which this warp takes the next task; -1: never
  unsigned taken = 0;
  int next_slot = 0, next_phase = 0;
  auto tile = [&](auto* dst, const CUtensorMap* map, int head, int row, int batch, uint64_t* full) {
    dst += c.rank * rows_each * 64;
    row += c.rank * rows_each;
    for (int x = 0; x < K; x += 64)
      if (c.ctas == 1)
        tma_load(dst + x * kChunk, map, x, head, row, batch, full);
      else
        tma_load_multicast((1 << c.ctas) - 1, dst + x * kChunk, map, x, head, row, batch, full);
  };
  auto slice = [&](auto& dst, const CUtensorMap* map, int block, int head, int row, int batch, uint64_t* full) {
    for (int i = 0; i < groups; ++i) tma_load(dst[i], map, (block * groups + i) * Sh::kSlice, head, row, batch, full);
  };
  for_each_task(sh, p, c, [&](const Sequence& s, int head, int, int block) {
    int key_head = head / (p.heads / p.key_heads);
    for (int chunk = s.steps() - 1; chunk >= 0; --chunk, advance<Sh::kDepth>(stage, phase)) {
      if (lane) continue;
      // The result is used much later; with atomicAdd the compiler would wait for it. All clusters together increment
      // once per task, so the counter wraps to 0 for the next launch.
      if (chunk == fetch_chunk) taken = atomicInc(p.taken, p.sequences * p.heads * c.splits - 1);
      int row = s.begin + chunk * kChunk;
      uint64_t *full = sh.full[stage], *empty = sh.empty[stage];
      auto& operands = sh.stage[stage];
      if (s.rows == 0) {
        for (int part = 0; part < kOperands; ++part) {
          mbarrier_wait(&empty[part], phase ^ 1);
          mbarrier_arrive(&full[part]);
        }
        continue;
      }
      mbarrier_wait(&empty[kKTile], phase ^ 1);
      mbarrier_expect_tx(&full[kKTile], bytes + slice_bytes);
      tile(operands.k, &maps.k, key_head, row, s.batch, &full[kKTile]);
      slice(operands.dv, &maps.dv, block, head, row, s.batch, &full[kKTile]);
      mbarrier_wait(&empty[kQTile], phase ^ 1);
      mbarrier_expect_tx(&full[kQTile], bytes + slice_bytes);
      tile(operands.q, &maps.q, key_head, row, s.batch, &full[kQTile]);
      slice(operands.d_o, &maps.d_o, block, head, row, s.batch, &full[kQTile]);
      mbarrier_wait(&empty[kWTile], phase ^ 1);
      mbarrier_expect_tx(&full[kWTile], bytes);
      tile(operands.w, &maps.w, head, row, s.batch, &full[kWTile]);
    }
    __syncwarp();
    if (p.taken) {
      bool single = c.ctas == 1;  // needs no remote address
      if (lane == 0 && !single) mbarrier_expect_tx(&sh.queue_full[next_slot], sizeof(int));
      if (c.rank == 0) {
        mbarrier_wait(&sh.queue_empty[next_slot], next_phase ^ 1);
        int next = gridDim.x / c.ctas + __shfl_sync(~0u, taken, 0);
        if (single && lane == 0) {
          sh.queue[next_slot] = next;
          mbarrier_arrive(&sh.queue_full[next_slot], 0);
        }
        if (!single && lane < c.ctas)
          st_async(map_shared_rank(&sh.queue[next_slot], lane), next, map_shared_rank(&sh.queue_full[next_slot], lane));
      }
      __syncwarp();
      advance<kQueueDepth>(next_slot, next_phase);
    }
  });
  // No CTA may exit while another can still write to its shared memory: wait for the last phase of all barriers that
  // other CTAs arrive at.
  for (int i = 0; i < Sh::kDepth; ++i, advance<Sh::kDepth>(stage, phase))
    for (uint64_t& empty : sh.empty[stage]) mbarrier_wait(&empty, phase ^ 1);
  if (p.taken && c.rank == 0)
    for (int i = 0; i < kQueueDepth; ++i, advance<kQueueDepth>(next_slot, next_phase))
      mbarrier_wait(&sh.queue_empty[next_slot], next_phase ^ 1);
}

// Gates of a chunk that a lane of factor warp `share` (of kWarps) reads: some rows, the last row, and some channels of
// K.
template <int K, int kWarps>
struct Gates {
  static constexpr int kRows = 2 / kWarps, kChannels = K / 32 / kWarps;
  float g[kRows], last, gk[kChannels];

  static __device__ __forceinline__ int row(int share, int i) { return (share * kRows + i) * 32 + threadIdx.x % 32; }
  static __device__ __forceinline__ int channel(int share, int i) {
    return (share * 32 + threadIdx.x % 32) * kChannels + i;
  }

  static __device__ __forceinline__ int64_t first(const AlignkitDelta& p, const Sequence& s, int chunk, int head) {
    return (static_cast<int64_t>(s.batch) * p.rows + s.begin + chunk * kChunk) * p.heads + head;
  }

  // Prefetch to L2: if memory is busy, the loads of `read` take longer than a chunk. The chunk must not be the
  // sequence's last.
  static __device__ __forceinline__ void fetch(const AlignkitDelta& p, const Sequence& s, int chunk, int head,
                                               int share) {
    auto prefetch_line = [](const float* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); };
    int64_t base = first(p, s, chunk, head);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (p.g) prefetch_line(p.g + base + static_cast<int64_t>(row(share, i)) * p.heads);
    if (p.gk) prefetch_line(p.gk + (base + static_cast<int64_t>(kChunk - 1) * p.heads) * K + channel(share, 0));
  }

  __device__ __forceinline__ void read(const AlignkitDelta& p, const Sequence& s, int chunk, int head, int share) {
    int end = s.rows_of_chunk(chunk) - 1;
    bool valid = end >= 0;
    int64_t base = first(p, s, chunk, head), at_end = base + static_cast<int64_t>(end) * p.heads;
#pragma unroll
    for (int i = 0; i < kRows; ++i)  // rows past the end: any finite gate, because their operands are zero
      g[i] = p.g && valid ? p.g[base + static_cast<int64_t>(min(row(share, i), end)) * p.heads] : 0.0f;
    last = p.g && valid ? p.g[at_end] : 0.0f;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) gk[i] = p.gk && valid ? p.gk[at_end * K + channel(share, i)] : 0.0f;
  }

  __device__ __forceinline__ void write(Factors<K>& factors, float scale, float unit, int share) const {
    float last_factor = exp2_approx(last * unit);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      factors.do_scale[row(share, i)] = scale * exp2_approx(g[i] * unit);
      factors.dv_scale[row(share, i)] = exp2_approx((last - g[i]) * unit);
    }
#pragma unroll
    for (int i = 0; i < kChannels; ++i) factors.decay[channel(share, i)] = last_factor * exp2_approx(gk[i] * unit);
  }
};

// Multiply rows `begin` to `end` of `tile`, of kSlice columns, by their factors and round them, by one warp.
template <int kSlice, class T>
__device__ __forceinline__ void scale_rows(T* tile, const float* factors, int begin, int end) {
  constexpr int kBatch = 4, kUnits = kSlice / 8, kRows = 32 / kUnits;
  for (int r = begin + threadIdx.x % 32 / kUnits; r < end; r += kRows * kBatch) {
    // The swizzle permutes units within a row; their order does not matter here.
    uint4* units = reinterpret_cast<uint4*>(tile + r * kSlice) + threadIdx.x % kUnits;
    uint4 v[kBatch];
    float factor[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      v[i] = units[i * 32];
      factor[i] = factors[r + i * kRows];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      for (uint32_t* pair : {&v[i].x, &v[i].y, &v[i].z, &v[i].w}) {
        float2 x = unpack<T>(*pair);
        *pair = pack<T>(x.x * factor[i], x.y * factor[i]);
      }
      units[i * 32] = v[i];
    }
  }
}

constexpr int kPrefetchDistance = 6;  // schedule: chunks between the L2 prefetch of gates and their use

// Factor warps: compute a chunk's factors and scale do in place, each warp its share of the rows.
template <int K, int kWarps, class Sh>
__device__ void prepare(Sh& sh, const AlignkitDelta& p, int share, const Cluster& c) {
  int stage = 0, phase = 0, begin = share * (kChunk / kWarps);
  for_each_task(sh, p, c, [&](const Sequence& s, int head, int, int) {
    int chunk = s.steps() - 1;
    Gates<K, kWarps> now, next;
    now.read(p, s, chunk, head, share);
    if (chunk > 0) next.read(p, s, chunk - 1, head, share);
    for (; chunk >= 0; --chunk, advance<Sh::kDepth>(stage, phase)) {
      Gates<K, kWarps> later = next;
      if (chunk >= kPrefetchDistance) Gates<K, kWarps>::fetch(p, s, chunk - kPrefetchDistance, head, share);
      if (chunk > 1) later.read(p, s, chunk - 2, head, share);  // in flight while the earlier chunks' gates are used
      mbarrier_wait(&sh.factors_empty[stage], phase ^ 1);
      now.write(sh.factors[stage], p.scale, p.unit, share);
      __syncwarp();
      mbarrier_wait(&sh.full[stage][kQTile], phase);
      for (auto& tile : sh.stage[stage].d_o)
        scale_rows<Sh::kSlice>(tile, sh.factors[stage].do_scale, begin, begin + kChunk / kWarps);
      fence_proxy_async();  // before TMA overwrites the stage
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&sh.factors_full[stage]);
      now = next;
      next = later;
    }
  });
}

// Named barriers: two between each consumer warpgroup and its store warp, one of all consumers.
enum NamedBarrier { kOutFull = 1, kOutEmpty, kNames = 2, kAllGroups = 2 * kNames + 1 };
constexpr int kStoreThreads = 128 + 32;  // hardware: a warpgroup and a warp

// Rows of a warp's 16-row A operand that are columns of V; the following rows are arbitrary.
template <int kSlice>
constexpr int kOwnRows = kSlice / 4;

// Return the address of a lane's row for ldmatrix_x4 or stmatrix_x4 in a swizzled tile of kSlice columns.
// The four matrices are the warp's 16 columns of 16 rows from `row` on, or, at kSlice 32, its 8 columns of 32 rows.
// Transposed, they are one A operand, or the owned rows of two, with the second's in place of the first's arbitrary
// rows.
template <int kSlice>
__device__ __forceinline__ uint32_t matrix_row_address(uint32_t tile, int row) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  row += lane / 16 * 8 + lane % 8;
  if (kSlice == 64) return tile + row * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
  return tile + (row + lane / 8 % 2 * 16) * 64 + ((warp ^ (lane % 8 / 2)) << 4);
}

// For 8 owned rows: move the owned rows of every second operand into the operand before it, as stmatrix_x4 takes them;
// and back.

__device__ __forceinline__ void gather_rows(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    a[i][1] = a[i + 1][0];
    a[i][3] = a[i + 1][2];
  }
}

__device__ __forceinline__ void scatter_rows(uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    a[i + 1][0] = a[i][1];
    a[i + 1][2] = a[i][3];
  }
}

// Store warp of a consumer warpgroup: writes dh and dv2.
template <class T, int K, class Sh>
__device__ void store_chunks(Sh& sh, const DeltaMaps& maps, const AlignkitDelta& p, int group, const Cluster& c) {
  constexpr int slice = Sh::kSlice, units = slice / 8;
  int lane = threadIdx.x % 32, barriers = group * kNames;
  for_each_task(sh, p, c, [&](const Sequence& s, int head, int, int block) {
    int first = (block * Sh::kGroups + group) * slice;
    for (int chunk = s.steps() - 1; chunk >= 0; --chunk) {
      if (lane == 0) tma_store_wait<0>();
      __syncwarp();
      named_barrier_arrive(barriers + kOutEmpty, kStoreThreads);
      named_barrier_sync(barriers + kOutFull, kStoreThreads);
      int row = s.begin + chunk * kChunk, rows = s.rows_of_chunk(chunk);
      int dh_tile = (s.first_chunk + chunk) * p.heads + head;
      if (lane == 0 && rows > 0) {
        fence_proxy_async();  // issued by the store warp, because the consumers' time is critical
        if (p.v_first)
          for (int x = 0; x < K; x += 64) tma_store(&maps.dh, sh.dh[group] + x * slice, x, first, dh_tile);
        else
          tma_store(&maps.dh, sh.dh[group], first, 0, dh_tile);
        if (rows == kChunk) tma_store(&maps.dv2, sh.dv2[group], first, head, row, s.batch);
        tma_store_commit();
      }
      if (rows == kChunk) continue;
      // A partial chunk is stored by the warp: the rows after it may belong to another sequence.
      int64_t base = (static_cast<int64_t>(s.batch) * p.rows + row) * p.heads + head;
      T* dst = static_cast<T*>(p.dv2) + base * p.value_dim + first + lane % units * 8;
      for (int r = lane / units; r < rows; r += 32 / units)
        *reinterpret_cast<uint4*>(dst + static_cast<int64_t>(r) * p.heads * p.value_dim) =
            *reinterpret_cast<const uint4*>(sh.dv2[group] + r * slice + (lane % units ^ r / (8 / units) % units) * 8);
    }
  });
  if (lane == 0) tma_store_wait<0>();
}

// Zero the rows from `rows` on in a tile of kBoxes boxes [64, kWidth], by threads 0 to kThreads - 1.
template <int kWidth, int kBoxes, int kThreads, class T>
__device__ __forceinline__ void zero_rows(T* tile, int rows, int thread) {
  constexpr int units = kWidth / 8, box = kChunk * units;
#pragma unroll
  for (int i = 0; i < kBoxes * box; i += kThreads)
    if (i % box + thread >= rows * units) reinterpret_cast<uint4*>(tile)[i + thread] = make_uint4(0, 0, 0, 0);
}

// Call function(i, offset) for each accumulator of the thread and its offset in the states' tensor.
template <int K, int kSlice, class Function>
__device__ __forceinline__ void for_each_accumulator(const AlignkitDelta& p, int state, int first,
                                                     const Function& function) {
  int lane = threadIdx.x % 32, v = first + threadIdx.x / 32 % 4 * kOwnRows<kSlice> + lane / 4, k = 2 * (lane % 4);
  int64_t next_v = p.v_first ? K : 1, next_k = p.v_first ? 1 : p.value_dim;
  int64_t base = static_cast<int64_t>(state) * K * p.value_dim + v * next_v + k * next_k;
#pragma unroll
  for (int i = 0; i < K / 2; ++i)
    if (i / 2 % 2 * 8 < kOwnRows<kSlice>) function(i, base + i / 2 % 2 * 8 * next_v + (i / 4 * 8 + i % 2) * next_k);
}

// Consumer warpgroup: propagates D through the chunks of each state.
template <class T, int K, class Sh>
__device__ void propagate(Sh& sh, const AlignkitDelta& p, int group, const Cluster& cluster) {
  constexpr int slice = Sh::kSlice, operands_per_x4 = 64 / slice;  // A operands per x4 instruction
  constexpr int parts = K / 64;                                    // 64-wide parts of K
  constexpr int cached_parts = parts > 2 ? 1 : parts;              // parts whose rounded D stays in registers
  int thread = threadIdx.x, lane = thread % 32, barriers = group * kNames;
  int stage = 0, phase = 0, pair = 2 * (lane % 4);
  float d[parts][32] = {};
  uint32_t a[cached_parts][4][4];  // D, rounded: A operand of the first GEMM, and dh
  uint32_t out_dh = shared_address(sh.dh[group]), out_dv2 = shared_address(sh.dv2[group]);
  auto round = [&](int part) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += operands_per_x4) {
        int index = 8 * i + 2 * r;
        a[part % cached_parts][i][r] = pack<T>(d[part][index], d[part][index + 1]);
      }
    if (slice < 64) gather_rows(a[part % cached_parts]);
  };
  auto stage_dh = [&](int begin) {
#pragma unroll
    for (int part = begin; part < begin + cached_parts; ++part)
#pragma unroll
      for (int i = 0; i < 4; i += operands_per_x4)
        if (p.v_first) {
          int row = thread / 32 % 4 * kOwnRows<slice> + (slice == 64 ? lane / 8 % 2 * 8 : 0) + lane % 8;
          int unit = 2 * i + lane / 16 + (slice == 64 ? 0 : lane / 8 % 2 * 2);
          stmatrix_x4<false>(out_dh + part * (slice * 128) + row * 128 + ((unit ^ (lane % 8)) << 4),
                             a[part % cached_parts][i]);
        } else {
          stmatrix_x4<true>(matrix_row_address<slice>(out_dh, part * 64 + i * 16), a[part % cached_parts][i]);
        }
  };
  for_each_task(sh, p, cluster, [&](const Sequence& s, int, int state, int block) {
    int first = (block * Sh::kGroups + group) * slice;
    if (p.dht)
      for_each_accumulator<K, slice>(p, state, first,
                                     [&](int i, int64_t offset) { d[i / 32][i % 32] = p.dht[offset]; });
    else
      for_each_accumulator<K, slice>(p, state, first, [&](int i, int64_t) { d[i / 32][i % 32] = 0.0f; });
#pragma unroll
    for (int part = 0; part < cached_parts; ++part) round(part);
    int steps = s.steps(), rows = s.rows_of_chunk(steps - 1);
    if (rows < kChunk) {  // zero the rows that TMA loaded past the sequence's end
      for (uint64_t& full : sh.full[stage]) mbarrier_wait(&full, phase);
      mbarrier_wait(&sh.factors_full[stage], phase);
      auto& in = sh.stage[stage];
      constexpr int threads = Sh::kGroups * 128;
      zero_rows<64, parts, threads>(in.k, rows, thread);
      zero_rows<64, parts, threads>(in.q, rows, thread);
      zero_rows<64, parts, threads>(in.w, rows, thread);
      zero_rows<slice, Sh::kGroups, threads>(in.dv[0], rows, thread);
      zero_rows<slice, Sh::kGroups, threads>(in.d_o[0], rows, thread);
      fence_proxy_async();
      named_barrier_sync(kAllGroups, threads);
    }
    mbarrier_wait(&sh.full[stage][kKTile], phase);
    for (; steps > 0; --steps) {
      uint64_t *full = sh.full[stage], *empty = sh.empty[stage];
      auto& in = sh.stage[stage];
      const auto& factors = sh.factors[stage];
      auto release = [&](Operand operand) {
        __syncwarp();
        if (lane < cluster.ctas) mbarrier_arrive(&empty[operand], lane);
      };

      // dv2^T = D^T k^T.
      float x[32];
      uint64_t k_operand = smem_descriptor<false>(in.k);
      warpgroup_wait<0>();  // nothing is pending; without this the compiler inserts a wait at the next use of D
#pragma unroll
      for (int begin = 0; begin < parts; begin += cached_parts) {
        if (begin > 0) {
          if (begin == cached_parts) named_barrier_sync(barriers + kOutEmpty, kStoreThreads);
          stage_dh(begin - cached_parts);
          warpgroup_wait<0>();
#pragma unroll
          for (int part = begin; part < begin + cached_parts; ++part) round(part);
        }
        warpgroup_arrive();
#pragma unroll
        for (int part = begin; part < begin + cached_parts; ++part)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            wgmma<false, false>(T{}, x, a[part % cached_parts][i],
                                k_operand + part * (kBoxBytes >> 4) + i * kDescriptorStep<false>, part + i > 0);
        warpgroup_commit();
      }

      uint32_t c[4][4];
      uint32_t dv = shared_address(in.dv[group]);
#pragma unroll
      for (int i = 0; i < 4; i += operands_per_x4) ldmatrix_x4<true>(c[i], matrix_row_address<slice>(dv, 16 * i));
      if (slice < 64) scatter_rows(c);

      // D^T = decay D^T + do^T q, overlapping with the GEMM above.
      mbarrier_wait(&sh.factors_full[stage], phase);  // implies that q is loaded
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
      for (int i = 0; i < 4; i += operands_per_x4) ldmatrix_x4<true>(b[i], matrix_row_address<slice>(d_o, 16 * i));
      if (slice < 64) scatter_rows(b);
      uint64_t q_operand = smem_descriptor<true>(in.q);
      warpgroup_arrive();
#pragma unroll
      for (int part = 0; part < parts; ++part)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma<false, true>(T{}, d[part], b[i], q_operand + part * (kBoxBytes >> 4) + i * kDescriptorStep<true>, true);
      warpgroup_commit();

      if (parts > cached_parts) stage_dh(parts - cached_parts);  // before its registers are reused

      // Finish dv2^T.
      float2 dv_scale[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) dv_scale[i] = *reinterpret_cast<const float2*>(&factors.dv_scale[8 * i + pair]);
      mbarrier_wait(&full[kWTile], phase);
      warpgroup_wait<1>();
      warpgroup_fence_operand(x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; r += operands_per_x4) {
          float2 factor = dv_scale[2 * i + r / 2], v = unpack<T>(c[i][r]);
          int index = 8 * i + 2 * r;
          c[i][r] = pack<T>(__fmaf_rn(factor.x, x[index], v.x), __fmaf_rn(factor.y, x[index + 1], v.y));
        }
      // ptxas workaround: if it moves an operand of a negated wgmma to another register, as here, it negates that
      // operand as an integer. So flip the sign bits explicitly.
      uint32_t minus[4][4];
      if (slice < 64) {
        gather_rows(c);
#pragma unroll
        for (int i = 0; i < 16; ++i) minus[i / 4][i % 4] = c[i / 4][i % 4] ^ 0x80008000;
      }

      // D^T -= dv2^T w, one 64-wide part of K after another: a part is rounded while the next ones are computed.
      uint64_t w_operand = smem_descriptor<true>(in.w);
      warpgroup_arrive();
#pragma unroll
      for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if constexpr (slice == 64)
            wgmma<true, true>(T{}, d[part], c[i], w_operand + part * (kBoxBytes >> 4) + i * kDescriptorStep<true>,
                              true);
          else
            wgmma<false, true>(T{}, d[part], minus[i], w_operand + part * (kBoxBytes >> 4) + i * kDescriptorStep<true>,
                               true);
        warpgroup_commit();
      }
      release(kKTile);
      if (lane == 0) mbarrier_arrive(&sh.factors_empty[stage]);

      // Meanwhile hand dh and dv2 to the store warp and wait for the next chunk's k.
      if (parts == cached_parts) {
        named_barrier_sync(barriers + kOutEmpty, kStoreThreads);
        stage_dh(0);
      }
#pragma unroll
      for (int i = 0; i < 4; i += operands_per_x4) stmatrix_x4<true>(matrix_row_address<slice>(out_dv2, 16 * i), c[i]);
      named_barrier_arrive(barriers + kOutFull, kStoreThreads);
      warpgroup_wait<parts>();
      release(kQTile);
      advance<Sh::kDepth>(stage, phase);
      warpgroup_wait<parts - 1>();
      warpgroup_fence_operand(d[0]);
      round(0);
      if (steps > 1) mbarrier_wait(&sh.full[stage][kKTile], phase);
      warpgroup_wait<0>();
#pragma unroll
      for (int part = 1; part < parts; ++part) warpgroup_fence_operand(d[part]);
#pragma unroll
      for (int part = 1; part < cached_parts; ++part) round(part);
      release(kWTile);
    }
    if (p.dh0)
      for_each_accumulator<K, slice>(p, state, first,
                                     [&](int i, int64_t offset) { p.dh0[offset] = d[i / 32][i % 32]; });
  });
}

// The kernel; see the top of the file. kColumns: columns of V per CTA.
template <class T, int K, int kColumns>
__global__ void __launch_bounds__((groups_of(kColumns) + 1) * 128, 1)
    delta_backward(const __grid_constant__ DeltaMaps maps, const __grid_constant__ AlignkitDelta p, int cluster_size,
                   int splits) {
  using Sh = DeltaSharedOf<T, K, kColumns>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  constexpr int kGroups = Sh::kGroups, factor_warps = 3 - kGroups;
  Cluster cluster{cluster_size, kColumns > 32 ? 1 : splits, cluster_rank()};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      for (int part = 0; part < kOperands; ++part) {
        mbarrier_init(&sh.full[i][part], 1);
        mbarrier_init(&sh.empty[i][part], 4 * kGroups * cluster_size);  // consumer warps of all CTAs
      }
      mbarrier_init(&sh.factors_full[i], factor_warps);
      mbarrier_init(&sh.factors_empty[i], 4 * kGroups);
    }
    for (int i = 0; i < kQueueDepth; ++i) {
      mbarrier_init(&sh.queue_full[i], 1);
      mbarrier_init(&sh.queue_empty[i], 4 * (kGroups + 1) * cluster_size);  // all warps of all CTAs
    }
    fence_mbarrier_init();
  }
  if (is_sorted(p)) sort_by_length(sh.order, p);
  cluster_sync();
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp / 4 == kGroups) {
    if (kGroups == 2) setmaxnreg_dec<72>();
    if (warp % 4 == 0) load_chunks<K>(sh, maps, p, cluster);
    if (warp % 4 > 0 && warp % 4 <= kGroups) store_chunks<T, K>(sh, maps, p, warp % 4 - 1, cluster);
    if (warp % 4 > kGroups) prepare<K, factor_warps>(sh, p, warp % 4 - 1 - kGroups, cluster);
  } else {
    if (kGroups == 2) setmaxnreg_inc<216>();
    propagate<T, K>(sh, p, warp / 4, cluster);
  }
  // No code may follow: after reconvergence here, the compiler moves wgmma operands through uniform registers at a high
  // cost.
}

// Host code.

struct Box {
  const void* data;
  bool half;
  cuuint64_t size[4], stride[3];  // in elements
  cuuint32_t box[4];
  int dimensions;
};

cudaError_t make_tensor_map(CUtensorMap* map, Box b) {
  if (!tensor_map_encoder()) return cudaErrorNotSupported;
  cuuint32_t one[4] = {1, 1, 1, 1};
  for (cuuint64_t& s : b.stride) s *= 2;
  CUtensorMapDataType type = b.half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUresult status = tensor_map_encoder()(map, type, b.dimensions, const_cast<void*>(b.data), b.size, b.stride, b.box,
                                         one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         b.box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Make the map of a tensor [batch, rows, heads, columns]: a box is `rows` rows by `box_columns` columns of one head.
cudaError_t make_row_map(CUtensorMap* map, const AlignkitDelta& p, const void* data, const int64_t (&strides)[3],
                         int heads, int columns, int box_columns, int rows) {
  using Size = cuuint64_t;
  return make_tensor_map(map, {data,
                               p.half != 0,
                               {Size(columns), Size(heads), Size(p.rows), Size(p.batch)},
                               {Size(strides[2]), Size(strides[1]), Size(strides[0])},
                               {cuuint32_t(box_columns), 1, cuuint32_t(rows), 1},
                               4});
}

cudaError_t make_tensor_maps(DeltaMaps* maps, const AlignkitDelta& p, int slice, int cluster_size) {
  struct {
    CUtensorMap* map;
    const void* data;
    int heads, columns, box_columns, rows;
  } inputs[5] = {{&maps->q, p.q, p.key_heads, p.key_dim, 64, kChunk / cluster_size},
                 {&maps->k, p.k, p.key_heads, p.key_dim, 64, kChunk / cluster_size},
                 {&maps->w, p.w, p.heads, p.key_dim, 64, kChunk / cluster_size},
                 {&maps->d_o, p.d_o, p.heads, p.value_dim, slice, kChunk},
                 {&maps->dv, p.dv, p.heads, p.value_dim, slice, kChunk}};
  for (int i = 0; i < 5; ++i)
    if (cudaError_t e = make_row_map(inputs[i].map, p, inputs[i].data, p.strides[i], inputs[i].heads, inputs[i].columns,
                                     inputs[i].box_columns, inputs[i].rows))
      return e;
  int64_t row = int64_t{p.heads} * p.value_dim, dense[3] = {row * p.rows, row, p.value_dim};
  if (cudaError_t e = make_row_map(&maps->dv2, p, p.dv2, dense, p.heads, p.value_dim, slice, kChunk)) return e;
  using Size = cuuint64_t;
  Size inner = p.v_first ? p.key_dim : p.value_dim, outer = p.v_first ? p.value_dim : p.key_dim;
  return make_tensor_map(&maps->dh,
                         {p.dh,
                          p.half != 0,
                          {inner, outer, Size(p.batch) * p.chunks * p.heads, 1},
                          {inner, inner * outer, 0},
                          {cuuint32_t(p.v_first ? 64 : slice), cuuint32_t(p.v_first ? slice : p.key_dim), 1, 1},
                          3});
}

constexpr int kCounters = 64;  // schedule: streams with a queue counter of their own
// Queue counters; each launch leaves its counter at zero.
__device__ unsigned counters[kCounters];

// Return the counter of a stream, whose launches run one after another. Return null if none is left, or if the stream
// is being captured, because graphs may run concurrently.
unsigned* stream_counter(int device, cudaStream_t stream) {
  static std::mutex mutex;
  static int used = 0;
  static struct {
    int device;
    unsigned long long stream;  // unique; never reused
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

// Launch the kernel. If `fits` is given, set it to whether all states fit on the device at once, and launch only then.
template <class T, int K, int kColumns>
cudaError_t launch_delta(const AlignkitDelta& p, cudaStream_t stream, bool* fits = nullptr) {
  using Sh = DeltaSharedOf<T, K, kColumns>;
  constexpr auto kernel = delta_backward<T, K, kColumns>;
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
  // Cached per device: the number of clusters of each size that it can hold.
  static thread_local int prepared = -1, max_clusters[9];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    std::fill(max_clusters, max_clusters + 9, 0);
    prepared = device;
  }
  auto query_clusters = [&](int cluster_size) {
    cluster.val.clusterDim.x = cluster_size;
    config.gridDim = cluster_size;
    return max_clusters[cluster_size] ? cudaSuccess
                                      : cudaOccupancyMaxActiveClusters(&max_clusters[cluster_size], kernel, &config);
  };
  int64_t states = int64_t{p.sequences} * p.heads;
  int ctas_per_state = p.value_dim / kColumns, cluster_size = ctas_per_state;
  if (cudaError_t e = query_clusters(ctas_per_state)) return e;
  // Small clusters leave fewer SMs idle, but each cluster reads q, k and w again.
  while (kColumns == 32 && cluster_size > 2 && states * (ctas_per_state / cluster_size) > max_clusters[cluster_size])
    if (cudaError_t e = query_clusters(cluster_size /= 2)) return e;
  bool all_resident = states * (ctas_per_state / cluster_size) <= max_clusters[cluster_size];
  if (fits && !(*fits = all_resident)) return cudaSuccess;
  if (!all_resident)
    if (cudaError_t e = query_clusters(cluster_size = ctas_per_state)) return e;
  config.gridDim = static_cast<unsigned>(
      (all_resident ? states * (ctas_per_state / cluster_size) : max_clusters[cluster_size]) * cluster_size);
  DeltaMaps maps;
  if (cudaError_t e = make_tensor_maps(&maps, p, Sh::kSlice, cluster_size)) return e;
  AlignkitDelta scheduled = p;
  if (all_resident) scheduled.taken = nullptr;
  if (scheduled.taken) {
    if (unsigned* counter = stream_counter(device, stream))
      scheduled.taken = counter;
    else if (cudaError_t e = cudaMemsetAsync(scheduled.taken, 0, sizeof(*scheduled.taken), stream))
      return e;
  }
  return cudaLaunchKernelEx(&config, kernel, maps, scheduled, cluster_size, ctas_per_state / cluster_size);
}

// Choose the columns per CTA: as few as let all states fit at once. K = 256 has registers for one warpgroup of 64 only.
template <class T, int K>
cudaError_t launch_delta(const AlignkitDelta& p, cudaStream_t stream) {
  if constexpr (K < 256) {
    bool fits = true, above_64 = p.value_dim > 64;
    if (!p.columns || p.columns == 32) {
      cudaError_t e = launch_delta<T, K, 32>(p, stream, p.columns ? nullptr : &fits);
      if (e || fits) return e;
    }
    if (!p.columns && above_64) {
      cudaError_t e = launch_delta<T, K, 64>(p, stream, &fits);
      if (e || fits) return e;
    }
    // States in flight share the memory bandwidth. A few long sequences finish sooner with 64 columns, that is, fewer
    // states in flight.
    bool few_long = p.cu_seqlens && int64_t{p.sequences} * p.heads <= 512 && p.chunks / 6 >= p.sequences;
    if (above_64 && (p.columns == 128 || (!p.columns && !few_long))) return launch_delta<T, K, 128>(p, stream);
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

// Run the kernel. K and V are each 64, 128 or 256, and columns are 0, 32, 64 or 128; otherwise the result is
// cudaErrorInvalidValue. Not checked here: input strides are multiples of 8 and addresses multiples of 16 bytes
// (cuda_backend.py copies other inputs); all other tensors are dense. Returns a cudaError_t.
extern "C" int alignkit_delta_back(const AlignkitDelta* p, cudaStream_t stream) {
  using namespace alignkit;
  auto is_width = [](int dim) { return dim == 64 || dim == 128 || dim == 256; };
  bool columns = !p->columns || p->columns == 32 || p->columns == 64 || p->columns == 128;
  if (!is_width(p->key_dim) || !is_width(p->value_dim) || !columns || p->key_heads < 1 || p->heads % p->key_heads)
    return cudaErrorInvalidValue;
  return p->half ? launch_delta<__half>(*p, stream) : launch_delta<__nv_bfloat16>(*p, stream);
}

ALIGNKIT_FUNCTION(alignkit_delta_back)
