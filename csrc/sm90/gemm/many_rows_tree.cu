// out [m, n] = a [m, k] . b [n, k]^T for many rows, each output a k-tree: 1, 2, 4 or 8 leaves, chains over equal parts of k, joined
// by the balanced tree.
//
// A cluster of two blocks takes 128 rows by 256 columns, each block 128 of the columns: of so many, a thread's registers hold
// the sums of a leaf and those of one and two leaves that wait for as many more; those of four wait in shared memory. One
// warp of a block copies operands there, the rows for both blocks at once, through the ends of leaves and tiles without a
// pause; two groups of four warps multiply 64 rows each, of which the second stays a little behind, so that one has the tensor
// core while the other adds or stores.
#include "leaves.cuh"

namespace alignkit {
namespace {

constexpr int kTreeColumns = 128;        // of a block
constexpr int kSums = kTreeColumns / 2;  // of a thread
constexpr int kTreeDepth = 5;            // stages
constexpr int kTreeBand = 8;             // tiles of rows that take turns over the same columns

struct TreeStage {
  __nv_bfloat16 a[kRows * kStep];
  __nv_bfloat16 b[kTreeColumns * kStep];
};

struct TreeShared {
  TreeStage stage[kTreeDepth];
  float four[2][kSums * 128];  // of the threads of a group
  uint64_t full[kTreeDepth], empty[kTreeDepth];
};

constexpr int kTreeBytes = sizeof(TreeShared) + 1024;

struct Tree {
  const __nv_bfloat16* bias;  // or null
  void* out;
  int64_t pitch;
  bool round;
  int m, n;
  int steps;         // of a leaf
  int down, across;  // tiles of clusters

  // The first row and column of tile i of a cluster.
  __device__ void at(int i, int& row, int& column) const {
    int first = i / (kTreeBand * across) * kTreeBand, band = min(kTreeBand, down - first), j = i - first * across;
    row = (first + j % band) * kRows;
    column = j / band * (kBlocks * kTreeColumns);
  }
};

template <int kLeaves>
__device__ __forceinline__ void copy_tree(TreeShared& sh, const CUtensorMap* a, const CUtensorMap* b, const Tree& t,
                                          int rank) {
  constexpr uint16_t all = (1 << kBlocks) - 1;
  constexpr int half = kRows / kBlocks;
  int stage = 0, phase = 0;
  for (int i = blockIdx.x / kBlocks; i < t.down * t.across; i += gridDim.x / kBlocks) {
    int row, column;
    t.at(i, row, column);
    for (int leaf = 0; leaf < kLeaves; ++leaf)
#pragma unroll 1
      for (int k = 0; k < t.steps * kStep; k += kStep, step<kTreeDepth>(stage, phase)) {
        barrier_wait(&sh.empty[stage], phase ^ 1);
        uint64_t* full = &sh.full[stage];
        barrier_expect(full, sizeof(TreeStage));
        copy_box(sh.stage[stage].b, b, k, leaf, column + rank * kTreeColumns, full);
        copy_box_to(all, sh.stage[stage].a + rank * half * kStep, a, k, leaf, row + rank * half, full);
      }
  }
}

// Where a group of warps is in the ring of stages.
struct Reader {
  TreeShared& sh;
  uint64_t a, b;  // operands of the first stage
  int steps;
  bool late, first = true;  // whether it begins behind the other group; whether it has not begun
  int stage = 0, phase = 0;

  __device__ Reader(TreeShared& sh, int group, int steps)
      : sh(sh),
        a(operand<false>(sh.stage[0].a + group * kGroupRows * kStep)),
        b(operand<false>(sh.stage[0].b)),
        steps(steps),
        late(group == 1) {}

  // The sums of the next leaf. A stage is handed back when the next products have been started, or these are done.
  __device__ __forceinline__ void chain(float (&sums)[kSums]) {
    if (first && late) named_barrier_sync(1, 256);
    int before = multiply_stage<true>(sums);
    if (first && !late && steps < kBehind) named_barrier_arrive(1, 256);
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      int now = multiply_stage<false>(sums);
      if (first && !late && i == kBehind - 1) named_barrier_arrive(1, 256);
      products_wait<1>();
      hand_back<kBlocks>(&sh.empty[before]);
      before = now;
    }
    products_wait<0>();
    products_taken(sums);
    hand_back<kBlocks>(&sh.empty[before]);
    first = false;
  }

  // Starts the products of the next stage, and returns which that is.
  template <bool kFirst>
  __device__ __forceinline__ int multiply_stage(float (&sums)[kSums]) {
    int now = stage;
    barrier_wait(&sh.full[now], phase);
    uint64_t next = now * (sizeof(TreeStage) >> 4);
    products_begin();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      if (kFirst && j == 0)
        begin<false, false>(sums, a + next, b + next);
      else
        multiply<false, false>(sums, a + next + j * kNext<false>, b + next + j * kNext<false>, true);
    }
    products_end();
    step<kTreeDepth>(stage, phase);
    return now;
  }
};

