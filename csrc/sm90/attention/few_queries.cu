// Causal attention of sequences with few queries over a paged cache, as when decoding: the time is that of bringing keys and
// values.
//
// The leaves of all sequences, one after the other, of each head of keys are cut into equal runs, one for each block of
// threads. A warp has the copy engine bring keys and values in blocks of 128 positions, far ahead; four warps share a tile of
// 16 rows, positions times the heads of a group: of a block each makes the scores of a quarter of the keys, and sums a quarter
// of the columns of the values. Between the two they trade probabilities in shared memory.
//
// What a block of threads has whole, from the first leaf of a query on to the last, it joins and finishes. At the borders of
// runs it leaves in memory of a first part the joined state, of later ones that of each leaf, and a second kernel joins those
// in order.
#include <algorithm>
#include <type_traits>

#include "../../interface.h"
#include "../ptx/barrier.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/exponential.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/pack.cuh"
#include "heads.cuh"
#include "leaves.cuh"

struct AlignkitFewQueries {
  AlignkitHeads q, k, v;
  void* out;      // [tokens, heads, dim]
  float* states;  // [programs, slots, positions * group, dim + 4]: of a row its sums of values, what is added to a score, l
  int* runs;      // [programs, 8]
  AlignkitInts starts, kv_len, table;
  int64_t table_row, kv_rows;
  int page, width;  // rows of a page; pages of a sequence at most
  // Sequences of at most `most` queries, and those of at most `few` behind at least `far` positions; others are left out.
  int most, few, far;
  int tokens, sequences, heads, kv_heads, dim;
  int positions;  // of a tile
  int share;      // blocks of threads on a multiprocessor: 1 or, but for heads of 256, 2
  int parts;      // blocks of threads for each head of keys
  int slots;      // states that each may leave
  float factor;   // of scores, for powers of 2
};

ALIGNKIT_LAYOUT(AlignkitFewQueries, q, k, v, out, states, runs, starts, kv_len, table, table_row, kv_rows, page, width,
                most, few, far, tokens, sequences, heads, kv_heads, dim, positions, share, parts, slots, factor)

namespace alignkit {
namespace {

struct Problem : AlignkitFewQueries {
  int part_rows;  // rows of keys that lie in one page
  int group;      // heads of q that share one of k

