// What kernels share: the shape of a warp, and the real-KV hashes of its lanes' slots.
//
// Short rows are hashed by one lane each. Long rows are read by the whole warp, 128 bytes of a row by eight neighbouring
// lanes, so that memory sees whole lines, and folded from shared memory, a row a lane, since a hash is serial.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "kvcanary/endpoint.h"

namespace kvcanary::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullMask = 0xFFFFFFFFu;

inline constexpr uint32_t kLongWords = 16;  // a row of at least this many words is long
inline constexpr int kChunkPairs = 8;       // pairs of words of one row that are fetched at a time
inline constexpr int kStages = 3;           // chunks in flight or being folded

// A warp's shared memory: chunks of its 32 rows. Four warps of a block with all else that they keep stay below the 99 KiB that
// some architectures allow. Pair c of row r lies at place c ^ (r % 8), so that neither the lanes that
// store a row nor those that each read their own row meet in a bank.
struct RowStages {
  WordPair pairs[kStages][kWarp][kChunkPairs];
};

// Starts the copy of a pair of real KV to shared memory. This launch does not ask for it again, so caches should give its place up
// first and keep records: memory sends two of them at a time, which a launch asks for at different times. Rows that lanes read alone,
// but for a single pair, come without this hint.
__device__ inline void copy_kv_async(WordPair* target, const WordPair* source) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], %2, %3;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(target))), "l"(source), "n"(sizeof(WordPair)), "l"(policy)
               : "memory");
}

KVC_HD bool is_long(const Source& source) { return source.paired && source.num_words >= kLongWords; }

inline bool has_long_rows(const EndpointList& endpoints) {
  for (int e = 0; e < endpoints.size; ++e) {
    for (int s = 0; s < endpoints.items[e].num_sources; ++s) {
      if (is_long(endpoints.items[e].sources[s])) return true;
    }
  }
  return false;
}

// One source's hashes of the slots of those lanes that want one; for all lanes of a warp at once.
__device__ inline uint64_t hash_long_rows(const Source& source, bool wanted, uint32_t slot, RowStages& stages) {
  constexpr int kRowsAtOnce = kWarp / kChunkPairs;
  constexpr int kTurns = kWarp / kRowsAtOnce;
  const int lane = threadIdx.x % kWarp, column = lane % kChunkPairs, first_row = lane / kChunkPairs;
  const auto mine = wanted ? reinterpret_cast<uintptr_t>(source.slot_bytes(slot)) : uintptr_t{0};
  const WordPair* rows[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    rows[turn] = reinterpret_cast<const WordPair*>(__shfl_sync(kFullMask, mine, turn * kRowsAtOnce + first_row));
  }
  const uint32_t num_pairs = source.num_words / 2, chunks = (num_pairs + kChunkPairs - 1) / kChunkPairs;

  const auto fetch = [&](uint32_t chunk) {
    const uint32_t pair = chunk * kChunkPairs + column;
    if (pair < num_pairs) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = turn * kRowsAtOnce + first_row;
        WordPair* place = &stages.pairs[chunk % kStages][row][column ^ (row % kChunkPairs)];
        if (rows[turn] != nullptr) copy_kv_async(place, rows[turn] + pair);
      }
    }
    __pipeline_commit();
  };

  for (uint32_t chunk = 0; chunk < kStages - 1; ++chunk) fetch(chunk);
  uint64_t hash = 0;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    fetch(chunk + kStages - 1);
    __pipeline_wait_prior(kStages - 1);
    __syncwarp();
    const WordPair* row = stages.pairs[chunk % kStages][lane];
    const uint32_t left = num_pairs - chunk * kChunkPairs;
#pragma unroll
    for (uint32_t c = 0; c < kChunkPairs; ++c) {
      if (c < left) {
        const WordPair pair = row[c ^ (lane % kChunkPairs)];
        hash = fold(fold(hash, pair.low), pair.high);
      }
    }
    __syncwarp();  // before the stage is fetched into again
  }
  return wanted ? hash : 0;
}

// The hash of each lane's slot in one source; with kLong, for all lanes of the warp together.
template <bool kLong>
__device__ uint64_t hash_rows(const Source& source, bool wanted, int64_t slot, RowStages* stages) {
  if constexpr (kLong) {
    if (is_long(source)) return hash_long_rows(source, wanted, static_cast<uint32_t>(slot), *stages);
  }
  return wanted ? source_hash(source, static_cast<uint32_t>(slot)) : 0;
}

// The real-KV hash of each lane's slot, 0 where none is wanted; for all lanes of the warp together.
template <bool kLong>
__device__ uint64_t real_kv_hash_of(const Endpoint& endpoint, bool wanted, int64_t slot, RowStages* stages) {
  uint64_t hash = 0;
  KVC_ROLLED
  for (int s = 0; s < endpoint.num_sources; ++s) hash = fold(hash, hash_rows<kLong>(endpoint.sources[s], wanted, slot, stages));
  return wanted ? hash : 0;
}

}  // namespace kvcanary::cuda
