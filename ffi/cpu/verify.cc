#include "cpu/launch.h"

namespace kvcanary::cpu {
namespace {

// Steps of a hash that the check of a record takes, its predecessor's hash and its way from memory included.
constexpr int64_t kRecordSteps = 4;

}  // namespace

void launch_verify(const Workers& workers, const VerifyLaunch& launch) {
  const EndpointList& endpoints = launch.endpoints;
  bool enabled = false;  // for all or for none
  for (int e = 0; e < endpoints.size; ++e) enabled = begin_verify(launch, endpoints.items[e]);
  if (!enabled) return;
  const int64_t grain = grain_of(kRecordSteps * endpoints.size + fingerprint_steps(endpoints));
  // A predecessor is mostly the entry before, whose record is in the nearest cache: carrying its hash along saves no time.
  parallel_for(workers, verify_entries(launch), grain, [&launch, &endpoints](int64_t begin, int64_t end) noexcept {
    for (int e = 0; e < endpoints.size; ++e) {
      const Endpoint& endpoint = endpoints.items[e];
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) prefetch<false>(endpoint, launch.slots[i + kAhead]);
        verify_entry(launch, endpoint, i);
      }
    }
  });
}

}  // namespace kvcanary::cpu
