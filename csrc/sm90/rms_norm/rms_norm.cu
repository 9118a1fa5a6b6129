// RMSNorm of long bf16 rows and the gradients of RMSNorm, at the speed of memory: alignkit/ops/rms_norm/cuda.py.
//
// A thread takes four vectors of 16 bytes of each tensor at a time. They lie in one row or in up to four, which are the rows
// of a step; a team of 8 to 32 lanes, or of all warps of a block, shares them. Lane, vector and warp are the bits of a
// vector's place in its row, lowest first: the balanced tree goes over a vector, then lanes, then vectors, then warps. A pair
// has one sum, so which of its two threads adds cannot change a bit.
#include <algorithm>
#include <cstdlib>

#include "../../interface.h"
#include "../ptx/copy.cuh"
#include "../ptx/dependent_launch.cuh"
#include "../ptx/pack.cuh"

// Row r is head r % heads of token r / heads; strides are in elements. What has no strides is dense.
struct AlignkitNormRows {
  const void* data;
  int64_t token, head;
};

// The arguments, as alignkit/ops/rms_norm/cuda.py fills them.
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
  const void *dy, *d_total, *weight;  // d_total: or null
  const float* rstd;
  void *dx, *dweight;
  float* workspace;
  int rows, heads, h, zero_centered;
  int rounded;  // dweight is bf16
  int chains;   // of a run; -n: n, then fewer; 0: as is best
};

ALIGNKIT_LAYOUT(AlignkitNormRows, data, token, head)
ALIGNKIT_LAYOUT(AlignkitNorm, x, weight, y, rstd, rows, heads, h, zero_centered, eps)
ALIGNKIT_LAYOUT(AlignkitNormGrad, x, dy, d_total, weight, rstd, dx, dweight, workspace, rows, heads, h, zero_centered,
                rounded, chains)

namespace alignkit {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kVectors = 4;             // of a thread, of a tensor, of a step
constexpr int kColumns = 8;             // of a vector
constexpr int kAcross = 32 * kColumns;  // columns of a warp's vectors that are read at once
constexpr int kBlock = 128;             // threads of a block of teams of lanes
constexpr int kMostWarps = 32;
constexpr int kChain = 16;              // rows of a chain of dweight
constexpr int kMostRows = 1 << 27, kMostColumns = 1 << 14;
constexpr int kMostBytes = 192 << 10;   // of shared memory, for copies

// n / divisor for n below 2^31, by a product.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  explicit Divisor(uint32_t d) : divisor(d), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  __device__ __forceinline__ uint32_t of(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

__device__ __forceinline__ const bf16* row_of(const AlignkitNormRows& t, const Divisor& heads, uint32_t row) {
  uint32_t token = heads.of(row), head = row - token * heads.divisor;
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

__device__ __forceinline__ float tree(const float (&f)[kColumns]) {
  return ((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]));
}

// The sum over a row of the vectors' sums, as far as a warp has it, or kLanes lanes that share rows of kOfRow vectors a lane.
template <int kLanes, int kOfRow>
__device__ __forceinline__ float sum_of_lanes(const float (&of)[kVectors]) {
  // Lanes that differ in a bit share the work: one adds the first half of the values, the other the second.
  int lane = threadIdx.x % 32;
  bool upper = lane & 1;
  float low = (upper ? of[2] : of[0]) + __shfl_xor_sync(~0u, upper ? of[0] : of[2], 1);
  float high = (upper ? of[3] : of[1]) + __shfl_xor_sync(~0u, upper ? of[1] : of[3], 1);
  upper = lane & 2;
  float s = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 2);
#pragma unroll
  for (int bit = 4; bit < kLanes; bit *= 2) s += __shfl_xor_sync(~0u, s, bit);
  if (kOfRow >= 2) s += __shfl_xor_sync(~0u, s, 2);
  if (kOfRow == 4) s += __shfl_xor_sync(~0u, s, 1);
  return s;
}

// The leaves of the tree over 2 or more warps.
__device__ __forceinline__ int padded(int warps) { return 2 << (31 - __clz(warps - 1)); }

