// RMSNorm of long bf16 rows (forward) and the gradients dx and dweight (backward), at memory bandwidth.
//
// - Tile: a thread processes four 16-byte vectors of each tensor per step, from one row or from up to four rows. A team
//   of 8 to 32 lanes, or all warps of a CTA, shares the rows of a step.
// - Order of summation over a row (docs/contract.md, "On Hopper GPUs"): the balanced tree, neighbors first. Lane,
//   vector and warp are the bits of a vector's position in its row, lowest first, so the tree goes over the elements of
//   a vector, then lanes, vectors and warps.
// - Order of summation of dweight: chains of 16 rows, added by the balanced tree in row order.
// - Launch, forward: one CTA per row.
// - Launch, backward: a team computes a run of 1, 2, 4 or 8 chains, with a two-step cp.async ring per thread. A CTA is
//   one team of warps or several teams of lanes. rms_norm_dweight, launched with PDL, adds the sums of runs.
//
// Teams, runs and launch shape change no bits. tests/ops/test_rms_norm_on_cpu.py finds the declaration of `shared` and
// the two <<<...>>> launches by their text.
#include <algorithm>
#include <cstdlib>

#include "../../interface.h"
#include "../ptx/pack.cuh"
#include "../ptx/pdl.cuh"
#include "../ptx/tma.cuh"
#include "alignkit/runtime/kernels.h"

// A strided tensor (others are contiguous): row r is head r % heads of token r / heads; strides in elements.
struct AlignkitNormRows {
  const void* data;
  int64_t token, head;
};

// Arguments, filled by alignkit/ops/rms_norm/cuda_backend.py.
struct AlignkitNorm {
  AlignkitNormRows x;
  const void* weight;
  void* y;
  float* rstd;
  int rows, heads, h, zero_centered;
  float eps;
};

struct AlignkitNormGrad {
  AlignkitNormRows x;
  const void *dy, *d_total, *weight;  // d_total: gradient added to dx, or null
  const float* rstd;
  void *dx, *dweight;
  float* workspace;
  int rows, heads, h, zero_centered;
  int rounded;  // dweight is bf16, else fp32
  int chains;   // chains per run; -n: runs of n, then shorter ones; 0: chosen by the launcher
};

ALIGNKIT_STRUCT(AlignkitNormRows, data, token, head)
ALIGNKIT_STRUCT(AlignkitNorm, x, weight, y, rstd, rows, heads, h, zero_centered, eps)
ALIGNKIT_STRUCT(AlignkitNormGrad, x, dy, d_total, weight, rstd, dx, dweight, workspace, rows, heads, h, zero_centered,
                rounded, chains)

namespace alignkit {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kVectors = 4;                  // schedule: 16-byte vectors per thread, tensor and step
constexpr int kColumns = 8;                  // hardware: bf16 elements per 16-byte vector
constexpr int kWarpColumns = 32 * kColumns;  // columns of one vector per lane of a warp
constexpr int kNarrowThreads = 128;          // schedule: threads per CTA of Narrow teams
constexpr int kMaxWarps = 32;                // hardware: warps per CTA
constexpr int kChain = 16;                   // mirrors alignkit/ops/rms_norm/triton_backend.py:DW_ROWS
constexpr int kMaxSharedBytes = 192 << 10;   // schedule: dynamic shared memory per CTA, for the cp.async ring

// Division of n < 2^31 by an invariant divisor, as multiply and shift.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// The address of a row.
__device__ __forceinline__ const bf16* row_of(const AlignkitNormRows& t, const Divisor& heads, uint32_t row) {
  uint32_t token = heads.divide(row), head = row - token * heads.divisor;
  return static_cast<const bf16*>(t.data) + token * t.token + head * t.head;
}

__device__ __forceinline__ const bf16* row_of(const void* dense, int h, uint32_t row) {
  return static_cast<const bf16*>(dense) + int64_t{row} * h;
}

__device__ __forceinline__ void unpack(const uint4& v, float (&f)[kColumns]) {
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair = alignkit::unpack<bf16>(pairs[i]);
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack(const float (&f)[kColumns]) {
  using alignkit::pack;
  return make_uint4(pack<bf16>(f[0], f[1]), pack<bf16>(f[2], f[3]), pack<bf16>(f[4], f[5]), pack<bf16>(f[6], f[7]));
}

// Sum of a vector's elements by the balanced tree.
__device__ __forceinline__ float tree(const float (&f)[kColumns]) {
  return ((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]));
}

// Sum vector sums over kLanes lanes that share rows, kPerRow vectors per lane: a row's sum, or a warp's part of it.
template <int kLanes, int kPerRow>
__device__ __forceinline__ float sum_lanes(const float (&sums)[kVectors]) {
  // Transposing reduction: two lanes that differ in one bit exchange values, and each adds half of them.
  int lane = threadIdx.x % 32;
  bool upper = lane & 1;
  float low = (upper ? sums[2] : sums[0]) + __shfl_xor_sync(~0u, upper ? sums[0] : sums[2], 1);
  float high = (upper ? sums[3] : sums[1]) + __shfl_xor_sync(~0u, upper ? sums[1] : sums[3], 1);
  upper = lane & 2;
  float s = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
#pragma unroll
  for (int bit = 4; bit < kLanes; bit *= 2) s += __shfl_xor_sync(~0u, s, bit);
  if (kPerRow >= 2) s += __shfl_xor_sync(~0u, s, 2);
  if (kPerRow == 4) s += __shfl_xor_sync(~0u, s, 1);
  return s;
}

// Leaves of the balanced tree over at least two warps: the next power of two.
__device__ __forceinline__ int tree_leaves(int warps) { return 2 << (31 - __clz(warps - 1)); }

// A thread's slots in the ring buffer of cp.async copies in flight.
template <int kTensors, int kDepth_>
struct Ring {
  static constexpr int kDepth = kDepth_, kBytes = kDepth * kTensors * kVectors * 16;  // bytes per thread
  uint4* slots;

