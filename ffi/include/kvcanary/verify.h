// Verify: compare planned slots with their records. The check of one entry stands here; a launcher spreads entries over
// threads.
#pragma once

#include <cstdint>

#include "kvcanary/endpoint.h"
#include "kvcanary/log.h"

namespace kvcanary {

struct VerifyLaunch {
  const int32_t* slots;               // [capacity]
  const int32_t* expected_tokens;     // [capacity]
  const int32_t* expected_positions;  // [capacity]
  const int32_t* prev_slots;          // [capacity]
  const int32_t* num_valid;           // [1]
  const int32_t* enable;              // [1]
  const int32_t* row_offsets;         // [log.num_rows + 1]: first entry of each row of the batch
  int64_t capacity;
  bool check_expected_token;
  Log log;
  EndpointList endpoints;
};

// How many entries an enabled launch checks.
KVC_HD int64_t verify_entries(const VerifyLaunch& launch) {
  const int64_t wanted = *launch.num_valid;
  return wanted < 0 ? 0 : (wanted < launch.capacity ? wanted : launch.capacity);
}

// Counts the launch itself; returns whether there is anything to check.
KVC_HD bool begin_verify(const VerifyLaunch& launch, const Endpoint& endpoint) {
  add(&launch.log.kernel_runs[endpoint.tag], uint64_t{1});
  if (*launch.enable == 0) {
    add(&launch.log.skips[endpoint.tag], 1u);
    return false;
  }
  add(&launch.log.slot_runs[endpoint.tag], static_cast<uint64_t>(verify_entries(launch)));
  return true;
}

// The row of the batch that an entry belongs to: the last one that does not begin behind it. Looked up for findings only.
KVC_HD int64_t row_of_entry(const VerifyLaunch& launch, int64_t entry) {
  int64_t low = -1, high = launch.log.num_rows;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (launch.row_offsets[middle] <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

KVC_HD void verify_entry(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry) {
  const int64_t slot = launch.slots[entry];
  if (slot == 0) return;
  const int64_t prev_slot = launch.prev_slots[entry];
  const int64_t expected_position = launch.expected_positions[entry];
  const int64_t expected_token = launch.check_expected_token ? launch.expected_tokens[entry] : -1;

  if (!endpoint.holds(slot) || prev_slot >= endpoint.num_slots) {
    record(launch.log, {/*tag=*/endpoint.tag,
                        /*slot=*/endpoint.holds(slot) ? prev_slot : slot,
                        /*position=*/expected_position,
                        /*stored_token=*/-1,
                        /*expected_token=*/expected_token,
                        /*stored_chain_hash=*/0,
                        /*expected_aux=*/static_cast<uint64_t>(endpoint.num_slots),
                        /*reasons=*/kSlotOutOfRange}, row_of_entry(launch, entry));
    return;
  }

  const Record stored = endpoint.records[slot];
  uint64_t expected_hash = stored.prev_hash;  // slot 0 as predecessor is unreachable: nothing to compare with
  if (prev_slot < 0) {
    expected_hash = kAnchorHash;
  } else if (prev_slot > 0) {
    expected_hash = record_hash(endpoint.records[prev_slot]);
  }

  int64_t reasons = 0;
  if (stored.prev_hash != expected_hash) reasons |= kVerifyChainHash;
  if (stored.position != expected_position) reasons |= kVerifyPosition;
  if (stored.real_kv_hash != endpoint.real_kv_hash_of(slot)) reasons |= kVerifyRealKvHash;
  if (expected_token != -1 && stored.token != expected_token) reasons |= kVerifyToken;
  if (reasons == 0) return;
  record(launch.log, {/*tag=*/endpoint.tag,
                      /*slot=*/slot,
                      /*position=*/stored.position,
                      /*stored_token=*/stored.token,
                      /*expected_token=*/expected_token,
                      /*stored_chain_hash=*/stored.prev_hash,
                      /*expected_aux=*/expected_hash,
                      /*reasons=*/reasons}, row_of_entry(launch, entry));
}

}  // namespace kvcanary