// The thread's place for each vector of the steps that are on their way.
template <int kTensors, int kDepth_>
struct Ring {
  static constexpr int kDepth = kDepth_, kBytes = kDepth * kTensors * kVectors * 16;  // of a thread
  uint4* place;

  __device__ __forceinline__ Ring(uint4* shared) : place(shared + threadIdx.x) {}

  __device__ __forceinline__ uint4& at(int stage, int tensor, int vector) const {
    return place[((stage * kTensors + tensor) * kVectors + vector) * blockDim.x];
  }
};

// A thread's part of the weight, as it is in memory: in half of the registers.
template <class Team>
struct Weight {
  uint4 vectors[Team::kOfRow];
  float offset;

  __device__ __forceinline__ Weight(const void* weight, int h, int column, int zero_centered)
      : offset(zero_centered ? 1.0f : -0.0f) {  // -0 changes nothing, not even a zero
#pragma unroll
    for (int i = 0; i < Team::kOfRow; ++i, column += kAcross)
      vectors[i] = column < h ? __ldg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(weight) + column))
                              : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void get(int v, float (&w)[kColumns]) const {
    unpack(vectors[v % Team::kOfRow], w);
#pragma unroll
    for (float& f : w) f += offset;
  }

  // The compiler would keep what it unpacked, of the rows too, for the next time; there are no registers for that.
  __device__ __forceinline__ void forget_unpacked() {
#pragma unroll
    for (uint4& v : vectors) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
  }
};

// Forward: a block takes a row, straight to registers. A multiprocessor has two at least, which do not wait for each other.

__global__ void __launch_bounds__(kMostColumns / (kVectors * kColumns), 2)
    rms_norm(const __grid_constant__ AlignkitNorm p, const Divisor heads) {
  __shared__ float between[kMostWarps];
  const uint32_t row = blockIdx.x, rows = p.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int column = warp * (kVectors * kAcross) + lane * kColumns;
  // There is no block beyond the rows; but without these checks the compiler moves the weight's loads before the squares.
  const bf16* from = row_of(p.x, heads, row < rows ? row : 0) + column;
  uint4 x[kVectors], weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    x[v] = row < rows && column + v * kAcross < p.h ? *reinterpret_cast<const uint4*>(from + v * kAcross)
                                                    : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    weight[v] = column + v * kAcross < p.h
                    ? __ldg(reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.weight) + column + v * kAcross))
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
  float sum = sum_of_lanes<32, kVectors>(squares);
  if (lane == 0) between[warp] = sum;
  __syncthreads();
  int leaves = padded(warps), leaf = lane % leaves;
  sum = leaf < warps ? between[leaf] : 0.0f;
  for (int bit = 1; bit < leaves; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  float mean = __fdiv_rn(sum, static_cast<float>(p.h));
  float rstd = __fdiv_rn(1.0f, __fsqrt_rn(mean + p.eps));
  if (threadIdx.x == 0) p.rstd[row] = rstd;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    asm volatile("" : "+r"(x[v].x), "+r"(x[v].y), "+r"(x[v].z), "+r"(x[v].w)::"memory");  // keep it packed
    float f[kColumns], w[kColumns];
    unpack(x[v], f);
    unpack(weight[v], w);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) f[i] = f[i] * rstd * (w[i] + (p.zero_centered ? 1.0f : -0.0f));
    if (column + v * kAcross < p.h)
      *reinterpret_cast<uint4*>(static_cast<bf16*>(p.y) + int64_t{row} * p.h + column + v * kAcross) = pack(f);
  }
}

// Backward: a team takes runs of 1, 2, 4 or 8 chains and joins their sums, each thread those of its columns. Where a team is a
// block, which may have a multiprocessor to itself, runs are dealt to blocks as these are done, and the copies of a run begin
// during the last steps of the one before; else a block takes one for each team. The sums of runs are joined by another kernel. A zero is added to a chain's sum, which makes a negative zero a positive one: so sums of
// absent rows and chains, which are zero, can be added or left out.

constexpr int kMostLevels = 3;  // a run is of 2^level chains
constexpr int kSlice = 32;      // columns of a block of the second kernel
constexpr int kMostGroups = 256;