  __device__ int rows() const { return positions * group; }
  __device__ int64_t state() const { return int64_t{rows()} * (dim + 4); }
};

constexpr int kRows = 16;    // of a tile
constexpr int kWarps = 4;    // that compute
constexpr int kRun = 8;      // words that a block of threads leaves for those who join

// kShare: blocks of threads on a multiprocessor.
template <int kDim, int kShare>
struct Shared {
  static constexpr int halves = kHalves<kDim>, width = halves * kHalf;
  static constexpr int block = kKeys * width;  // elements of a block of keys, or of values
  static constexpr int depth = std::min(192 * 1024 / kShare / (block * 2), 8);
  static_assert(depth >= 2);
  static constexpr int p_row = kKeys + 8;  // elements; so that rows of probabilities begin in other banks
  __nv_bfloat16 rows[depth][block];  // of keys and values in turn
  __nv_bfloat16 p[2][kRows * p_row];
  float top[kWarps][kRows];
  uint64_t full[depth], empty[depth];
};

// Leaves of a tile of a sequence.
struct Part {
  int s, q0, q_len, context;
  int first;         // position of the tile among the queries
  int leaf, take;    // the first of its leaves, and how many
  int leaves;        // that the tile has
  int begin, end;    // of keys
};

struct Sequence {
  int q0, q_len, length;  // 0: of all positions, if it is not for these kernels
  bool fits;
};

__device__ __forceinline__ Sequence sequence(const Problem& p, int s) {
  Sequence of;
  rows_of(p.starts, s, p.tokens, of.q0, of.q_len);
  int64_t length = at(p.kv_len, s);
  of.fits = length >= of.q_len && length <= int64_t{p.width} * p.page;
  bool few = of.q_len <= p.most || (of.q_len <= p.few && length - of.q_len >= p.far);
  of.length = of.fits && few ? static_cast<int>(length) : 0;
  return of;
}

__device__ __forceinline__ int leaves_of(const Problem& p, const Sequence& of) {
  return (of.length + kLeafKeys - 1) / kLeafKeys * ((of.q_len + p.positions - 1) / p.positions);
}

// Leaves of the lane's sequence, of those from `base` on.
__device__ __forceinline__ int leaves_from(const Problem& p, int base) {
  int s = base + threadIdx.x % 32;
  return s < p.sequences ? leaves_of(p, sequence(p, s)) : 0;
}

// Calls visit(part) for each part of the run of this block of threads, in order; by a whole warp, whose lanes' sequences, of the
// first ones, have `own` leaves. Returns the length of a run.
template <class Visit>
__device__ __forceinline__ int each_part(const Problem& p, int own, Visit&& visit) {
  int lane = threadIdx.x % 32;
  int64_t total = own;
#pragma unroll 4
  for (int base = 32; base < p.sequences; base += 32) total += leaves_from(p, base);
#pragma unroll
  for (int distance = 16; distance; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
  // More than there is memory for are only there if starts decrease.
  int64_t most = int64_t{p.tokens} * ((int64_t{p.width} * p.page + kLeafKeys - 1) / kLeafKeys);
  if (total > most) total = 0;
  int run = static_cast<int>((total + p.parts - 1) / p.parts);
  int item = static_cast<int>(blockIdx.x) / p.kv_heads * run, stop = min(item + run, static_cast<int>(total));
  if (item >= stop) return run;
  // The sequence of the run's first leaf, and how many leaves are before that.
  int s = 0, before = 0;
  while (s < p.sequences) {
    int of_this = s ? leaves_from(p, s) : own, ends = of_this;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      int other = __shfl_sync(~0u, ends, max(lane - distance, 0));
      if (lane >= distance) ends += other;
    }
    ends += before;
    unsigned later = __ballot_sync(~0u, ends > item);
    if (later) {
      int there = __ffs(later) - 1;
      before = __shfl_sync(~0u, ends - of_this, there);
      s += there;
      break;
    }
    before = __shfl_sync(~0u, ends, 31);
    s += 32;
  }
  while (item < stop && s < p.sequences) {
    Sequence of = sequence(p, s);
    int leaves = (of.length + kLeafKeys - 1) / kLeafKeys, there = leaves_of(p, of);
    if (item < before + there) {
      Part part;
      int tile = (item - before) / leaves;
      part.s = s, part.q0 = of.q0, part.q_len = of.q_len, part.context = of.length - of.q_len;
      part.first = tile * p.positions;
      part.leaf = item - before - tile * leaves;
      part.take = min(leaves - part.leaf, stop - item);
      part.leaves = leaves;
      part.begin = part.leaf * kLeafKeys;
      part.end = min((part.leaf + part.take) * kLeafKeys, part.context + min(of.q_len, part.first + p.positions));
      visit(part);
      item += part.take;
    }
    if (item >= before + there) {
      before += there;
      ++s;
    }
  }
  return run;
}

// `value`, twice, to rows begin, begin + step, ... before `end` of the result, by `threads` of which this is number `thread`.
template <int kDim>
__device__ __forceinline__ void fill(const Problem& p, uint32_t value, int64_t begin, int64_t end, int64_t step, int thread,
                                     int threads) {
  int vectors = p.heads * (kDim / 8);
  for (int64_t row = begin; row < end; row += step)
    for (int i = thread; i < vectors; i += threads)
      static_cast<uint4*>(p.out)[row * vectors + i] = make_uint4(value, value, value, value);
}

constexpr uint32_t kNan = 0x7fc07fc0;

// The warp that has keys and values brought: parts of a block that lie in one page each, half a head at a time, by a lane each.
template <int kDim, int kShare>
__device__ __forceinline__ void bring(Shared<kDim, kShare>& sh, const CUtensorMap* k, const CUtensorMap* v, const Problem& p,
                                      int own) {
  using Sh = Shared<kDim, kShare>;
  int lane = threadIdx.x % 32, head = blockIdx.x % p.kv_heads;
  int part_rows = p.part_rows, parts = kKeys / part_rows, first = lane % parts * part_rows, half = lane / parts;
  int slot = 0, phase = 0;
  each_part(p, own, [&](const Part& part) {
    // Of a leaf, each part's row in the cache, by a lane each.
    auto row_of = [&](int begin) {
      int position = begin + lane * part_rows;
      if (position >= part.end || position >= begin + kLeafKeys) return 0;
      int64_t page = at(p.table, part.s * p.table_row + position / p.page);
      page = min(max(page, int64_t{0}), p.kv_rows / p.page - 1);
      return static_cast<int>(page) * p.page + position % p.page;
    };
    int rows = row_of(part.begin), rows_next = 0;
#pragma unroll 1
    for (int b = part.begin; b < part.end; b += kKeys) {
      if (b % kLeafKeys == 0) {
        if (b > part.begin) rows = rows_next;
        rows_next = row_of(b + kLeafKeys);  // before they are needed
      }
      int row = __shfl_sync(~0u, rows, b % kLeafKeys / part_rows + lane % parts), left = part.end - b;
      int bytes = min(parts, (left + part_rows - 1) / part_rows) * part_rows * Sh::width * 2;
#pragma unroll
      for (int values = 0; values < 2; ++values) {
        barrier_wait(&sh.empty[slot], phase ^ 1);
        if (lane == 0) barrier_expect(&sh.full[slot], bytes);
        __syncwarp();
        if (half < Sh::halves && first < left)
          copy_box(sh.rows[slot] + (half * kKeys + first) * kHalf, values ? v : k, half * kHalf, head, row, 0,
                   &sh.full[slot]);
        step<Sh::depth>(slot, phase);
      }
    }
  });
}

// The four warps that compute. A thread has of rows lane / 4 and 8 further two neighbours each of eight columns, as the
// tensor core has them.
template <int kDim, int kShare>
__device__ __forceinline__ void attend(Shared<kDim, kShare>& sh, const Problem& p, int own) {
  using Sh = Shared<kDim, kShare>;
  constexpr int steps = kDim / 16, tiles = kDim / 8 / kWarps;  // tiles: of eight columns, of a warp
  constexpr int keys = kKeys / kWarps / 8;                     // of eight keys, of a warp
  constexpr uint32_t half_bytes = kKeys * kHalf * 2, row_bytes = kHalf * 2;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, hk = blockIdx.x % p.kv_heads;
  int slot = 0, phase = 0, turn = 0;
  auto taken = [&] {
    __syncwarp();
    if (lane == 0) barrier_arrive(&sh.empty[slot]);
    step<Sh::depth>(slot, phase);
  };
  int* told = p.runs + blockIdx.x * kRun;
  float* states = p.states + blockIdx.x * p.slots * p.state();
  Part torn;  // what earlier blocks of threads began
  torn.leaf = 0;

  int run = each_part(p, own, [&](const Part& part) {
    bool here[2];
    int position[2], row_of[2];  // among the queries, and in the tile
    int64_t token[2];            // a row of q and head
    uint32_t q[steps][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int r = lane / 4 + 8 * h, place = part.first + r / p.group, head = hk * p.group + r % p.group;
      here[h] = r < p.rows() && place < part.q_len;
      row_of[h] = r;
      position[h] = part.context + place;
      token[h] = int64_t{part.q0 + place} * p.heads + head;
      const auto* from = static_cast<const uint32_t*>(p.q.data) +
                         ((part.q0 + place) * p.q.token + head * p.q.head) / 2 + lane % 4;
#pragma unroll
      for (int j = 0; j < steps; ++j) {
        q[j][h] = here[h] ? from[8 * j] : 0;
        q[j][2 + h] = here[h] ? from[8 * j + 4] : 0;
      }
    }
    int seen_by_all = part.context + part.first + 1;
    float shift[2] = {0, 0}, acc[tiles][4], sums[4];  // of a leaf; sums: of probabilities, each twice
    float of_all[2] = {0, 0}, all[tiles][4], all_sums[2] = {0, 0};
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
      for (int x = 0; x < 4; ++x) all[t][x] = acc[t][x] = 0;
#pragma unroll
    for (int x = 0; x < 4; ++x) sums[x] = 0;

    auto write_state = [&](float* to, const float (&z)[2], const float (&l)[2], const float (&a)[tiles][4]) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!here[h]) continue;
        float* row = to + row_of[h] * (kDim + 4);
#pragma unroll
        for (int t = 0; t < tiles; ++t)
          *reinterpret_cast<float2*>(row + (warp * tiles + t) * 8 + lane % 4 * 2) =
              make_float2(a[t][2 * h], a[t][2 * h + 1]);
        if (threadIdx.x < 32 && lane % 4 == 0) *reinterpret_cast<float2*>(row + kDim) = make_float2(z[h], l[h]);
      }
    };

#pragma unroll 1
    for (int b = part.begin; b < part.end; b += kKeys) {
      // Scores of a quarter of the keys; of the leaf's first one by every warp.
      float score[keys][4], first[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) first[x] = 0;
#pragma unroll
      for (int j = 0; j < keys; ++j)
#pragma unroll
        for (int x = 0; x < 4; ++x) score[j][x] = 0;
      barrier_wait(&sh.full[slot], phase);
      {
        uint32_t from = shared_address(sh.rows[slot]);
        // Two times eight keys, of which a lane names one, and two times eight columns.
        auto take = [&](uint32_t (&m)[4], int key, int j) {
          uint32_t of_lane = key + lane / 16 * 8 + lane % 8, chunk = 2 * j + lane / 8 % 2;
          load_matrices<false>(m, from + chunk / 8 * half_bytes + of_lane * row_bytes + ((chunk % 8 ^ of_lane % 8) << 4));
        };
#pragma unroll
        for (int j = 0; j < steps; ++j)
#pragma unroll
          for (int i = 0; i < keys; i += 2) {
            uint32_t m[4];
            take(m, (warp * keys + i) * 8, j);
            multiply_16(score[i], q[j], m[0], m[1]);
            multiply_16(score[i + 1], q[j], m[2], m[3]);
          }
        if (b % kLeafKeys == 0) {
#pragma unroll
          for (int j = 0; j < steps; ++j) {
            uint32_t m[4];
            take(m, 0, j);
            multiply_16(first, q[j], m[0], m[1]);
          }
        }
      }
      taken();
      if (b % kLeafKeys == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) shift[h] = __fmaf_rn(-__shfl_sync(~0u, first[2 * h], 0, 4), p.factor, -kReserve);
      }
      if (b + kKeys > seen_by_all) {
#pragma unroll
        for (int j = 0; j < keys; ++j)
#pragma unroll
          for (int x = 0; x < 4; ++x)
            if (b + (warp * keys + j) * 8 + lane % 4 * 2 + x % 2 > position[x / 2]) score[j][x] = -kInfinity;
      }

