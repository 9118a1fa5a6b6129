// RMSNorm of long bf16 rows and the gradients of RMSNorm, at the speed of memory: alignkit/ops/rms_norm/cuda.py.
//
// A thread takes four vectors of 16 bytes of each tensor at a time. They lie in one row or in up to four, which are the rows
// of a step; a team of 8 to 32 lanes, or of all warps of a block, shares them. Lane, vector and warp are the bits of a
// vector's place in its row, lowest first: the balanced tree goes over a vector, then lanes, then vectors, then warps. A pair
// has one sum, so which of its two threads adds cannot change a bit.
//
// Backward, a thread waits only for copies of its own: it keeps a ring of steps in shared memory, of which all but one are on
// their way.
#include <algorithm>

#include "tensors.cuh"

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
  int chains;   // of a run, at most; 0: as is best
};

namespace alignkit {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kVectors = 4;             // of a thread, of a tensor, of a step
constexpr int kColumns = 8;             // of a vector
constexpr int kAcross = 32 * kColumns;  // columns of a warp's vectors that are read at once
constexpr int kBlock = 128;             // threads of a block, unless it is one team
constexpr int kMostThreads = 512;
constexpr int kChain = 16;              // rows of a chain of dweight
constexpr int kMostRows = 1 << 27;

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

// Who takes what. Rows of kOfRow vectors a lane; kWarps: the block is one team, else teams are of kLanes lanes.
template <int kLanes_, int kOfRow_, bool kWarps_>
struct Team {
  static constexpr int kLanes = kLanes_, kOfRow = kOfRow_, kRows = kVectors / kOfRow;
  static constexpr bool kWarps = kWarps_;
  static constexpr int kOfBlock = kWarps ? 1 : kBlock / kLanes;

  uint32_t id, first;  // the team; the first team of this warp
  int column;          // of the thread's first vector
  int held;            // the row of a step whose sum `sum` leaves in this lane

  __device__ __forceinline__ Team() {
    int lane = threadIdx.x % 32;
    first = blockIdx.x * kOfBlock + (kWarps ? 0 : threadIdx.x / 32 * (32 / kLanes));
    id = first + (kWarps ? 0 : lane / kLanes);
    column = lane % kLanes * kColumns + (kWarps ? threadIdx.x / 32 * (kVectors * kAcross) : 0);
    held = (lane % 2 * 2 + lane / 2 % 2) / kOfRow;
  }

  // The value of a lane that holds row n.
  __device__ __forceinline__ float of_row(float value, int n) const {
    int q = n * kOfRow;
    return kRows == 1 ? value : __shfl_sync(~0u, value, q / 2 + q % 2 * 2, kLanes);
  }

