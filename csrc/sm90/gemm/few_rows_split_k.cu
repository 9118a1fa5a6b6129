// out [m, n] = a [m, k] . b [n, k]^T for few rows, each output a k-tree: 2, 4 or 8 leaves, chains over equal parts of
// k, joined by the balanced tree. Few rows make few tiles, so the leaves of a tile are dealt out to blocks, until all
// multiprocessors read b at once.
//
// Rows of b are rows to the tensor core, as in few_rows_wide.cu; of the warps of a block one copies and eight multiply. There are
// two ways. Up to 64 rows a cluster of two blocks has all leaves of a tile, a quarter of them for each group of four warps,
// and joins them in shared memory. With more rows a block sums some leaves of a larger tile and writes the sums to memory,
// and a second kernel joins them; there the two blocks of a cluster share one of the operands.
//
// To the copy engine k is two dimensions, leaves and what is in them: a leaf whose length is no multiple of 64 ends in zeros.
#include "few_rows.cuh"

namespace alignkit {
namespace {

// The sums of one leaf: `steps` stages of a ring, of which `a` and `b` are this group's operands in the first. A stage is
// handed back to the blocks that copy to it, this one or both of the cluster.
template <int kDepth, int kStageSize, int kCopying, int kCount>
__device__ __forceinline__ void leaf(float (&sums)[kCount], uint64_t a, uint64_t b, uint64_t* full, uint64_t* empty,
                                     int steps, int& stage, int& phase) {
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    barrier_wait(&full[stage], phase);
    uint64_t next = stage * (kStageSize >> 4);
    products_begin();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j)
      multiply<false, false>(sums, b + next + j * kNext<false>, a + next + j * kNext<false>, i + j > 0);
    products_end();
    products_wait<0>();
    if (kCopying == 1) {
      if (threadIdx.x % 32 == 0) barrier_arrive(&empty[stage]);
    } else if (threadIdx.x % 32 < kCopying) {
      barrier_arrive(&empty[stage], threadIdx.x % 32);
    }
    step<kDepth>(stage, phase);
  }
  products_taken(sums);
}

template <int kCount>
__device__ __forceinline__ void add(const float (&left)[kCount], float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = left[i] + sums[i];
}

template <int kCount>
__device__ __forceinline__ void keep(float (&kept)[kCount], const float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) kept[i] = sums[i];
}

// The tree over 1, 2 or 4 leaves, which next(sums) computes in turn.
template <int kLeaves, int kCount, class Next>
__device__ __forceinline__ void subtree(float (&sums)[kCount], Next next) {
  float one[kCount], two[kCount];  // sums of so many leaves, which wait for their pair
  next(sums);
  if (kLeaves > 1) {
    keep(one, sums);
    next(sums);
    add(one, sums);
  }
  if (kLeaves > 2) {
    keep(two, sums);
    next(sums);
    keep(one, sums);
    next(sums);
    add(one, sums);
    add(two, sums);
  }
}

template <class Out>
struct Target {
  const __nv_bfloat16* bias;  // or null
  Out* out;
  int64_t pitch;
  int m, n;
  bool fours;  // whether four neighbours may be written at once

  // What to add to a sum: -0 changes none.
  __device__ float bias_of(int column) const { return bias && column < n ? __bfloat162float(bias[column]) : -0.0f; }
};

