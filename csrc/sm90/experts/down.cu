// Rows in the order of experts, each by its expert's matrix: a chain over ascending k, or the balanced tree of 2, 4 or 8 chains
// over leaves of k.
//
// A block takes 128 rows by 128 columns. One warp copies operands to shared memory, through the ends of leaves and tiles without a
// pause, and shares them with the other blocks of its cluster; two groups of four warps multiply 64 rows each. A leaf may end wherever
// 16 of k do. What has been multiplied is added, rounded and stored while the next leaf is multiplied: of a thread's sums, registers
// hold those of that leaf, of the one before, and of one or two that wait for as many more; shared memory those of two or four.
#include "experts.cuh"

namespace alignkit {
namespace {

constexpr int kDownColumns = 128;
constexpr int kSums = kDownColumns / 2;  // of a thread
constexpr int kDepth = 4;                // stages
constexpr int kSlices = kStep / 16;      // of a stage
constexpr int kTall = 2, kWide = 2;      // a cluster's blocks
using DownTurns = Turns<kTall, kWide>;
constexpr int kPart = kRows / DownTurns::kBlocks, kPartOfB = kDownColumns / kTall;  // rows of an operand that are copied at a time

struct DownStage {
  __nv_bfloat16 a[kRows * kStep];
  __nv_bfloat16 b[kDownColumns * kStep];
};

constexpr int kDownBytes = sizeof(DownStage);

struct DownShared {
  DownStage stage[kDepth];
  float four[2][kSums * 128];  // of the threads of a group
  Rows rows;
  uint64_t full[kDepth], empty[kDepth];
};

struct Down {
  void* out;
  int64_t pitch;
  bool round;
  int columns, k, leaf;
  Matrices weights;
  Experts experts;
};

__device__ __forceinline__ void copy_down(DownShared& sh, const CUtensorMap* a, const CUtensorMap* all, const Down& p) {
  int stage = 0, phase = 0;
  DownTurns::Tile t;
  for (DownTurns turns(sh.rows, p.experts); turns.next(t);) {
    const CUtensorMap* map = p.weights.map(all, t.expert);
    int column = p.weights.first_row(t.expert) + t.column * kDownColumns, tall = turns.rank / kWide, wide = turns.rank % kWide;
    // Blocks with the same rows, and those with the same columns.
    uint16_t beside = (1 << kWide) - 1 << tall * kWide, below = 0;
    for (int i = 0; i < kTall; ++i) below |= 1 << (i * kWide + wide);
#pragma unroll 1
    for (int k = 0; k < p.k; k += kStep, step<kDepth>(stage, phase)) {
      barrier_wait(&sh.empty[stage], phase ^ 1);
      barrier_expect(&sh.full[stage], kDownBytes);
      __nv_bfloat16 *to_a = sh.stage[stage].a, *to_b = sh.stage[stage].b;
      uint64_t* full = &sh.full[stage];
      // Of rows of the next expert nothing is stored.
      if (t.flat) {
        int part = turns.rank * kPart;
        copy_box_to((1 << DownTurns::kBlocks) - 1, to_a + part * kStep, a, k, t.row + part, full);
        for (int part = 0; part < kDownColumns; part += kPartOfB) copy_box(to_b + part * kStep, map, k, column + part, full);
      } else {
        for (int i = 0; i < kTall; ++i) {
          int part = (wide * kTall + i) * kPart;
          copy_box_to(beside, to_a + part * kStep, a, k, t.row + part, full);
        }
        int part = tall * kPartOfB;
        copy_box_to(below, to_b + part * kStep, map, k, column + part, full);
      }
    }
  }
}

// Where a group of warps is in the ring of stages.
struct Reader {
  DownShared& sh;
  uint64_t a, b;  // operands of the next 16 of k
  int stage = 0, phase = 0, slice = 0;
  int before = -1;     // a stage of which products may still be under way
  bool first = false;  // the other group waits for products to have begun

