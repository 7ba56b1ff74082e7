// Real KV of a slot: where its bytes lie in an array, and their hash.
#pragma once

#include <cstdint>

#include "kvcanary/hash.h"

namespace kvcanary {

inline constexpr int kMaxSources = 4;

struct Source {
  const uint8_t* data;  // first byte of slot 0
  int64_t page_stride;  // bytes from one page to the next
  int64_t slot_stride;  // bytes from one slot to the next within a page
  uint32_t page_size;   // slots in one page
  uint32_t num_words;   // 8-byte words to hash, already cut to the hash mode
  bool paired;          // address and length allow 16-byte loads

  KVC_HD const uint8_t* slot_bytes(uint32_t slot) const {
    if (page_size == 1) return data + slot * page_stride;
    const uint32_t page = slot / page_size;
    return data + page * page_stride + (slot - page * page_size) * slot_stride;
  }
};

struct alignas(16) WordPair {
  uint64_t low, high;
};

KVC_HD uint64_t source_hash(const Source& source, uint32_t slot) {
  const uint8_t* bytes = source.slot_bytes(slot);
  uint64_t hash = 0;
  if (source.paired) {
    const auto* pairs = reinterpret_cast<const WordPair*>(bytes);
    for (uint32_t i = 0; i < source.num_words / 2; ++i) {
      const WordPair pair = pairs[i];
      hash = fold(fold(hash, pair.low), pair.high);
    }
  } else {
    const auto* words = reinterpret_cast<const uint64_t*>(bytes);
    for (uint32_t i = 0; i < source.num_words; ++i) hash = fold(hash, words[i]);
  }
  return hash;
}

// 0 where nothing is hashed: no sources are passed when the mode is NONE.
KVC_HD uint64_t real_kv_hash(const Source* sources, int num_sources, uint32_t slot) {
  uint64_t hash = 0;
  for (int i = 0; i < num_sources; ++i) hash = fold(hash, source_hash(sources[i], slot));
  return hash;
}

}  // namespace kvcanary