// Of a matrix [rows, k]: `box_rows` rows by 64 of a leaf at a time.
cudaError_t map_of_leaves(CUtensorMap* map, const Matrix& matrix, int rows, int k, int leaves, int box_rows) {
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

int steps_of(int k, int leaves) { return (k / leaves + kStep - 1) / kStep; }

// Up to 64 rows.

constexpr int kQuarterIds = 64;    // of n, of a cluster
constexpr int kQuarterWidth = 64;  // rows of a
constexpr int kQuarterDepth = 6;

struct QuarterStage {  // of each of the block's groups
  __nv_bfloat16 b[2][kQuarterIds * kStep];
  __nv_bfloat16 a[2][kQuarterWidth * kStep];
};

struct QuarterShared {
  QuarterStage stage[kQuarterDepth];
  float sums[2][kQuarterWidth / 2][128];  // of the block's second group, and, in the first block, of the second block
  uint64_t full[kQuarterDepth], empty[kQuarterDepth];
};

template <int kLeaves, class Out>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    quarter_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int steps,
                 const Target<Out> target) {
  extern __shared__ uint8_t raw[];
  QuarterShared& sh = *reinterpret_cast<QuarterShared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQuarterDepth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8);  // warps that multiply
    }
    barrier_init_done();
  }
  cluster_sync();
  wait_for_kernel_before();
  let_next_kernel_begin();
  int rank = cluster_rank(), id = blockIdx.x / 2 * kQuarterIds, stage = 0, phase = 0;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  float sums[kQuarterWidth / 2];
  if (group == 2) {
    if (thread == 0)
      for (int leaf = 0; leaf < kLeaves; ++leaf)
        for (int k = 0; k < steps * kStep; k += kStep, step<kQuarterDepth>(stage, phase)) {
          barrier_wait(&sh.empty[stage], phase ^ 1);
          barrier_expect(&sh.full[stage], sizeof(QuarterStage));
          for (int g = 0; g < 2; ++g) {
            int at = (2 * rank + g) * kLeaves + leaf;
            copy_box(sh.stage[stage].b[g], &b, k, at, id, &sh.full[stage]);
            copy_box(sh.stage[stage].a[g], &a, k, at, 0, &sh.full[stage]);
          }
        }
    __syncwarp();
  } else {
    uint64_t of_a = operand<false>(sh.stage[0].a[group]), of_b = operand<false>(sh.stage[0].b[group]);
    subtree<kLeaves>(sums, [&](float(&s)[kQuarterWidth / 2]) {
      leaf<kQuarterDepth, sizeof(QuarterStage), 1>(s, of_a, of_b, sh.full, sh.empty, steps, stage, phase);
    });
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < kQuarterWidth / 2; ++i) sh.sums[0][i][thread] = sums[i];
    }
    named_barrier_sync(1, 256);
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < kQuarterWidth / 2; ++i) sums[i] = sums[i] + sh.sums[0][i][thread];
      if (rank == 1) {
        uint32_t there = address_in(&sh.sums[1][0][thread], 0);
#pragma unroll
        for (int i = 0; i < kQuarterWidth / 2; ++i) store_there(there + i * sizeof(sh.sums[1][0]), sums[i]);
      }
    }
  }
  cluster_sync();
  if (group > 0 || rank > 0) return;
  Place p(target.n, id, 0);
  float bias[2] = {target.bias_of(p.row), target.bias_of(p.row + 8)};
#pragma unroll
  for (int i = 0; i < kQuarterWidth / 2; ++i) sums[i] = sums[i] + sh.sums[1][i][thread] + bias[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < kQuarterWidth / 2; ++i) {
    int h = i / 2 % 2, row = p.column + i / 4 * 8 + i % 2;
    if (row < target.m && p.here[h]) target.out[row * target.pitch + p.row + 8 * h] = static_cast<Out>(sums[i]);
  }
}

template <int kLeaves, class Out>
cudaError_t launch_quarters(const Matrix& a, const Matrix& b, int k, const Target<Out>& target, cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = map_of_leaves(&maps[0], a, target.m, k, 4 * kLeaves, kQuarterWidth)) return e;
  if (cudaError_t e = map_of_leaves(&maps[1], b, target.n, k, 4 * kLeaves, kQuarterIds)) return e;
  constexpr auto kernel = quarter_gemm<kLeaves, Out>;
  constexpr int bytes = sizeof(QuarterShared) + 1024;
  int held;
  if (cudaError_t e = prepare<kernel>(bytes, 2, &held)) return e;
  int clusters = (target.n + kQuarterIds - 1) / kQuarterIds;
  return launch_early(kernel, 2 * clusters, kThreads, bytes, stream, maps[0], maps[1], steps_of(k, 4 * kLeaves), target);
}

// More rows.

// What the blocks of a cluster have in common: rows of a, and the second has the next ids; or rows of b, and the second has
// the next rows of a.
enum class Common { kA, kB };