  __device__ Reader(DownShared& sh, int group)
      : sh(sh), a(operand<false>(sh.stage[0].a + group * kGroupRows * kStep)), b(operand<false>(sh.stage[0].b)) {}

  // Of this block and the others.
  __device__ void free(int which) {
    if (threadIdx.x % 32 < DownTurns::kBlocks) barrier_arrive(&sh.empty[which], threadIdx.x % 32);
  }

  // Begins a chain over the next `slices` of 16.
  __device__ void chain(float (&sums)[kSums], int slices) {
    slices -= run<true>(sums, slices);
#pragma unroll 1
    while (slices > 0) slices -= run<false>(sums, slices);
  }

  // Waits for the chains that have begun.
  __device__ void wait() {
    products_wait<0>();
    free_before();
  }

  __device__ void free_before() {
    if (before >= 0) free(before);
    before = -1;
  }

  // The next 16 of k, and as many more as there are in this stage; returns how many. They follow each other without a pause.
  template <bool kFirst>
  __device__ int run(float (&sums)[kSums], int slices) {
    if (slice == 0) barrier_wait(&sh.full[stage], phase);
    int some = min(kSlices - slice, slices);
    products_begin();
    switch (some) {
      case 4: multiply_slices<kFirst, 4>(sums); break;
      case 3: multiply_slices<kFirst, 3>(sums); break;
      case 2: multiply_slices<kFirst, 2>(sums); break;
      default: multiply_slices<kFirst, 1>(sums);
    }
    if (first) named_barrier_arrive(1, 256);
    first = false;
    slice += some;
    a += some * kNext<false>;
    b += some * kNext<false>;
    products_wait<1>();  // all but these
    free_before();
    if (slice == kSlices) {
      before = stage;
      next_stage();
    }
    return some;
  }

  template <bool kFirst, int kCount>
  __device__ void multiply_slices(float (&sums)[kSums]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (kFirst && j == 0)
        begin<false, false>(sums, a, b);
      else
        multiply<false, false>(sums, a + j * kNext<false>, b + j * kNext<false>, true);
    }
    products_end();
  }

  // The rest of the last stage of a tile has nothing.
  __device__ void end() {
    if (slice == 0) return;
    free(stage);
    next_stage();
  }

  __device__ void next_stage() {
    constexpr int size = kDownBytes >> 4;
    int past = slice * kNext<false>;
    a += size - past;
    b += size - past;
    slice = 0;
    step<kDepth>(stage, phase);
    if (stage == 0) {
      a -= kDepth * size;
      b -= kDepth * size;
    }
  }
};

__device__ __forceinline__ void add(float (&to)[kSums], const float (&other)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) to[i] = to[i] + other[i];
}

// The balanced tree over the next kLeaves leaves.
template <int kLeaves>
struct Tree {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], int slices, float* four) {
    Tree<kLeaves / 2>::sum(reader, sums, slices, four);
    float right[kSums];
    Tree<kLeaves / 2>::sum(reader, right, slices, four);
    add(sums, right);
  }
};

template <>
struct Tree<1> {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], int slices, float*) {
    reader.chain(sums, slices);
    reader.wait();
    products_taken(sums);
  }
};

// Two chains follow each other without a pause.
template <>
struct Tree<2> {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], int slices, float*) {
    float right[kSums];
    reader.chain(sums, slices);
    reader.chain(right, slices);
    reader.wait();
    products_taken(sums);
    products_taken(right);
    add(sums, right);
  }
};

template <>
struct Tree<8> {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], int slices, float* four) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) four[i * 128] = sums[i];
      }
      Tree<4>::sum(reader, sums, slices, four);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = four[i * 128] + sums[i];
  }
};