__device__ __forceinline__ void add(float (&to)[kSums], const float (&other)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) to[i] = to[i] + other[i];
}

// The balanced tree over the next kLeaves leaves.
template <int kLeaves>
struct Subtree {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], float* four) {
    Subtree<kLeaves / 2>::sum(reader, sums, four);
    float right[kSums];
    Subtree<kLeaves / 2>::sum(reader, right, four);
    add(sums, right);
  }
};

template <>
struct Subtree<8> {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], float* four) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if (half == 1) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) four[i * 128] = sums[i];
      }
      Subtree<4>::sum(reader, sums, four);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = four[i * 128] + sums[i];
  }
};

template <>
struct Subtree<1> {
  static __device__ __forceinline__ void sum(Reader& reader, float (&sums)[kSums], float*) { reader.chain(sums); }
};

__device__ __forceinline__ void store_tree(float (&sums)[kSums], const Tree& t, int row, int column) {
  Place place(t.m, row, column);
  if (t.bias) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      int j = place.column + i / 4 * 8 + i % 2;
      if (j < t.n) sums[i] = sums[i] + __bfloat162float(t.bias[j]);
    }
  }
  if (t.round) {
    store_rows(sums, place, static_cast<__nv_bfloat16*>(t.out), t.pitch, t.n, column);
    return;
  }
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    int h = i / 2 % 2, j = place.column + i / 4 * 8;
    if (place.here[h] && j < t.n)
      *reinterpret_cast<float2*>(static_cast<float*>(t.out) + (place.row + 8 * h) * t.pitch + j) =
          make_float2(sums[i], sums[i + 1]);
  }
}

template <int kLeaves>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    tree_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Tree t) {
  extern __shared__ uint8_t raw[];
  TreeShared& sh = *reinterpret_cast<TreeShared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTreeDepth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8 * kBlocks);  // warps that multiply, in both blocks
    }
    barrier_init_done();
  }
  cluster_sync();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 2) {
    registers_down<24>();
    if (threadIdx.x == 2 * 128) copy_tree<kLeaves>(sh, &a, &b, t, rank);
  } else {
    registers_up<240>();
    float* four = sh.four[group] + threadIdx.x % 128;
    Reader reader(sh, group, t.steps);
    for (int i = blockIdx.x / kBlocks; i < t.down * t.across; i += gridDim.x / kBlocks) {
      int row, column;
      t.at(i, row, column);
      float sums[kSums];
      Subtree<kLeaves>::sum(reader, sums, four);
      store_tree(sums, t, row + group * kGroupRows, column + rank * kTreeColumns);
    }
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other block may still write here
}

template <int kLeaves>
cudaError_t launch_many(const Matrix& a, const Matrix& b, int k, const Tree& t, cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = map_of_leaves(&maps[0], a, t.m, k, kLeaves, kRows / kBlocks)) return e;
  if (cudaError_t e = map_of_leaves(&maps[1], b, t.n, k, kLeaves, kTreeColumns)) return e;
  constexpr auto kernel = tree_gemm<kLeaves>;
  int held;
  if (cudaError_t e = prepare<kernel>(kTreeBytes, kBlocks, &held)) return e;
  int clusters = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(t.down) * t.across, held));
  return launch_early(kernel, clusters * kBlocks, kThreads, kTreeBytes, stream, maps[0], maps[1], t);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n], bf16 if `round`, else fp32, rows `out_pitch` elements apart, at multiples of 16 bytes; n is a multiple of 8. A leaf,
// k / leaves, is a multiple of 16; there are 1, 2, 4 or 8. bias [n], bf16, or null, is added to each row. Returns a cudaError_t.
extern "C" int alignkit_many_tree(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias, void* out,
                                  int64_t out_pitch, int round, int m, int n, int k, int leaves, cudaStream_t stream) {
  if (n % 8 || k % (leaves * 16)) return cudaErrorInvalidValue;
  Matrix left{a, a_pitch}, right{b, b_pitch};
  Tree t = {static_cast<const __nv_bfloat16*>(bias),
            out,
            out_pitch,
            round != 0,
            m,
            n,
            steps_of(k, leaves),
            (m + kRows - 1) / kRows,
            (n + kBlocks * kTreeColumns - 1) / (kBlocks * kTreeColumns)};
  switch (leaves) {
    case 1: return launch_many<1>(left, right, k, t, stream);
    case 2: return launch_many<2>(left, right, k, t, stream);
    case 4: return launch_many<4>(left, right, k, t, stream);
    case 8: return launch_many<8>(left, right, k, t, stream);
    default: return cudaErrorInvalidValue;
  }
}
