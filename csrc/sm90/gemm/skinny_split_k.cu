// Skinny GEMM out [m, n] = a [m, k] . b [n, k]^T as a k-tree: k is cut into 2, 4 or 8 equal leaves. Small m makes few
// tiles, so the leaves of a tile are distributed over CTAs until all SMs read b at once.
//
// - quarter_gemm, m <= 64: a cluster of two CTAs computes 64 outputs. Each of its four consumer warpgroups computes a
//   quarter of the leaves, and the sums are added through distributed shared memory.
// - part_gemm, larger m: a CTA computes a part, that is some of the leaves, of a tile and writes the part's sum to
//   global memory; reduce_parts adds the parts. The two CTAs of a cluster share one operand by multicast.
// - Warp specialization: one producer thread issues TMA loads, two consumer warpgroups per CTA; operands are swapped.
// - Order of summation (docs/contract.md, "Linear"): each leaf is a chain over ascending k, in steps of 16; leaves are
//   added by the balanced tree; then the bias; then one rounding.
// - Launch: quarter_gemm one cluster per 64 outputs; part_gemm persistent clusters; 384 threads per CTA; PDL.
//
// The tensor maps split k into (leaf, k within the leaf), so the TMA pads a leaf that is no multiple of 64 with zeros.
//
// Called by alignkit/ops/linear/cuda_backend.py. Tile and launch shape change no bits.
#include "skinny.cuh"

namespace alignkit {
namespace {

// Consumer: compute one leaf over `steps` pipeline stages. `a` and `b` are the descriptors of this warpgroup's operands
// in stage 0. kProducers: CTAs whose producers write to this CTA's stages, and whose `empty` barriers it arrives at.
template <int kDepth, int kStageSize, int kProducers, int kCount>
__device__ __forceinline__ void leaf(float (&sums)[kCount], uint64_t a, uint64_t b, uint64_t* full, uint64_t* empty,
                                     int steps, int& stage, int& phase) {
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(&full[stage], phase);
    uint64_t offset = stage * (kStageSize >> 4);
    warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < kStep / 16; ++j)
      wgmma<false, false>(sums, b + offset + j * kDescriptorStep<false>, a + offset + j * kDescriptorStep<false>,
                          i + j > 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    if (kProducers == 1) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&empty[stage]);
    } else if (threadIdx.x % 32 < kProducers) {
      mbarrier_arrive(&empty[stage], threadIdx.x % 32);
    }
    advance<kDepth>(stage, phase);
  }
  warpgroup_fence_operand(sums);
}

// sums = left + sums.
template <int kCount>
__device__ __forceinline__ void add(const float (&left)[kCount], float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = left[i] + sums[i];
}

template <int kCount>
__device__ __forceinline__ void copy(float (&dst)[kCount], const float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) dst[i] = sums[i];
}

// Sum 1, 2 or 4 leaves by the balanced tree; each next(sums) computes the next leaf.
template <int kLeaves, int kCount, class Next>
__device__ __forceinline__ void subtree(float (&sums)[kCount], Next next) {
  float one[kCount], two[kCount];  // left operands: sums of one leaf and of two
  next(sums);
  if (kLeaves > 1) {
    copy(one, sums);
    next(sums);
    add(one, sums);
  }
  if (kLeaves > 2) {
    copy(two, sums);
    next(sums);
    copy(one, sums);
    next(sums);
    add(one, sums);
    add(two, sums);
  }
}

// The output matrix.
template <class Out>
struct Target {
  const __nv_bfloat16* bias;  // or null
  Out* out;
  int64_t pitch;
  int m, n;
  bool vectorized;  // four adjacent outputs may be stored at once

  // The bias of a column; without one -0, which changes no sum.
  __device__ float bias_of(int column) const { return bias && column < n ? __bfloat162float(bias[column]) : -0.0f; }
};

