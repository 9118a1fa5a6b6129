// The head: logits = hidden . weight^T, which never leave the chip. What becomes of a tile of them, its epilogue, is
// computed from the registers of the product: the statistics of the contract, or the gradient of the logits.
//
// A cluster of two blocks takes 256 rows by 256 ids, each block 128 of the rows. One warp of a block copies operands to
// shared memory, the ids' for both blocks at once; two groups of four warps multiply 64 rows each by all ids. The second
// group starts a little later than the first and stays behind, so that one computes an epilogue while the other has the
// tensor core. Each output is one chain over ascending k, whatever the tile.
#include <algorithm>
#include <cmath>

#include "hopper.cuh"

namespace alignkit {
namespace {

constexpr int kRows = 128;      // of a block
constexpr int kGroupRows = 64;  // of a group of warps
constexpr int kIds = 256;
constexpr int kTile = 128;  // ids of a tile of the contract
constexpr int kStep = 64;   // of k: rows of 128 bytes in shared memory
constexpr int kStages = 4;
constexpr int kBlocks = 2;  // of a cluster
constexpr int kBand = 16;   // clusters' rows that take turns over the same ids, 4096 rows: these stay in the L2 cache
constexpr int kBehind = 2;  // steps of k by which the second group starts later
constexpr int kThreads = 3 * 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kOne = 0x3f800000;  // 1.0f

struct Stage {
  __nv_bfloat16 hidden[kRows * kStep];
  __nv_bfloat16 weight[kIds * kStep];
};

struct Shared {
  Stage stage[kStages];
  uint64_t full[kStages], empty[kStages];
};

constexpr int kStageBytes = sizeof(Stage);
constexpr int kSharedBytes = sizeof(Shared) + 1024;  // to begin at a multiple of 1024

struct Shape {
  int rows, ids, k;
  const int* count;  // of so many rows, `before` of which come before these, the first count; null: all do
  int before;
};

// The order in which tiles are taken.
struct Tiles {
  int down, across, counted;

  __device__ Tiles(const Shape& s) {
    down = (s.rows + kBlocks * kRows - 1) / (kBlocks * kRows);
    across = (s.ids + kIds - 1) / kIds;
    int rows = s.count ? max(min(*s.count - s.before, s.rows), 0) : s.rows;
    counted = (rows + kBlocks * kRows - 1) / (kBlocks * kRows);
  }

  // The first row of the cluster and the first id of tile i; false if no row of it counts.
  __device__ bool at(int i, int& row, int& id) const {
    int first = i / (kBand * across) * kBand, band = min(kBand, down - first), j = i - first * across;
    int r = first + j % band;
    row = r * kBlocks * kRows;
    id = j / band * kIds;
    return r < counted;
  }
};

__device__ __forceinline__ void step(int& stage, int& phase) {
  if (++stage == kStages) {
    stage = 0;
    phase ^= 1;
  }
}

__device__ void copy(Shared& sh, const CUtensorMap* hidden, const CUtensorMap* weight, const Shape& s, int rank) {
  Tiles tiles(s);
  int steps = (s.k + kStep - 1) / kStep, stage = 0, phase = 0;
  for (int i = blockIdx.x / kBlocks; i < tiles.down * tiles.across; i += gridDim.x / kBlocks) {
    int row, id;
    if (!tiles.at(i, row, id)) continue;
    for (int k = 0; k < steps; ++k, step(stage, phase)) {
      barrier_wait(&sh.empty[stage], phase ^ 1);
      barrier_expect(&sh.full[stage], kStageBytes);
      Stage& to = sh.stage[stage];
      copy_box(to.hidden, hidden, k * kStep, row + rank * kRows, &sh.full[stage]);
      int half = rank * (kIds / kBlocks);
      copy_box_to((1 << kBlocks) - 1, to.weight + half * kStep, weight, k * kStep, id + half, &sh.full[stage]);
    }
  }
}

__device__ __forceinline__ float larger(float a, float b) {  // NaN if one is
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2e));
  return y;
}

