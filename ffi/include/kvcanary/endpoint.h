// An endpoint: one canary buffer with its launch tag and the real KV that goes into its records. A launch takes a list
// of them, so that K and V of a phase share one custom call.
#pragma once

#include <cstdint>

#include "kvcanary/record.h"
#include "kvcanary/source.h"

namespace kvcanary {

inline constexpr int kMaxEndpoints = 4;

struct Endpoint {
  Record* records;  // [num_slots]
  int64_t num_slots;
  int32_t tag;
  int32_t num_sources;
  Source sources[kMaxSources];

  KVC_HD bool holds(int64_t slot) const { return slot >= 0 && slot < num_slots; }

  KVC_HD uint64_t real_kv_hash_of(int64_t slot) const {
    return real_kv_hash(sources, num_sources, static_cast<uint32_t>(slot));
  }
};

struct EndpointList {
  Endpoint items[kMaxEndpoints];
  int32_t size;
};

}  // namespace kvcanary
