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
  int64_t* ring;            // [ring_capacity, 8]
  int32_t* request_rows;    // [ring_capacity]: the request row of each violation, -1 where it belongs to none
  int32_t* write_index;     // [1]
  uint64_t* kernel_runs;    // [12]
  uint64_t* slot_runs;      // [12]
  uint32_t* reasons;        // [12, 8]
  uint32_t* skips;          // [12]
  int32_t* row_flags;       // [num_rows]: the reasons found for each row of the batch in this step
  const int32_t* requests;  // [num_rows]: the request row of each row of the batch
  int64_t ring_capacity;
  int64_t num_rows;  // 0 where findings are not told apart by row
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

KVC_HD void set_bits(int32_t* flags, int32_t bits) {
#if defined(__CUDA_ARCH__)
  atomicOr(flags, bits);
#else
  __atomic_fetch_or(flags, bits, __ATOMIC_RELAXED);
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

// Fill-once: a violation that finds the ring full is dropped, but it is counted, and so is each of its reasons. `row` is the
// row of the batch that it belongs to, -1 for none.
KVC_HD void record(const Log& log, const Violation& v, int64_t row) {
  const bool attributed = row >= 0 && row < log.num_rows;
  if (attributed) set_bits(&log.row_flags[row], static_cast<int32_t>(v.reasons));
  KVC_ROLLED
  for (int bit = 0; bit < kReasonColumns; ++bit) {
    if (v.reasons >> bit & 1) add(&log.reasons[v.tag * kReasonColumns + bit], 1u);
  }
  const int32_t number = next_violation(log.write_index);
  if (number < 0 || number >= log.ring_capacity) return;
  log.request_rows[number] = attributed ? log.requests[row] : -1;
  int64_t* fields = log.ring + static_cast<int64_t>(number) * kViolationFields;
  fields[0] = v.tag;
  fields[1] = v.slot;
  fields[2] = v.position;
  fields[3] = v.stored_token;
  fields[4] = v.expected_token;
  fields[5] = static_cast<int64_t>(v.stored_chain_hash);
  fields[6] = static_cast<int64_t>(v.expected_aux);
  fields[7] = v.reasons;
}

}  // namespace kvcanary
