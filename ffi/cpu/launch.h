// Launchers on the host: they return when the work is done, which the threads of a pool share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/parallel.h"
#include "kvcanary/report.h"
#include "kvcanary/verify.h"
#include "kvcanary/write.h"

namespace kvcanary::cpu {

void launch_verify(const Workers& workers, const VerifyLaunch& launch);
void launch_write(const Workers& workers, const WriteLaunch& launch);

// One phase of a step: verify, write and, where `report` has somewhere to write it, the step's report.
void launch_phase(const Workers& workers, const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report);

// Work is counted in steps of a hash: one for each 8-byte word, some 4 ns. A piece of work worth handing to another
// thread has this many, which is a few times what it costs to wake one.
inline constexpr int64_t kGrainSteps = 8192;

// Steps to fingerprint one slot of each endpoint.
inline int64_t fingerprint_steps(const EndpointList& endpoints) {
  int64_t steps = 0;
  for (int e = 0; e < endpoints.size; ++e) {
    const Endpoint& endpoint = endpoints.items[e];
    for (int s = 0; s < endpoint.num_sources; ++s) steps += endpoint.sources[s].num_words + int64_t{1};
  }
  return steps;
}

// How many slots make a piece of work, where a slot takes so many steps.
inline int64_t grain_of(int64_t steps_per_slot) {
  return std::max<int64_t>(1, kGrainSteps / std::max<int64_t>(1, steps_per_slot));
}

// How many entries ahead of the one at work its slot is fetched: slots lie anywhere in memory.
inline constexpr int64_t kAhead = 16;

// Starts loading what the work on a slot will read or store. Always inline: GCC drops calls of functions that do nothing
// but prefetch.
template <bool kStores>
[[gnu::always_inline]] inline void prefetch(const Endpoint& endpoint, int64_t slot) {
  if (!endpoint.holds(slot)) return;
  __builtin_prefetch(&endpoint.records[slot], kStores);
  for (int s = 0; s < endpoint.num_sources; ++s) __builtin_prefetch(endpoint.sources[s].slot_bytes(static_cast<uint32_t>(slot)));
}

}  // namespace kvcanary::cpu
