// Stand-in for csrc/sm90/ptx/wgmma.cuh, bf16 only: a wgmma is computed at the warpgroup_wait for its group. Negated and
// transposed a are left out.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

template <int count>
void setmaxnreg_inc() {}
template <int count>
void setmaxnreg_dec() {}

template <bool kTransposed>
uint64_t smem_descriptor(const void* p, int rows = 64) {
  return shared_address(p) >> 4 | static_cast<uint64_t>(kTransposed ? rows * 128 >> 4 : 1) << 16 |
         static_cast<uint64_t>(8 * 128 >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}
template <bool kTransposed>
constexpr int kDescriptorStep = (kTransposed ? 16 * 128 : 16 * 2) >> 4;

inline machine::Fiber& self() { return machine::fibers[machine::current]; }

inline void warpgroup_arrive() {}
inline void warpgroup_commit() {
  self().groups.push_back(self().group_begin);
  self().group_begin = self().wgmmas.size();
}

// Element (n, k) of the operand that descriptor b names.
inline float element(uint64_t b, bool transposed, int n, int k) {
  uint32_t begin = (b & 0x3fff) << 4, leading = (b >> 16 & 0x3fff) << 4, stride = (b >> 32 & 0x3fff) << 4;
  uint32_t address = transposed ? begin + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                                : begin + n / 8 * stride + n % 8 * 128 + k * 2;
  uint16_t v;
  std::memcpy(&v, swizzled(address), 2);
  return bf16(v);
}

// Compute one wgmma as `chain` of test_attention_on_cpu.py does: accumulator plus 16 exact products in double, rounded
// once. The tensor core rounds otherwise.
inline void compute(const machine::Wgmma& p) {
  auto& exchange = machine::exchange[machine::warp()];
  int lane = machine::lane();
  for (int i = 0; p.a && i < 4; ++i) exchange[lane][i] = p.a[i];
  machine::sync_warp();
  for (int h = 0; h < 2; ++h) {
    float a[16];
    for (int k = 0; k < 16; ++k) {
      if (!p.a) {
        a[k] = element(p.a_shared, false, machine::warp() % 4 * 16 + lane / 4 + 8 * h, k);
        continue;
      }
      auto pair = static_cast<uint32_t>(exchange[lane / 4 * 4 + k / 2 % 4][h + k / 8 * 2]);
      a[k] = bf16(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair));
    }
    for (int j = 0; j < p.columns / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float& d = p.d[4 * j + 2 * h + e];
        double sum = p.add ? d : 0.0f;
        for (int k = 0; k < 16; ++k) sum += double{a[k]} * element(p.b, p.transposed, 8 * j + 2 * (lane % 4) + e, k);
        d = static_cast<float>(sum);
      }
  }
  machine::sync_warp();
}

template <int pending>
void warpgroup_wait() {
  auto& f = self();
  while (f.groups.size() > pending) {
    size_t end = f.groups.size() > 1 ? f.groups[1] : f.group_begin;
    for (size_t i = 0; i < end; ++i) compute(f.wgmmas[i]);
    f.wgmmas.erase(f.wgmmas.begin(), f.wgmmas.begin() + static_cast<long>(end));
    f.groups.erase(f.groups.begin());
    for (auto& g : f.groups) g -= end;
    f.group_begin -= end;
  }
}
template <int kCount>
void warpgroup_fence_operand(float (&)[kCount]) {}

template <bool kNegated, bool kTransposed, int kCount>
void wgmma(__nv_bfloat16, float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(!kNegated);
  self().wgmmas.push_back({d, 2 * kCount, a, 0, b, kTransposed, add});
}
template <bool kNegated, bool kTransposed>
void wgmma(__nv_bfloat16, float (&d)[132], const uint32_t (&a)[4], uint64_t b, uint64_t more, bool add) {
  static_assert(!kNegated);
  self().wgmmas.push_back({d, 256, a, 0, b, kTransposed, add});
  self().wgmmas.push_back({d + 128, 8, a, 0, more, kTransposed, add});
}
template <bool kATransposed, bool kTransposed, int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool add) {
  static_assert(!kATransposed);
  self().wgmmas.push_back({d, 2 * kCount, nullptr, a, b, kTransposed, add});
}
template <bool kATransposed, bool kTransposed, int kCount>
void wgmma_zero(float (&d)[kCount], uint64_t a, uint64_t b) {
  wgmma<kATransposed, kTransposed>(d, a, b, false);
}

}  // namespace alignkit