// Runs of one length, of whole blocks: the first of them, its block and its first chain.
struct Segment {
  uint32_t block, run, chain, level;
};

struct Plan {
  Segment segments[kMostLevels + 1];
  uint32_t count, chains, blocks;
  int each;       // chains of a team of the second kernel, a multiple of 16
  int groups;     // of so many chains as a block of it has
  float* parts;   // the sums of runs
  float* joined;  // of groups
  int* arrived;   // blocks of the second kernel, for each of its slices of columns
  int* dealt;     // runs, beyond the first of each block

  // The segment that has a block or a chain, by where each begins.
  template <uint32_t Segment::*kBegin>
  __device__ __forceinline__ Segment of(uint32_t i) const {
    Segment s = segments[0];
#pragma unroll
    for (int j = 1; j <= kMostLevels; ++j)
      if (j < count && i >= segments[j].*kBegin) s = segments[j];
    return s;
  }
};

// Who takes what: teams of kLanes lanes, of rows of kOfRow vectors a lane.
template <int kLanes_, int kOfRow_>
struct Narrow {
  static constexpr int kLanes = kLanes_, kOfRow = kOfRow_, kRows = kVectors / kOfRow, kOfBlock = kBlock / kLanes;
  static constexpr bool kDealt = false;
  static constexpr int kShared = 1;  // nothing

  uint32_t first, id;  // of the block's teams, this warp's first and this
  int column;          // of the thread's first vector
  int held;            // the row of a step whose sum `sum` leaves in this lane

  static int threads(int) { return kBlock; }

  __device__ __forceinline__ Narrow() {
    first = threadIdx.x / 32 * (32 / kLanes);
    id = first + threadIdx.x % 32 / kLanes;
    column = threadIdx.x % kLanes * kColumns;
    held = (threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2) / kOfRow;
  }

  __device__ __forceinline__ void begin(float*) const {}

  // The value of a lane that holds row n.
  __device__ __forceinline__ float of_row(float value, int n) const {
    int q = n * kOfRow;
    return __shfl_sync(~0u, value, q / 2 + q % 2 * 2, kLanes);
  }

  __device__ __forceinline__ float sum(const float (&of)[kVectors], float*, int&) const {
    return sum_of_lanes<kLanes, kOfRow>(of);
  }
};

// All warps of a block share rows of kOfRow vectors a lane.
template <int kOfRow_>
struct Wide {
  static constexpr int kOfRow = kOfRow_, kRows = kVectors / kOfRow, kOfBlock = 1;
  static constexpr bool kDealt = true;
  static constexpr int kShared = 2 * kRows * kMostWarps;  // two lines for what warps have of each row
  static constexpr int kOfSum = 32 / kRows;               // lanes that join a row's sum; its first has it
  static constexpr int kEach = kMostWarps / kOfSum;       // warps of such a lane; there must be more than half as many

  uint32_t first, id;
  int column, held, warp, warps;

  static int threads(int h) { return (h + kOfRow * kAcross - 1) / (kOfRow * kAcross) * 32; }

  __device__ __forceinline__ Wide() {
    first = id = 0;
    warps = blockDim.x / 32;
    warp = threadIdx.x / 32;
    column = warp * (kOfRow * kAcross) + threadIdx.x % 32 * kColumns;
    held = threadIdx.x % 32 / kOfSum;
  }

  // Absent warps have zeros. All warps must meet before they are read.
  __device__ __forceinline__ void begin(float* between) const {
    for (int i = threadIdx.x; i < kShared; i += blockDim.x)
      if (i % kMostWarps >= warps) between[i] = 0.0f;
  }

  __device__ __forceinline__ float of_row(float value, int n) const {
    return kRows == 1 ? value : __shfl_sync(~0u, value, n * kOfSum);
  }