  __device__ __forceinline__ Ring(uint4* shared) : slots(shared + threadIdx.x) {}

  __device__ __forceinline__ uint4& at(int stage, int tensor, int vector) const {
    return slots[((stage * kTensors + tensor) * kVectors + vector) * blockDim.x];
  }
};

// A thread's part of the weight, packed as bf16 to save registers.
template <class Team>
struct Weight {
  uint4 vectors[Team::kPerRow];
  float offset;

  __device__ __forceinline__ Weight(const void* weight, int h, int column, int zero_centered)
      : offset(zero_centered ? 1.0f : -0.0f) {  // adding -0 changes no value, not even -0
#pragma unroll
    for (int i = 0; i < Team::kPerRow; ++i, column += kWarpColumns)
      vectors[i] = column < h ? __ldg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(weight) + column))
                              : make_uint4(0, 0, 0, 0);
  }

  // Unpack the weight of vector v.
  __device__ __forceinline__ void get(int v, float (&w)[kColumns]) const {
    unpack(vectors[v % Team::kPerRow], w);
#pragma unroll
    for (float& f : w) f += offset;
  }

  // Keep the compiler from reusing unpacked values of weight and rows, for which there are no registers.
  __device__ __forceinline__ void discard_unpacked() {
#pragma unroll
    for (uint4& v : vectors) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }
};

// Forward: one CTA per row, held in registers. Two CTAs or more share an SM, so that one loads while another reduces.
__global__ void __launch_bounds__(kNormMaxColumns / (kVectors * kColumns), 2)
    rms_norm(const __grid_constant__ AlignkitNorm p, const Divisor heads) {
  __shared__ float warp_sums[kMaxWarps];
  const uint32_t row = blockIdx.x, rows = p.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int column = warp * (kVectors * kWarpColumns) + lane * kColumns;
  // `row < rows` always holds; without these checks the compiler moves the weight's loads before the squares.
  const bf16* src = row_of(p.x, heads, row < rows ? row : 0) + column;
  uint4 x[kVectors], weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    x[v] = row < rows && column + v * kWarpColumns < p.h ? *reinterpret_cast<const uint4*>(src + v * kWarpColumns)
                                                         : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    weight[v] = column + v * kWarpColumns < p.h ? __ldg(reinterpret_cast<const uint4*>(
                                                      static_cast<const bf16*>(p.weight) + column + v * kWarpColumns))
                                                : make_uint4(0, 0, 0, 0);
  if (row >= rows) return;
  float squares[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float f[kColumns];
    unpack(x[v], f);
#pragma unroll
    for (float& e : f) e *= e;
    squares[v] = tree(f);
  }
  float sum = sum_lanes<32, kVectors>(squares);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  int leaves = tree_leaves(warps), leaf = lane % leaves;
  sum = leaf < warps ? warp_sums[leaf] : 0.0f;
  for (int bit = 1; bit < leaves; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  float mean = __fdiv_rn(sum, static_cast<float>(p.h));
  float rstd = __fdiv_rn(1.0f, __fsqrt_rn(mean + p.eps));
  if (threadIdx.x == 0) p.rstd[row] = rstd;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    asm volatile("" : "+r"(x[v].x), "+r"(x[v].y), "+r"(x[v].z), "+r"(x[v].w)::"memory");  // stay packed until here
    float f[kColumns], w[kColumns];
    unpack(x[v], f);
    unpack(weight[v], w);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) f[i] = f[i] * rstd * (w[i] + (p.zero_centered ? 1.0f : -0.0f));
    if (column + v * kWarpColumns < p.h)
      *reinterpret_cast<uint4*>(static_cast<bf16*>(p.y) + int64_t{row} * p.h + column + v * kWarpColumns) = pack(f);
  }
}