// v in [0, 1] in multiples of 2^-23, plus kOne.
__device__ __forceinline__ uint32_t fixed_plus_one(float v) { return __float_as_uint(v + 1.0f); }

// From a product to a logit.
struct Transform {
  const float* bias;  // of the first id
  float cap, scale;
  bool capped, scaled;
  const float* temperature;  // a row; null: 1

  __device__ bool none() const { return !bias && !capped && !scaled && !temperature; }
};

__device__ __forceinline__ float logit(float x, const Transform& how, float bias, float temperature, float& capped) {
  if (how.bias) x = x + bias;
  if (how.capped) {
    x = __fdiv_rn(x, how.cap);
    if (fabsf(x) < 0x1p-126f) x = 0.0f;  // as it does in Triton, whose tanh flushes these
    x = tanhf(x) * how.cap;
  }
  capped = x;
  if (how.scaled) x = x * how.scale;
  if (how.temperature) x = __fdiv_rn(x, temperature);
  return x;
}

// Where a thread's sums of a tile lie: rows `row` and row + 8, ids `id` + 8 j + e.
struct Place {
  int row, id, lane;
  bool here[2];  // whether its rows exist

  __device__ Place(const Shape& s, int group_row, int first_id) {
    int thread = threadIdx.x % 128;
    lane = thread % 32;
    row = group_row + thread / 32 * 16 + lane / 4;
    id = first_id + 2 * (lane % 4);
    here[0] = row < s.rows;
    here[1] = row + 8 < s.rows;
  }
};

struct Statistics {
  Transform how;
  const int64_t* target;  // a row, or null
  int64_t first;          // the global id of id 0
  float* m;
  int* q;
  int* u;        // or null
  int64_t pitch;  // elements of these from row to row; tiles are contiguous
  float* z_target;
  float* products;  // [rows, products_pitch], or null
  int64_t products_pitch;  // a multiple of 2, at least ids

  template <bool kEntropy>
  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id) const {
    Place p(s, group_row, first_id);
    if (products) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = products + (p.row + 8 * h) * products_pitch + p.id;
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (p.here[h] && p.id + 8 * j < s.ids)
            *reinterpret_cast<float2*>(row + 8 * j) = make_float2(z[4 * j + 2 * h], z[4 * j + 2 * h + 1]);
      }
    }
    if (!how.none()) {
      float t[2] = {1.0f, 1.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (how.temperature && p.here[h]) t[h] = how.temperature[p.row + 8 * h];
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        int id = p.id + i / 4 * 8 + i % 2;
        float bias = how.bias && id < s.ids ? how.bias[id] : 0.0f, capped;
        z[i] = logit(z[i], how, bias, t[i / 2 % 2], capped);
      }
    }
    if (first_id + kIds > s.ids) {
#pragma unroll
      for (int i = 0; i < 128; ++i)
        if (p.id + i / 4 * 8 + i % 2 >= s.ids) z[i] = -INFINITY;
    }
    if (target) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int64_t at = (p.here[h] ? target[p.row + 8 * h] : -1) - first - first_id;
        bool mine = at >= 0 && at < kIds && first_id + at < s.ids && (at % 8) / 2 == p.lane % 4;
        if (!__any_sync(~0u, mine)) continue;
        int which = mine ? static_cast<int>(at / 8) * 4 + static_cast<int>(at % 2) + 2 * h : -1;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; ++i) value = i == which ? z[i] : value;
        if (mine) z_target[p.row + 8 * h] = value;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kIds / kTile; ++tile) {
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 64; ++i) top[i / 2 % 2] = larger(top[i / 2 % 2], z[64 * tile + i]);
      bool finite[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = larger(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = larger(top[h], __shfl_xor_sync(~0u, top[h], 2));
        finite[h] = top[h] > -INFINITY && top[h] < INFINITY;
      }
      uint32_t sum[2] = {0, 0}, weighted[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        int h = i / 2 % 2;
        float d = z[64 * tile + i] - top[h], e = exponential(d);
        sum[h] += fixed_plus_one(e);
        if (kEntropy) weighted[h] += fixed_plus_one(e > 0.0f ? e * -d : 0.0f);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] = quad_sum(finite[h] ? sum[h] - 32u * kOne : 0u);
        if (kEntropy) weighted[h] = quad_sum(finite[h] ? weighted[h] - 32u * kOne : 0u);
      }
      int h = p.lane % 2;
      if ((h ? p.here[1] : p.here[0]) && first_id + tile * kTile < s.ids) {
        int64_t to = (p.row + 8 * h) * pitch + first_id / kTile + tile;
        if (p.lane % 4 < 2) {
          m[to] = h ? top[1] : top[0];
          q[to] = static_cast<int>(h ? sum[1] : sum[0]);
        } else if (kEntropy) {
          u[to] = static_cast<int>(h ? weighted[1] : weighted[0]);
        }
      }
    }
  }

  __device__ __forceinline__ void skip(const Shape&, int, int) const {}

  static __device__ __forceinline__ uint32_t quad_sum(uint32_t v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
  }
};

