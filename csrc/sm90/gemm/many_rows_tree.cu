// out [m, n] = a [m, k] . b [n, k]^T for many rows, each output a k-tree: 2, 4 or 8 leaves, chains over equal parts of k, joined by
// the balanced tree.
//
// A block takes one tile of 128 rows after another. One warp copies operands to shared memory, through the ends of leaves and
// tiles without a pause; two groups of four warps multiply 64 rows each, of which the second stays a little behind, so that one
// has the tensor core while the other adds or stores. Three sums may wait for their pair: that of one leaf in registers, that of
// two in shared memory, that of four, once in a tile, in memory, which is the L2 cache. So a tile can have 192 columns: the more
// it has, the less is copied for a product. The blocks of a cluster have columns next to each other and share the rows.
//
// Where tiles do not fill the last round of all blocks, the leaves of its tiles are dealt out to several blocks, and a second
// kernel joins their sums.
//
// To the copy engine k is two dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros.
#include "gemm.cuh"

namespace alignkit {
namespace {

constexpr int kTreeBand = 8;  // tiles of rows that take turns over the same columns

// kWidth: columns of a block.
template <int kWidth>
struct TreeStage {
  __nv_bfloat16 a[kRows * kStep];
  __nv_bfloat16 b[kWidth * kStep];
};

template <int kWidth>
struct TreeShared {
  static constexpr int kSums = kWidth / 2;  // of a thread
  static constexpr int kDepth = kWidth == 128 ? 5 : kWidth == 160 ? 4 : 3;
  static constexpr int kLead = kDepth > 3 ? 2 : 1;  // steps by which the second group begins later
  TreeStage<kWidth> stage[kDepth];
  float two[2][kSums * 128];  // of the threads of a group
  uint64_t full[kDepth], empty[kDepth];
};

// What a block does at a time: `count` leaves of a tile, from `first` on. slot: where their sum goes; -1: it is the output.
struct Task {
  int tile, first, count, slot;
};

struct Tree {
  const __nv_bfloat16* bias;  // or null
  void* out;
  int64_t pitch;
  bool round;
  int m, n, leaves;
  int steps;          // of a leaf
  int down, across;   // tiles of clusters
  int whole, parts;   // the first `whole` tiles are not dealt out, the others to so many blocks
  float4 *four, *sums;

  __device__ int rest() const { return down * across - whole; }
  __device__ int tasks() const { return whole + rest() * parts; }

  __device__ Task task(int i) const {
    if (i < whole) return {i, 0, leaves, -1};
    int count = leaves / parts, part = (i - whole) / rest(), j = (i - whole) % rest();
    return {whole + j, part * count, count, part * rest() + j};
  }

  // The first row and column of a cluster's tile.
  __device__ void at(int tile, int width, int& row, int& column) const {
    int first = tile / (kTreeBand * across) * kTreeBand, band = min(kTreeBand, down - first), j = tile - first * across;
    row = (first + j % band) * kRows;
    column = j / band * width;
  }
};

template <int kWidth, int kCluster>
__device__ __forceinline__ void copy_tree(TreeShared<kWidth>& sh, const CUtensorMap* a, const CUtensorMap* b,
                                          const Tree& t, int rank) {
  int stage = 0, phase = 0;
  for (int i = blockIdx.x / kCluster; i < t.tasks(); i += gridDim.x / kCluster) {
    Task task = t.task(i);
    int row, column;
    t.at(task.tile, kCluster * kWidth, row, column);
    for (int leaf = task.first; leaf < task.first + task.count; ++leaf)
#pragma unroll 1
      for (int k = 0; k < t.steps * kStep; k += kStep, step<TreeShared<kWidth>::kDepth>(stage, phase)) {
        barrier_wait(&sh.empty[stage], phase ^ 1);
        uint64_t* full = &sh.full[stage];
        barrier_expect(full, sizeof(TreeStage<kWidth>));
        copy_box(sh.stage[stage].b, b, k, leaf, column + rank * kWidth, full);
        if constexpr (kCluster == 1) {
          copy_box(sh.stage[stage].a, a, k, leaf, row, full);
        } else {
          constexpr int some = kRows / kCluster;
          copy_box_to((1 << kCluster) - 1, sh.stage[stage].a + rank * some * kStep, a, k, leaf, row + rank * some, full);
        }
      }
  }
}

// Where a group of warps is in the ring of stages.
template <int kWidth, int kCluster>
struct TreeReader {
  using Sh = TreeShared<kWidth>;
  Sh& sh;
  uint64_t a, b;  // operands of the first stage
  int steps;
  bool late, first = true;  // whether it begins behind the other group; whether it has not begun
  int stage = 0, phase = 0;

