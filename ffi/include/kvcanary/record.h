// One record of a canary buffer: uint8 [num_slots, 32], little-endian int64 fields.
#pragma once

#include <cstdint>

#include "kvcanary/hash.h"

namespace kvcanary {

struct alignas(16) Record {
  int64_t token;
  int64_t position;
  uint64_t prev_hash;
  uint64_t real_kv_hash;
};
static_assert(sizeof(Record) == 32);

// The running hash behind a record: what its successor stores as prev_hash. The real-KV hash is left out on purpose,
// since two requests may share a prefix whose bytes came from different batch shapes.
KVC_HD uint64_t advance(uint64_t running, int64_t token, int64_t position) {
  return mix3(running, static_cast<uint64_t>(token), static_cast<uint64_t>(position));
}

KVC_HD uint64_t record_hash(const Record& record) {
  return advance(record.prev_hash, record.token, record.position);
}

}  // namespace kvcanary
