#include "cpu/launch.h"

namespace kvcanary::cpu {
namespace {

// Walks one row's chain and returns how many records it stored.
uint64_t write_row(const WriteLaunch& launch, const Endpoint& endpoint, int64_t row, const RowRange& range, const Seed& seed) {
  uint64_t running = seed.hash;
  int64_t previous = seed.position;
  const bool follows = *launch.check_positions != 0 && has_seed(endpoint, launch.seed_slots[row]);
  uint64_t stored = 0;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const Entry entry = read_entry(launch, i);
    if (entry.slot < 0) continue;
    check_entry(launch, endpoint, i, entry, running, follows, previous);
    if (endpoint.holds(entry.slot)) {
      endpoint.records[entry.slot] = {entry.token, entry.position, running, endpoint.real_kv_hash_of(entry.slot)};
      ++stored;
    }
    previous = entry.position;
    running = advance(running, entry.token, entry.position);
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
      stored += write_row(launch, endpoint, row, range, launch.seed(e, row));
    }
    add(&launch.log.slot_runs[endpoint.tag], stored);
  }
}

}  // namespace kvcanary::cpu