  // The sum over a row of the vectors' sums. `between`: two lines for what warps have; `line` says which is free.
  __device__ __forceinline__ float sum(const float (&of)[kVectors], float (*between)[32], int& line) const {
    int lane = threadIdx.x % 32;
    float s = sum_of_lanes<kLanes, kOfRow>(of);
    if (!kWarps) return s;
    int warps = blockDim.x / 32;
    if (lane == 0) between[line][threadIdx.x / 32] = s;
    __syncthreads();
    int leaves = padded(warps), warp = lane % leaves;
    s = warp < warps ? between[line][warp] : 0.0f;
    for (int bit = 1; bit < leaves; bit *= 2) s += __shfl_xor_sync(~0u, s, bit);
    line ^= 1;
    return s;
  }
};

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

__global__ void __launch_bounds__(kMostThreads, 2)
    rms_norm(const __grid_constant__ AlignkitNorm p, const Divisor heads) {
  __shared__ float between[32];
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

// Backward: a team takes one run of kChains chains, 1, 2 or 4, and joins their sums, each thread those of its columns. The
// sums of runs are joined by a second kernel. A zero is added to a chain's sum, which makes a negative zero a positive one: so
// sums of absent rows and chains, which are zero, can be added or left out.

struct Sums {
  uint32_t runs;
  int group;      // runs that a block of the second kernel joins
  float* parts;   // the sums of runs
  float* joined;  // of groups of runs
  int* arrived;   // blocks of the second kernel, for each of its slices of columns

  __host__ __device__ uint32_t groups() const { return (runs + group - 1) / group; }
};

constexpr int kSlice = 128;  // columns of a block of the second kernel
constexpr int kMostGroups = 256;

template <bool kTotal>
using BackwardRing = Ring<2 + kTotal, 2>;

// Registers of a thread: as few as hold its columns' weight and sums, so that a multiprocessor has 16 to 24 warps.
template <class Team, int kChains>
constexpr int kRegisters = Team::kOfRow == 1 ? 80 : Team::kOfRow * kChains < 8 ? 96 : 128;

template <class Team, bool kTotal, int kChains>
__global__ void __maxnreg__((kRegisters<Team, kChains>))
    rms_norm_grad(const __grid_constant__ AlignkitNormGrad p, const __grid_constant__ Sums sums, const Divisor heads) {
  using OwnRing = BackwardRing<kTotal>;
  constexpr int kSteps = kChain / Team::kRows;  // of a chain
  extern __shared__ uint4 shared[];
  __shared__ float between[2][32];
  let_next_kernel_begin();
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i * kSlice < p.h; i += blockDim.x) sums.arrived[i] = 0;
  Team team;
  OwnRing ring(shared);
  uint32_t rows = p.rows;
  // Of the team `id`, the first row of step n. A warp's first team has the first rows.
  auto row_of_step = [](uint32_t id, int n) { return id * (kChains * kChain) + n * Team::kRows; };
  auto copy = [&](int stage, int n) {
    if (n < kChains * kSteps && row_of_step(team.first, n) < rows) {
      uint32_t row = row_of_step(team.id, n);
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
    uint32_t row = row_of_step(team.id, n);
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) next_rstd[i] = row + i < rows ? __ldg(p.rstd + row + i) : 0.0f;
  };
  load_rstd(0);
  Weight<Team> weight(p.weight, p.h, team.column, p.zero_centered);
  float dw[Team::kOfRow][kColumns] = {};
  float waits[2][Team::kOfRow][kColumns];  // for their neighbours: a chain, and two of four
  int stage = 0, line = 0;
#pragma unroll 1
  for (int n = 0; n < kChains * kSteps; ++n) {
    uint32_t row = row_of_step(team.id, n);
    float rstd[Team::kRows];
#pragma unroll
    for (int i = 0; i < Team::kRows; ++i) rstd[i] = next_rstd[i];
    load_rstd(n + 1);
    copies_wait<OwnRing::kDepth - 1>();
    if (row_of_step(team.first, n) < rows) {
      float products[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float dy[kColumns], x[kColumns], w[kColumns];
        unpack(ring.at(stage, 0, v), dy);
        unpack(ring.at(stage, 1, v), x);
        weight.get(v, w);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dy[i] = dy[i] * w[i] * x[i];
        products[v] = tree(dy);
      }
      float of_held = rstd[0];
#pragma unroll
      for (int i = 1; i < Team::kRows; ++i) of_held = team.held == i ? rstd[i] : of_held;
      float sum = team.sum(products, between, line);
      float c = __fdiv_rn(sum, static_cast<float>(p.h)) * of_held * of_held;
      if (Team::kOfRow == 4) weight.forget_unpacked();
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        uint32_t r = row + v / Team::kOfRow;
        int column = team.column + v % Team::kOfRow * kAcross;
        float of_row = team.of_row(c, v / Team::kOfRow), of_rstd = rstd[v / Team::kOfRow];
        float dy[kColumns], x[kColumns], w[kColumns], dx[kColumns];
        unpack(ring.at(stage, 0, v), dy);
        unpack(ring.at(stage, 1, v), x);
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
          unpack(ring.at(stage, 2, v), other);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dx[i] += other[i];
          out = pack(dx);
        }
        if (r < rows && column < p.h)
          *reinterpret_cast<uint4*>(static_cast<bf16*>(p.dx) + int64_t{r} * p.h + column) = out;
      }
    }
    copy(stage, n + OwnRing::kDepth);
    stage ^= 1;
    if (n % kSteps != kSteps - 1 || n == kChains * kSteps - 1) continue;
    // A chain but the last is done, and waits; the second of four joins the first.
#pragma unroll
    for (int i = 0; i < Team::kOfRow; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float done = dw[i][j] + 0.0f;
        if (kChains == 4 && n / kSteps == 1) waits[1][i][j] = waits[0][i][j] + done;
        else waits[0][i][j] = done;
        dw[i][j] = 0.0f;
      }
  }
