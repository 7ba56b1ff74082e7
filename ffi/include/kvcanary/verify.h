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

struct alignas(16) PlannedEntry {
  int32_t slot, prev_slot, expected_position, expected_token;

  // Both records that the check may read are in the buffer.
  KVC_HD bool in_range(const Endpoint& endpoint) const { return endpoint.holds(slot) && prev_slot < endpoint.num_slots; }
};

KVC_HD PlannedEntry read_planned(const VerifyLaunch& launch, int64_t entry) {
  return {launch.slots[entry], launch.prev_slots[entry], launch.expected_positions[entry],
          launch.check_expected_token ? launch.expected_tokens[entry] : -1};
}

// The finding of an entry that names a slot outside the buffer.
KVC_HD void report_range(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry, const PlannedEntry& planned) {
  record(launch.log, {/*tag=*/endpoint.tag,
                      /*slot=*/endpoint.holds(planned.slot) ? planned.prev_slot : planned.slot,
                      /*position=*/planned.expected_position,
                      /*stored_token=*/-1,
                      /*expected_token=*/planned.expected_token,
                      /*stored_chain_hash=*/0,
                      /*expected_aux=*/static_cast<uint64_t>(endpoint.num_slots),
                      /*reasons=*/kSlotOutOfRange}, row_of_entry(launch, entry));
}

// Compares a record with what the plan, its predecessor and the real KV say; reports where they differ.
KVC_HD void check_record(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry, const PlannedEntry& planned,
                         const Record& stored, uint64_t expected_hash, uint64_t real_kv_hash) {
  int64_t reasons = 0;
  if (stored.prev_hash != expected_hash) reasons |= kVerifyChainHash;
  if (stored.position != planned.expected_position) reasons |= kVerifyPosition;
  if (stored.real_kv_hash != real_kv_hash) reasons |= kVerifyRealKvHash;
  if (planned.expected_token != -1 && stored.token != planned.expected_token) reasons |= kVerifyToken;
  if (reasons == 0) return;
  record(launch.log, {/*tag=*/endpoint.tag,
                      /*slot=*/planned.slot,
                      /*position=*/stored.position,
                      /*stored_token=*/stored.token,
                      /*expected_token=*/planned.expected_token,
                      /*stored_chain_hash=*/stored.prev_hash,
                      /*expected_aux=*/expected_hash,
                      /*reasons=*/reasons}, row_of_entry(launch, entry));
}

// What an entry's record should follow: the anchor at the start of a chain, nothing that could be compared behind slot 0,
// which is unreachable, and else its predecessor, whose hash is asked for only then.
template <typename HashOf>
KVC_HD uint64_t expected_chain_hash(int64_t prev_slot, const Record& stored, HashOf hash_of) {
  if (prev_slot < 0) return kAnchorHash;
  return prev_slot == 0 ? stored.prev_hash : hash_of(prev_slot);
}

// The whole check of one entry.
KVC_HD void verify_entry(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry) {
  const PlannedEntry planned = read_planned(launch, entry);
  if (planned.slot == 0) return;  // padding
  if (!planned.in_range(endpoint)) return report_range(launch, endpoint, entry, planned);
  const Record stored = endpoint.records[planned.slot];
  const uint64_t expected =
      expected_chain_hash(planned.prev_slot, stored, [&](int64_t slot) { return record_hash(endpoint.records[slot]); });
  check_record(launch, endpoint, entry, planned, stored, expected, endpoint.real_kv_hash_of(planned.slot));
}

}  // namespace kvcanary