struct Gradient {
  Transform how;
  const int64_t* target;
  int64_t first;
  const float *lse, *entropy, *g_logp, *g_entropy;  // a row; entropy and g_entropy may be null
  __nv_bfloat16* dz;                                // [rows, width]
  int64_t width;                                    // a multiple of 8, at least ids

  template <bool kEntropy>
  __device__ __forceinline__ void run(const Shape& s, float (&z)[128], int group_row, int first_id) const {
    Place p(s, group_row, first_id);
    float l[2], g[2], ent[2], ge[2];
    int at[2];  // the target's id here; -1: elsewhere; -2: the row does not count
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = p.row + 8 * h;
      int64_t id = p.here[h] ? target[row] : -1;
      at[h] = id < 0 ? -2 : id >= first && id < first + s.ids ? static_cast<int>(id - first) : -1;
      l[h] = id >= 0 ? lse[row] : 0.0f;
      g[h] = id >= 0 ? g_logp[row] : 0.0f;
      ent[h] = kEntropy && id >= 0 ? entropy[row] : 0.0f;
      ge[h] = kEntropy && id >= 0 ? g_entropy[row] : 0.0f;
    }
    bool all = how.none() && at[0] > -2 && at[1] > -2 && first_id + kIds <= s.ids;
    if (__all_sync(~0u, all)) {
      bool mine = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) mine |= at[h] >= first_id && at[h] < first_id + kIds;
      bool some = __any_sync(~0u, mine);
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        int h = i / 2 % 2;
        float d = gradient<kEntropy>(z[i] - l[h], g[h], ge[h], ent[h]);
        if (some && p.id + i / 4 * 8 + i % 2 == at[h]) d = d + g[h];
        z[i] = d;
      }
    } else {
      float t[2] = {1.0f, 1.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (how.temperature && at[h] > -2) t[h] = how.temperature[p.row + 8 * h];
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        int h = i / 2 % 2, id = p.id + i / 4 * 8 + i % 2;
        float bias = how.bias && id < s.ids ? how.bias[id] : 0.0f, capped;
        float d = gradient<kEntropy>(logit(z[i], how, bias, t[h], capped) - l[h], g[h], ge[h], ent[h]);
        if (id == at[h]) d = d + g[h];
        if (how.temperature) d = __fdiv_rn(d, t[h]);
        if (how.scaled) d = d * how.scale;
        if (how.capped) {
          float c = __fdiv_rn(capped, how.cap);
          d = d * (1.0f - c * c);
        }
        z[i] = at[h] > -2 && id < s.ids ? d : 0.0f;
      }
    }
    store(s, z, p, first_id);
  }

  // By the logit of an id that is not the target, from its logprob.
  template <bool kEntropy>
  static __device__ __forceinline__ float gradient(float lp, float g, float g_entropy, float entropy) {
    float e = exponential(lp), d = -(g * e);
    if (kEntropy) d = e == 0.0f ? 0.0f : d - g_entropy * (e * (lp + entropy));
    return d;
  }

  // Zeros for rows that do not count.
  __device__ __forceinline__ void skip(const Shape& s, int group_row, int first_id) const {
    float zeros[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) zeros[i] = 0.0f;
    store(s, zeros, Place(s, group_row, first_id), first_id);
  }

  // Four lanes hold two neighbours each of eight ids; they trade until each has all eight of its own, 16 bytes.
  __device__ __forceinline__ void store(const Shape& s, const float (&z)[128], const Place& p, int first_id) const {
    bool odd = p.lane & 1, high = p.lane & 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      __nv_bfloat16* row = dz + static_cast<int64_t>(p.row + 8 * h) * width + first_id;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          __nv_bfloat162 pair = __floats2bfloat162_rn(z[16 * i + 4 * j + 2 * h], z[16 * i + 4 * j + 2 * h + 1]);
          w[j] = *reinterpret_cast<uint32_t*>(&pair);
        }
        uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
        (odd ? w[0] : w[1]) = a;
        (odd ? w[2] : w[3]) = b;
        a = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
        (high ? w[0] : w[2]) = a;
        (high ? w[1] : w[3]) = b;
        int id = 32 * i + 8 * (p.lane % 4);
        if (p.here[h] && first_id + id < width)
          *reinterpret_cast<uint4*>(row + id) = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
};

