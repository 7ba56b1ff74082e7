#include "cpu/launch.h"

namespace kvcanary::cpu {
namespace {

// Steps of a slot's fingerprints from which a pass of their own over the records pays: the walk takes about as many.
constexpr int64_t kWorthAPass = 8;

// Whether the chains of one row are the same in two endpoints, so that one walk serves both.
bool same_chain(const WriteLaunch& launch, int64_t row, int a, int b) {
  const Link &x = launch.seed(a, row), &y = launch.seed(b, row);
  const int64_t seed_slot = launch.seed_slots[row];
  const Endpoint* endpoints = launch.endpoints.items;
  return x.hash == y.hash && x.position == y.position && has_seed(endpoints[a], seed_slot) == has_seed(endpoints[b], seed_slot);
}

// Walks the chain or tree of one row that the endpoints in `members`, a set of bits, have in common, and adds the records
// stored to `stored [endpoints]`. Without kFingerprint the real-KV hashes are left for later.
template <bool kFingerprint>
void walk_row(const WriteLaunch& launch, uint32_t members, int64_t row, const RowRange& range, uint64_t* stored) {
  const int first = __builtin_ctz(members);  // the ends of a tree are kept as this one's
  const Link seed = launch.seed(first, row);
  const bool seeded = *launch.check_positions != 0 && has_seed(launch.endpoints.items[first], launch.seed_slots[row]);
  Link end = seed;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const Entry entry = read_entry(launch, i);
    if (i + kAhead < range.end) {
      const int64_t ahead = launch.slots[i + kAhead];
      for (int e = first; members >> e != 0; ++e) {
        if (members >> e & 1) prefetch<true>(launch.endpoints.items[e], ahead);
      }
    }
    bool sound = true;
    if (launch.tree) {
      const Parent parent = parent_of(launch, range, i);
      end = parent.entry < 0 ? seed : launch.end(first, parent.entry);
      sound = parent.sound;
    }
    if (entry.slot >= 0) {
      for (int e = first; members >> e != 0; ++e) {
        if ((members >> e & 1) == 0) continue;
        const Endpoint& endpoint = launch.endpoints.items[e];
        if (!sound) report_parent(launch, endpoint, row, i, entry, end.hash);
        check_entry(launch, endpoint, row, i, entry, end.hash, seeded && sound, end.position);
        if (!endpoint.holds(entry.slot)) continue;
        endpoint.records[entry.slot] = {entry.token, entry.position, end.hash, kFingerprint ? endpoint.real_kv_hash_of(entry.slot) : 0};
        ++stored[e];
      }
      end = {advance(end.hash, entry.token, entry.position), entry.position};
    }
    if (launch.tree) launch.end(first, i) = end;
  }
}

// Rows are walked one after the other: of a slot that two of them name, one whole record must stay.
template <bool kFingerprint>
void walk_rows(const WriteLaunch& launch, int64_t rows) {
  const int endpoints = launch.endpoints.size;
  uint64_t stored[kMaxEndpoints] = {};
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange range = row_range(launch, row);
    for (int e = 0; e < endpoints; ++e) check_row(launch, launch.endpoints.items[e], row, range);
    for (uint32_t open = (1u << endpoints) - 1; open != 0;) {
      const int first = __builtin_ctz(open);
      uint32_t members = 1u << first;
      for (int e = first + 1; e < endpoints; ++e) {
        if ((open >> e & 1) && same_chain(launch, row, first, e)) members |= 1u << e;
      }
      walk_row<kFingerprint>(launch, members, row, range, stored);
      open &= ~members;
    }
  }
  for (int e = 0; e < endpoints; ++e) add(&launch.log.slot_runs[launch.endpoints.items[e].tag], stored[e]);
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
    for (int64_t row = 0; row < rows; ++row) launch.seed(e, row) = read_seed(launch, endpoint, row);
  }
  const int64_t steps = fingerprint_steps(launch.endpoints), grain = grain_of(steps);
  const RowRange span = workers.count > 1 && steps >= kWorthAPass ? span_of(launch, rows) : RowRange{};
  if (span.end - span.begin <= grain) {
    walk_rows<true>(launch, rows);
    return;
  }
  walk_rows<false>(launch, rows);
  parallel_for(workers, span.end - span.begin, grain, [&launch, rows, &span](int64_t begin, int64_t end) noexcept {
    fingerprint_entries(launch, rows, span.begin + begin, span.begin + end);
  });
}

}  // namespace kvcanary::cpu