// Backward. A team computes one run of 1, 2, 4 or 8 chains of dweight, each thread the chains of its own columns, and
// adds them by the tree. A second kernel adds the sums of runs. +0 is added to each chain's sum, which turns -0 into
// +0; so absent rows and chains, whose sum is zero, can be added or left out without changing bits.

constexpr int kMaxLevels = 3;    // schedule: limit of Plan; a run has 2^level chains
constexpr int kSlice = 128;      // schedule: columns per CTA of the second kernel (sizes the workspace)
constexpr int kMaxGroups = 256;  // schedule: groups of chains, CTAs per slice of the second kernel

// Consecutive CTAs whose runs have 2^level chains: the segment's first CTA, run and chain.
struct Segment {
  uint32_t block, run, chain, level;
};

// Distribution of dweight's chains over CTAs, and the workspace.
struct Plan {
  Segment segments[kMaxLevels + 1];
  uint32_t count, chains, blocks;
  int warp_chains;    // chains per warp of the second kernel, a multiple of 16
  int groups;         // CTAs per slice of the second kernel; each adds one group of chains
  float* run_sums;    // [runs, h]
  float* group_sums;  // [groups, h]
  int* arrived;       // per slice: CTAs of the second kernel that are done

  // The segment of CTA or chain i, by the member kBegin.
  template <uint32_t Segment::*kBegin>
  __device__ __forceinline__ Segment find(uint32_t i) const {
    Segment s = segments[0];
#pragma unroll
    for (int j = 1; j <= kMaxLevels; ++j)
      if (j < count && i >= segments[j].*kBegin) s = segments[j];
    return s;
  }
};

// Teams of kLanes lanes; a row has kPerRow vectors per lane, a step kRows rows.
template <int kLanes_, int kPerRow_>
struct Narrow {
  static constexpr int kLanes = kLanes_, kPerRow = kPerRow_, kRows = kVectors / kPerRow,
                       kTeams = kNarrowThreads / kLanes;
  static constexpr int kShared = 1;  // unused

  uint32_t first, id;  // index in the CTA of the warp's first team, and of this team
  int column;          // first column of the thread's first vector
  int held_row;            // row of the step whose sum `sum` returns in this lane

  static int threads(int) { return kNarrowThreads; }

  __device__ __forceinline__ Narrow() {
    first = threadIdx.x / 32 * (32 / kLanes);
    id = first + threadIdx.x % 32 / kLanes;
    column = threadIdx.x % kLanes * kColumns;
    held_row = (threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2) / kPerRow;
  }

  __device__ __forceinline__ void begin(float*) const {}

  // Broadcast `value` from the lane that holds row n.
  __device__ __forceinline__ float broadcast_row(float value, int n) const {
    int q = n * kPerRow;
    return __shfl_sync(~0u, value, q / 2 + q % 2 * 2, kLanes);
  }

  // Sum the step's rows; each lane returns the sum of row `held`.
  __device__ __forceinline__ float sum(const float (&sums)[kVectors], float*, int&) const {
    return sum_lanes<kLanes, kPerRow>(sums);
  }
};