  // `line` says which line is free.
  __device__ __forceinline__ float sum(const float (&of)[kVectors], float* between, int& line) const {
    int lane = threadIdx.x % 32;
    float s = sum_of_lanes<32, kOfRow>(of);
    float* lines = between + line * (kRows * kMostWarps);
    int row = (lane % kRows % 2 * 2 + lane % kRows / 2) / kOfRow;
    if (lane < kRows) lines[row * kMostWarps + warp] = s;
    __syncthreads();
    float v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = lines[held * kMostWarps + lane % kOfSum * kEach + i];
#pragma unroll
    for (int apart = 1; apart < kEach; apart *= 2)
#pragma unroll
      for (int i = 0; i < kEach; i += 2 * apart) v[i] += v[i + apart];
    s = v[0];
    int leaves = padded(warps);
#pragma unroll
    for (int bit = 1; bit < kOfSum; bit *= 2) {
      float other = __shfl_xor_sync(~0u, s, bit);
      if (bit * kEach < leaves) s += other;
    }
    if (kRows == 1) s = __shfl_sync(~0u, s, 0);
    line ^= 1;
    return s;
  }
};

template <bool kTotal>
using BackwardRing = Ring<2 + kTotal, 2>;

// A thread waits only for copies of its own, to a ring of two steps in shared memory. kKept: a step moves to registers before
// its rows' sums are known, and the next copy begins. Else it is read again, and more warps fit.
template <class Team, bool kTotal, int kLevels, int kRegisters, bool kKept>
__global__ void __maxnreg__(kRegisters)
    rms_norm_grad(const __grid_constant__ AlignkitNormGrad p, const __grid_constant__ Plan plan, const Divisor heads) {
  using OwnRing = BackwardRing<kTotal>;
  constexpr int kTensors = 2 + kTotal;
  constexpr int kSteps = kChain / Team::kRows;  // of a chain
  static_assert(!Team::kDealt || kSteps >= OwnRing::kDepth + 2);
  extern __shared__ uint4 shared[];
  __shared__ __align__(16) float between[Team::kShared];
  let_next_kernel_begin();
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * kSlice < p.h; i += blockDim.x) plan.arrived[i] = 0;
  __shared__ uint32_t dealt;
  constexpr uint32_t kNone = 1u << 31;  // a row beyond all
  Team team;
  uint32_t run = blockIdx.x;  // of the block, whose teams have as many
  Segment segment = plan.of<&Segment::block>(run);
  // The first row of a team in a run.
  auto row_of_run = [&](const Segment& s, uint32_t run, uint32_t team) {
    return (s.chain + (((run - s.block) * Team::kOfBlock + team) << s.level)) * kChain;
  };
  // This team's first row, and that of the warp's first team, which has the first rows.
  uint32_t own = row_of_run(segment, run, team.id), first = row_of_run(segment, run, team.first);
  int steps = kSteps << segment.level;
  uint32_t next_run = 0, next_own = kNone;
  OwnRing ring(shared);
  uint32_t rows = p.rows;
  // Of a step, of which those beyond the run are the next run's.
  auto row_at = [&](int n) {
    return Team::kDealt && n >= steps ? next_own + (n - steps) * Team::kRows : own + n * Team::kRows;
  };
  auto copy = [&](int stage, int n) {
    if (Team::kDealt ? row_at(n) < rows : n < steps && first + n * Team::kRows < rows) {
      uint32_t row = row_at(n);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t r = row + v / Team::kOfRow;
        int column = team.column + v % Team::kOfRow * kAcross;
        bool here = r < rows && column < p.h;
        copy_vector(&ring.at(stage, 0, v), here ? row_of(p.dy, p.h, r) + column : p.dy, here);
        copy_vector(&ring.at(stage, 1, v), here ? row_of(p.x, heads, r) + column : p.dy, here);
        if (kTotal) copy_vector(&ring.at(stage, 2, v), here ? row_of(p.d_total, p.h, r) + column : p.dy, here);
      }
    }
    copies_end();
  };