// Encode the tensor map of a matrix [rows, leaves, k / leaves] with boxes of `box_rows` rows by 64 of one leaf.
cudaError_t make_leaf_map(CUtensorMap* map, const Matrix& matrix, int rows, int k, int leaves, int box_rows) {
  if (!tensor_map_encoder()) return cudaErrorNotSupported;
  cuuint64_t leaf = k / leaves;
  cuuint64_t size[3] = {leaf, static_cast<cuuint64_t>(leaves), static_cast<cuuint64_t>(rows)};
  cuuint64_t stride[2] = {leaf * 2, static_cast<cuuint64_t>(matrix.pitch) * 2};
  cuuint32_t box[3] = {kStep, 1, static_cast<cuuint32_t>(box_rows)}, one[3] = {1, 1, 1};
  CUresult result = tensor_map_encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(matrix.data), size,
                                         stride, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Pipeline stages per leaf.
int steps_per_leaf(int k, int leaves) { return (k / leaves + kStep - 1) / kStep; }

// Variant for m <= 64.

constexpr int kQuarterOutputs = 64;  // schedule: outputs (of n) per cluster, fixed: the M of wgmma
constexpr int kQuarterDepth = 6;     // schedule: TMA pipeline depth

struct QuarterStage {  // one operand pair per consumer warpgroup
  __nv_bfloat16 b[2][kQuarterOutputs * kStep];
  __nv_bfloat16 a[2][kQuarterWidth * kStep];
};

struct QuarterShared {
  QuarterStage stage[kQuarterDepth];
  float sums[2][kQuarterWidth / 2][128];  // [0]: from the second warpgroup; [1], in CTA 0: from CTA 1
  uint64_t full[kQuarterDepth], empty[kQuarterDepth];
};

// kLeaves: leaves per consumer warpgroup, 1 or 2.
template <int kLeaves, class Out>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    quarter_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int steps,
                 const Target<Out> target) {
  extern __shared__ uint8_t raw[];
  QuarterShared& sh = *reinterpret_cast<QuarterShared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQuarterDepth; ++i) {
      mbarrier_init(&sh.full[i], 1);
      mbarrier_init(&sh.empty[i], 8);  // consumer warps
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  griddep_wait();
  griddep_launch_dependents();
  int rank = cluster_rank(), output = blockIdx.x / 2 * kQuarterOutputs, stage = 0, phase = 0;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  float sums[kQuarterWidth / 2];
  if (group == 2) {
    if (thread == 0)
      for (int leaf = 0; leaf < kLeaves; ++leaf)
        for (int k = 0; k < steps * kStep; k += kStep, advance<kQuarterDepth>(stage, phase)) {
          mbarrier_wait(&sh.empty[stage], phase ^ 1);
          mbarrier_expect_tx(&sh.full[stage], sizeof(QuarterStage));
          for (int g = 0; g < 2; ++g) {
            int group_leaf = (2 * rank + g) * kLeaves + leaf;
            tma_load(sh.stage[stage].b[g], &b, k, group_leaf, output, &sh.full[stage]);
            tma_load(sh.stage[stage].a[g], &a, k, group_leaf, 0, &sh.full[stage]);
          }
        }
    __syncwarp();
  } else {
    uint64_t desc_a = smem_descriptor<false>(sh.stage[0].a[group]),
             desc_b = smem_descriptor<false>(sh.stage[0].b[group]);
    subtree<kLeaves>(sums, [&](float(&s)[kQuarterWidth / 2]) {
      leaf<kQuarterDepth, sizeof(QuarterStage), 1>(s, desc_a, desc_b, sh.full, sh.empty, steps, stage, phase);
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
        uint32_t remote = map_shared_rank(&sh.sums[1][0][thread], 0);
#pragma unroll
        for (int i = 0; i < kQuarterWidth / 2; ++i) st_shared_cluster(remote + i * sizeof(sh.sums[1][0]), sums[i]);
      }
    }
  }
  cluster_sync();
  if (group > 0 || rank > 0) return;
  Coords p(target.n, output, 0);
  float bias[2] = {target.bias_of(p.row), target.bias_of(p.row + 8)};
#pragma unroll
  for (int i = 0; i < kQuarterWidth / 2; ++i) sums[i] = sums[i] + sh.sums[1][i][thread] + bias[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < kQuarterWidth / 2; ++i) {
    int h = i / 2 % 2, row = p.column + i / 4 * 8 + i % 2;
    if (row < target.m && p.valid[h]) target.out[row * target.pitch + p.row + 8 * h] = static_cast<Out>(sums[i]);
  }
}

