// Data of the cases, in the form that both sides are filled from: this project (launches.cuh) and the baseline.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "harness.cuh"

namespace bench {

inline constexpr int64_t kRowBytes = 2048;  // real KV of one slot in one half of the pool
inline constexpr int kRecordWords = 4;
inline constexpr int kEndpoints = 4;  // their launch tags are their numbers: K head, V head, K tail, V tail
inline constexpr int kTailK = 2;
inline constexpr int kTags = 12;
inline constexpr int64_t kRingCapacity = 1024;
inline constexpr int kViolationWords = 8;

struct Mode {
  const char* name;
  int64_t bytes;  // hashed of each slot's row
};
inline constexpr std::array<Mode, 3> kModes = {{{"NONE", 0}, {"PARTIAL", 16}, {"ALL", kRowBytes}}};

// Indices for both sides: 32 bits in this project, 64 in the baseline.
struct Indices {
  DeviceArray<int32_t> narrow;
  DeviceArray<int64_t> wide;

  explicit Indices(const std::vector<int64_t>& values) : narrow(std::vector<int32_t>(values.begin(), values.end())), wide(values) {}
};

// What one launch of write is told: `rows` requests of `length` tokens each.
struct WriteSet {
  int64_t rows, length;
  Indices offsets;                // [rows + 1]
  Indices seed_slots;             // [rows], -1 where a request begins
  Indices tokens;                 // [rows * length]
  Indices positions;              // [rows * length]
  Indices slots;                  // [rows * length]
  DeviceArray<int32_t> num_rows;  // [1]

  int64_t num_tokens() const { return rows * length; }
};

// What one launch of verify is told: all `length` entries of `rows` requests.
struct VerifySet {
  int64_t rows, length, capacity;
  Indices slots, prev_slots, positions, expected_tokens;  // [capacity]; no token is expected
  Indices row_offsets;                                    // [rows + 1]
  DeviceArray<int32_t> num_valid, enable;                 // [1]