#pragma unroll
  for (int i = 0; i < OwnRing::kDepth; ++i) copy(i, i);
  float next_rstd[Team::kRows];
  auto load_rstd = [&](int n) {
    uint32_t row = row_at(n);
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) next_rstd[i] = row + i < rows ? __ldg(p.rstd + row + i) : 0.0f;
  };
  load_rstd(0);
  Weight<Team> weight(p.weight, p.h, team.column, p.zero_centered);
  team.begin(between);
  float dw[Team::kOfRow][kColumns] = {};
  float waits[kLevels][Team::kOfRow][kColumns];  // the sums of 2^level chains, for their neighbours
  int stage = 0, line = 0, taken = 0;
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (Team::kDealt) {
      // The next run is asked for in a run's first step, told in its second, and known to all when its first copy begins.
      if (n == 0 && threadIdx.x == 0) {
        wait_for_kernel_before();
        taken = plan.blocks > gridDim.x ? atomicAdd(plan.dealt, 1) : 0;
      }
      if (n == 1 && threadIdx.x == 0) dealt = gridDim.x + taken;
      if (n == steps - OwnRing::kDepth) {
        next_run = dealt;
        next_own = next_run < plan.blocks ? row_of_run(plan.of<&Segment::block>(next_run), next_run, 0) : kNone;
      }
    }
    uint32_t row = own + n * Team::kRows;
    float rstd[Team::kRows];
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) rstd[i] = next_rstd[i];
    load_rstd(n + 1);
    copies_wait<OwnRing::kDepth - 1>();
    uint4 kept[kTensors][kVectors];
    auto take = [&](int tensor, int v, float (&f)[kColumns]) {
      unpack(kKept ? kept[tensor][v] : ring.at(stage, tensor, v), f);
    };
    if (first + n * Team::kRows < rows) {
      if (kKept) {
#pragma unroll
        for (int t = 0; t < kTensors; ++t)
#pragma unroll
          for (int v = 0; v < kVectors; ++v) kept[t][v] = ring.at(stage, t, v);
      }
      float products[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float dy[kColumns], x[kColumns], w[kColumns];
        take(0, v, dy);
        take(1, v, x);
        weight.get(v, w);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dy[i] = dy[i] * w[i] * x[i];
        products[v] = tree(dy);
      }
      if (kKept) copy(stage, n + OwnRing::kDepth);
      float of_held = rstd[0];
#pragma unroll
      for (int i = 1; i < Team::kRows; ++i) of_held = team.held == i ? rstd[i] : of_held;
      float sum = team.sum(products, between, line);
      float c = __fdiv_rn(sum, static_cast<float>(p.h)) * of_held * of_held;
      if (kKept) {  // likewise of what is kept
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (uint4& v : kept[t]) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
      } else {
        weight.forget_unpacked();
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t r = row + v / Team::kOfRow;
        int column = team.column + v % Team::kOfRow * kAcross;
        float of_row = team.of_row(c, v / Team::kOfRow), of_rstd = rstd[v / Team::kOfRow];
        float dy[kColumns], x[kColumns], w[kColumns], dx[kColumns];
        take(0, v, dy);
        take(1, v, x);
        weight.get(v, w);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          dx[i] = of_rstd * __fmaf_rn(-of_row, x[i], dy[i] * w[i]);
          float& sum_of = dw[v % Team::kOfRow][i];
          sum_of = __fmaf_rn(dy[i], x[i] * of_rstd, sum_of);
        }
        uint4 out = pack(dx);
        if (kTotal) {
          float other[kColumns];
          unpack(out, dx);
          take(2, v, other);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dx[i] += other[i];
          out = pack(dx);
        }
        if (r < rows && column < p.h)
          *reinterpret_cast<uint4*>(static_cast<bf16*>(p.dx) + int64_t{r} * p.h + column) = out;
      }
    }
    if (Team::kDealt && first + n * Team::kRows >= rows) __syncthreads();  // as where there are rows
    if (!kKept || first + n * Team::kRows >= rows) copy(stage, n + OwnRing::kDepth);
    stage ^= 1;
    if (n % kSteps != kSteps - 1) continue;
    // A chain is done. All but a run's last join those that wait, and wait themselves; the last joins all.
    const bool last = n == steps - 1;
    const int joins = last ? segment.level : __ffs(~(n / kSteps)) - 1;