// One team: all warps of the CTA share the rows, with kPerRow vectors per lane.
template <int kPerRow_>
struct Wide {
  static constexpr int kPerRow = kPerRow_, kRows = kVectors / kPerRow, kTeams = 1;
  static constexpr int kShared = 2 * kRows * kMaxWarps;  // two buffers of warp sums per row
  static constexpr int kSumLanes = 32 / kRows;           // lanes that add a row's warp sums; the first holds the row
  static constexpr int kPerLane = kMaxWarps / kSumLanes;  // warp sums per such lane; warps > kPerLane / 2

  uint32_t first, id;
  int column, held_row, warp, warps;

  static int threads(int h) { return (h + kPerRow * kWarpColumns - 1) / (kPerRow * kWarpColumns) * 32; }

  __device__ __forceinline__ Wide() {
    first = id = 0;
    warps = blockDim.x / 32;
    warp = threadIdx.x / 32;
    column = warp * (kPerRow * kWarpColumns) + threadIdx.x % 32 * kColumns;
    held_row = threadIdx.x % 32 / kSumLanes;
  }

  // Zero the sums of absent warps. Requires a __syncthreads before they are read.
  __device__ __forceinline__ void begin(float* warp_sums) const {
    for (int i = threadIdx.x; i < kShared; i += blockDim.x)
      if (i % kMaxWarps >= warps) warp_sums[i] = 0.0f;
  }

  // Broadcast `value` from the lane that holds row n.
  __device__ __forceinline__ float broadcast_row(float value, int n) const {
    return kRows == 1 ? value : __shfl_sync(~0u, value, n * kSumLanes);
  }

  // Sum the step's rows; each lane returns the sum of row `held`. `buffer` alternates between the two buffers.
  __device__ __forceinline__ float sum(const float (&sums)[kVectors], float* warp_sums, int& buffer) const {
    int lane = threadIdx.x % 32;
    float s = sum_lanes<32, kPerRow>(sums);
    float* lines = warp_sums + buffer * (kRows * kMaxWarps);
    int row = (lane % kRows % 2 * 2 + lane % kRows / 2) / kPerRow;
    if (lane < kRows) lines[row * kMaxWarps + warp] = s;
    __syncthreads();
    float v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = lines[held_row * kMaxWarps + lane % kSumLanes * kPerLane + i];
#pragma unroll
    for (int distance = 1; distance < kPerLane; distance *= 2)
#pragma unroll
      for (int i = 0; i < kPerLane; i += 2 * distance) v[i] += v[i + distance];
    s = v[0];
    int leaves = tree_leaves(warps);
#pragma unroll
    for (int bit = 1; bit < kSumLanes; bit *= 2) {
      float other = __shfl_xor_sync(~0u, s, bit);
      if (bit * kPerLane < leaves) s += other;
    }
    if (kRows == 1) s = __shfl_sync(~0u, s, 0);
    buffer ^= 1;
    return s;
  }
};

template <bool kTotal>
using BackwardRing = Ring<2 + kTotal, 2>;

// Backward kernel. Each thread waits only for its own copies, in a ring of two steps. kInRegisters: a step moves to
// registers before its rows' sums are known, so that the next copy starts earlier. Otherwise it is read again from
// shared memory: this takes fewer registers, so that more warps fit.
template <class Team, bool kTotal, int kLevels, int kRegisters, bool kInRegisters>
__global__ void __maxnreg__(kRegisters)
    rms_norm_grad(const __grid_constant__ AlignkitNormGrad p, const __grid_constant__ Plan plan, const Divisor heads) {
  using OwnRing = BackwardRing<kTotal>;
  constexpr int kTensors = 2 + kTotal;
  constexpr int kSteps = kChain / Team::kRows;  // steps per chain
  extern __shared__ uint4 shared[];
  __shared__ __align__(16) float warp_sums[Team::kShared];
  griddep_launch_dependents();
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * kSlice < p.h; i += blockDim.x) plan.arrived[i] = 0;
  Team team;
  const Segment segment = plan.find<&Segment::block>(blockIdx.x);
  const uint32_t block_run = (blockIdx.x - segment.block) * Team::kTeams;  // CTA's first run within the segment
  const uint32_t chain = segment.chain + ((block_run + team.id) << segment.level);
  // First row of this team, and of the warp's first team.
  const uint32_t own = chain * kChain, first = (segment.chain + ((block_run + team.first) << segment.level)) * kChain;
  const int steps = kSteps << segment.level;
  OwnRing ring(shared);
  uint32_t rows = p.rows;
  auto copy = [&](int stage, int n) {
    if (n < steps && first + n * Team::kRows < rows) {
      uint32_t row = own + n * Team::kRows;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t r = row + v / Team::kPerRow;
        int column = team.column + v % Team::kPerRow * kWarpColumns;
        bool valid = r < rows && column < p.h;
        cp_async_zfill(&ring.at(stage, 0, v), valid ? row_of(p.dy, p.h, r) + column : p.dy, valid);
        cp_async_zfill(&ring.at(stage, 1, v), valid ? row_of(p.x, heads, r) + column : p.dy, valid);
        if (kTotal) cp_async_zfill(&ring.at(stage, 2, v), valid ? row_of(p.d_total, p.h, r) + column : p.dy, valid);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < OwnRing::kDepth; ++i) copy(i, i);
  float next_rstd[Team::kRows];
  auto load_rstd = [&](int n) {
    uint32_t row = own + n * Team::kRows;
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) next_rstd[i] = row + i < rows ? __ldg(p.rstd + row + i) : 0.0f;
  };
  load_rstd(0);
  Weight<Team> weight(p.weight, p.h, team.column, p.zero_centered);
  team.begin(warp_sums);
  float dw[Team::kPerRow][kColumns] = {};
  float pending[kLevels][Team::kPerRow][kColumns];  // sums of 2^level chains that wait for their neighbor
  int stage = 0, buffer = 0;