#pragma unroll
  for (int i = 0; i < Team::kOfRow; ++i) {
    int column = team.column + i * kAcross;
    if (team.id >= sums.runs || column >= p.h) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      dw[i][j] += 0.0f;
      if (kChains >= 2) dw[i][j] = waits[0][i][j] + dw[i][j];
      if (kChains == 4) dw[i][j] = waits[1][i][j] + dw[i][j];
    }
    float4* at = reinterpret_cast<float4*>(sums.parts + int64_t{team.id} * p.h + column);
    __stcg(at, make_float4(dw[i][0], dw[i][1], dw[i][2], dw[i][3]));
    __stcg(at + 1, make_float4(dw[i][4], dw[i][5], dw[i][6], dw[i][7]));
  }
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

constexpr int kJoinWarps = 8;
constexpr int kJoinLevels = 9;  // a warp joins at most 8 * 2^9 runs: of kMostRows rows there are 2^23

// The balanced tree of rows [first, first + kJoinWarps * each) of parts [runs, h], in the first warp; `each` is a power of
// two, at least 8. Rows beyond `runs` are zero. All threads of the block call it.
__device__ __forceinline__ float4 join_rows(const float* parts, uint32_t runs, int h, int column, uint32_t first, int each,
                                            float4 (&shared)[kJoinWarps][32]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  first += warp * each;
  float4 sum, waits[kJoinLevels];
  for (int batch = 0; batch < each / 8; ++batch) {
    float4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t run = first + batch * 8 + i;
      v[i] = run < runs && column < h ? __ldcg(reinterpret_cast<const float4*>(parts + int64_t{run} * h + column))
                                      : float4();
    }
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2)
#pragma unroll
      for (int i = 0; i < 8; i += 2 * apart) v[i] = add(v[i], v[i + apart]);
    sum = v[0];
    bool waiting = false;
#pragma unroll
    for (int l = 0; l < kJoinLevels; ++l) {
      if (waiting) continue;
      if (batch >> l & 1) {
        sum = add(waits[l], sum);
      } else {
        waits[l] = sum;
        waiting = true;
      }
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp == 0) {
    float4 v[kJoinWarps];
#pragma unroll
    for (int i = 0; i < kJoinWarps; ++i) v[i] = shared[i][lane];
#pragma unroll
    for (int apart = 1; apart < kJoinWarps; apart *= 2)
#pragma unroll
      for (int i = 0; i < kJoinWarps; i += 2 * apart) v[i] = add(v[i], v[i + apart]);
    sum = v[0];
  }
  __syncthreads();
  return sum;
}

// The sums of runs to dweight. Of the blocks of a slice of columns, the last to be done joins what all have.
__global__ void __launch_bounds__(kJoinWarps * 32)
    rms_norm_join(const __grid_constant__ Sums sums, int h, void* dweight, int rounded) {
  __shared__ float4 shared[kJoinWarps][32];
  __shared__ bool last;
  wait_for_kernel_before();
  int column = blockIdx.x * kSlice + threadIdx.x % 32 * 4;
  float4 sum = join_rows(sums.parts, sums.runs, h, column, blockIdx.y * sums.group, sums.group / kJoinWarps, shared);
  if (gridDim.y > 1) {
    if (threadIdx.x < 32) {
      if (column < h) __stcg(reinterpret_cast<float4*>(sums.joined + int64_t{blockIdx.y} * h + column), sum);
      __threadfence();
      __syncwarp();
      if (threadIdx.x == 0) last = atomicAdd(sums.arrived + blockIdx.x, 1) == static_cast<int>(gridDim.y) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = join_rows(sums.joined, gridDim.y, h, column, 0, kMostGroups / kJoinWarps, shared);
  }
  if (threadIdx.x >= 32 || column >= h) return;
  if (rounded) {
    bf16* to = static_cast<bf16*>(dweight) + column;
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(dweight) + column) = sum;
  }
}

// Host.

