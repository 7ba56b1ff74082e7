// The second part of a write: checks and records, from links.
#pragma once

#include "cuda/links.cuh"
#include "kvcanary/report.h"

namespace kvcanary::cuda {

// How it is known which of several entries that name one slot keeps it.
enum class Keeper {
  kClaim,    // by the claims in the records; the links are marked on the way
  kCarried,  // by the links, which are marked already
  kLast,     // rows are walked one after the other, so the last one to come keeps it
};

__device__ inline void store_record(const Endpoint& endpoint, const Entry& entry, uint64_t hash, uint64_t real_kv_hash) {
  auto* halves = reinterpret_cast<ulonglong2*>(&endpoint.records[entry.slot]);
  halves[0] = {static_cast<uint64_t>(entry.token), static_cast<uint64_t>(entry.position)};
  halves[1] = {hash, real_kv_hash};
}

// Whether each row's entries lie behind those of the row before; for all threads of a block at once. Only a plan made by hand
// has others. There is one link an entry, so rows that share entries cannot use them.
__device__ inline bool rows_in_order(const WriteLaunch& launch) {
  const int64_t rows = write_rows(launch);
  bool disorder = false;
  KVC_ROLLED
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) disorder |= launch.offsets[row] > launch.offsets[row + 1];
  return !__syncthreads_or(disorder);
}

// Checks and stores the entries of a warp's lanes; `live` where a lane has one that its endpoint shares the link of. Returns how
// many the warp stored.
template <bool kLong>
__device__ unsigned store_lanes(const WriteLaunch& launch, int e, int64_t row, const RowRange& range, int64_t i, const Entry& entry,
                                const Link& link, bool live, Keeper keeper, RowStages* stages) {
  const Endpoint& endpoint = launch.endpoints.items[e];
  const bool fits = live && endpoint.holds(entry.slot);
  bool keeps = fits;
  if (keeper == Keeper::kClaim) {
    keeps = fits && endpoint.records[entry.slot].real_kv_hash == claim_of(i);
    if (e == 0 && fits && !keeps) launch.links[i].row = ~link.row_of();
  } else if (keeper == Keeper::kCarried) {
    // A link of another row is none of this launch's, and its mark says nothing.
    keeps = fits && (launch.links[i].keeps_slot() || launch.links[i].row_of() != row);
  } else {
    const unsigned same_slot = __match_any_sync(kFullMask, fits ? entry.slot : -1);
    keeps = fits && static_cast<int>(threadIdx.x % kWarp) == 31 - __clz(static_cast<int>(same_slot));
  }
  const uint64_t real_kv_hash = real_kv_hash_of<kLong>(endpoint, keeps, entry.slot, stages);
  if (live && entry.slot >= 0) check_entry(launch, e, row, range, i, entry, link, checks_positions(launch, e, row));
  if (keeps) store_record(endpoint, entry, link.hash, real_kv_hash);
  return __popc(__ballot_sync(kFullMask, fits));
}

// One row by one warp, without its links.
template <bool kLong>
__device__ unsigned store_row(const WriteLaunch& launch, int e, int64_t row, const RowRange& range, Keeper keeper, RowStages* stages) {
  unsigned stored = 0;
  walk_row(launch, e, row, range, [&](int64_t i, const Entry& entry, const Link& link) {
    stored += store_lanes<kLong>(launch, e, row, range, i, entry, link, i < range.end, keeper, stages);
  });
  return stored;
}

// Every row's own findings, and the rows that cannot use the links. Blocks take rows in turn, and each of their warps one of
// those that must be walked.
template <bool kLong>
__device__ void store_rows(const WriteLaunch& launch, Keeper keeper, RowStages* stages) {
  __shared__ int64_t walks[kMaxSmallTokens];
  __shared__ int num_walks;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t rows = write_rows(launch), blocks = gridDim.x;
  KVC_ROLLED
  for (int64_t first = blockIdx.x; first < rows; first += blocks * blockDim.x) {
    const int64_t row = first + blocks * threadIdx.x;
    const RowRange range = row < rows ? row_range(launch, row) : RowRange{0, 0, false};
    unsigned must_walk = 0;  // endpoints, as bits
    for (int e = 0; e < launch.endpoints.size; ++e) {
      if (row < rows) check_row(launch, launch.endpoints.items[e], row, range);
      if (!range.empty() && !launch.shares_chain(e, row)) must_walk |= 1u << e;
    }
    if (!__syncthreads_or(static_cast<int>(must_walk))) continue;
    KVC_ROLLED
    for (int e = 0; e < launch.endpoints.size; ++e) {
      num_walks = 0;
      __syncthreads();
      if (must_walk >> e & 1) walks[atomicAdd(&num_walks, 1)] = row;
      __syncthreads();
      KVC_ROLLED
      for (int w = warp; w < num_walks; w += warps) {
        const unsigned stored = store_row<kLong>(launch, e, walks[w], row_range(launch, walks[w]), keeper, stages);
        if (threadIdx.x % kWarp == 0) add(&launch.log.slot_runs[launch.endpoints.items[e].tag], static_cast<uint64_t>(stored));
      }
      __syncthreads();
    }
  }
}