#pragma unroll
    for (int i = 0; i < Team::kOfRow; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        dw[i][j] += 0.0f;
#pragma unroll
        for (int l = 0; l < kLevels; ++l) {
          if (l < joins) dw[i][j] = waits[l][i][j] + dw[i][j];
          if (l == joins) waits[l][i][j] = dw[i][j];
        }
      }
      const int column = team.column + i * kAcross;
      if (last && own < rows && column < p.h) {
        const uint32_t part = segment.run + (run - segment.block) * Team::kOfBlock + team.id;
        float4* at = reinterpret_cast<float4*>(plan.parts + int64_t{part} * p.h + column);
        __stcg(at, make_float4(dw[i][0], dw[i][1], dw[i][2], dw[i][3]));
        __stcg(at + 1, make_float4(dw[i][4], dw[i][5], dw[i][6], dw[i][7]));
      }
#pragma unroll
      for (float& f : dw[i]) f = 0.0f;
    }
    if (!last) continue;
    if (!Team::kDealt || next_own == kNone) return;
    run = next_run, own = first = next_own;
    segment = plan.of<&Segment::block>(run);
    steps = kSteps << segment.level;
    n = -1;
  }
}

// Nothing is dealt yet.
__global__ void rms_norm_grad_begin(int* dealt) {
  let_next_kernel_begin();
  *dealt = 0;
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// In the second kernel teams of 8 lanes take four columns a lane, so that a block has many teams. Where there are slices of columns
// for all multiprocessors, one block joins all runs of its columns, and no other block waits for sums of its.
constexpr int kJoinThreads = 512, kJoinWarps = kJoinThreads / 32, kJoinLanes = kSlice / 4;
constexpr int kJoinTeams = kJoinThreads / kJoinLanes;
constexpr int kJoinLevels = 6;  // a team joins at most 16 * 2^5 chains: of kMostRows rows there are 2^23, of kMostGroups groups
static_assert(int64_t{kMostRows} / kChain <= int64_t{kMostGroups} * kJoinTeams * (16 << (kJoinLevels - 1)));

// The balanced tree of kJoinTeams times `batches` times kOf leaves, in the first warp. fetch(batch, v) gets a batch's.
template <int kOf, class Fetch>
__device__ __forceinline__ float4 join_leaves(int batches, const Fetch& fetch, float4 (&shared)[kJoinWarps][kJoinLanes]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float4 sum, waits[kJoinLevels];
#pragma unroll 1
  for (int batch = 0; batch < batches; ++batch) {
    float4 v[kOf];
    fetch(threadIdx.x / kJoinLanes * batches + batch, v);
#pragma unroll
    for (int apart = 1; apart < kOf; apart *= 2)
#pragma unroll
      for (int i = 0; i < kOf; i += 2 * apart) v[i] = add(v[i], v[i + apart]);
    sum = v[0];
    int l = 0;
#pragma unroll 1
    for (; batch >> l & 1; ++l) sum = add(waits[l], sum);
    if (batches > 1) waits[l] = sum;
  }
  auto join_teams = [&] {
#pragma unroll
    for (int apart = kJoinLanes; apart < 32; apart *= 2)
      sum = add(sum, make_float4(__shfl_xor_sync(~0u, sum.x, apart), __shfl_xor_sync(~0u, sum.y, apart),
                                 __shfl_xor_sync(~0u, sum.z, apart), __shfl_xor_sync(~0u, sum.w, apart)));
  };
  join_teams();
  if (lane < kJoinLanes) shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0) {
    constexpr int each = kJoinWarps / (32 / kJoinLanes);
    float4 v[each];
#pragma unroll
    for (int i = 0; i < each; ++i) v[i] = shared[lane / kJoinLanes * each + i][lane % kJoinLanes];
#pragma unroll
    for (int apart = 1; apart < each; apart *= 2)
#pragma unroll
      for (int i = 0; i < each; i += 2 * apart) v[i] = add(v[i], v[i + apart]);
    sum = v[0];
    join_teams();
  }
  __syncthreads();
  return sum;
}