      // They become probabilities.
      __nv_bfloat16* shared_p = sh.p[turn];
      turn ^= 1;
      auto powers = [&] {
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < keys; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float low = power_of_2(__fmaf_rn(score[j][2 * h], p.factor, shift[h]));
            float high = power_of_2(__fmaf_rn(score[j][2 * h + 1], p.factor, shift[h]));
            uint32_t pair = pack<__nv_bfloat16>(low, high);
            bits |= pair;
            *reinterpret_cast<uint32_t*>(shared_p + row_of[h] * Sh::p_row + (warp * keys + j) * 8 + lane % 4 * 2) = pair;
          }
        return (bits & kTooGreat) != 0;
      };
      if (named_barrier_any(1, kWarps * 32, powers())) {
        // A row whose probabilities are too great is measured by its greatest score.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = score[0][2 * h];
#pragma unroll
          for (int j = 0; j < keys; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) top = fmaxf(top, score[j][2 * h + e]);
#pragma unroll
          for (int distance = 2; distance; distance /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
          if (lane % 4 == 0) sh.top[warp][row_of[h]] = top;
        }
        named_barrier_sync(1, kWarps * 32);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = sh.top[0][row_of[h]];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) top = fmaxf(top, sh.top[w][row_of[h]]);
          bool moves = too_great(power_of_2(__fmaf_rn(top, p.factor, shift[h])));
          float to = moves ? __fmaf_rn(-top, p.factor, -kReserve) : shift[h];
          float alpha = moves ? power_of_2(to - shift[h]) : 1.0f;
          shift[h] = to;
          if (b % kLeafKeys) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              sums[2 * h + e] *= alpha;
#pragma unroll
              for (int t = 0; t < tiles; ++t) acc[t][2 * h + e] *= alpha;
            }
          }
        }
        powers();
        named_barrier_sync(1, kWarps * 32);
      }

      // Sums of a quarter of the values' columns.
      barrier_wait(&sh.full[slot], phase);
      {
        uint32_t from = shared_address(sh.rows[slot]), of_p = shared_address(shared_p);
        int left = part.end - b;
        constexpr uint32_t ones = 0x3f803f80;
#pragma unroll
        for (int i = 0; i < kKeys / 32; ++i) {
          uint32_t weight[2][4];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            load_matrices<false>(weight[e], of_p + (lane % 16 * Sh::p_row + i * 32 + e * 16 + lane / 16 * 8) * 2);
            multiply_16(sums, weight[e], ones, ones);
          }
#pragma unroll
          for (int t = 0; t < tiles; ++t) {
            uint32_t m[4], key = i * 32 + lane, chunk = warp * tiles + t;
            load_matrices<true>(m, from + chunk / 8 * half_bytes + key * row_bytes + ((chunk % 8 ^ key % 8) << 4));
            if (left < kKeys) {  // rows that are not the sequence's may be anything, which 0 times is no 0
#pragma unroll
              for (int x = 0; x < 4; ++x) {
                int of_pair = left - (i * 32 + x * 8 + lane % 4 * 2);
                m[x] = of_pair >= 2 ? m[x] : of_pair == 1 ? m[x] & 0xffff : 0;
              }
            }
            multiply_16(acc[t], weight[0], m[0], m[1]);
            multiply_16(acc[t], weight[1], m[2], m[3]);
          }
        }
      }
      taken();

      if ((b + kKeys) % kLeafKeys && b + kKeys < part.end) continue;
      // The end of a leaf.
      int leaf = b / kLeafKeys * kLeafKeys;
      float total[2] = {sums[0], sums[2]};
      if (part.begin) {
        write_state(states + (leaf - part.begin) / kLeafKeys * p.state(), shift, total, acc);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (leaf > position[h]) continue;
          float before, after, to = meet(of_all[h], shift[h], before, after);
          all_sums[h] = leaf ? __fmaf_rn(total[h], after, all_sums[h] * before) : total[h];
#pragma unroll
          for (int t = 0; t < tiles; ++t)
#pragma unroll
            for (int x = 2 * h; x < 2 * h + 2; ++x)
              all[t][x] = leaf ? __fmaf_rn(acc[t][x], after, all[t][x] * before) : acc[t][x];
          of_all[h] = leaf ? to : shift[h];
        }
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) sums[x] = 0;
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int x = 0; x < 4; ++x) acc[t][x] = 0;
    }

    if (part.take == part.leaves) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!here[h]) continue;
        auto* row = static_cast<__nv_bfloat16*>(p.out) + token[h] * kDim;
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          float low = all[t][2 * h], high = all[t][2 * h + 1];
          low = __fdiv_rn(low, all_sums[h] + low * 0.0f);
          high = __fdiv_rn(high, all_sums[h] + high * 0.0f);
          *reinterpret_cast<uint32_t*>(row + (warp * tiles + t) * 8 + lane % 4 * 2) = pack<__nv_bfloat16>(low, high);
        }
      }
    } else if (part.leaf == 0) {
      write_state(states + (p.slots - 1) * p.state(), of_all, all_sums, all);
    } else {
      torn = part;
    }
  });
  if (threadIdx.x == 0) {
    told[0] = torn.leaf;  // 0: there is nothing to join
    told[1] = run;
    if (torn.leaf) {
      told[2] = torn.leaves;
      told[3] = torn.context + torn.first;
      told[4] = torn.q0 + torn.first;
      told[5] = min(torn.q_len - torn.first, p.positions);
    }
  }
}