  __device__ TreeReader(Sh& sh, int group, int steps)
      : sh(sh),
        a(operand<false>(sh.stage[0].a + group * kGroupRows * kStep)),
        b(operand<false>(sh.stage[0].b)),
        steps(steps),
        late(group == 1) {}

  // Of each warp that multiplies, one arrival in each block that copies to the stage.
  __device__ __forceinline__ void hand_back(int which) {
    if constexpr (kCluster == 1) {
      if (threadIdx.x % 32 == 0) barrier_arrive(&sh.empty[which]);
    } else if (threadIdx.x % 32 < kCluster) {
      barrier_arrive(&sh.empty[which], threadIdx.x % 32);
    }
  }

  // The sums of the next leaf. A stage is handed back when the next products have been started, or these are done.
  __device__ __forceinline__ void chain(float (&sums)[Sh::kSums]) {
    if (first && late) named_barrier_sync(1, 256);
    int before = multiply_stage<true>(sums);
    if (first && !late && (Sh::kLead == 1 || steps == 1)) named_barrier_arrive(1, 256);
#pragma unroll 1
    for (int i = 1; i < steps; ++i) {
      int now = multiply_stage<false>(sums);
      if (Sh::kLead > 1 && first && !late && i == Sh::kLead - 1) named_barrier_arrive(1, 256);
      products_wait<1>();
      hand_back(before);
      before = now;
    }
    products_wait<0>();
    products_taken(sums);
    hand_back(before);
    first = false;
  }

  // Starts the products of the next stage, and returns which that is.
  template <bool kFirst>
  __device__ __forceinline__ int multiply_stage(float (&sums)[Sh::kSums]) {
    int now = stage;
    barrier_wait(&sh.full[now], phase);
    uint64_t next = now * (sizeof(TreeStage<kWidth>) >> 4);
    products_begin();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j) {
      if (kFirst && j == 0)
        begin<false, false>(sums, a + next, b + next);
      else
        multiply<false, false>(sums, a + next + j * kNext<false>, b + next + j * kNext<false>, true);
    }
    products_end();
    step<Sh::kDepth>(stage, phase);
    return now;
  }
};

template <int kCount>
__device__ __forceinline__ void write_sums(float4* to, const float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) to[i / 4 * 128] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}

// sums = those written + sums.
template <int kCount>
__device__ __forceinline__ void add_written(const float4* from, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    float4 v = from[i / 4 * 128];
    sums[i] = v.x + sums[i];
    sums[i + 1] = v.y + sums[i + 1];
    sums[i + 2] = v.z + sums[i + 2];
    sums[i + 3] = v.w + sums[i + 3];
  }
}

// The balanced tree over the next `count` leaves.
template <int kWidth, int kCluster, int kCount>
__device__ __forceinline__ void tree_of(TreeReader<kWidth, kCluster>& reader, int count, float4* two, float4* four,
                                        float (&sums)[kCount]) {
  if (count == 1) return reader.chain(sums);
#pragma unroll 1
  for (int pair = 0; pair < count / 2; ++pair) {
    float one[kCount];
    reader.chain(one);
    reader.chain(sums);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = one[i] + sums[i];
    if (pair % 2 == 0) {
      if (count > 2) write_sums(two, sums);
      continue;
    }
    add_written(two, sums);
    if (pair == 3) add_written(four, sums);
    if (pair == 1 && count > 4) write_sums(four, sums);
  }
}

