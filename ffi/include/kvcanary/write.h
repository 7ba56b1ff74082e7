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

// The chain before a row's first entry: what that one stores as prev_hash, and the position that it should follow.
struct alignas(16) Seed {
  uint64_t hash;
  int64_t position;
};

// What an entry follows. Links do not depend on the endpoint as long as seeds agree, so K and V share them, and so do the
// HEAD and TAIL launches of a step.
struct alignas(16) Link {
  uint64_t hash;     // the running hash before the entry
  int32_t previous;  // the entry whose position comes before, -1 for the row's seed
  int32_t row;       // the row that it belongs to; its complement where another entry of the launch keeps the slot

  KVC_HD int32_t row_of() const { return row < 0 ? ~row : row; }
  KVC_HD bool keeps_slot() const { return row >= 0; }

  // Whether it can be the link of entry i, wherever it comes from.
  KVC_HD bool follows_earlier(int64_t i) const { return previous >= -1 && previous < i; }
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
  bool carried;                    // links and starts were left by a launch over the same entries
  const int32_t* check_positions;  // [1]
  Link* links;                     // [num_tokens]
  uint64_t* starts;                // [row_capacity]: the hash that each row's links start from
  Seed* seeds;                     // scratch [endpoints, row_capacity]: each row's, read before any record changes
  Link* ends;                      // scratch [endpoints, num_tokens], where tree: what the entries behind each one follow
  uint32_t* finished;              // scratch [1], read where a verify came before: blocks that are done
  Log log;
  EndpointList endpoints;

  KVC_HD Seed& seed(int endpoint, int64_t row) const { return seeds[endpoint * row_capacity + row]; }
  // Whether a row's links hold for an endpoint.
  KVC_HD bool shares_chain(int endpoint, int64_t row) const { return seed(endpoint, row).hash == starts[row]; }
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

// The position that an entry with this link should follow.
KVC_HD int64_t position_before(const WriteLaunch& launch, int endpoint, int64_t row, const Link& link) {
  return link.previous < 0 ? launch.seed(endpoint, row).position : launch.positions[link.previous];
}

// What follows on an entry with this link: a skipped one hands on what came before it.
KVC_HD Link link_behind(const Link& link, const Entry& entry, int64_t i) {
  if (entry.slot < 0) return link;
  return {advance(link.hash, entry.token, entry.position), static_cast<int32_t>(i), link.row};
}

// Slot 0 is padding and has no content to start from; any other seed outside the buffer is none either.
KVC_HD bool has_seed(const Endpoint& endpoint, int64_t seed_slot) {
  return seed_slot > 0 && endpoint.holds(seed_slot);
}

KVC_HD Seed read_seed(const Endpoint& endpoint, int64_t seed_slot) {
  if (!has_seed(endpoint, seed_slot)) return {kAnchorHash, 0};
  const Record& seed = endpoint.records[seed_slot];
  return {record_hash(seed), seed.position};
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

// Whether the positions of a row are checked: its seed has one that they go on from.
KVC_HD bool checks_positions(const WriteLaunch& launch, int e, int64_t row) {
  return *launch.check_positions != 0 && has_seed(launch.endpoints.items[e], launch.seed_slots[row]);
}

// Findings of an entry that is not skipped, by what it follows; `positions` as checks_positions says.
KVC_HD void check_entry(const WriteLaunch& launch, int e, int64_t row, const RowRange& range, int64_t i, const Entry& entry,
                        const Link& link, bool positions) {
  const Endpoint& endpoint = launch.endpoints.items[e];
  const uint64_t running = link.hash;
  const bool sound = !launch.tree || parent_of(launch, range, i).sound;
  if (!sound) report_parent(launch, endpoint, row, i, entry, running);
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
  if (!sound || !positions) return;
  // Unsigned, so that the successor of the largest position wraps instead of being undefined.
  const uint64_t next = static_cast<uint64_t>(position_before(launch, e, row, link)) + 1;
  if (static_cast<uint64_t>(entry.position) != next) {
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
