// The first part of a write: what each entry follows, and who keeps a slot that several entries name.
#pragma once

#include "cuda/warp.cuh"
#include "kvcanary/write.h"

namespace kvcanary::cuda {

inline constexpr int kTile = 256;  // entries of a row that are staged at a time

// Entries of all rows, as far as the token arrays have them.
__device__ inline RowRange all_entries(const WriteLaunch& launch) {
  const int64_t rows = write_rows(launch);
  if (rows == 0) return {0, 0, false};
  const int64_t begin = launch.offsets[0], end = launch.offsets[rows];
  return {begin < 0 ? 0 : begin, end < launch.num_tokens ? end : launch.num_tokens, false};
}

__device__ inline void read_seed_of(const WriteLaunch& launch, int e, int64_t row) {
  const Seed seed = read_seed(launch.endpoints.items[e], launch.seed_slots[row]);
  launch.seed(e, row) = seed;
  if (e == 0) launch.starts[row] = seed.hash;
}

// An entry's mark in the real-KV field of the record that it wants to store. What else stands there, such as a hash, is
// taken for a mark only if the entry that it would be names the slot too, and then that entry marks it anyway.
__device__ inline uint64_t claim_of(int64_t i) { return static_cast<uint64_t>(i) + 1; }

__device__ inline void claim_slot(const WriteLaunch& launch, const Endpoint& endpoint, const RowRange& entries, int64_t i, int64_t slot) {
  auto* mark = reinterpret_cast<unsigned long long*>(&endpoint.records[slot].real_kv_hash);
  const unsigned long long mine = claim_of(i);
  unsigned long long seen = *mark;
  while (true) {
    const auto other = static_cast<int64_t>(seen - 1);
    const bool later = seen >= mine && other >= entries.begin && other < entries.end && launch.slots[other] == slot;
    if (later) return;
    const unsigned long long before = atomicCAS(mark, seen, mine);
    if (before == seen) return;
    seen = before;
  }
}

// Every entry's claim in every endpoint; of a warp's entries for one slot only the last one tries.
__device__ inline void claim_slots(const WriteLaunch& launch, int64_t thread, int64_t threads) {
  const RowRange entries = all_entries(launch);
  const int lane = thread % kWarp;
  for (int64_t base = entries.begin + thread - lane; base < entries.end; base += threads) {
    const int64_t i = base + lane;
    const int64_t slot = i < entries.end ? launch.slots[i] : -1;
    const unsigned same_slot = __match_any_sync(kFullMask, slot);
    if (slot < 0 || lane != 31 - __clz(static_cast<int>(same_slot))) continue;
    for (int e = 0; e < launch.endpoints.size; ++e) {
      const Endpoint& endpoint = launch.endpoints.items[e];
      if (endpoint.holds(slot)) claim_slot(launch, endpoint, entries, i, slot);
    }
  }
}

// A row's entries pass through shared memory: while one lane walks a tile, the other warps bring the next one and take
// the links of the last one away.
struct LinkTiles {
  ulonglong2 operands[2][kTile];  // token, position
  bool advances[2][kTile];        // the entry is not skipped
  uint64_t before[2][kTile];
  int32_t previous[2][kTile];
};

// The chain over one tile. The loop without skips is the critical path of a long write: nothing is in it but the hash.
template <bool kSkips>
__device__ void walk_tile(LinkTiles& tiles, int tile, int size, int64_t base, uint64_t& hash, int32_t& previous) {
  const ulonglong2* operands = tiles.operands[tile];
  uint64_t* before = tiles.before[tile];
  tiles.previous[tile][0] = previous;
#pragma unroll 8
  for (int i = 0; i < size; ++i) {
    const ulonglong2 operand = operands[i];
    before[i] = hash;
    if constexpr (kSkips) {
      tiles.previous[tile][i] = previous;
      if (!tiles.advances[tile][i]) continue;
      previous = static_cast<int32_t>(base + i);
    }
    hash = advance(hash, static_cast<int64_t>(operand.x), static_cast<int64_t>(operand.y));
  }
  if constexpr (!kSkips) previous = static_cast<int32_t>(base + size - 1);
}

// Links of a chain, by a whole block.
__device__ inline void link_chain(const WriteLaunch& launch, int64_t row, const RowRange& range, LinkTiles& tiles) {
  if (range.empty()) return;
  const int thread = threadIdx.x, helpers = blockDim.x - kWarp;
  const auto size_of = [&](int64_t base) { return static_cast<int>(range.end - base < kTile ? range.end - base : kTile); };
  const auto stage = [&](int64_t base, int tile, int first, int step) {
    bool skipped = false;
    for (int j = first; j < size_of(base); j += step) {
      const Entry entry = read_entry(launch, base + j);
      tiles.operands[tile][j] = {static_cast<uint64_t>(entry.token), static_cast<uint64_t>(entry.position)};
      tiles.advances[tile][j] = entry.slot >= 0;
      skipped |= entry.slot < 0;
    }
    return skipped;
  };
  const auto flush = [&](int64_t base, int tile, bool skips, int first, int step) {
    for (int j = first; j < size_of(base); j += step) {
      const int32_t previous = skips || j == 0 ? tiles.previous[tile][j] : static_cast<int32_t>(base + j - 1);
      launch.links[base + j] = {tiles.before[tile][j], previous, static_cast<int32_t>(row)};
    }
  };

  uint64_t hash = launch.starts[row];
  int32_t previous = -1;
  int tile = 0;
  bool skips = __syncthreads_or(stage(range.begin, 0, thread, blockDim.x)), skipped_before = false;
  for (int64_t base = range.begin; base < range.end; base += kTile, tile ^= 1) {
    bool skips_next = false;
    if (thread == 0) {
      if (skips) {
        walk_tile<true>(tiles, tile, size_of(base), base, hash, previous);
      } else {
        walk_tile<false>(tiles, tile, size_of(base), base, hash, previous);
      }
    } else if (thread >= kWarp) {
      if (base > range.begin) flush(base - kTile, tile ^ 1, skipped_before, thread - kWarp, helpers);
      if (base + kTile < range.end) skips_next = stage(base + kTile, tile ^ 1, thread - kWarp, helpers);
    }
    skipped_before = skips;
    skips = __syncthreads_or(skips_next);
  }
  const int64_t last = range.begin + (range.end - range.begin - 1) / kTile * kTile;
  flush(last, tile ^ 1, skipped_before, thread, blockDim.x);
}

// What the entry of a warp's lane follows in a tree. In each round the lanes whose parent's end is known compute their own, so
// that 32 entries take as many rounds as they have levels; ends are kept for later ones. A parent stands before its
// children, so that every lane gets its turn.
__device__ inline Link walk_tree(const WriteLaunch& launch, int e, const RowRange& range, int64_t base, const Entry& entry,
                                 const Link& seed) {
  const int lane = threadIdx.x % kWarp;
  const int64_t i = base + lane;
  const bool live = i < range.end;
  const Parent parent = live ? parent_of(launch, range, i) : Parent{-1, true};
  const bool in_batch = parent.entry >= base;
  const int source = in_batch ? static_cast<int>(parent.entry - base) : lane;
  Link before = parent.entry >= 0 && !in_batch ? launch.end(e, parent.entry) : seed;
  Link end = before;
  bool pending = live;
  for (unsigned done = __ballot_sync(kFullMask, !pending); done != kFullMask; done = __ballot_sync(kFullMask, !pending)) {
    const Link from = {__shfl_sync(kFullMask, end.hash, source), __shfl_sync(kFullMask, end.previous, source), seed.row};
    if (pending && (!in_batch || (done >> source & 1))) {
      if (in_batch) before = from;
      end = link_behind(before, entry, i);
      pending = false;
    }
  }
  if (live) launch.end(e, i) = end;
  __syncwarp();
  return before;
}

// What the entry of a warp's lane follows in a chain: every lane walks all 32 and keeps the link before its own. `end` is
// moved behind them.
__device__ inline Link walk_chain(const Entry& entry, int64_t base, Link* end) {
  const int lane = threadIdx.x % kWarp;
  const unsigned advancing = __ballot_sync(kFullMask, entry.slot >= 0);
  Link before = *end;
#pragma unroll 4
  for (int step = 0; step < kWarp; ++step) {
    const Entry next = {entry.slot, __shfl_sync(kFullMask, entry.token, step), __shfl_sync(kFullMask, entry.position, step)};
    if (step == lane) before = *end;
    if (advancing >> step & 1) *end = {advance(end->hash, next.token, next.position), static_cast<int32_t>(base + step), end->row};
  }
  return before;
}

// Walks a row by one warp, 32 entries at a time, for one endpoint: body(i, entry, link) is called for all lanes at once,
// with i past the row's end for those that have no entry.
template <typename Body>
__device__ void walk_row(const WriteLaunch& launch, int e, int64_t row, const RowRange& range, Body body) {
  const Link seed = {launch.seed(e, row).hash, -1, static_cast<int32_t>(row)};
  Link end = seed;
  for (int64_t base = range.begin; base < range.end; base += kWarp) {
    const int64_t i = base + threadIdx.x % kWarp;
    const Entry entry = i < range.end ? read_entry(launch, i) : Entry{-1, 0, 0};
    body(i, entry, launch.tree ? walk_tree(launch, e, range, base, entry, seed) : walk_chain(entry, base, &end));
    __syncwarp();
  }
}

// Links of a tree, by one warp.
__device__ inline void link_tree(const WriteLaunch& launch, int64_t row, const RowRange& range) {
  walk_row(launch, 0, row, range, [&](int64_t i, const Entry&, const Link& link) {
    if (i < range.end) launch.links[i] = link;
  });
}

inline constexpr int kMaxSmallTokens = 1024;
inline constexpr int kSmallPlaces = 2 * kMaxSmallTokens;

// All entries of a small launch, and a hash table of their slots with the last entry that names each, which uses as many places
// as the entries need.
struct SmallChain {
  ulonglong2 operands[kMaxSmallTokens];  // token, position
  bool advances[kMaxSmallTokens];
  int32_t places[kMaxSmallTokens];  // of the entries' slots in the table, -1 for those that no buffer holds
  int32_t slots[kSmallPlaces];      // -1 for none
  int32_t last[kSmallPlaces];
};

// The place of a slot, which is entered where it is not there yet. There are more places than entries.
__device__ inline int place_of(SmallChain& chain, int places, int32_t slot) {
  int place = static_cast<int>(splitmix64(static_cast<uint64_t>(slot))) & (places - 1);
  for (int32_t found; (found = atomicCAS(&chain.slots[place], -1, slot)) != -1 && found != slot;) place = (place + 1) & (places - 1);
  return place;
}

// No buffer has more slots than int32 can count.
__device__ inline bool may_be_held(int64_t slot) { return slot >= 0 && slot < INT32_MAX; }

// The whole first part by one block, with all entries in shared memory and one thread a row.
__device__ inline void link_small(const WriteLaunch& launch, SmallChain& chain) {
  const int64_t rows = write_rows(launch);
  const RowRange entries = all_entries(launch);
  const int tokens = launch.num_tokens < 1 ? 1 : static_cast<int>(launch.num_tokens);
  const int places = 2 << (kWarp - __clz(tokens - 1));  // a power of two, at least twice the tokens
  KVC_ROLLED
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    for (int e = 0; e < launch.endpoints.size; ++e) read_seed_of(launch, e, row);
  }
  KVC_ROLLED
  for (int place = threadIdx.x; place < places; place += blockDim.x) {
    chain.slots[place] = -1;
    chain.last[place] = -1;
  }
  __syncthreads();
  KVC_ROLLED
  for (int64_t i = entries.begin + threadIdx.x; i < entries.end; i += blockDim.x) {
    const Entry entry = read_entry(launch, i);
    chain.operands[i] = {static_cast<uint64_t>(entry.token), static_cast<uint64_t>(entry.position)};
    chain.advances[i] = entry.slot >= 0;
    chain.places[i] = may_be_held(entry.slot) ? place_of(chain, places, static_cast<int32_t>(entry.slot)) : -1;
    if (chain.places[i] >= 0) atomicMax(&chain.last[chain.places[i]], static_cast<int>(i));
  }
  __syncthreads();
  KVC_ROLLED
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    const RowRange range = row_range(launch, row);
    // Rows in disorder may reach past the entries that are staged; their links are not used.
    const int64_t begin = range.begin > entries.begin ? range.begin : entries.begin;
    const int64_t end = range.end < entries.end ? range.end : entries.end;
    Link link = {launch.starts[row], -1, 0};
    KVC_ROLLED
    for (int64_t i = begin; i < end; ++i) {
      const bool keeps = chain.places[i] < 0 || chain.last[chain.places[i]] == i;
      link.row = static_cast<int32_t>(keeps ? row : ~row);
      launch.links[i] = link;
      if (!chain.advances[i]) continue;
      link.hash = advance(link.hash, static_cast<int64_t>(chain.operands[i].x), static_cast<int64_t>(chain.operands[i].y));
      link.previous = static_cast<int32_t>(i);
    }
  }
}

}  // namespace kvcanary::cuda
