// Device times of write and verify beside the baseline and the floors, one line of JSON each. kernel_rows.py compiles and
// runs this program; a limit is the most that a time may be of its reference.
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "baseline.cuh"
#include "data.cuh"
#include "floors.cuh"
#include "harness.cuh"
#include "launches.cuh"

namespace bench {
namespace {

constexpr int64_t kPrefillTokens = 16'384;
constexpr int64_t kDecodeRows = 256;
constexpr int64_t kVerifyRows = 256, kVerifyLength = 4'096;
constexpr int64_t kVerifyEntries = kVerifyRows * kVerifyLength;
constexpr int64_t kFewEntries = 256;
// Sets that launches take in turn. What those of a large case touch together is more than the caches hold; cases of few
// entries measure the latency of their launches.
constexpr int kWriteSets = 48;
constexpr int kVerifySets = 3;
// Each set of a large verify has a pool of its own, which it fills to 94 %: a server's pool is what memory was left, and is full
// when there is something to do. Its slots are in random order.
constexpr int64_t kPoolSlots = 1'114'111;  // prime
constexpr int64_t kNumSlots = 1 + kVerifySets * kPoolSlots;
static_assert(kVerifyEntries < kPoolSlots && kWriteSets * kPrefillTokens < kVerifyEntries);

using Limits = std::array<std::optional<double>, kModes.size()>;  // one a mode
constexpr std::optional<double> kNoLimit = std::nullopt;

// The slots of all pools, as many of each as a large verify has entries.
std::vector<int64_t> slots_of_pools() {
  std::vector<int64_t> slots;
  for (int i = 0; i < kVerifySets; ++i) {
    const std::vector<int64_t> pool = permutation(1 + i * kPoolSlots, 1 + (i + 1) * kPoolSlots, 3 + i);
    slots.insert(slots.end(), pool.begin(), pool.begin() + kVerifyEntries);
  }
  return slots;
}

struct Bench {
  cudaStream_t stream;
  Pool pool{kNumSlots};
  Project project{kNumSlots, std::max(kVerifyRows, kDecodeRows), kVerifyEntries};
  baseline::Baseline baseline{kNumSlots};
  std::vector<int64_t> slots = slots_of_pools();