template <int kDim, int kShare>
__global__ void __launch_bounds__(32 * (kWarps + 1), kShare)
    attention_few_queries(const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v, const Problem p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  using Sh = Shared<kDim, kShare>;
  Sh& sh = *reinterpret_cast<Sh*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::depth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], kWarps);
    }
    barrier_init_done();
  }
  if (threadIdx.x == 32 * kWarps) {
    prefetch_map(&k);
    prefetch_map(&v);
  }
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int64_t begin = at(p.starts, 0), end = at(p.starts, p.sequences);
  int own = computed(leaves_from(p, 0));  // of numbers that are on their way beside those two
  int w = blockIdx.x, programs = gridDim.x;
  if (begin != 0 || end > p.tokens) {
    if (threadIdx.x < 2) p.runs[w * kRun + threadIdx.x] = 0;
    fill<kDim>(p, kNan, w, p.tokens, programs, threadIdx.x, blockDim.x);
    return;
  }
  if (threadIdx.x < 32 * kWarps) {
    attend(sh, p, own);
    return;
  }
  bring(sh, &k, &v, p, own);
  // Rows that no leaf is of: 0 behind the last sequence, NaN of a sequence that does not fit.
  int lane = threadIdx.x % 32;
  fill<kDim>(p, 0, end + w, p.tokens, programs, lane, 32);
  for (int s = w; s < p.sequences; s += programs) {
    Sequence of = sequence(p, s);
    if (!of.fits) fill<kDim>(p, kNan, of.q0, of.q0 + of.q_len, 1, lane, 32);
  }
}