#pragma unroll 1
  for (int n = 0; n < steps; ++n) {
    uint32_t row = own + n * Team::kRows;
    float rstd[Team::kRows];
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) rstd[i] = next_rstd[i];
    load_rstd(n + 1);
    cp_async_wait<OwnRing::kDepth - 1>();
    uint4 staged[kTensors][kVectors];
    auto get = [&](int tensor, int v, float (&f)[kColumns]) {
      unpack(kInRegisters ? staged[tensor][v] : ring.at(stage, tensor, v), f);
    };
    if (first + n * Team::kRows < rows) {
      if (kInRegisters) {
#pragma unroll
        for (int t = 0; t < kTensors; ++t)
#pragma unroll
          for (int v = 0; v < kVectors; ++v) staged[t][v] = ring.at(stage, t, v);
      }
      float products[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float dy[kColumns], x[kColumns], w[kColumns];
        get(0, v, dy);
        get(1, v, x);
        weight.get(v, w);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dy[i] = dy[i] * w[i] * x[i];
        products[v] = tree(dy);
      }
      if (kInRegisters) copy(stage, n + OwnRing::kDepth);
      float held_rstd = rstd[0];
#pragma unroll
      for (int i = 1; i < Team::kRows; ++i) held_rstd = team.held_row == i ? rstd[i] : held_rstd;
      float sum = team.sum(products, warp_sums, buffer);
      float c = __fdiv_rn(sum, static_cast<float>(p.h)) * held_rstd * held_rstd;
      if (kInRegisters) {  // do the same as discard_unpacked for the staged rows
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (uint4& v : staged[t]) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
      } else {
        weight.discard_unpacked();
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t r = row + v / Team::kPerRow;
        int column = team.column + v % Team::kPerRow * kWarpColumns;
        float row_c = team.broadcast_row(c, v / Team::kPerRow), row_rstd = rstd[v / Team::kPerRow];
        float dy[kColumns], x[kColumns], w[kColumns], dx[kColumns];
        get(0, v, dy);
        get(1, v, x);
        weight.get(v, w);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          dx[i] = row_rstd * __fmaf_rn(-row_c, x[i], dy[i] * w[i]);
          float& acc = dw[v % Team::kPerRow][i];
          acc = __fmaf_rn(dy[i], x[i] * row_rstd, acc);
        }
        uint4 out = pack(dx);
        if (kTotal) {
          float other[kColumns];
          unpack(out, dx);
          get(2, v, other);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dx[i] += other[i];
          out = pack(dx);
        }
        if (r < rows && column < p.h)
          *reinterpret_cast<uint4*>(static_cast<bf16*>(p.dx) + int64_t{r} * p.h + column) = out;
      }
    }
    if (!kInRegisters || first + n * Team::kRows >= rows) copy(stage, n + OwnRing::kDepth);
    stage ^= 1;
    if (n % kSteps != kSteps - 1 || n == steps - 1) continue;
    // A chain but the last is complete: add it to the pending sums of a binary carry, and store the result as pending.
    const int carry = __ffs(~(n / kSteps)) - 1;