template <int kLeaves, class Out>
cudaError_t launch_quarters(const Matrix& a, const Matrix& b, int k, const Target<Out>& target, cudaStream_t stream) {
  CUtensorMap maps[2];
  if (cudaError_t e = make_leaf_map(&maps[0], a, target.m, k, 4 * kLeaves, kQuarterWidth)) return e;
  if (cudaError_t e = make_leaf_map(&maps[1], b, target.n, k, 4 * kLeaves, kQuarterOutputs)) return e;
  constexpr auto kernel = quarter_gemm<kLeaves, Out>;
  constexpr int bytes = sizeof(QuarterShared) + 1024;
  int max_clusters;
  if (cudaError_t e = prepare<kernel>(bytes, 2, &max_clusters)) return e;
  int clusters = (target.n + kQuarterOutputs - 1) / kQuarterOutputs;
  return launch_pdl(kernel, 2 * clusters, kThreads, bytes, stream, maps[0], maps[1], steps_per_leaf(k, 4 * kLeaves),
                    target);
}

// Variant for larger m.

// The operand multicast to both CTAs of a cluster. kA: they share rows of a, and the second CTA has the next outputs.
// kB: they share rows of b, and the second CTA has the next rows of a.
enum class Multicast { kA, kB };

// Sum the kLeaves leaves of each part into out [parts, m, pitch]. A task is one part of one cluster tile; `tile_rows`
// counts the cluster tiles over m, `steps` the pipeline stages per leaf.
template <int kWidth, int kLeaves, Multicast kMulticast>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    part_gemm(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, int m, int steps, int parts,
              int tasks, int tile_rows, float* out, int64_t pitch) {
  using Sh = WideShared<kWidth>;
  extern __shared__ uint8_t raw[];
  Sh& sh = *reinterpret_cast<Sh*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sh::kDepth; ++i) {
      mbarrier_init(&sh.full[i], 1);
      mbarrier_init(&sh.empty[i], 8 * kClusterSize);  // consumer warps of both CTAs
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  griddep_wait();
  griddep_launch_dependents();
  constexpr bool multicast_a = kMulticast == Multicast::kA;
  constexpr uint16_t all = (1 << kClusterSize) - 1;
  int rank = cluster_rank(), stage = 0, phase = 0, clusters = gridDim.x / kClusterSize;
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  auto place = [&](int task, int& output, int& row) {
    int tile = task / parts, tile_row = tile % tile_rows, tile_column = tile / tile_rows;
    output = (multicast_a ? kClusterSize * tile_column + rank : tile_column) * kOutputs;
    // Shift the last tile to end at row m and overlap the one above: TMA loads outside a tensor are slow.
    row = min((multicast_a ? tile_row : kClusterSize * tile_row + rank) * kWidth, max(m - kWidth, 0));
  };
  if (group == 2) {
    setmaxnreg_dec<40>();
    if (threadIdx.x % 128 == 0)
      for (int task = blockIdx.x / kClusterSize; task < tasks; task += clusters) {
        int output, row;
        place(task, output, row);
        int leaf = task % parts * kLeaves, end = leaf + kLeaves;
        for (; leaf < end; ++leaf)
          for (int k = 0; k < steps * kStep; k += kStep, advance<Sh::kDepth>(stage, phase)) {
            mbarrier_wait(&sh.empty[stage], phase ^ 1);
            uint64_t* full = &sh.full[stage];
            mbarrier_expect_tx(full, sizeof(WideStage<kWidth>));
            __nv_bfloat16 *to_a = sh.stage[stage].a, *to_b = sh.stage[stage].b;
            if (multicast_a) {
              int half = rank * (kWidth / kClusterSize);
              tma_load(to_b, &b, k, leaf, output, full);
              tma_load_multicast(all, to_a + half * kStep, &a, k, leaf, row + half, full);
            } else {
              int half = rank * (kOutputs / kClusterSize);
              tma_load_multicast(all, to_b + half * kStep, &b, k, leaf, output + half, full);
              tma_load(to_a, &a, k, leaf, row, full);
            }
          }
      }
  } else {
    setmaxnreg_inc<232>();
    uint64_t desc_a = smem_descriptor<false>(sh.stage[0].a),
             desc_b = smem_descriptor<false>(sh.stage[0].b + group * kGroupRows * kStep);
    float sums[kWidth / 2];
    for (int task = blockIdx.x / kClusterSize; task < tasks; task += clusters) {
      subtree<kLeaves>(sums, [&](float(&s)[kWidth / 2]) {
        leaf<Sh::kDepth, sizeof(WideStage<kWidth>), kClusterSize>(s, desc_a, desc_b, sh.full, sh.empty, steps, stage,
                                                                  phase);
      });
      int output, row;
      place(task, output, row);
      Coords p(static_cast<int>(pitch), output + group * kGroupRows, row);
      float* dst = out + task % parts * (m * pitch) + p.row;
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) {
        int h = i / 2 % 2, r = p.column + i / 4 * 8 + i % 2;
        if (r < m) dst[r * pitch + 8 * h] = sums[i];
      }
    }
  }
  __syncwarp();
  cluster_sync();  // do not exit while the other CTA may still multicast or arrive here
}

