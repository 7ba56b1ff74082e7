// The violation log and the counters of one canary, shared by all its launches.
#pragma once

#include <cstdint>

#include "kvcanary/hash.h"

namespace kvcanary {

inline constexpr int kNumTags = 12;
inline constexpr int kReasonColumns = 8;
inline constexpr int kViolationFields = 8;

// Bits of a violation's reasons.
inline constexpr int64_t kVerifyChainHash = 1;
inline constexpr int64_t kVerifyPosition = 2;
inline constexpr int64_t kVerifyRealKvHash = 4;
inline constexpr int64_t kWriteToken = 8;
inline constexpr int64_t kWritePosition = 16;
inline constexpr int64_t kVerifyToken = 32;
inline constexpr int64_t kSlotOutOfRange = 64;

// One row of the ring, in the order of the contract.
struct Violation {
  int64_t tag;
  int64_t slot;
  int64_t position;
  int64_t stored_token;
  int64_t expected_token;
  uint64_t stored_chain_hash;
  uint64_t expected_aux;
  int64_t reasons;
};

struct Log {
  int64_t* ring;          // [ring_capacity, 8]
  int32_t* write_index;   // [1]
  uint64_t* kernel_runs;  // [12]
  uint64_t* slot_runs;    // [12]
  uint32_t* reasons;      // [12, 8]
  uint32_t* skips;        // [12]
  int64_t ring_capacity;
};

// Atomic on both sides: threads of a GPU, or of a host pool, log at the same time.
KVC_HD void add(uint32_t* counter, uint32_t value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(counter, value);
#else
  __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
#endif
}

KVC_HD void add(uint64_t* counter, uint64_t value) {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
#else
  __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
#endif
}

// Counts a violation and returns its number. The count stays at 2^31 - 1 once it is there, rather than turn negative.
KVC_HD int32_t next_violation(int32_t* write_index) {
#if defined(__CUDA_ARCH__)
  const auto number = static_cast<int32_t>(atomicAdd(reinterpret_cast<unsigned int*>(write_index), 1u));
  if (number < 0 || number == INT32_MAX) atomicExch(write_index, INT32_MAX);
#else
  const auto number = static_cast<int32_t>(__atomic_fetch_add(reinterpret_cast<uint32_t*>(write_index), 1u, __ATOMIC_RELAXED));
  if (number < 0 || number == INT32_MAX) __atomic_store_n(write_index, INT32_MAX, __ATOMIC_RELAXED);
#endif
  return number;
}

// Fill-once: a row that finds the ring full is dropped, but it is counted, and so is each of its reasons.
KVC_HD void record(const Log& log, const Violation& v) {
  for (int bit = 0; bit < kReasonColumns; ++bit) {
    if (v.reasons >> bit & 1) add(&log.reasons[v.tag * kReasonColumns + bit], 1u);
  }
  const int32_t number = next_violation(log.write_index);
  if (number < 0 || number >= log.ring_capacity) return;
  int64_t* row = log.ring + static_cast<int64_t>(number) * kViolationFields;
  row[0] = v.tag;
  row[1] = v.slot;
  row[2] = v.position;
  row[3] = v.stored_token;
  row[4] = v.expected_token;
  row[5] = static_cast<int64_t>(v.stored_chain_hash);
  row[6] = static_cast<int64_t>(v.expected_aux);
  row[7] = v.reasons;
}

}  // namespace kvcanary