// A thread's element of a state.
struct Element {
  float z, l, acc;
};

constexpr int kJoinThreads = 128;

// What an earlier block of threads began and block x and perhaps later ones finished, in order of leaves: an element of
// the result for each thread. Of many leaves those of the next turn are on their way while these are joined.

template <int kDim>
__global__ void __launch_bounds__(kJoinThreads) join_leaves(const Problem p) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  const int* told = p.runs + blockIdx.x * kRun;
  int leaf = told[0], run = told[1];
  if (leaf == 0 || leaf > run) return;  // nothing, or a block before it is the first to go on
  int leaves = told[2], element = blockIdx.y * kJoinThreads + threadIdx.x;
  if (element >= told[5] * p.group * kDim) return;
  int r = element / kDim, d = element % kDim, position = told[3] + r / p.group;
  auto read = [&](int64_t state) {
    const float* row = p.states + state * p.state() + r * (kDim + 4);
    float2 zl = *reinterpret_cast<const float2*>(row + kDim);
    return Element{zl.x, zl.y, row[d]};
  };
  int seen = min(leaves, position / kLeafKeys + 1);  // leaves; later ones have no part in this row
  // States of the leaves from this run's first on: `run` in a row, then those of the next block of this head.
  int64_t state = int64_t{blockIdx.x} * p.slots;
  int index = 0;
  auto next = [&] {
    Element e = read(state + index);
    if (++index == run) index = 0, state += int64_t{p.kv_heads} * p.slots;
    return e;
  };
  Element all = read(int64_t{blockIdx.x - p.kv_heads + 1} * p.slots - 1);  // the first part, joined
  auto join = [&](const Element& e) {
    float before, after, to = meet(all.z, e.z, before, after);
    all.l = __fmaf_rn(e.l, after, all.l * before);
    all.acc = __fmaf_rn(e.acc, after, all.acc * before);
    all.z = to;
  };
  auto join_all = [&](auto count) {
    constexpr int n = decltype(count)::value;
    Element now[n], then[n];
#pragma unroll
    for (int x = 0; x < n; ++x)
      if (leaf + x < seen) now[x] = next();
#pragma unroll 1
    for (; leaf < seen; leaf += n) {
#pragma unroll
      for (int x = 0; x < n; ++x)
        if (leaf + n + x < seen) then[x] = next();
#pragma unroll
      for (int x = 0; x < n; ++x)
        if (leaf + x < seen) join(now[x]);
#pragma unroll
      for (int x = 0; x < n; ++x) now[x] = then[x];
    }
  };
  if (seen - leaf > 16)
    join_all(std::integral_constant<int, 32>());
  else
    join_all(std::integral_constant<int, 8>());
  int64_t row = int64_t{told[4] + r / p.group} * p.heads + blockIdx.x % p.kv_heads * p.group + r % p.group;
  static_cast<uint16_t*>(p.out)[row * kDim + d] =
      static_cast<uint16_t>(pack<__nv_bfloat16>(__fdiv_rn(all.acc, all.l + all.acc * 0.0f), 0.0f));
}

