// Stand-in for csrc/sm90/ptx/mbarrier.cuh, without arrivals at another CTA. Waiting threads yield to the other fibers.
#pragma once
#include "shared_address.cuh"

namespace alignkit {

// The 64 bits of an mbarrier.
struct Mbarrier {
  int16_t pending, arrivals;  // arrivals pending in this phase; arrivals of a phase
  int32_t bytes : 31;         // transaction bytes pending; negative if copies complete before expect_tx
  uint32_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

// Check that the mbarrier lies in shared memory, and return it.
inline Mbarrier& mbarrier(uint64_t* b) {
  shared_address(b);
  return *reinterpret_cast<Mbarrier*>(b);
}
// Start the next phase if this one is complete.
inline void mbarrier_update(Mbarrier& b) {
  ++machine::progress;
  if (b.pending < 0) machine::fail("mbarrier: more arrivals than expected");
  if (b.pending == 0 && b.bytes == 0) {
    b.pending = b.arrivals;
    b.phase ^= 1;
  }
}
inline void mbarrier_init(uint64_t* b, int arrivals) {
  mbarrier(b) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_expect_tx(uint64_t* b, int bytes) {
  mbarrier(b).bytes += bytes;
  --mbarrier(b).pending;
  mbarrier_update(mbarrier(b));
}
inline void mbarrier_arrive(uint64_t* b) {
  --mbarrier(b).pending;
  mbarrier_update(mbarrier(b));
}
// Count `bytes` of a completed copy.
inline void mbarrier_complete_tx(uint64_t* b, int bytes) {
  mbarrier(b).bytes -= bytes;
  mbarrier_update(mbarrier(b));
}
inline bool mbarrier_test_wait(uint64_t* b, int parity) {
  return mbarrier(b).phase != static_cast<uint32_t>(parity & 1);
}
inline void mbarrier_wait(uint64_t* b, int parity) {
  while (!mbarrier_test_wait(b, parity)) machine::yield();
}

struct NamedBarrier {
  int arrived, round;
};
inline NamedBarrier named_barriers[16];

// Arrive, and return the round that this arrival belongs to.
inline int named_barrier_arrive(int id, int threads) {
  ++machine::progress;
  int round = named_barriers[id].round;
  if (++named_barriers[id].arrived == threads) {
    named_barriers[id].arrived = 0;
    ++named_barriers[id].round;
  }
  return round;
}
inline void named_barrier_sync(int id, int threads) {
  int round = named_barrier_arrive(id, threads);
  while (named_barriers[id].round == round) machine::yield();
}

template <int kDepth>
void advance(int& stage, int& phase) {
  if (++stage == kDepth) {
    stage = 0;
    phase ^= 1;
  }
}

}  // namespace alignkit
