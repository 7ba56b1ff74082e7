// Write: stamp the records of the tokens that a step stores. The chain of a row is serial; what can be checked or
// computed for one row or one entry alone stands here, and a launcher decides who does it.
#pragma once

#include <cstdint>

#include "kvcanary/endpoint.h"
#include "kvcanary/log.h"

namespace kvcanary {

// int32 or int64 values that the caller passed, read without change of value.
struct Integers {
  const void* data;
  bool wide;

  KVC_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The end of a chain: what the entry behind it stores as prev_hash, and the position that it should follow.
struct alignas(16) Link {
  uint64_t hash;
  int64_t position;
};

struct WriteLaunch {
  const int32_t* offsets;     // [row_capacity + 1]
  const int32_t* seed_slots;  // [row_capacity]
  const int32_t* num_rows;    // [1]
  int64_t row_capacity;
  Integers tokens;              // [num_tokens]
  Integers positions;           // [num_tokens]
  Integers slots;               // [num_tokens]
  Integers expected_tokens;     // [num_tokens], read where check_input
  Integers expected_positions;  // [num_tokens], read where check_input
  Integers parents;             // [num_tokens], read where tree: the entry that each one follows, negative for the seed
  int64_t num_tokens;
  bool check_input;
  bool tree;
  const int32_t* check_positions;  // [1]
  Link* seeds;                     // scratch [endpoints, row_capacity]: each row's, read before any record changes
  Link* ends;                      // scratch [endpoints, num_tokens], where tree: the chain behind each entry
  Log log;
  EndpointList endpoints;

  KVC_HD Link& seed(int endpoint, int64_t row) const { return seeds[endpoint * row_capacity + row]; }
  KVC_HD Link& end(int endpoint, int64_t i) const { return ends[endpoint * num_tokens + i]; }
};

KVC_HD int64_t write_rows(const WriteLaunch& launch) {
  const int64_t wanted = *launch.num_rows;
  return wanted < 0 ? 0 : (wanted < launch.row_capacity ? wanted : launch.row_capacity);
}

// Entries of a row: those planned, cut to those that the token arrays have.
struct RowRange {
  int64_t begin, end;
  bool cut;