// Host.

template <int kDim, int kShare>
cudaError_t launch(const AlignkitFewQueries& given, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<kDim, kShare>);
  constexpr auto kernel = attention_few_queries<kDim, kShare>;
  Problem p = {given, part_rows_of(given.page, kKeys), given.heads / given.kv_heads};
  CUtensorMap k, v;
  if (cudaError_t e = map_of(&k, p.k, p.kv_rows, p.kv_heads, kDim, 1, p.part_rows)) return e;
  if (cudaError_t e = map_of(&v, p.v, p.kv_rows, p.kv_heads, kDim, 1, p.part_rows)) return e;
  if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  unsigned programs = p.parts * p.kv_heads;
  if (cudaError_t e = launch_early(kernel, programs, 32 * (kWarps + 1), bytes, stream, k, v, p)) return e;
  if (int64_t{p.width} * p.page <= kLeafKeys) return cudaSuccess;  // nothing to join
  unsigned blocks = (p.positions * p.group * kDim + kJoinThreads - 1) / kJoinThreads;
  return launch_early(join_leaves<kDim>, dim3(programs, blocks), kJoinThreads, 0, stream, p);
}

}  // namespace
}  // namespace alignkit

// Returns a cudaError_t.
extern "C" int alignkit_attention_few_queries(const AlignkitFewQueries* p, cudaStream_t stream) {
  if (p->page % 16 || p->heads % p->kv_heads || p->positions < 1 || p->positions * (p->heads / p->kv_heads) > 16 ||
      p->parts < 1 || p->slots < 1)
    return cudaErrorInvalidValue;
  using alignkit::launch;
  bool alone = p->share == 1;
  if (p->dim == 256) return launch<256, 1>(*p, stream);
  if (p->dim == 128) return alone ? launch<128, 1>(*p, stream) : launch<128, 2>(*p, stream);
  if (p->dim == 96) return alone ? launch<96, 1>(*p, stream) : launch<96, 2>(*p, stream);
  if (p->dim == 64) return alone ? launch<64, 1>(*p, stream) : launch<64, 2>(*p, stream);
  return cudaErrorInvalidValue;
}
