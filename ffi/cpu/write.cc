#include "cpu/launch.h"

namespace kvcanary::cpu {
namespace {

// Walks one row's chain, or its tree, and returns how many records it stored.
uint64_t write_row(const WriteLaunch& launch, int e, int64_t row, const RowRange& range) {
  const Endpoint& endpoint = launch.endpoints.items[e];
  const Link seed = launch.seed(e, row);
  const bool seeded = *launch.check_positions != 0 && has_seed(endpoint, launch.seed_slots[row]);
  Link end = seed;
  uint64_t stored = 0;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const Entry entry = read_entry(launch, i);
    bool follows = seeded;
    if (launch.tree) {
      const Parent parent = parent_of(launch, range, i);
      end = parent.entry < 0 ? seed : launch.end(e, parent.entry);
      if (!parent.sound && entry.slot >= 0) {
        report_parent(launch, endpoint, row, i, entry, end.hash);
        follows = false;
      }
    }
    if (entry.slot >= 0) {
      check_entry(launch, endpoint, row, i, entry, end.hash, follows, end.position);
      if (endpoint.holds(entry.slot)) {
        endpoint.records[entry.slot] = {entry.token, entry.position, end.hash, endpoint.real_kv_hash_of(entry.slot)};
        ++stored;
      }
      end = {advance(end.hash, entry.token, entry.position), entry.position};
    }
    if (launch.tree) launch.end(e, i) = end;
  }
  return stored;
}

}  // namespace

void launch_write(const WriteLaunch& launch) {
  const int64_t rows = write_rows(launch);
  for (int e = 0; e < launch.endpoints.size; ++e) {
    const Endpoint& endpoint = launch.endpoints.items[e];
    add(&launch.log.kernel_runs[endpoint.tag], uint64_t{1});
    // All seeds first: a row may overwrite the record that another one goes on from.
    for (int64_t row = 0; row < rows; ++row) launch.seed(e, row) = read_seed(launch, endpoint, row);
    uint64_t stored = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const RowRange range = row_range(launch, row);
      check_row(launch, endpoint, row, range);
      stored += write_row(launch, e, row, range);
    }
    add(&launch.log.slot_runs[endpoint.tag], stored);
  }
}

}  // namespace kvcanary::cpu
