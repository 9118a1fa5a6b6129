#pragma once
#include "shared_address.cuh"

namespace alignkit {

// In the 64 bits: arrivals that are missing, arrivals of a phase, announced bytes that are missing (they may be early),
// the phase.
struct Barrier {
  int16_t missing, arrivals;
  int32_t bytes : 31;
  uint32_t phase : 1;
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier(uint64_t* b) {
  shared_address(b);
  return *reinterpret_cast<Barrier*>(b);
}
inline void barrier_turn(Barrier& b) {
  ++machine::moves;
  if (b.missing < 0) machine::fail("too many arrivals");
  if (b.missing == 0 && b.bytes == 0) {
    b.missing = b.arrivals;
    b.phase ^= 1;
  }
}
inline void barrier_init(uint64_t* b, int arrivals) {
  barrier(b) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0, 0};
}
inline void barrier_init_done() {}
inline void barrier_expect(uint64_t* b, int bytes) {
  barrier(b).bytes += bytes;
  --barrier(b).missing;
  barrier_turn(barrier(b));
}
inline void barrier_arrive(uint64_t* b) {
  --barrier(b).missing;
  barrier_turn(barrier(b));
}
inline void barrier_copied(uint64_t* b, int bytes) {
  barrier(b).bytes -= bytes;
  barrier_turn(barrier(b));
}
inline bool barrier_ended(uint64_t* b, int parity) {
  return barrier(b).phase != static_cast<uint32_t>(parity & 1);
}
inline void barrier_wait(uint64_t* b, int parity) {
  while (!barrier_ended(b, parity)) machine::yield();
}

struct Named {
  int arrived, round;
};
inline Named named[16];

inline int named_barrier_arrive(int name, int threads) {
  ++machine::moves;
  int round = named[name].round;
  if (++named[name].arrived == threads) {
    named[name].arrived = 0;
    ++named[name].round;
  }
  return round;
}
inline void named_barrier_sync(int name, int threads) {
  int round = named_barrier_arrive(name, threads);
  while (named[name].round == round) machine::yield();
}

template <int kDepth>
void step(int& stage, int& phase) {
  if (++stage == kDepth) {
    stage = 0;
    phase ^= 1;
  }
}

}  // namespace alignkit