template <int kLeaves>
__device__ __forceinline__ void multiply_down(DownShared& sh, const Down& p) {
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), slices = (p.leaf + 15) / 16;
  float* four = sh.four[group] + threadIdx.x % 128;
  Reader reader(sh, group);
  bool first = true;
  DownTurns::Tile t;
  for (DownTurns turns(sh.rows, p.experts); turns.next(t);) {
    float sums[kSums];
    // The second group stays behind, so that the two do not wait for their last products together.
    if (first && group == 1) named_barrier_sync(1, 256);
    reader.first = first && group == 0;
    first = false;
    Tree<kLeaves>::sum(reader, sums, slices, four);
    reader.end();
    int column = t.column * kDownColumns;
    Place place(t.end, t.row + group * kGroupRows, column);
    if (p.round) {
      store_rows(sums, place, static_cast<__nv_bfloat16*>(p.out), p.pitch, p.columns, column);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      int h = i / 2 % 2, j = place.column + i / 4 * 8;
      if (place.here[h] && j < p.columns)
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + (place.row + 8 * h) * p.pitch + j) =
            make_float2(sums[i], sums[i + 1]);
    }
  }
}

template <int kLeaves>
__global__ void __cluster_dims__(DownTurns::kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    down(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap weights, const Down p) {
  extern __shared__ uint8_t raw[];
  DownShared& sh = begin_block<DownShared, 8, DownTurns::kBlocks>(
      raw, p.experts, 1, [&](int rows) { return DownTurns::of(rows, p.experts.across); });
  if (threadIdx.x / 128 == 2) {
    registers_down<40>();
    if (threadIdx.x == 2 * 128) copy_down(sh, &a, &weights, p);
  } else {
    registers_up<232>();
    multiply_down<kLeaves>(sh, p);
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while another block may still write here
}

template <int kLeaves>
cudaError_t launch_down(const CUtensorMap& a, const CUtensorMap& weights, const Down& p, int pairs,
                        cudaStream_t stream) {
  constexpr auto kernel = down<kLeaves>;
  constexpr int bytes = sizeof(DownShared) + 1024;
  int clusters;
  if (cudaError_t e = prepare<kernel>(bytes, DownTurns::kBlocks, &clusters)) return e;
  return launch_early(kernel, blocks_of<DownTurns>(pairs, p.experts, clusters), kThreads, bytes, stream, a, weights, p);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [pairs, n], bf16 if `round`, else fp32, = a [pairs, k] by the matrices [n, k] of the rows' experts, which lie as those of
// alignkit_experts_gate_up. 1, 2, 4 or 8 leaves. Returns a cudaError_t.
extern "C" int alignkit_experts_down(const void* a, int64_t a_pitch, const void* weights, int64_t pitch,
                                     const void* each, const int64_t* offsets, int experts, void* out, int64_t out_pitch,
                                     int round, int pairs, int n, int k, int leaves, cudaStream_t stream) {
  if (experts > kMostExperts) return cudaErrorInvalidValue;
  CUtensorMap maps[2] = {};
  if (cudaError_t e = map_of(&maps[0], {a, a_pitch}, Layout::kPlain, pairs, k, kPart)) return e;
  if (!each)
    if (cudaError_t e = map_of(&maps[1], {weights, pitch}, Layout::kPlain, static_cast<int64_t>(experts) * n, k, kPartOfB)) return e;
  Down p = {out,
            out_pitch,
            round != 0,
            n,
            k,
            leaves > 1 ? k / leaves : k,
            {static_cast<const CUtensorMap*>(each), n},
            {offsets, experts, (n + kDownColumns - 1) / kDownColumns}};
  switch (leaves) {
    case 1: return launch_down<1>(maps[0], maps[1], p, pairs, stream);
    case 2: return launch_down<2>(maps[0], maps[1], p, pairs, stream);
    case 4: return launch_down<4>(maps[0], maps[1], p, pairs, stream);
    case 8: return launch_down<8>(maps[0], maps[1], p, pairs, stream);
    default: return cudaErrorInvalidValue;
  }
}

// The map of a matrix [n, k], 128 bytes, for `each`.
extern "C" int alignkit_experts_down_map(void* map, const void* matrix, int64_t pitch, int rows, int k) {
  return write_map(map, {matrix, pitch}, rows, k, kPartOfB);
}