  KVC_HD bool empty() const { return begin >= end; }
};

KVC_HD RowRange row_range(const WriteLaunch& launch, int64_t row) {
  const int64_t begin = launch.offsets[row], end = launch.offsets[row + 1];
  if (begin >= end) return {0, 0, false};
  const int64_t first = begin < 0 ? 0 : begin, last = end < launch.num_tokens ? end : launch.num_tokens;
  return {first, last, first != begin || last != end};
}

struct Entry {
  int64_t slot, token, position;
};

KVC_HD Entry read_entry(const WriteLaunch& launch, int64_t i) {
  return {launch.slots[i], launch.tokens[i], launch.positions[i]};
}

// Slot 0 is padding and has no content to start from; any other seed outside the buffer is none either.
KVC_HD bool has_seed(const Endpoint& endpoint, int64_t seed_slot) {
  return seed_slot > 0 && endpoint.holds(seed_slot);
}

KVC_HD Link read_seed(const WriteLaunch& launch, const Endpoint& endpoint, int64_t row) {
  const int64_t seed_slot = launch.seed_slots[row];
  if (!has_seed(endpoint, seed_slot)) return {kAnchorHash, 0};
  const Record& seed = endpoint.records[seed_slot];
  return {advance(seed.prev_hash, seed.token, seed.position), seed.position};
}

// Findings that belong to the row as a whole, once for each.
KVC_HD void check_row(const WriteLaunch& launch, const Endpoint& endpoint, int64_t row, const RowRange& range) {
  if (range.cut) {
    record(launch.log, {/*tag=*/endpoint.tag,
                        /*slot=*/-1,
                        /*position=*/-1,
                        /*stored_token=*/-1,
                        /*expected_token=*/-1,
                        /*stored_chain_hash=*/0,
                        /*expected_aux=*/static_cast<uint64_t>(launch.num_tokens),
                        /*reasons=*/kSlotOutOfRange}, row);
  }
  const int64_t seed_slot = launch.seed_slots[row];
  if (range.empty() || seed_slot < endpoint.num_slots) return;
  const Entry first = read_entry(launch, range.begin);
  record(launch.log, {/*tag=*/endpoint.tag,
                      /*slot=*/seed_slot,
                      /*position=*/first.position,
                      /*stored_token=*/first.token,
                      /*expected_token=*/-1,
                      /*stored_chain_hash=*/kAnchorHash,
                      /*expected_aux=*/static_cast<uint64_t>(endpoint.num_slots),
                      /*reasons=*/kSlotOutOfRange}, row);
}

// Which entry of a tree entry i follows: one before it in its row, or -1 for the row's seed.
struct Parent {
  int64_t entry;
  bool sound;
};

KVC_HD Parent parent_of(const WriteLaunch& launch, const RowRange& range, int64_t i) {
  const int64_t parent = launch.parents[i];
  if (parent < 0) return {-1, true};
  if (parent < range.begin || parent >= i) return {-1, false};
  return {parent, true};
}

// The finding of an entry whose parent is none: it follows the seed instead, so that one bad index does not cascade.
KVC_HD void report_parent(const WriteLaunch& launch, const Endpoint& endpoint, int64_t row, int64_t i, const Entry& entry,
                          uint64_t running) {
  record(launch.log, {/*tag=*/endpoint.tag,
                      /*slot=*/launch.parents[i],
                      /*position=*/entry.position,
                      /*stored_token=*/entry.token,
                      /*expected_token=*/-1,
                      /*stored_chain_hash=*/running,
                      /*expected_aux=*/static_cast<uint64_t>(i),
                      /*reasons=*/kSlotOutOfRange}, row);
}

// Findings of an entry that is not skipped; running is the hash before it, previous the position it should follow
// where follows says that there is one.
KVC_HD void check_entry(const WriteLaunch& launch, const Endpoint& endpoint, int64_t row, int64_t i, const Entry& entry,
                        uint64_t running, bool follows, int64_t previous) {
  if (entry.slot >= endpoint.num_slots) {
    record(launch.log, {/*tag=*/endpoint.tag,
                        /*slot=*/entry.slot,
                        /*position=*/entry.position,
                        /*stored_token=*/entry.token,
                        /*expected_token=*/-1,
                        /*stored_chain_hash=*/running,
                        /*expected_aux=*/static_cast<uint64_t>(endpoint.num_slots),
                        /*reasons=*/kSlotOutOfRange}, row);
    return;
  }
  if (launch.check_input) {
    const int64_t expected_token = launch.expected_tokens[i], expected_position = launch.expected_positions[i];
    const int64_t reasons =
        (entry.token != expected_token ? kWriteToken : 0) | (entry.position != expected_position ? kWritePosition : 0);
    if (reasons != 0) {
      record(launch.log, {/*tag=*/endpoint.tag,
                          /*slot=*/entry.slot,
                          /*position=*/entry.position,
                          /*stored_token=*/entry.token,
                          /*expected_token=*/expected_token,
                          /*stored_chain_hash=*/running,
                          /*expected_aux=*/static_cast<uint64_t>(expected_position),
                          /*reasons=*/reasons}, row);
    }
  }
  // Unsigned, so that the successor of the largest position wraps instead of being undefined.
  const uint64_t next = static_cast<uint64_t>(previous) + 1;
  if (follows && static_cast<uint64_t>(entry.position) != next) {
    record(launch.log, {/*tag=*/endpoint.tag,
                        /*slot=*/entry.slot,
                        /*position=*/entry.position,
                        /*stored_token=*/entry.token,
                        /*expected_token=*/entry.token,
                        /*stored_chain_hash=*/running,
                        /*expected_aux=*/next,
                        /*reasons=*/kWritePosition}, row);
  }
}

}  // namespace kvcanary