// Sums of a part's leaves, to sums [parts, m, pitch]; `steps` is that of a leaf. A task is a part of a cluster's tile, of which
// `down` are above each other.
template <int kWidth, int kLeaves, Common kCommon>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    part_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int m, int steps, int parts,
              int tasks, int down, float* out, int64_t pitch) {
  using Sh = WideShared<kWidth>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8 * kBlocks);  // warps that multiply, in both blocks
    }
    barrier_init_done();
  }
  cluster_sync();
  wait_for_kernel_before();
  let_next_kernel_begin();
  constexpr bool common_a = kCommon == Common::kA;
  constexpr uint16_t all = (1 << kBlocks) - 1;
  int rank = cluster_rank(), stage = 0, phase = 0, clusters = gridDim.x / kBlocks;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  auto place = [&](int task, int& id, int& row) {
    int tile = task / parts, above = tile % down, across = tile / down;
    id = (common_a ? kBlocks * across + rank : across) * kIds;
    // The last rows end where a does, on others' if need be: the copy engine is slow outside of a matrix.
    row = min((common_a ? above : kBlocks * above + rank) * kWidth, max(m - kWidth, 0));
  };
  if (group == 2) {
    registers_down<40>();
    if (threadIdx.x % 128 == 0)
      for (int task = blockIdx.x / kBlocks; task < tasks; task += clusters) {
        int id, row;
        place(task, id, row);
        int leaf = task % parts * kLeaves, end = leaf + kLeaves;
        for (; leaf < end; ++leaf)
          for (int k = 0; k < steps * kStep; k += kStep, step<Sh::kDepth>(stage, phase)) {
            barrier_wait(&sh.empty[stage], phase ^ 1);
            uint64_t* full = &sh.full[stage];
            barrier_expect(full, sizeof(WideStage<kWidth>));
            __nv_bfloat16 *to_a = sh.stage[stage].a, *to_b = sh.stage[stage].b;
            if (common_a) {
              int half = rank * (kWidth / kBlocks);
              copy_box(to_b, &b, k, leaf, id, full);
              copy_box_to(all, to_a + half * kStep, &a, k, leaf, row + half, full);
            } else {
              int half = rank * (kIds / kBlocks);
              copy_box_to(all, to_b + half * kStep, &b, k, leaf, id + half, full);
              copy_box(to_a, &a, k, leaf, row, full);
            }
          }
      }
  } else {
    registers_up<232>();
    uint64_t of_a = operand<false>(sh.stage[0].a), of_b = operand<false>(sh.stage[0].b + group * kGroupRows * kStep);
    float sums[kWidth / 2];
    for (int task = blockIdx.x / kBlocks; task < tasks; task += clusters) {
      subtree<kLeaves>(sums, [&](float(&s)[kWidth / 2]) {
        leaf<Sh::kDepth, sizeof(WideStage<kWidth>), kBlocks>(s, of_a, of_b, sh.full, sh.empty, steps, stage, phase);
      });
      int id, row;
      place(task, id, row);
      Place p(static_cast<int>(pitch), id + group * kGroupRows, row);
      float* to = out + task % parts * (m * pitch) + p.row;
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) {
        int h = i / 2 % 2, at = p.column + i / 4 * 8 + i % 2;
        if (at < m) to[at * pitch + 8 * h] = sums[i];
      }
    }
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other block may still write here
}

constexpr int kJoinThreads = 128;

template <class Out>
struct alignas(4 * sizeof(Out)) Four {
  Out v[4];
};

// Four neighbours of a row a thread.
template <int kParts, class Out>
__global__ void __launch_bounds__(kJoinThreads) join_parts(const float* parts, int64_t pitch, const Target<Out> target) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  int column = 4 * (blockIdx.x * kJoinThreads + threadIdx.x), row = blockIdx.y;
  if (column >= target.n) return;
  const float* from = parts + row * pitch + column;
  float4 v[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) v[i] = *reinterpret_cast<const float4*>(from + i * (target.m * pitch));
#pragma unroll
  for (int width = 1; width < kParts; width *= 2)
#pragma unroll
    for (int i = 0; i < kParts; i += 2 * width) {
      v[i].x += v[i + width].x;
      v[i].y += v[i + width].y;
      v[i].z += v[i + width].z;
      v[i].w += v[i + width].w;
    }
  float sums[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
  Four<Out> done;
#pragma unroll
  for (int i = 0; i < 4; ++i) done.v[i] = static_cast<Out>(sums[i] + target.bias_of(column + i));
  Out* to = target.out + row * target.pitch + column;
  if (target.fours) {
    *reinterpret_cast<Four<Out>*>(to) = done;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < target.n) to[i] = done.v[i];
  }
}

template <class Out>
cudaError_t launch_join(int parts, const float* sums, int64_t pitch, const Target<Out>& target, cudaStream_t stream) {
  dim3 grid((target.n + 4 * kJoinThreads - 1) / (4 * kJoinThreads), target.m);
  if (parts == 2) return launch_early(join_parts<2, Out>, grid, kJoinThreads, 0, stream, sums, pitch, target);
  if (parts == 4) return launch_early(join_parts<4, Out>, grid, kJoinThreads, 0, stream, sums, pitch, target);
  return launch_early(join_parts<8, Out>, grid, kJoinThreads, 0, stream, sums, pitch, target);
}