  int64_t num_entries() const { return rows * length; }
};

inline std::vector<int64_t> even_offsets(int64_t rows, int64_t length) {
  std::vector<int64_t> offsets;
  for (int64_t row = 0; row <= rows; ++row) offsets.push_back(row * length);
  return offsets;
}

// Writes to `slots` [rows * length], request after request. They begin, or go on behind the `seeds` [rows] at position `first`.
inline WriteSet write_set(int64_t rows, int64_t length, const int64_t* slots, uint64_t random_seed, const int64_t* seeds = nullptr,
                          int64_t first = 0) {
  std::vector<int64_t> tokens, positions;
  for (int64_t i = 0; i < rows * length; ++i) {
    tokens.push_back(static_cast<int64_t>(random_value(random_seed, static_cast<uint64_t>(i)) % 128'256));
    positions.push_back(first + i % length);
  }
  const std::vector<int64_t> seed_slots = seeds != nullptr ? std::vector<int64_t>(seeds, seeds + rows) : std::vector<int64_t>(rows, -1);
  return {rows,
          length,
          Indices(even_offsets(rows, length)),
          Indices(seed_slots),
          Indices(tokens),
          Indices(positions),
          Indices(std::vector<int64_t>(slots, slots + rows * length)),
          DeviceArray<int32_t>(std::vector<int32_t>{static_cast<int32_t>(rows)})};
}

// Entries of what write_set wrote to the same slots without seeds. The plan has room for `capacity` of them.
inline VerifySet verify_set(int64_t rows, int64_t length, int64_t capacity, const int64_t* slots) {
  const int64_t entries = rows * length;
  require(entries <= capacity, "a plan must have room for its entries");
  const size_t size = static_cast<size_t>(capacity);
  std::vector<int64_t> own(size, 0), previous(size, -1), positions(size, 0), tokens(size, -1);
  for (int64_t i = 0; i < entries; ++i) {
    own[i] = slots[i];
    previous[i] = i % length == 0 ? -1 : slots[i - 1];
    positions[i] = i % length;
  }
  return {rows,
          length,
          capacity,
          Indices(own),
          Indices(previous),
          Indices(positions),
          Indices(tokens),
          Indices(even_offsets(rows, length)),
          DeviceArray<int32_t>(std::vector<int32_t>{static_cast<int32_t>(entries)}),
          DeviceArray<int32_t>(std::vector<int32_t>{1})};
}

// One canary buffer as a launch sees it.
struct EndpointView {
  int64_t* records;  // [num_slots, 4]
  int64_t num_slots;
  int tag;
  const uint8_t* real_kv;  // [num_slots, kRowBytes]
  int64_t real_kv_bytes;   // hashed of each row, 0 for none
};

// The parts of a log that both sides have.
struct LogArrays {
  DeviceArray<int64_t> ring{kRingCapacity * kViolationWords};
  DeviceArray<int32_t> write_index{1};
  DeviceArray<uint64_t> kernel_runs{kTags};
  DeviceArray<uint64_t> slot_runs{kTags};

  LogArrays() { reset(); }

  void reset() const {
    ring.fill_bytes(0);
    write_index.fill_bytes(0);
    kernel_runs.fill_bytes(0);
    slot_runs.fill_bytes(0);
  }
};

// Canary buffers and log of one side.
struct Side {
  const char* name;
  int64_t num_slots;
  LogArrays log;
  std::vector<DeviceArray<int64_t>> records;  // [kEndpoints][num_slots, 4]

  Side(const char* name, int64_t num_slots) : name(name), num_slots(num_slots) {
    for (int e = 0; e < kEndpoints; ++e) records.emplace_back(num_slots * kRecordWords);
    reset();
  }

  // Records that nothing has written are 0xFF all over.
  void reset() const {
    for (const auto& buffer : records) buffer.fill_bytes(0xFF);
    log.reset();
  }

  void require_clean(const std::string& work) const {
    const int32_t findings = log.write_index.at(0);
    require(findings == 0, work + ": the " + name + " has " + std::to_string(findings) + " findings where there is nothing to find");
  }

  // That `tag` was launched as often, over as many entries, as it should have been since the log was reset.
  void require_runs(const std::string& work, int tag, int64_t launches, int64_t entries) const {
    const uint64_t counted_launches = log.kernel_runs.at(tag), counted_entries = log.slot_runs.at(tag);
    const bool right = counted_launches == static_cast<uint64_t>(launches) && counted_entries == static_cast<uint64_t>(entries);
    require(right, work + ": the " + name + " counted other launches or entries of tag " + std::to_string(tag) + " than there were");
  }
};

// K and V of a layer, random bytes.
struct Pool {
  int64_t num_slots;
  DeviceArray<uint64_t> k, v;  // [num_slots, kRowBytes / 8]

  explicit Pool(int64_t num_slots)
      : num_slots(num_slots), k(random_words(num_slots * (kRowBytes / 8), 1)), v(random_words(num_slots * (kRowBytes / 8), 2)) {}

  // The heads are stamped before a forward and have no real KV.
  EndpointView endpoint(const Side& side, int number, const Mode& mode) const {
    const DeviceArray<uint64_t>& half = number % 2 == 0 ? k : v;
    const int64_t bytes = number < kTailK ? 0 : mode.bytes;
    return {side.records[number].data(), side.num_slots, number, reinterpret_cast<const uint8_t*>(half.data()), bytes};
  }

  std::vector<EndpointView> endpoints(const Side& side, const Mode& mode) const {
    std::vector<EndpointView> views;
    for (int number = 0; number < kEndpoints; ++number) views.push_back(endpoint(side, number, mode));
    return views;
  }
};

static __global__ void compare_kernel(const int64_t* left, const int64_t* right, int64_t count, unsigned long long* different) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    if (left[i] != right[i]) atomicAdd(different, 1ull);
  }
}

// That both sides left the same bytes in every canary buffer.
inline void require_same_records(const std::string& work, const Side& left, const Side& right) {
  constexpr int kThreads = 256;
  DeviceArray<unsigned long long> different(1);
  for (int number = 0; number < kEndpoints; ++number) {
    different.fill_bytes(0);
    const DeviceArray<int64_t>& records = left.records[number];
    const DeviceArray<int64_t>& others = right.records[number];
    compare_kernel<<<full_grid(compare_kernel, kThreads), kThreads>>>(records.data(), others.data(), records.size(), different.data());
    check(cudaGetLastError(), "launching the comparison");
    const unsigned long long count = different.at(0);
    require(count == 0, work + ": " + left.name + " and " + right.name + " left different records in endpoint " + std::to_string(number) +
                            ", in " + std::to_string(count) + " words");
  }
}

}  // namespace bench
