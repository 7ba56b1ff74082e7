#include "cpu/launch.h"

namespace kvcanary::cpu {
namespace {

// Steps of a slot's fingerprints from which a pass of their own over the records pays: the walk takes about as many.
constexpr int64_t kWorthAPass = 8;

// A set of endpoints, as bits.
using Members = uint32_t;

template <typename Body>
void for_each(Members members, Body body) {
  for (int e = 0; members >> e != 0; ++e) {
    if (members >> e & 1) body(e);
  }
}

// What the members that store one row have in common.
struct Row {
  int64_t number;
  RowRange range;
  Members members;
  Members positions;  // endpoints that check positions
};

// Checks an entry and stores its record in all members. Without kFingerprint the real-KV hashes are left for later.
template <bool kFingerprint>
[[gnu::always_inline]] inline void store_entry(const WriteLaunch& launch, const Row& row, int64_t i, const Entry& entry, const Link& link,
                                               uint64_t* stored) {
  if (entry.slot < 0) return;
  for_each(row.members, [&](int e) {
    const Endpoint& endpoint = launch.endpoints.items[e];
    check_entry(launch, e, row.number, row.range, i, entry, link, row.positions >> e & 1);
    if (!endpoint.holds(entry.slot)) return;
    endpoint.records[entry.slot] = {entry.token, entry.position, link.hash, kFingerprint ? endpoint.real_kv_hash_of(entry.slot) : 0};
    ++stored[e];
  });
}

// Starts loading what the entries behind this one will store. Always inline, and a loop in place, as prefetch is.
[[gnu::always_inline]] inline void prefetch_ahead(const WriteLaunch& launch, const Row& row, int64_t i) {
  if (i + kAhead >= row.range.end) return;
  const int64_t ahead = launch.slots[i + kAhead];
  for (int e = 0; row.members >> e != 0; ++e) {
    if (row.members >> e & 1) prefetch<true>(launch.endpoints.items[e], ahead);
  }
}

// Walks the chain or tree of one row for all its members, which go on from one hash, and counts the records in `stored
// [endpoints]`. The links are kept where `keeps_links`.
template <bool kFingerprint, bool kTree>
void walk_row(const WriteLaunch& launch, const Row& row, bool keeps_links, uint64_t* stored) {
  const int first = __builtin_ctz(row.members);  // the ends of a tree are kept as this one's
  const Link seed = {launch.seed(first, row.number).hash, -1, static_cast<int32_t>(row.number)};
  Link link = seed;
  for (int64_t i = row.range.begin; i < row.range.end; ++i) {
    prefetch_ahead(launch, row, i);
    const Entry entry = read_entry(launch, i);
    if (kTree) {
      const Parent parent = parent_of(launch, row.range, i);
      link = parent.entry < 0 ? seed : launch.end(first, parent.entry);
    }
    const Link before = link;
    if (kTree || i + 1 < row.range.end) link = link_behind(before, entry, i);  // nothing follows the end of a chain
    if (kTree) launch.end(first, i) = link;
    if (keeps_links) launch.links[i] = before;
    store_entry<kFingerprint>(launch, row, i, entry, before, stored);
  }
}

// Whether the links of a row, as another launch left them, name what they can.
bool are_sound(const WriteLaunch& launch, const RowRange& range) {
  for (int64_t i = range.begin; i < range.end; ++i) {
    if (!launch.links[i].follows_earlier(i)) return false;
  }
  return true;
}

// All endpoints of a launch.
struct Common {
  Members all;
  int64_t least_slots;  // that each buffer has
};

Common common_of(const EndpointList& endpoints) {
  Common common = {(Members{1} << endpoints.size) - 1, endpoints.items[0].num_slots};
  for (int e = 1; e < endpoints.size; ++e) common.least_slots = std::min(common.least_slots, endpoints.items[e].num_slots);
  return common;
}

// The endpoints that check positions in a row.
Members checking_positions(const WriteLaunch& launch, const Common& common, int64_t row) {
  const int64_t seed_slot = launch.seed_slots[row];
  if (*launch.check_positions == 0 || seed_slot <= 0) return 0;
  if (seed_slot < common.least_slots) return common.all;
  Members found = 0;
  for_each(common.all, [&](int e) { found |= Members{checks_positions(launch, e, row)} << e; });
  return found;
}

// Those of some endpoints whose row goes on from a hash.
[[gnu::always_inline]] inline Members members_from(const WriteLaunch& launch, Members endpoints, int64_t row, uint64_t start) {
  Members found = 0;
  for_each(endpoints, [&](int e) { found |= Members{launch.seed(e, row).hash == start} << e; });
  return found;
}

// Rows one after the other: of a slot that two of them name, one whole record must stay.
template <bool kFingerprint>
void write_rows_in_turn(const WriteLaunch& launch, int64_t rows, bool in_order) {
  const Common common = common_of(launch.endpoints);
  uint64_t stored[kMaxEndpoints] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange range = row_range(launch, row);
    if (range.cut || launch.seed_slots[row] >= common.least_slots) {
      for_each(common.all, [&](int e) { check_row(launch, launch.endpoints.items[e], row, range); });
    }
    if (range.empty()) continue;
    const Members positions = checking_positions(launch, common, row);
    Members open = common.all;
    if (launch.carried && in_order && are_sound(launch, range)) {
      const Members sharing = members_from(launch, open, row, launch.starts[row]);
      const Row taken = {row, range, sharing, positions};
      for (int64_t i = range.begin; sharing != 0 && i < range.end; ++i) {
        prefetch_ahead(launch, taken, i);
        store_entry<kFingerprint>(launch, taken, i, read_entry(launch, i), launch.links[i], stored);
      }
      open &= ~sharing;
    }
    while (open != 0) {
      const int first = __builtin_ctz(open);
      const Members own = Members{1} << first;
      const Members sharing = own | members_from(launch, open & ~own, row, launch.seed(first, row).hash);
      open &= ~sharing;
      const bool keeps_links = first == 0 && !launch.carried;
      // Calls in place: one through a pointer would take longer than a row of one entry.
      if (launch.tree) {
        walk_row<kFingerprint, true>(launch, {row, range, sharing, positions}, keeps_links, stored);
      } else {
        walk_row<kFingerprint, false>(launch, {row, range, sharing, positions}, keeps_links, stored);
      }
    }
  }
  for (int e = 0; e < launch.endpoints.size; ++e) add(&launch.log.slot_runs[launch.endpoints.items[e].tag], stored[e]);
}

// The real-KV hashes of the records stored for entries [begin, end). They depend on the slot alone, so that any thread
// may store them in any order; those of a slot named twice are the same, and are stored as atomics for that reason.
void fingerprint_entries(const WriteLaunch& launch, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange range = row_range(launch, row);
    for (int64_t i = std::max(begin, range.begin); i < std::min(end, range.end); ++i) {
      const int64_t slot = launch.slots[i];
      for (int e = 0; e < launch.endpoints.size; ++e) {
        const Endpoint& endpoint = launch.endpoints.items[e];
        if (endpoint.holds(slot)) __atomic_store_n(&endpoint.records[slot].real_kv_hash, endpoint.real_kv_hash_of(slot), __ATOMIC_RELAXED);
      }
    }
  }
}