// The sums of runs to dweight. Of the blocks of a slice of columns, the last to be done joins what all have.
__global__ void __launch_bounds__(kJoinThreads, 1)
    rms_norm_join(const __grid_constant__ Plan plan, int h, void* dweight, int rounded) {
  __shared__ float4 shared[kJoinWarps][kJoinLanes];
  __shared__ bool last;
  int column = blockIdx.x * kSlice + threadIdx.x % kJoinLanes * 4, batches = plan.each / 16;
  wait_for_kernel_before();
  // Of a run, the first chain has the sum and the others are zero, which changes nothing.
  auto of_chains = [&](int batch, float4 (&v)[16]) {
    uint32_t chain = (blockIdx.y * kJoinTeams * batches + batch) * 16;
    const Segment segment = plan.of<&Segment::chain>(chain);
    const uint32_t inside = (1u << segment.level) - 1;
    const float4* at = reinterpret_cast<const float4*>(
        plan.parts + int64_t{segment.run + ((chain - segment.chain) >> segment.level)} * h + column);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = float4();
      if (!(i & inside) && chain + i < plan.chains && column < h) {
        v[i] = __ldcg(at);
        at += h / 4;
      }
    }
  };
  float4 sum = join_leaves<16>(batches, of_chains, shared);
  if (gridDim.y > 1) {
    if (threadIdx.x < 32) {
      if (threadIdx.x < kJoinLanes && column < h)
        __stcg(reinterpret_cast<float4*>(plan.joined + int64_t{blockIdx.y} * h + column), sum);
      __threadfence();
      __syncwarp();
      if (threadIdx.x == 0) last = atomicAdd(plan.arrived + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    constexpr int some = kMostGroups / kJoinTeams;
    auto of_groups = [&](int batch, float4 (&v)[some]) {
#pragma unroll
      for (int i = 0; i < some; ++i) {
        uint32_t group = batch * some + i;
        v[i] = group < gridDim.y && column < h
                   ? __ldcg(reinterpret_cast<const float4*>(plan.joined + int64_t{group} * h + column))
                   : float4();
      }
    };
    sum = join_leaves<some>(1, of_groups, shared);
  }
  if (threadIdx.x >= kJoinLanes || column >= h) return;
  if (rounded) {
    bf16* to = static_cast<bf16*>(dweight) + column;
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(dweight) + column) = sum;
  }
}

// Host.

// The device's multiprocessors, and how many blocks of `threads` threads of a kernel one holds at a time.
struct Room {
  uint32_t processors, blocks;
};

template <auto kKernel>
cudaError_t room_of(int threads, int bytes, Room* room) {
  static thread_local int prepared = -1;
  static thread_local Room kept[kMostWarps + 1];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared))
      return e;
    std::fill(kept, kept + kMostWarps + 1, Room());
    prepared = device;
  }
  Room& found = kept[threads / 32];
  if (!found.blocks) {
    int blocks, processors;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kKernel, threads, bytes)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
    if (!blocks) return cudaErrorInvalidConfiguration;
    found = {static_cast<uint32_t>(processors), static_cast<uint32_t>(blocks)};
  }
  *room = found;
  return cudaSuccess;
}

