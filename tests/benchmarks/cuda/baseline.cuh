// The algorithm that this project is compared with. Write: one thread a request, which hashes, loads and stores inside
// the chain's loop. Verify: 64 blocks of 512 threads, each thread loading and hashing its predecessor's record. Indices
// have 64 bits, and every endpoint is a launch of its own. Its real-KV rows have a page size of 1 and its input checks
// are left out, both to its advantage.
#pragma once

#include <cstdint>
#include <vector>

#include "data.cuh"
#include "kvcanary/hash.h"

namespace bench::baseline {

inline constexpr int kVerifyBlocks = 64;
inline constexpr int kVerifyThreads = 512;
inline constexpr int64_t kChainMismatch = 1, kPositionMismatch = 2, kRealKvMismatch = 4;

struct Log {
  int64_t* ring;                    // [kRingCapacity, 8]
  int32_t* write_index;             // [1]
  unsigned long long* kernel_runs;  // [12]
  unsigned long long* slot_runs;    // [12]
};

struct Write {
  EndpointView endpoint;
  const int64_t *offsets, *seed_slots;        // [rows + 1], [rows]
  const int64_t *tokens, *positions, *slots;  // [tokens]
  const int32_t* num_rows;                    // [1]
  Log log;
};

struct Verify {
  EndpointView endpoint;
  const int64_t *slots, *prev_slots, *positions;  // [capacity]
  const int32_t *num_valid, *enable;              // [1]
  int64_t capacity;
  Log log;
};

// Endpoints have one source or none.
static __device__ uint64_t real_kv_hash(const EndpointView& endpoint, int64_t slot) {
  if (endpoint.real_kv_bytes == 0) return 0;
  const auto* words = reinterpret_cast<const uint64_t*>(endpoint.real_kv + slot * kRowBytes);
  uint64_t source_hash = 0;
  for (int64_t i = 0; i < endpoint.real_kv_bytes / 8; ++i) source_hash = kvcanary::splitmix64(source_hash ^ words[i]);
  return kvcanary::splitmix64(source_hash);  // folded into 0, the start of the hash over all sources
}

static __device__ uint64_t hash_behind(const int64_t* record) {
  return kvcanary::mix3(static_cast<uint64_t>(record[2]), static_cast<uint64_t>(record[0]), static_cast<uint64_t>(record[1]));
}

static __global__ void write_kernel(const Write write) {
  if (blockIdx.x == 0) atomicAdd(&write.log.kernel_runs[write.endpoint.tag], 1ull);
  const int64_t row = blockIdx.x;
  if (row >= *write.num_rows) return;
  const int64_t begin = write.offsets[row], end = write.offsets[row + 1], seed_slot = write.seed_slots[row];
  uint64_t running = seed_slot >= 0 ? hash_behind(write.endpoint.records + seed_slot * kRecordWords) : kvcanary::kAnchorHash;
  unsigned long long stored = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = write.slots[i];
    if (slot < 0) continue;
    const int64_t token = write.tokens[i], position = write.positions[i];
    const uint64_t fingerprint = real_kv_hash(write.endpoint, slot);
    int64_t* record = write.endpoint.records + slot * kRecordWords;
    record[0] = token;
    record[1] = position;
    record[2] = static_cast<int64_t>(running);
    record[3] = static_cast<int64_t>(fingerprint);
    running = kvcanary::mix3(running, static_cast<uint64_t>(token), static_cast<uint64_t>(position));
    ++stored;
  }
  atomicAdd(&write.log.slot_runs[write.endpoint.tag], stored);
}

static __global__ void __launch_bounds__(kVerifyThreads) verify_kernel(const Verify verify) {
  const int tag = verify.endpoint.tag;
  const int64_t entries = *verify.num_valid < verify.capacity ? *verify.num_valid : verify.capacity;
  const bool enabled = *verify.enable != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    atomicAdd(&verify.log.kernel_runs[tag], 1ull);
    if (enabled) atomicAdd(&verify.log.slot_runs[tag], static_cast<unsigned long long>(entries));
  }
  if (!enabled) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < entries; i += stride) {
    const int64_t slot = verify.slots[i], prev_slot = verify.prev_slots[i], expected_position = verify.positions[i];
    if (slot == 0) continue;
    const int64_t* record = verify.endpoint.records + slot * kRecordWords;
    const int64_t token = record[0], position = record[1], prev_hash = record[2], fingerprint = record[3];
    int64_t expected_hash = prev_hash;  // slot 0 as predecessor: nothing to compare with
    if (prev_slot < 0) {
      expected_hash = static_cast<int64_t>(kvcanary::kAnchorHash);
    } else if (prev_slot > 0) {
      expected_hash = static_cast<int64_t>(hash_behind(verify.endpoint.records + prev_slot * kRecordWords));
    }
    int64_t reasons = 0;
    if (prev_hash != expected_hash) reasons |= kChainMismatch;
    if (position != expected_position) reasons |= kPositionMismatch;
    if (fingerprint != static_cast<int64_t>(real_kv_hash(verify.endpoint, slot))) reasons |= kRealKvMismatch;
    if (reasons == 0) continue;
    const int32_t number = atomicAdd(verify.log.write_index, 1);
    if (number >= kRingCapacity) continue;
    const int64_t fields[kViolationWords] = {tag, slot, position, token, -1, prev_hash, expected_hash, reasons};
    for (int field = 0; field < kViolationWords; ++field) verify.log.ring[number * kViolationWords + field] = fields[field];
  }
}

class Baseline : public Side {
 public:
  explicit Baseline(int64_t num_slots) : Side("baseline", num_slots) {}

  cudaError_t write(cudaStream_t stream, const WriteSet& set, const std::vector<EndpointView>& endpoints) const {
    for (const EndpointView& endpoint : endpoints) {
      write_kernel<<<static_cast<unsigned>(set.rows), 1, 0, stream>>>({endpoint,
                                                                       set.offsets.wide.data(),
                                                                       set.seed_slots.wide.data(),
                                                                       set.tokens.wide.data(),
                                                                       set.positions.wide.data(),
                                                                       set.slots.wide.data(),
                                                                       set.num_rows.data(),
                                                                       log_view()});
      if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

  cudaError_t verify(cudaStream_t stream, const VerifySet& set, const std::vector<EndpointView>& endpoints) const {
    for (const EndpointView& endpoint : endpoints) {
      verify_kernel<<<kVerifyBlocks, kVerifyThreads, 0, stream>>>({endpoint,
                                                                   set.slots.wide.data(),
                                                                   set.prev_slots.wide.data(),
                                                                   set.positions.wide.data(),
                                                                   set.num_valid.data(),
                                                                   set.enable.data(),
                                                                   set.capacity,
                                                                   log_view()});
      if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }

 private:
  Log log_view() const {
    return {log.ring.data(), log.write_index.data(), reinterpret_cast<unsigned long long*>(log.kernel_runs.data()),
            reinterpret_cast<unsigned long long*>(log.slot_runs.data())};
  }
};

}  // namespace bench::baseline