#pragma unroll
    for (int i = 0; i < Team::kPerRow; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float total = dw[i][j] + 0.0f;
#pragma unroll
        for (int l = 0; l < kLevels; ++l) {
          if (l < carry) total = pending[l][i][j] + total;
          if (l == carry) pending[l][i][j] = total;
        }
        dw[i][j] = 0.0f;
      }
  }
  if (chain >= plan.chains) return;
#pragma unroll
  for (int i = 0; i < Team::kPerRow; ++i) {
    int column = team.column + i * kWarpColumns;
    if (column >= p.h) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      dw[i][j] += 0.0f;
#pragma unroll
      for (int l = 0; l < kLevels; ++l)
        if (l < segment.level) dw[i][j] = pending[l][i][j] + dw[i][j];
    }
    float4* dst = reinterpret_cast<float4*>(plan.run_sums + int64_t{segment.run + block_run + team.id} * p.h + column);
    __stcg(dst, make_float4(dw[i][0], dw[i][1], dw[i][2], dw[i][3]));
    __stcg(dst + 1, make_float4(dw[i][4], dw[i][5], dw[i][6], dw[i][7]));
  }
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

constexpr int kDweightWarps = 8;   // schedule: warps per CTA of rms_norm_dweight
constexpr int kDweightLevels = 9;  // schedule: pending levels, at least 9: 2^27 rows are 2^23 chains, 16 * 2^8 per warp

// Sum kDweightWarps * batches * kPerBatch leaves by the balanced tree; the result is in the first warp. fetch(b, v)
// loads batch b.
template <int kPerBatch, class Fetch>
__device__ __forceinline__ float4 sum_leaves(int batches, const Fetch& fetch, float4 (&shared)[kDweightWarps][32]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float4 sum, pending[kDweightLevels];
#pragma unroll 1
  for (int batch = 0; batch < batches; ++batch) {
    float4 v[kPerBatch];
    fetch(warp * batches + batch, v);
#pragma unroll
    for (int distance = 1; distance < kPerBatch; distance *= 2)
#pragma unroll
      for (int i = 0; i < kPerBatch; i += 2 * distance) v[i] = add(v[i], v[i + distance]);
    sum = v[0];
    int l = 0;
#pragma unroll 1
    for (; batch >> l & 1; ++l) sum = add(pending[l], sum);
    if (batches > 1) pending[l] = sum;
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0) {
    float4 v[kDweightWarps];
#pragma unroll
    for (int i = 0; i < kDweightWarps; ++i) v[i] = shared[i][lane];
#pragma unroll
    for (int distance = 1; distance < kDweightWarps; distance *= 2)
#pragma unroll
      for (int i = 0; i < kDweightWarps; i += 2 * distance) v[i] = add(v[i], v[i + distance]);
    sum = v[0];
  }
  __syncthreads();
  return sum;
}

// dweight from the sums of runs. CTA (s, g) adds group g of slice s; the last CTA of a slice to finish adds the groups.
__global__ void __launch_bounds__(kDweightWarps * 32, 3)
    rms_norm_dweight(const __grid_constant__ Plan plan, int h, void* dweight, int rounded) {
  __shared__ float4 shared[kDweightWarps][32];
  __shared__ bool last;
  griddep_wait();
  int column = blockIdx.x * kSlice + threadIdx.x % 32 * 4;
  // A run's sum takes the place of its first chain; the others count as zero, which changes no bit.
  int batches = plan.warp_chains / 16;
  auto fetch_chains = [&](int batch, float4 (&v)[16]) {
    uint32_t chain = (blockIdx.y * kDweightWarps * batches + batch) * 16;
    const Segment segment = plan.find<&Segment::chain>(chain);
    const uint32_t run_mask = (1u << segment.level) - 1;
    const float4* src = reinterpret_cast<const float4*>(
        plan.run_sums + int64_t{segment.run + ((chain - segment.chain) >> segment.level)} * h + column);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = float4();
      if (!(i & run_mask) && chain + i < plan.chains && column < h) {
        v[i] = __ldcg(src);
        src += h / 4;
      }
    }
  };
  float4 sum = sum_leaves<16>(batches, fetch_chains, shared);
  if (gridDim.y > 1) {
    if (threadIdx.x < 32) {
      if (column < h) __stcg(reinterpret_cast<float4*>(plan.group_sums + int64_t{blockIdx.y} * h + column), sum);
      __threadfence();
      __syncwarp();
      if (threadIdx.x == 0) last = atomicAdd(plan.arrived + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    auto fetch_groups = [&](int batch, float4 (&v)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t group = batch * 8 + i;
        v[i] = group < gridDim.y && column < h
                   ? __ldcg(reinterpret_cast<const float4*>(plan.group_sums + int64_t{group} * h + column))
                   : float4();
      }
    };
    sum = sum_leaves<8>(max(1, tree_leaves(gridDim.y) / (8 * kDweightWarps)), fetch_groups, shared);
  }
  if (threadIdx.x >= 32 || column >= h) return;
  if (rounded) {
    bf16* dst = static_cast<bf16*>(dweight) + column;
    dst[0] = sum.x, dst[1] = sum.y, dst[2] = sum.z, dst[3] = sum.w;
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(dweight) + column) = sum;
  }
}