// Sums of 2 kCount columns, plus the bias.
template <int kCount>
__device__ __forceinline__ void store_tree(float (&sums)[kCount], const Tree& t, int row, int column) {
  Place place(t.m, row, column);
  if (t.bias) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int j = place.column + i / 4 * 8 + i % 2;
      if (j < t.n) sums[i] = sums[i] + __bfloat162float(t.bias[j]);
    }
  }
  if (t.round) {
    store_rows(sums, place, static_cast<__nv_bfloat16*>(t.out), t.pitch, t.n, column);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    int h = i / 2 % 2, j = place.column + i / 4 * 8;
    if (place.here[h] && j < t.n)
      *reinterpret_cast<float2*>(static_cast<float*>(t.out) + (place.row + 8 * h) * t.pitch + j) =
          make_float2(sums[i], sums[i + 1]);
  }
}

// Where the sums of a group of warps lie: four of a thread beside those of the next.
template <int kWidth>
__device__ __forceinline__ float4* slot_of(float4* sums, int block, int group) {
  return sums + (2 * static_cast<int64_t>(block) + group) * (kWidth / 8 * 128) + threadIdx.x % 128;
}

template <int kWidth, int kCluster>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    tree_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Tree t) {
  using Sh = TreeShared<kWidth>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  int rank = kCluster == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8 * kCluster);  // warps that multiply
    }
    barrier_init_done();
  }
  cluster_sync();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (group == 2) {
    registers_down<24>();
    if (threadIdx.x == 2 * 128) copy_tree<kWidth, kCluster>(sh, &a, &b, t, rank);
  } else {
    registers_up<240>();
    float4* two = reinterpret_cast<float4*>(sh.two[group]) + threadIdx.x % 128;
    float4* four = slot_of<kWidth>(t.four, blockIdx.x, group);
    TreeReader<kWidth, kCluster> reader(sh, group, t.steps);
    for (int i = blockIdx.x / kCluster; i < t.tasks(); i += gridDim.x / kCluster) {
      Task task = t.task(i);
      float sums[Sh::kSums];
      tree_of(reader, task.count, two, four, sums);
      int row, column;
      t.at(task.tile, kCluster * kWidth, row, column);
      if (task.slot < 0)
        store_tree(sums, t, row + group * kGroupRows, column + rank * kWidth);
      else
        write_sums(slot_of<kWidth>(t.sums, kCluster * task.slot + rank, group), sums);
    }
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while another block may still write here
}

// The tree over the parts of the tiles that were dealt out: a group of warps for 32 columns.
template <int kWidth, int kCluster, int kParts>
__global__ void __launch_bounds__(128) join_tree(const Tree t) {
  constexpr int kCount = 16;
  wait_for_kernel_before();
  let_next_kernel_begin();
  int block = blockIdx.x / 2, group = blockIdx.x % 2, some = blockIdx.y;
  int64_t next = 2 * static_cast<int64_t>(kCluster) * t.rest() * (kWidth / 8 * 128);
  const float4* from = slot_of<kWidth>(t.sums, block, group) + some * (kCount / 4 * 128);
  float sums[kParts][kCount];
#pragma unroll
  for (int p = 0; p < kParts; ++p)
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      float4 v = from[p * next + i / 4 * 128];
      sums[p][i] = v.x, sums[p][i + 1] = v.y, sums[p][i + 2] = v.z, sums[p][i + 3] = v.w;
    }
#pragma unroll
  for (int width = 1; width < kParts; width *= 2)
#pragma unroll
    for (int p = 0; p < kParts; p += 2 * width)
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[p][i] = sums[p][i] + sums[p + width][i];
  int row, column;
  t.at(t.whole + block / kCluster, kCluster * kWidth, row, column);
  store_tree(sums[0], t, row + group * kGroupRows, column + block % kCluster * kWidth + some * 2 * kCount);
}

// Of a matrix [rows, k]: `box_rows` rows by 64 of a leaf at a time.
cudaError_t map_of_tree(CUtensorMap* map, const Matrix& matrix, int rows, int k, int leaves, int box_rows) {
  if (!encode()) return cudaErrorNotSupported;
  cuuint64_t leaf = k / leaves;
  cuuint64_t size[3] = {leaf, static_cast<cuuint64_t>(leaves), static_cast<cuuint64_t>(rows)};
  cuuint64_t stride[2] = {leaf * 2, static_cast<cuuint64_t>(matrix.pitch) * 2};
  cuuint32_t box[3] = {kStep, 1, static_cast<cuuint32_t>(box_rows)}, one[3] = {1, 1, 1};
  CUresult made = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix.data), size, stride, box,
                           one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <int kWidth, int kCluster>