constexpr int kReduceThreads = 128;  // schedule: threads per CTA of reduce_parts

template <class Out>
struct alignas(4 * sizeof(Out)) Vec4 {
  Out v[4];
};

// Add the parts by the balanced tree, then the bias, and round. A thread computes four adjacent outputs of a row.
template <int kParts, class Out>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_parts(const float* parts, int64_t pitch, const Target<Out> target) {
  griddep_wait();
  griddep_launch_dependents();
  int column = 4 * (blockIdx.x * kReduceThreads + threadIdx.x), row = blockIdx.y;
  if (column >= target.n) return;
  const float* src = parts + row * pitch + column;
  float4 v[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) v[i] = *reinterpret_cast<const float4*>(src + i * (target.m * pitch));
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
  Vec4<Out> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.v[i] = static_cast<Out>(sums[i] + target.bias_of(column + i));
  Out* dst = target.out + row * target.pitch + column;
  if (target.vectorized) {
    *reinterpret_cast<Vec4<Out>*>(dst) = result;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < target.n) dst[i] = result.v[i];
  }
}

template <class Out>
cudaError_t launch_reduce(int parts, const float* sums, int64_t pitch, const Target<Out>& target, cudaStream_t stream) {
  dim3 grid((target.n + 4 * kReduceThreads - 1) / (4 * kReduceThreads), target.m);
  if (parts == 2) return launch_pdl(reduce_parts<2, Out>, grid, kReduceThreads, 0, stream, sums, pitch, target);
  if (parts == 4) return launch_pdl(reduce_parts<4, Out>, grid, kReduceThreads, 0, stream, sums, pitch, target);
  return launch_pdl(reduce_parts<8, Out>, grid, kReduceThreads, 0, stream, sums, pitch, target);
}

template <int kWidth, int kLeaves, Multicast kMulticast>
cudaError_t launch_parts(const Matrix& a, const Matrix& b, int m, int n, int k, int parts, float* sums, int64_t pitch,
                         cudaStream_t stream) {
  constexpr bool multicast_a = kMulticast == Multicast::kA;
  CUtensorMap maps[2];
  int leaves = parts * kLeaves;
  if (cudaError_t e = make_leaf_map(&maps[0], a, m, k, leaves, multicast_a ? kWidth / kClusterSize : kWidth)) return e;
  if (cudaError_t e = make_leaf_map(&maps[1], b, n, k, leaves, multicast_a ? kOutputs : kOutputs / kClusterSize))
    return e;
  constexpr auto kernel = part_gemm<kWidth, kLeaves, kMulticast>;
  constexpr int bytes = sizeof(WideShared<kWidth>) + 1024, outputs = multicast_a ? kClusterSize * kOutputs : kOutputs;
  int max_clusters;
  if (cudaError_t e = prepare<kernel>(bytes, kClusterSize, &max_clusters)) return e;
  constexpr int rows = multicast_a ? kWidth : kClusterSize * kWidth;
  int tile_rows = (m + rows - 1) / rows, tasks = (n + outputs - 1) / outputs * tile_rows * parts;
  int waves = (tasks + max_clusters - 1) / max_clusters, clusters = (tasks + waves - 1) / waves;
  return launch_pdl(kernel, clusters * kClusterSize, kThreads, bytes, stream, maps[0], maps[1], m,
                    steps_per_leaf(k, leaves), parts, tasks, tile_rows, sums, pitch);
}