template <class Epilogue, bool kEntropy>
__device__ void multiply_tiles(Shared& sh, const Shape& s, const Epilogue& epilogue, int rank) {
  Tiles tiles(s);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler sees that it is a warp's
  int steps = (s.k + kStep - 1) / kStep, stage = 0, phase = 0;
  bool late = group == 1;
  uint64_t a0 = operand(sh.stage[0].hidden + group * kGroupRows * kStep), b0 = operand(sh.stage[0].weight);
  float z[128];
  for (int i = blockIdx.x / kBlocks; i < tiles.down * tiles.across; i += gridDim.x / kBlocks) {
    int row, id;
    bool counts = tiles.at(i, row, id);
    row += rank * kRows + group * kGroupRows;
    if (!counts) {
      epilogue.skip(s, row, id);
      continue;
    }
    bool first = i == blockIdx.x / kBlocks;  // a tile that counts, if any of this cluster's do: rows ascend in a band
    if (kBehind && first && late) named_barrier_sync(1, 256);
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
      barrier_wait(&sh.full[stage], phase);
      uint64_t a = a0 + stage * (kStageBytes >> 4), b = b0 + stage * (kStageBytes >> 4);
      products_begin();
#pragma unroll
      for (int j = 0; j < kStep / 16; ++j) multiply(z, a + 2 * j, b + 2 * j, k + j > 0);  // 16 of k are 32 bytes
      products_end();
      if (first && !late && k == min(kBehind, steps) - 1) named_barrier_arrive(1, 256);
      if (k > 0) {
        products_wait<1>();
        if (threadIdx.x % 32 < kBlocks) barrier_arrive(&sh.empty[before], threadIdx.x % 32);
      }
      before = stage;
      step(stage, phase);
    }
    products_wait<0>();
    products_taken(z);
    if (threadIdx.x % 32 < kBlocks) barrier_arrive(&sh.empty[before], threadIdx.x % 32);
    epilogue.template run<kEntropy>(s, z, row, id);
  }
}

template <class Epilogue, bool kEntropy>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    head(const __grid_constant__ CUtensorMap hidden, const __grid_constant__ CUtensorMap weight, const Shape s,
         const Epilogue epilogue) {
  extern __shared__ uint8_t raw[];
  Shared& sh = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&sh.full[i], 1);
      barrier_init(&sh.empty[i], 8 * kBlocks);  // warps that multiply, in both blocks
    }
    barrier_init_done();
  }
  cluster_sync();
  if (threadIdx.x / 128 == 2) {
    registers_down<40>();
    if (threadIdx.x == 2 * 128) copy(sh, &hidden, &weight, s, rank);
  } else {
    registers_up<232>();
    multiply_tiles<Epilogue, kEntropy>(sh, s, epilogue, rank);
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other block may still write here
}