// Blocks of `threads` threads of a kernel that the device holds at a time.
template <auto kKernel>
cudaError_t held(int threads, int bytes, int* blocks) {
  static thread_local int prepared = -1, kept[kMostThreads / 32 + 1];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             bytes / threads * kMostThreads))
      return e;
    if (cudaError_t e = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared))
      return e;
    std::fill(kept, kept + kMostThreads / 32 + 1, 0);
    prepared = device;
  }
  int& found = kept[threads / 32];
  if (!found) {
    int each, processors;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kKernel, threads, bytes)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return e;
    found = each * processors;
  }
  *blocks = found;
  return cudaSuccess;
}

uint32_t up(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

template <class Team>
int threads_of(int h) {
  return Team::kWarps ? 32 * up(h, kVectors * kAcross) : kBlock;
}

// Whether there are kernels for rows of h columns, of which there must be more than `above`.
bool fits(int h, int rows, int above) {
  return h > above && h % kColumns == 0 && h <= kMostThreads / 32 * kVectors * kAcross && rows > 0 && rows <= kMostRows;
}

// Calls `function` with the team for rows of h columns.
template <class Function>
cudaError_t with_team(int h, int rows, const Function& function) {
  if (!fits(h, rows, 32)) return cudaErrorInvalidValue;
  if (h <= 64) return function(Team<8, 1, false>());
  if (h <= 128) return function(Team<16, 1, false>());
  if (h <= 256) return function(Team<32, 1, false>());
  if (h <= 512) return function(Team<32, 2, false>());
  if (h <= 1024) return function(Team<32, 4, false>());
  return function(Team<32, 4, true>());
}

cudaError_t launch_norm(const AlignkitNorm& p, cudaStream_t stream) {
  if (!fits(p.h, p.rows, kVectors * kAcross)) return cudaErrorInvalidValue;
  rms_norm<<<p.rows, 32 * up(p.h, kVectors * kAcross), 0, stream>>>(p, Divisor(p.heads));
  return cudaGetLastError();
}

// Longer runs have fewer sums to join; but where a multiprocessor has few blocks one after the other, more of it is idle while
// the last are done.
template <class Team, bool kTotal, int kChains = Team::kOfRow == 4 ? 2 : 4>
cudaError_t launch_grad(const AlignkitNormGrad& p, cudaStream_t stream) {
  constexpr auto kernel = rms_norm_grad<Team, kTotal, kChains>;
  int threads = threads_of<Team>(p.h), bytes = threads * BackwardRing<kTotal>::kBytes, most;
  if (cudaError_t e = held<kernel>(threads, bytes, &most)) return e;
  Sums sums;
  sums.runs = up(p.rows, kChains * kChain);
  uint32_t blocks = up(sums.runs, Team::kOfBlock);
  if constexpr (kChains > 1)
    if (p.chains ? kChains > p.chains : blocks < 3u * most) return launch_grad<Team, kTotal, kChains / 2>(p, stream);
  sums.group = 8 * kJoinWarps;
  while (sums.groups() > kMostGroups) sums.group *= 2;
  sums.parts = p.workspace;
  sums.joined = sums.parts + int64_t{sums.runs} * p.h;
  sums.arrived = reinterpret_cast<int*>(sums.joined + int64_t{sums.groups()} * p.h);
  kernel<<<blocks, threads, bytes, stream>>>(p, sums, Divisor(p.heads));
  if (cudaError_t e = cudaGetLastError()) return e;
  return launch_early(rms_norm_join, dim3(up(p.h, kSlice), sums.groups()), kJoinWarps * 32, 0, stream, sums, p.h, p.dweight,
                      p.rounded);
}

}  // namespace
}  // namespace alignkit

// The functions return a cudaError_t. H is a multiple of 8, more than 32, forward 1024, and at most 16384; there are from 1 to
// 2^27 rows. All tensors but rstd lie at multiples of 16 bytes, strides are multiples of 8.

extern "C" int alignkit_rms_norm(const AlignkitNorm* p, cudaStream_t stream) {
  using namespace alignkit;
  return launch_norm(*p, stream);
}

// The workspace: h floats for each 16 rows, for each 1024, and for each 128 of h one.
extern "C" int alignkit_rms_norm_grad(const AlignkitNormGrad* p, cudaStream_t stream) {
  using namespace alignkit;
  return with_team(p->h, p->rows, [&](auto team) {
    using Team = decltype(team);
    return p->d_total ? launch_grad<Team, true>(*p, stream) : launch_grad<Team, false>(*p, stream);
  });
}