// Select the instantiation for `width` rows of a per CTA.
template <int kLeaves>
cudaError_t launch_parts(int width, Multicast multicast, const Matrix& a, const Matrix& b, int m, int n, int k,
                         int parts, float* sums, int64_t pitch, cudaStream_t stream) {
  auto launch = [&](auto function) { return function(a, b, m, n, k, parts, sums, pitch, stream); };
  if (multicast == Multicast::kA && width == 64) return launch(launch_parts<64, kLeaves, Multicast::kA>);
  if (multicast == Multicast::kA && width == 96) return launch(launch_parts<96, kLeaves, Multicast::kA>);
  if (multicast == Multicast::kA && width == 128) return launch(launch_parts<128, kLeaves, Multicast::kA>);
  if (multicast == Multicast::kB && width == 96) return launch(launch_parts<96, kLeaves, Multicast::kB>);
  if (multicast == Multicast::kB && width == 128) return launch(launch_parts<128, kLeaves, Multicast::kB>);
  return cudaErrorInvalidValue;
}

// Select the variant and the leaves per CTA.
template <class Out>
cudaError_t launch_tree(const Matrix& a, const Matrix& b, int k, int leaves, int parts, int width, Multicast multicast,
                        float* sums, int64_t pitch, const Target<Out>& target, cudaStream_t stream) {
  if (parts == 1)
    return leaves == 8 ? launch_quarters<2>(a, b, k, target, stream) : launch_quarters<1>(a, b, k, target, stream);
  auto launch = [&](auto function) {
    return function(width, multicast, a, b, target.m, target.n, k, parts, sums, pitch, stream);
  };
  cudaError_t e = leaves == parts       ? launch(launch_parts<1>)
                  : leaves == 2 * parts ? launch(launch_parts<2>)
                                        : launch(launch_parts<4>);
  return e ? e : launch_reduce(parts, sums, pitch, target, stream);
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

// out [m, n] = a . b^T + bias by a k-tree of `leaves` (2, 4 or 8) leaves. Returns a cudaError_t. Arguments out of the
// ranges below give cudaErrorInvalidValue.
//
// - out: fp32 or bf16 with `out_pitch` elements between rows; m <= 65535. bias [n]: bf16 or null.
// - k / leaves is a multiple of 16.
// - parts: CTAs over which the leaves of a tile are distributed, 2, 4 or 8, with 1, 2 or 4 leaves each; or 1 for
//   quarter_gemm, which needs m <= 64 and 4 or 8 leaves.
// - sums: scratch fp32 [parts, m, sums_pitch] for parts > 1; sums_pitch is a multiple of 256 and at least n.
// - width, multicast_b: rows of a per CTA for parts > 1. multicast_b: the two CTAs of a cluster compute different rows
//   of the same outputs, width 96 or 128; otherwise the same rows of different outputs, width 64, 96 or 128.
extern "C" int alignkit_few_tree(const void* a, int64_t a_pitch, const void* b, int64_t b_pitch, const void* bias,
                                 void* out, int64_t out_pitch, int out_bf16, float* sums, int64_t sums_pitch, int parts,
                                 int width, int multicast_b, int m, int n, int k, int leaves, cudaStream_t stream) {
  bool quarters = parts == 1 && m <= kQuarterWidth && (leaves == 4 || leaves == 8);
  bool split = sums && sums_pitch % (2 * kOutputs) == 0 && sums_pitch >= n &&
               (parts == 2 || parts == 4 || parts == 8) &&
               (leaves == parts || leaves == 2 * parts || leaves == 4 * parts);
  if (m < 1 || m > 65535 || n < 1 || !(quarters || split) || k % (leaves * 16)) return cudaErrorInvalidValue;
  Matrix left{a, a_pitch}, right{b, b_pitch};
  auto run = [&](auto* dst) {
    using Out = std::remove_pointer_t<decltype(dst)>;
    bool vectorized = (n | out_pitch) % 4 == 0 && reinterpret_cast<uintptr_t>(dst) % sizeof(Vec4<Out>) == 0;
    Target<Out> target{static_cast<const __nv_bfloat16*>(bias), dst, out_pitch, m, n, vectorized};
    return launch_tree(left, right, k, leaves, parts, width, multicast_b ? Multicast::kB : Multicast::kA, sums,
                       sums_pitch, target, stream);
  };
  return out_bf16 ? run(static_cast<__nv_bfloat16*>(out)) : run(static_cast<float*>(out));
}

ALIGNKIT_FUNCTION(alignkit_few_tree)