// Host.

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encode() {
  static Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// A matrix [rows, k] of bf16 with `pitch` elements from row to row, taken 128 rows by 64 of k at a time.
cudaError_t map_of(CUtensorMap* map, const void* data, int64_t rows, int64_t k, int64_t pitch) {
  if (!encode()) return cudaErrorNotSupported;
  cuuint64_t size[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows)};
  cuuint64_t stride[1] = {static_cast<cuuint64_t>(pitch) * 2};
  cuuint32_t box[2] = {kStep, kRows}, one[2] = {1, 1};
  CUresult made = encode()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), size, stride, box, one,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class Epilogue, bool kEntropy>
cudaError_t launch(const void* hidden, int64_t hidden_pitch, const void* weight, int64_t weight_pitch, Shape s,
                   const Epilogue& epilogue, cudaStream_t stream) {
  static_assert(kRows == kIds / kBlocks, "one size of box for both operands");
  CUtensorMap maps[2];
  if (cudaError_t e = map_of(&maps[0], hidden, s.rows, s.k, hidden_pitch)) return e;
  if (cudaError_t e = map_of(&maps[1], weight, s.ids, s.k, weight_pitch)) return e;
  auto kernel = head<Epilogue, kEntropy>;
  static thread_local int prepared = -1, most = 0;  // the device for which this is done, and the clusters that it holds
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (prepared != device) {
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)) return e;
    cudaLaunchConfig_t config = {};
    config.gridDim = kBlocks;
    config.blockDim = kThreads;
    config.dynamicSmemBytes = kSharedBytes;
    if (cudaError_t e = cudaOccupancyMaxActiveClusters(&most, kernel, &config)) return e;
    prepared = device;
  }
  int64_t down = (s.rows + kBlocks * kRows - 1) / (kBlocks * kRows), across = (s.ids + kIds - 1) / kIds;
  int64_t clusters = std::min<int64_t>(down * across, most);
  kernel<<<clusters * kBlocks, kThreads, kSharedBytes, stream>>>(maps[0], maps[1], s, epilogue);
  return cudaGetLastError();
}

}  // namespace
}  // namespace alignkit

using namespace alignkit;

struct AlignkitHead {
  const void *hidden, *weight;
  int64_t hidden_pitch, weight_pitch;
  int rows, ids, k;
  const int* count;
  int before;
  const float* bias;
  const float* temperature;
  float cap, scale;
  int capped, scaled;
  const int64_t* target;
  int64_t first;
};

namespace {
Shape shape_of(const AlignkitHead& h) { return {h.rows, h.ids, h.k, h.count, h.before}; }
Transform transform_of(const AlignkitHead& h) {
  return {h.bias, h.cap, h.scale, h.capped != 0, h.scaled != 0, h.temperature};
}
}  // namespace

// All return a cudaError_t.

extern "C" int alignkit_head_statistics(const AlignkitHead* h, float* m, int* q, int* u, int64_t pitch, float* z_target,
                                        float* products, int64_t products_pitch, cudaStream_t stream) {
  Statistics e{transform_of(*h), h->target, h->first, m, q, u, pitch, z_target, products, products_pitch};
  auto run = u ? launch<Statistics, true> : launch<Statistics, false>;
  return run(h->hidden, h->hidden_pitch, h->weight, h->weight_pitch, shape_of(*h), e, stream);
}

extern "C" int alignkit_head_gradient(const AlignkitHead* h, const float* lse, const float* entropy,
                                      const float* g_logp, const float* g_entropy, void* dz, int64_t width,
                                      cudaStream_t stream) {
  Gradient e{transform_of(*h), h->target,  h->first, lse, entropy, g_logp, g_entropy,
             static_cast<__nv_bfloat16*>(dz), width};
  auto run = entropy ? launch<Gradient, true> : launch<Gradient, false>;
  return run(h->hidden, h->hidden_pitch, h->weight, h->weight_pitch, shape_of(*h), e, stream);
}

extern "C" const char* alignkit_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