uint32_t up(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

// Whether there are kernels for rows of h columns, of which there must be more than `above`.
bool fits(int h, int rows, int above) {
  return h > above && h % kColumns == 0 && h <= kMostColumns && rows > 0 && rows <= kMostRows;
}

cudaError_t launch_norm(const AlignkitNorm& p, cudaStream_t stream) {
  if (!fits(p.h, p.rows, kVectors * kAcross)) return cudaErrorInvalidValue;
  rms_norm<<<p.rows, 32 * up(p.h, kVectors * kAcross), 0, stream>>>(p, Divisor(p.heads));
  return cudaGetLastError();
}

// Runs of 2^most chains, of teams of which a block has `of_block`: all, or else whole waves of them, of 9 in 10 chains, then
// likewise shorter ones of what is left, so that multiprocessors are done at much the same time. Each length's chains but the
// last's are a multiple of the 16 that the second kernel reads at once.
Plan plan_of(uint32_t chains, uint32_t of_block, uint32_t slots, int most, bool alike) {
  Plan plan = {};
  plan.chains = chains;
  uint32_t run = 0, chain = 0;
  for (int level = most; chain < chains; --level) {
    uint32_t of = of_block << level, rest = chains - chain, blocks = up(rest, of);
    if (level > 0 && !alike) {
      blocks = 9 * rest / (10 * of * slots) * slots;
      while (blocks * of % 16) --blocks;
    }
    if (!blocks) continue;
    plan.segments[plan.count++] = {plan.blocks, run, chain, static_cast<uint32_t>(level)};
    plan.blocks += blocks, run += blocks * of_block, chain += blocks * of;
  }
  return plan;
}

template <class Team, bool kTotal, int kLevels, int kRegisters, bool kKept = false>
cudaError_t launch_grad(const AlignkitNormGrad& p, cudaStream_t stream) {
  constexpr auto kernel = rms_norm_grad<Team, kTotal, kLevels, kRegisters, kKept>;
  int threads = Team::threads(p.h), bytes = threads * BackwardRing<kTotal>::kBytes, most = kLevels;
  uint32_t chains = up(p.rows, kChain), slices = up(p.h, kSlice);
  Room room;
  if (cudaError_t e = room_of<kernel>(threads, bytes, &room)) return e;
  while (p.chains && 1 << most > std::abs(p.chains)) --most;
  const uint32_t held = room.blocks * room.processors, slots = p.chains < 0 ? 1 : held;
  uint32_t blocks = up(chains, Team::kOfBlock << most), waves = up(blocks, slots);
  // Measured: where the last of several waves is all but full, short runs gain nothing, unless threads have one vector.
  bool alike = p.chains ? p.chains > 0 : Team::kOfRow > 1 && waves > 3 && 16 * blocks >= 15 * waves * slots;
  Plan plan = plan_of(chains, Team::kOfBlock, slots, most, alike);
  auto groups = [&] { return up(chains, plan.each * kJoinTeams); };
  plan.each = 16;
  while (groups() > 1 && groups() * slices > room.processors && plan.each < 16 << (kJoinLevels - 1)) plan.each *= 2;
  plan.groups = groups();
  plan.parts = p.workspace;
  plan.joined = plan.parts + int64_t{chains} * p.h;
  plan.arrived = reinterpret_cast<int*>(plan.joined + int64_t{plan.groups} * p.h);
  plan.dealt = plan.arrived + slices;
  uint32_t blocks_at_once = Team::kDealt ? std::min(plan.blocks, held) : plan.blocks;
  if (blocks_at_once < plan.blocks) {
    rms_norm_grad_begin<<<1, 1, 0, stream>>>(plan.dealt);
    if (cudaError_t e = cudaGetLastError()) return e;
    if (cudaError_t e = launch_early(kernel, dim3(blocks_at_once), threads, bytes, stream, p, plan, Divisor(p.heads))) return e;
  } else {
    kernel<<<plan.blocks, threads, bytes, stream>>>(p, plan, Divisor(p.heads));
    if (cudaError_t e = cudaGetLastError()) return e;
  }
  return launch_early(rms_norm_join, dim3(slices, plan.groups), kJoinThreads, 0, stream, plan, p.h, p.dweight,
                      p.rounded);
}

// A multiprocessor has registers for 16 warps with 128 of them, for 20 with 96, for 24 with 80; kMostBytes are the copies of 24
// warps without d_total and of 16 with it. With one vector of a row a thread has the fewest sums of dweight: so a step can be
// kept, or more warps fit, in several blocks up to 3072 columns. From there it is one block, which waits less if it keeps steps.
// Rows for which it has too few warps take two vectors a thread, and those of more than 8192 four, which leaves no choice.
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

// The functions return a cudaError_t. H is a multiple of 8, more than 32, forward 1024, and at most 16384; there are from 1 to
// 2^27 rows. All tensors but rstd lie at multiples of 16 bytes, strides are multiples of 8.

extern "C" int alignkit_rms_norm(const AlignkitNorm* p, cudaStream_t stream) {
  using namespace alignkit;
  return launch_norm(*p, stream);
}

// The workspace: h floats for each 16 rows, for each 16384, for each 32 of h one, and one.
extern "C" int alignkit_rms_norm_grad(const AlignkitNormGrad* p, cudaStream_t stream) {
  using namespace alignkit;
  if (!fits(p->h, p->rows, 32)) return cudaErrorInvalidValue;
  return p->d_total ? launch_grad<true>(*p, stream) : launch_grad<false>(*p, stream);
}