// Host.

// Set *ctas to the number of CTAs of `threads` threads that the device holds at once. The result is cached per thread
// for the device used last.
template <auto kKernel>
cudaError_t max_resident_ctas(int threads, int bytes, uint32_t* ctas) {
  static thread_local int prepared = -1, cached[kMaxWarps + 1];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes))
      return e;
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared))
      return e;
    std::fill(cached, cached + kMaxWarps + 1, 0);
    prepared = device;
  }
  int& entry = cached[threads / 32];
  if (!entry) {
    int per_sm, sms;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kKernel, threads, bytes)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
    if (!per_sm) return cudaErrorInvalidConfiguration;
    entry = per_sm * sms;
  }
  *ctas = entry;
  return cudaSuccess;
}

uint32_t ceil_div(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

// True if the kernels support `rows` rows of h columns, h > above.
bool is_supported(int h, int rows, int heads, int above) {
  return heads > 0 && h > above && h % kColumns == 0 && h <= kNormMaxColumns && rows > 0 && rows <= kNormMaxRows;
}

cudaError_t launch_norm(const AlignkitNorm& p, cudaStream_t stream) {
  if (!is_supported(p.h, p.rows, p.heads, kVectors * kWarpColumns)) return cudaErrorInvalidValue;
  rms_norm<<<p.rows, 32 * ceil_div(p.h, kVectors * kWarpColumns), 0, stream>>>(p, Divisor(p.heads));
  return cudaGetLastError();
}

// Distribute chains over runs of at most 2^max_level. uniform: runs of one length. Otherwise each length takes whole
// waves of CTAs, up to nine tenths of the remaining chains, and shorter runs the rest, so that all SMs finish at about
// the same time. The chains of each length but the last are a multiple of the 16 that the second kernel reads at once.
Plan make_plan(uint32_t chains, uint32_t teams, uint32_t slots, int max_level, bool uniform) {
  Plan plan = {};
  plan.chains = chains;
  uint32_t run = 0, chain = 0;
  for (int level = max_level; chain < chains; --level) {
    uint32_t cta_chains = teams << level, rest = chains - chain, blocks = ceil_div(rest, cta_chains);
    if (level > 0 && !uniform) {
      blocks = 9 * rest / (10 * cta_chains * slots) * slots;
      while (blocks * cta_chains % 16) --blocks;
    }
    if (!blocks) continue;
    plan.segments[plan.count++] = {plan.blocks, run, chain, static_cast<uint32_t>(level)};
    plan.blocks += blocks, run += blocks * teams, chain += blocks * cta_chains;
  }
  plan.warp_chains = 16;
  while (ceil_div(chains, plan.warp_chains * kDweightWarps) > kMaxGroups) plan.warp_chains *= 2;
  plan.groups = ceil_div(chains, plan.warp_chains * kDweightWarps);
  return plan;
}

// Launch the two backward kernels.
template <class Team, bool kTotal, int kLevels, int kRegisters, bool kInRegisters = false>
cudaError_t launch_grad(const AlignkitNormGrad& p, cudaStream_t stream) {
  constexpr auto kernel = rms_norm_grad<Team, kTotal, kLevels, kRegisters, kInRegisters>;
  int threads = Team::threads(p.h), bytes = threads * BackwardRing<kTotal>::kBytes, level = kLevels;
  uint32_t slots, chains = ceil_div(p.rows, kChain);
  if (cudaError_t e = max_resident_ctas<kernel>(threads, bytes, &slots)) return e;
  while (p.chains && 1 << level > std::abs(p.chains)) --level;
  if (p.chains < 0) slots = 1;
  uint32_t blocks = ceil_div(chains, Team::kTeams << level), waves = ceil_div(blocks, slots);
  // Measured: shorter runs gain nothing if the last of several waves is nearly full and threads have several vectors
  // per row.
  bool uniform = p.chains ? p.chains > 0 : Team::kPerRow > 1 && waves > 3 && 16 * blocks >= 15 * waves * slots;
  Plan plan = make_plan(chains, Team::kTeams, slots, level, uniform);
  plan.run_sums = p.workspace;
  plan.group_sums = plan.run_sums + int64_t{chains} * p.h;
  plan.arrived = reinterpret_cast<int*>(plan.group_sums + int64_t{plan.groups} * p.h);
  kernel<<<plan.blocks, threads, bytes, stream>>>(p, plan, Divisor(p.heads));
  if (cudaError_t e = cudaGetLastError()) return e;
  return launch_pdl(rms_norm_dweight, dim3(ceil_div(p.h, kSlice), plan.groups), kDweightWarps * 32, 0, stream, plan,
                    p.h, p.dweight, p.rounded);
}

// Select the team and registers per thread by row length. An SM has registers for 16 warps of 128 per thread, 20 of 96
// or 24 of 80; kMaxSharedBytes holds the copies of 24 warps without d_total, 16 with it. One vector per row and thread
// leaves the fewest sums of dweight, so a step can stay in registers, or more warps fit, in several CTAs up to 3072
// columns. Longer rows have one CTA per SM, which waits less with steps in registers. Rows with too few such warps take
// two vectors per thread, above 8192 columns four.
template <bool kTotal>
cudaError_t launch_grad(const AlignkitNormGrad& p, cudaStream_t stream) {
  if (p.h <= 64) return launch_grad<Narrow<8, 1>, kTotal, 2, 80>(p, stream);
  if (p.h <= 128) return launch_grad<Narrow<16, 1>, kTotal, 2, 80>(p, stream);
  if (p.h <= 256) return launch_grad<Narrow<32, 1>, kTotal, 2, 80>(p, stream);
  if (p.h <= 512) return launch_grad<Narrow<32, 2>, kTotal, 2, 128>(p, stream);
  if (p.h <= 3072) return launch_grad<Wide<1>, kTotal, 2, 80>(p, stream);
  if (p.h <= 4096) return launch_grad<Wide<1>, kTotal, 3, 128, true>(p, stream);
  if constexpr (!kTotal) {
    if (p.h <= 5120) return launch_grad<Wide<1>, kTotal, 2, 96, true>(p, stream);
    if (p.h <= 6144) return launch_grad<Wide<1>, kTotal, 2, 80>(p, stream);
  }
  if (p.h <= 8192) return launch_grad<Wide<2>, kTotal, 2, 128>(p, stream);
  return launch_grad<Wide<4>, kTotal, 1, 128>(p, stream);
}

}  // namespace
}  // namespace alignkit

// The functions return a cudaError_t: cudaErrorInvalidValue unless h is a multiple of 8, above 1024 (forward) or 32
// (backward) and at most 16384, and rows are in [1, 2^27]. Not checked here: all tensors but rstd are 16-byte aligned,
// and strides are multiples of 8 (alignkit/ops/rms_norm/cuda_backend.py).

// Forward: y = x * rstd * weight (1 + weight if zero_centered), rstd [rows].
extern "C" int alignkit_rms_norm(const AlignkitNorm* p, cudaStream_t stream) {
  using namespace alignkit;
  return launch_norm(*p, stream);
}

// Backward: dx (+ d_total) and dweight. workspace: h floats per 16 rows, h per 2048 rows, and one per 128 columns.
extern "C" int alignkit_rms_norm_grad(const AlignkitNormGrad* p, cudaStream_t stream) {
  using namespace alignkit;
  if (!is_supported(p->h, p->rows, p->heads, 32)) return cudaErrorInvalidValue;
  return p->d_total ? launch_grad<true>(*p, stream) : launch_grad<false>(*p, stream);
}

ALIGNKIT_FUNCTION(alignkit_rms_norm)
ALIGNKIT_FUNCTION(alignkit_rms_norm_grad)
