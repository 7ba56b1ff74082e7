#include "cpu/launch.h"

namespace kvcanary::cpu {

void launch_verify(const VerifyLaunch& launch) {
  for (int e = 0; e < launch.endpoints.size; ++e) {
    const Endpoint& endpoint = launch.endpoints.items[e];
    if (!begin_verify(launch, endpoint)) continue;
    const int64_t entries = verify_entries(launch);
    for (int64_t i = 0; i < entries; ++i) verify_entry(launch, endpoint, i);
  }
}

}  // namespace kvcanary::cpu