  std::array<const Side*, 2> sides() const { return {&project, &baseline}; }
};

// Device times of the two sides, µs.
struct Times {
  double project, baseline;
};

// Both sides write `sets`, one after the other, into fresh buffers, and must leave the same records.
void require_same_writes(const Bench& bench, const std::string& work, const std::vector<int>& numbers, const Mode& mode,
                         const std::vector<const WriteSet*>& sets) {
  bench.project.reset();
  bench.baseline.reset();
  int64_t tokens = 0;
  for (const WriteSet* set : sets) {
    tokens += set->num_tokens();
    std::vector<EndpointView> ours, theirs;
    for (int number : numbers) {
      ours.push_back(bench.pool.endpoint(bench.project, number, mode));
      theirs.push_back(bench.pool.endpoint(bench.baseline, number, mode));
    }
    check(bench.project.write(bench.stream, *set, ours), "launching this project's write");
    check(bench.baseline.write(bench.stream, *set, theirs), "launching the baseline's write");
  }
  finish("writing");
  require_same_records(work, bench.project, bench.baseline);
  for (const Side* side : bench.sides()) {
    side->require_clean(work);
    const int64_t launches = side == &bench.project ? Project::launches_in_write(numbers.size()) : 1;
    for (int number : numbers) side->require_runs(work, number, launches * static_cast<int64_t>(sets.size()), tokens);
  }
}

// Write to all endpoints in one launch of this project and four of the baseline.
Times write_times(const Bench& bench, const std::string& work, const Mode& mode, const std::vector<WriteSet>& before,
                  const std::vector<WriteSet>& sets, Timing baseline_timing) {
  // Only the sets that the baseline is timed on: it may need half a second for each.
  std::vector<const WriteSet*> compared;
  for (const WriteSet& set : before) compared.push_back(&set);
  for (int i = 0; i < baseline_timing.launches && i < static_cast<int>(sets.size()); ++i) compared.push_back(&sets[i]);
  require_same_writes(bench, work, {0, 1, 2, 3}, mode, compared);

  const auto ours = bench.pool.endpoints(bench.project, mode), theirs = bench.pool.endpoints(bench.baseline, mode);
  const double project_us = device_us(bench.stream, {kWriteSets, 7}, [&](int i) {
    return bench.project.write(bench.stream, sets[i % sets.size()], ours);
  });
  const double baseline_us = device_us(bench.stream, baseline_timing, [&](int i) {
    return bench.baseline.write(bench.stream, sets[i % sets.size()], theirs);
  });
  for (const Side* side : bench.sides()) side->require_clean(work);
  return {project_us, baseline_us};
}

// Prefill: `rows` requests that share the tokens of a step evenly.
void prefill_rows(const Bench& bench, const std::string& work, int64_t rows, const Limits& chain_limits, const Limits& baseline_limits) {
  const int64_t length = kPrefillTokens / rows;
  std::vector<WriteSet> sets;
  for (int i = 0; i < kWriteSets; ++i) sets.push_back(write_set(rows, length, &bench.slots[i * kPrefillTokens], 1000 + i));
  const double floor_us = floors::chain_us(bench.stream, length);
  for (size_t m = 0; m < kModes.size(); ++m) {
    const Timing baseline_timing = rows == 1 ? Timing{2, 3} : Timing{kWriteSets, 3};
    const Times times = write_times(bench, work, kModes[m], {}, sets, baseline_timing);
    print_row(work, kModes[m].name, times.project, "chain floor", floor_us, chain_limits[m]);
    print_row(work, kModes[m].name, times.project, "baseline", times.baseline, baseline_limits[m]);
  }
}

// Decode: every request goes on behind a record that it has.
void decode_rows(const Bench& bench) {
  const std::string work = "write, 256 requests of 1 token, 4 endpoints";
  std::vector<WriteSet> before, sets;
  for (int i = 0; i < kWriteSets; ++i) {
    const int64_t* seeds = &bench.slots[2 * i * kDecodeRows];
    before.push_back(write_set(kDecodeRows, 1, seeds, 2000 + i));
    sets.push_back(write_set(kDecodeRows, 1, seeds + kDecodeRows, 3000 + i, seeds, 1));
  }
  for (const Mode& mode : kModes) {
    const Times times = write_times(bench, work, mode, before, sets, {kWriteSets, 7});
    print_row(work, mode.name, times.project, "baseline", times.baseline);
  }
}

// A changed token is found by both sides in the entry behind it, and nothing else is.
void require_same_finding(const Bench& bench, const std::string& work, const VerifySet& set, const std::vector<EndpointView>& endpoint) {
  const DeviceArray<int64_t>& records = bench.project.records[kTailK];
  const int64_t token_at = set.slots.wide.at(kFewEntries / 2) * kRecordWords;
  const int64_t token = records.at(token_at);
  records.set(token_at, token + 1);
  bench.project.log.reset();
  bench.baseline.log.reset();
  check(bench.project.verify(bench.stream, set, endpoint), "launching this project's verify");
  check(bench.baseline.verify(bench.stream, set, endpoint), "launching the baseline's verify");
  for (const Side* side : bench.sides()) {
    require(side->log.write_index.at(0) == 1, work + ": the " + side->name + " does not find one changed token once");
  }
  for (int field = 0; field < kViolationWords; ++field) {
    require(bench.project.log.ring.at(field) == bench.baseline.log.ring.at(field),
            work + ": the two sides report a changed token differently, in field " + std::to_string(field));
  }
  records.set(token_at, token);
}

// Verify of one endpoint, on this project's records for both sides.
Times verify_times(const Bench& bench, const std::string& work, const Mode& mode, const std::vector<VerifySet>& sets) {
  const std::vector<EndpointView> endpoint = {bench.pool.endpoint(bench.project, kTailK, mode)};
  bench.project.log.reset();
  bench.baseline.log.reset();
  int64_t entries = 0;
  for (const VerifySet& set : sets) {
    entries += set.num_entries();
    check(bench.project.verify(bench.stream, set, endpoint), "launching this project's verify");
    check(bench.baseline.verify(bench.stream, set, endpoint), "launching the baseline's verify");
  }
  for (const Side* side : bench.sides()) side->require_runs(work, kTailK, static_cast<int64_t>(sets.size()), entries);

  const Timing timing = {12, 9};
  const double project_us = device_us(bench.stream, timing, [&](int i) {
    return bench.project.verify(bench.stream, sets[i % sets.size()], endpoint);
  });
  const double baseline_us = device_us(bench.stream, timing, [&](int i) {
    return bench.baseline.verify(bench.stream, sets[i % sets.size()], endpoint);
  });
  for (const Side* side : bench.sides()) side->require_clean(work);
  require_same_finding(bench, work, sets[0], endpoint);
  return {project_us, baseline_us};
}

void verify_rows(const Bench& bench, const Limits& baseline_limits, double read_limit) {
  const std::string many = "verify, 1,048,576 entries, 1 endpoint", few = "verify, 256 entries, 1 endpoint";
  const std::string read = "read of 1,048,576 random rows of 2,048 bytes";
  std::vector<WriteSet> writes;
  std::vector<VerifySet> sets, few_sets;
  for (int i = 0; i < kVerifySets; ++i) {
    const int64_t* slots = &bench.slots[i * kVerifyEntries];
    writes.push_back(write_set(kVerifyRows, kVerifyLength, slots, 4000 + i));
    sets.push_back(verify_set(kVerifyRows, kVerifyLength, kVerifyEntries, slots));
    // The plan of an idle batch has the room of a busy one.
    few_sets.push_back(verify_set(1, kFewEntries, kVerifyEntries, slots));
  }
  const Timing timing = {12, 9};
  const double read_us = floors::read_us(bench.stream, timing, bench.pool, sets);
  const double copy_us = floors::copy_us(bench.stream, timing, bench.pool, kVerifyEntries * kRowBytes);
  print_row(read, "ALL", read_us, "copy", copy_us);
  for (size_t m = 0; m < kModes.size(); ++m) {
    require_same_writes(bench, many, {kTailK}, kModes[m], {&writes[0], &writes[1], &writes[2]});
    const Times times = verify_times(bench, many, kModes[m], sets);
    print_row(many, kModes[m].name, times.project, "baseline", times.baseline, baseline_limits[m]);
    if (kModes[m].bytes == kRowBytes) print_row(many, kModes[m].name, times.project, "read", read_us, read_limit);
    const Times few_times = verify_times(bench, few, kModes[m], few_sets);
    print_row(few, kModes[m].name, few_times.project, "baseline", few_times.baseline);
  }
}

// A whole decode step: before and behind the forward, K and V, all prefixes are verified and a token is written behind each.
void step_rows(const Bench& bench, const Mode& mode) {
  const std::string work = "step of 256 requests, context 4,096: verify and write, 4 endpoints";
  constexpr int64_t kPrefix = kVerifyLength - 1;
  std::vector<WriteSet> before, sets;
  std::vector<VerifySet> prefixes;
  std::vector<const WriteSet*> written;
  for (int i = 0; i < kVerifySets; ++i) {
    const int64_t* slots = &bench.slots[i * kVerifyEntries];  // of the prefixes, then of the tokens behind them
    std::vector<int64_t> seeds;
    for (int64_t row = 1; row <= kVerifyRows; ++row) seeds.push_back(slots[row * kPrefix - 1]);
    before.push_back(write_set(kVerifyRows, kPrefix, slots, 5000 + i));
    prefixes.push_back(verify_set(kVerifyRows, kPrefix, kVerifyEntries, slots));
    sets.push_back(write_set(kVerifyRows, 1, slots + kVerifyRows * kPrefix, 6000 + i, seeds.data(), kPrefix));
  }
  for (const WriteSet& set : before) written.push_back(&set);
  require_same_writes(bench, work, {0, 1, 2, 3}, mode, written);

  const auto ours = bench.pool.endpoints(bench.project, mode), theirs = bench.pool.endpoints(bench.baseline, mode);
  const auto project_step = [&](int i) {
    return bench.project.step(bench.stream, &prefixes[i % kVerifySets], sets[i % kVerifySets], ours);
  };
  const auto baseline_step = [&](int i) {
    const cudaError_t error = bench.baseline.verify(bench.stream, prefixes[i % kVerifySets], theirs);
    return error != cudaSuccess ? error : bench.baseline.write(bench.stream, sets[i % kVerifySets], theirs);
  };
  for (const Side* side : bench.sides()) side->log.reset();
  for (int i = 0; i < kVerifySets; ++i) {
    check(project_step(i), "launching this project's step");
    check(baseline_step(i), "launching the baseline's step");
  }
  finish("running steps");
  require_same_records(work, bench.project, bench.baseline);
  for (const Side* side : bench.sides()) {
    for (int number = 0; number < kEndpoints; ++number) {
      side->require_runs(work, number, 2 * kVerifySets, kVerifySets * kVerifyRows * kVerifyLength);
    }
  }
  const double project_us = device_us(bench.stream, {12, 9}, project_step);
  const double baseline_us = device_us(bench.stream, {12, 9}, baseline_step);
  for (const Side* side : bench.sides()) side->require_clean(work);
  print_row(work, mode.name, project_us, "baseline", baseline_us);
}

}  // namespace
}  // namespace bench

int main() {
  using namespace bench;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  const Bench data{stream};
  // Limits of the modes in their order: NONE, PARTIAL, ALL.
  prefill_rows(data, "write, 1 request of 16,384 tokens, 4 endpoints", 1,
               /*chain=*/{1.25, 1.25, 1.6}, /*baseline=*/{kNoLimit, 0.1, kNoLimit});
  prefill_rows(data, "write, 32 requests of 512 tokens, 4 endpoints", 32,
               /*chain=*/{kNoLimit, 1.5, kNoLimit}, /*baseline=*/{});
  decode_rows(data);
  step_rows(data, kModes[1]);
  verify_rows(data, /*baseline=*/{0.5, 0.6, 0.35}, /*read=*/1.5);
  return 0;
}