template <int kWidth, int kLeaves, Common kCommon>
cudaError_t launch_parts(const Matrix& a, const Matrix& b, int m, int n, int k, int parts, float* sums, int64_t pitch,
                         cudaStream_t stream) {
  constexpr bool common_a = kCommon == Common::kA;
  CUtensorMap maps[2];
  int leaves = parts * kLeaves;
  if (cudaError_t e = map_of_leaves(&maps[0], a, m, k, leaves, common_a ? kWidth / kBlocks : kWidth)) return e;
  if (cudaError_t e = map_of_leaves(&maps[1], b, n, k, leaves, common_a ? kIds : kIds / kBlocks)) return e;
  constexpr auto kernel = part_gemm<kWidth, kLeaves, kCommon>;
  constexpr int bytes = sizeof(WideShared<kWidth>) + 1024, ids = common_a ? kBlocks * kIds : kIds;
  int held;
  if (cudaError_t e = prepare<kernel>(bytes, kBlocks, &held)) return e;
  constexpr int rows = common_a ? kWidth : kBlocks * kWidth;
  int down = (m + rows - 1) / rows, tasks = (n + ids - 1) / ids * down * parts;
  int rounds = (tasks + held - 1) / held, clusters = (tasks + rounds - 1) / rounds;
  return launch_early(kernel, clusters * kBlocks, kThreads, bytes, stream, maps[0], maps[1], m,
                      steps_of(k, leaves), parts, tasks, down, sums,
                      pitch);
}

template <int kLeaves>
cudaError_t launch_parts(int width, Common common, const Matrix& a, const Matrix& b, int m, int n, int k, int parts,
                         float* sums, int64_t pitch, cudaStream_t stream) {
  auto launch = [&](auto launched) { return launched(a, b, m, n, k, parts, sums, pitch, stream); };
  if (common == Common::kA && width == 64) return launch(launch_parts<64, kLeaves, Common::kA>);
  if (common == Common::kA && width == 96) return launch(launch_parts<96, kLeaves, Common::kA>);
  if (common == Common::kA && width == 128) return launch(launch_parts<128, kLeaves, Common::kA>);
  if (common == Common::kB && width == 96) return launch(launch_parts<96, kLeaves, Common::kB>);
  if (common == Common::kB && width == 128) return launch(launch_parts<128, kLeaves, Common::kB>);
  return cudaErrorInvalidValue;
}

template <class Out>
cudaError_t launch_tree(const Matrix& a, const Matrix& b, int k, int leaves, int parts, int width, Common common,
                        float* sums, int64_t pitch, const Target<Out>& t, cudaStream_t stream) {
  if (parts == 1)
    return leaves == 8 ? launch_quarters<2>(a, b, k, t, stream) : launch_quarters<1>(a, b, k, t, stream);
  auto launch = [&](auto launched) {
    return launched(width, common, a, b, t.m, t.n, k, parts, sums, pitch, stream);
  };
  cudaError_t e = leaves == parts       ? launch(launch_parts<1>)
                  : leaves == 2 * parts ? launch(launch_parts<2>)
                                        : launch(launch_parts<4>);
  return e ? e : launch_join(parts, sums, pitch, t, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n], fp32 or bf16, rows `out_pitch` elements apart; m at most 65535; a leaf, k / leaves, is a multiple of 16. bias
// [n], bf16, or null. Leaves are dealt out to `parts` blocks, 2, 4 or 8, one, two or four for each, by way of sums, fp32
// [parts, m, sums_pitch]; sums_pitch is a multiple of 256 and at least n. The two blocks of a cluster have `width` rows each: 96
// or 128 and the same outputs if `common_b`, else 64, 96 or 128, the same of both. If parts is 1, m is at most 64, and there are 4
// or 8 leaves. Returns a cudaError_t.
extern "C" int alignkit_few_tree(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias, void* out,
                                 int64_t out_pitch, int out_bf16, float* sums, int64_t sums_pitch, int parts, int width,
                                 int common_b, int m, int n, int k, int leaves, cudaStream_t stream) {
  bool quarters = parts == 1 && m <= kQuarterWidth && (leaves == 4 || leaves == 8);
  bool dealt = sums && (parts == 2 || parts == 4 || parts == 8) &&
               (leaves == parts || leaves == 2 * parts || leaves == 4 * parts);
  if (m > 65535 || k % (leaves * 16) || !(quarters || dealt)) return cudaErrorInvalidValue;
  Matrix left{a, a_pitch}, right{b, b_pitch};
  auto run = [&](auto* to) {
    using Out = std::remove_pointer_t<decltype(to)>;
    bool fours = (n | out_pitch) % 4 == 0 && reinterpret_cast<uintptr_t>(to) % sizeof(Four<Out>) == 0;
    Target<Out> target{static_cast<const __nv_bfloat16*>(bias), to, out_pitch, m, n, fours};
    return launch_tree(left, right, k, leaves, parts, width, common_b ? Common::kB : Common::kA, sums, sums_pitch, target,
                       stream);
  };
  return out_bf16 ? run(static_cast<__nv_bfloat16*>(out)) : run(static_cast<float*>(out));
}