// Rows that share entries: one warp an endpoint takes them one after the other.
template <bool kLong>
__device__ void store_in_turn(const WriteLaunch& launch, int e, RowStages* stages) {
  const int64_t rows = write_rows(launch);
  uint64_t stored = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const RowRange range = row_range(launch, row);
    if (threadIdx.x % kWarp == 0) check_row(launch, launch.endpoints.items[e], row, range);
    stored += store_row<kLong>(launch, e, row, range, Keeper::kLast, stages);
  }
  if (threadIdx.x % kWarp == 0) add(&launch.log.slot_runs[launch.endpoints.items[e].tag], stored);
}

// A link as another launch left it; what it names must lie where this launch's entries do.
__device__ inline bool is_sound(const WriteLaunch& launch, const Link& link, int64_t i) {
  const int64_t row = link.row_of();
  if (row >= write_rows(launch) || !link.follows_earlier(i)) return false;
  const RowRange range = row_range(launch, row);
  return range.begin <= i && i < range.end;
}

// The whole second part, by all blocks of the launch.
template <bool kLong>
__device__ void store_entries(const WriteLaunch& launch, Keeper keeper, RowStages* block_stages) {
  const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  RowStages* stages = kLong ? block_stages + warp : nullptr;
  const unsigned endpoints = launch.endpoints.size;
  if (blockIdx.x == 0 && threadIdx.x < endpoints) add(&launch.log.kernel_runs[launch.endpoints.items[threadIdx.x].tag], uint64_t{1});
  if (!rows_in_order(launch)) {
    if (blockIdx.x == 0 && warp < endpoints) store_in_turn<kLong>(launch, warp, stages);
    return;
  }
  store_rows<kLong>(launch, keeper, stages);

  // Warps take turns between the endpoints.
  const unsigned number = blockIdx.x * warps + warp, in_turn = gridDim.x * warps / endpoints, mine = number / endpoints;
  const int e = static_cast<int>(number - mine * endpoints);
  if (mine >= in_turn) return;
  const RowRange entries = all_entries(launch);
  const int64_t step = static_cast<int64_t>(in_turn) * kWarp;
  uint64_t stored = 0;
  KVC_ROLLED
  for (int64_t base = entries.begin + static_cast<int64_t>(mine) * kWarp; base < entries.end; base += step) {
    const int64_t i = base + lane;
    const bool inside = i < entries.end;
    const Entry entry = inside ? read_entry(launch, i) : Entry{-1, 0, 0};
    const Link link = inside ? launch.links[i] : Link{0, -1, 0};
    const int64_t row = link.row_of();
    const bool live = inside && is_sound(launch, link, i) && launch.shares_chain(e, row);
    const RowRange range = live ? row_range(launch, row) : RowRange{0, 0, false};
    stored += store_lanes<kLong>(launch, e, row, range, i, entry, link, live, keeper, stages);
  }
  if (lane == 0) add(&launch.log.slot_runs[launch.endpoints.items[e].tag], stored);
}

// The end of a launch: its last block writes the report, where one is wanted.
__device__ inline void finish(const WriteLaunch& launch, const ReportLaunch& report) {
  if (report.summary == nullptr) return;
  __shared__ bool last;
  if (gridDim.x > 1) __threadfence();
  __syncthreads();
  if (gridDim.x > 1) {
    if (threadIdx.x == 0) last = atomicAdd(launch.finished, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
  }
  fill_report(launch.log, report, threadIdx.x, blockDim.x);
}

}  // namespace kvcanary::cuda