cudaError_t launch_many(const Matrix& a, const Matrix& b, int k, Tree t, cudaStream_t stream) {
  constexpr int kBytes = sizeof(TreeShared<kWidth>) + 1024;
  t.across = (t.n + kCluster * kWidth - 1) / (kCluster * kWidth);
  int rest = t.down * t.across - t.whole;
  if (rest < 0 || (t.parts == 1 && rest)) return cudaErrorInvalidValue;
  CUtensorMap maps[2];
  if (cudaError_t e = map_of_tree(&maps[0], a, t.m, k, t.leaves, kRows / kCluster)) return e;
  if (cudaError_t e = map_of_tree(&maps[1], b, t.n, k, t.leaves, kWidth)) return e;
  constexpr auto kernel = tree_gemm<kWidth, kCluster>;
  int held;
  if (cudaError_t e = prepare<kernel>(kBytes, kCluster, &held)) return e;
  int clusters = std::min(t.whole + rest * t.parts, held);
  if (cudaError_t e = launch_early(kernel, clusters * kCluster, kThreads, kBytes, stream, maps[0], maps[1], t)) return e;
  if (!rest) return cudaSuccess;
  dim3 grid(rest * kCluster * 2, kWidth / 32);
  if (t.parts == 2) return launch_early(join_tree<kWidth, kCluster, 2>, grid, 128, 0, stream, t);
  if (t.parts == 4) return launch_early(join_tree<kWidth, kCluster, 4>, grid, 128, 0, stream, t);
  return launch_early(join_tree<kWidth, kCluster, 8>, grid, 128, 0, stream, t);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n], bf16 if `round`, else fp32, rows `out_pitch` elements apart, at multiples of 16 bytes; n is a multiple of 8. A leaf,
// k / leaves, is a multiple of 16. bias [n], bf16, or null, is added to each row. Tiles are 128 rows by cluster * width columns: width
// is 128, 160 or 192, cluster 1 or 2. All but the first `whole` are dealt out to `parts` blocks, 2, 4 or 8, at most as many as
// there are leaves; if parts is 1, all tiles are whole. four: fp32, 128 * width for each multiprocessor, if there are 8 leaves;
// sums: fp32 [parts, tiles dealt out, cluster, 128 * width]. Returns a cudaError_t.
extern "C" int alignkit_many_tree(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias, void* out,
                                  int64_t out_pitch, int round, float* four, float* sums, int width, int cluster, int parts,
                                  int whole, int m, int n, int k, int leaves, cudaStream_t stream) {
  bool tree = leaves == 2 || leaves == 4 || leaves == 8, dealt = parts == 2 || parts == 4 || parts == 8;
  if (!tree || n % 8 || k % (leaves * 16) || !(parts == 1 || (dealt && parts <= leaves && sums)) || (leaves == 8 && !four))
    return cudaErrorInvalidValue;
  Matrix left{a, a_pitch}, right{b, b_pitch};
  Tree t = {static_cast<const __nv_bfloat16*>(bias),
            out,
            out_pitch,
            round != 0,
            m,
            n,
            leaves,
            (k / leaves + kStep - 1) / kStep,
            (m + kRows - 1) / kRows,
            0,
            whole,
            parts,
            reinterpret_cast<float4*>(four),
            reinterpret_cast<float4*>(sums)};
  auto run = [&](auto launched) { return launched(left, right, k, t, stream); };
  if (width == 128 && cluster == 1) return run(launch_many<128, 1>);
  if (width == 128 && cluster == 2) return run(launch_many<128, 2>);
  if (width == 160 && cluster == 1) return run(launch_many<160, 1>);
  if (width == 160 && cluster == 2) return run(launch_many<160, 2>);
  if (width == 192 && cluster == 1) return run(launch_many<192, 1>);
  if (width == 192 && cluster == 2) return run(launch_many<192, 2>);
  return cudaErrorInvalidValue;
}