// The entries that rows have: a piece of the token arrays that holds them all.
RowRange span_of(const WriteLaunch& launch, int64_t rows) {
  RowRange span{launch.num_tokens, 0, false};
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange range = row_range(launch, row);
    if (range.empty()) continue;
    span.begin = std::min(span.begin, range.begin);
    span.end = std::max(span.end, range.end);
  }
  return span;
}

}  // namespace

// The chains are walked on the calling thread; fingerprints that cost more than they do are computed behind that by the
// whole pool.
void launch_write(const Workers& workers, const WriteLaunch& launch) {
  const int64_t rows = write_rows(launch);
  for (int e = 0; e < launch.endpoints.size; ++e) {
    const Endpoint& endpoint = launch.endpoints.items[e];
    add(&launch.log.kernel_runs[endpoint.tag], uint64_t{1});
    // All seeds first: a row may overwrite the record that another one goes on from.
    for (int64_t row = 0; row < rows; ++row) launch.seed(e, row) = read_seed(endpoint, launch.seed_slots[row]);
  }
  bool in_order = true;  // only then is there one link an entry
  for (int64_t row = 0; row < rows; ++row) {
    if (!launch.carried) launch.starts[row] = launch.seed(0, row).hash;
    in_order &= launch.offsets[row] <= launch.offsets[row + 1];
  }
  const int64_t steps = fingerprint_steps(launch.endpoints), grain = grain_of(steps);
  const RowRange span = workers.count > 1 && steps >= kWorthAPass ? span_of(launch, rows) : RowRange{};
  if (span.end - span.begin <= grain) {
    write_rows_in_turn<true>(launch, rows, in_order);
    return;
  }
  write_rows_in_turn<false>(launch, rows, in_order);
  parallel_for(workers, span.end - span.begin, grain, [&launch, rows, &span](int64_t begin, int64_t end) noexcept {
    fingerprint_entries(launch, rows, span.begin + begin, span.begin + end);
  });
}

void launch_phase(const Workers& workers, const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report) {
  launch_verify(workers, verify);
  launch_write(workers, write);
  if (report.summary == nullptr) return;
  blank_report(report, write.log.ring_capacity, 0, 1);
  fill_report(write.log, report, 0, 1);
}

}  // namespace kvcanary::cpu
