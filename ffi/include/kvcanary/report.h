// The report of a step: a copy of the log and the counters, which outlives the state that they are part of.
#pragma once

#include <cstdint>

#include "kvcanary/log.h"

namespace kvcanary {

// In the summary: violations so far, invalid rows, resets; launches, entries; reasons; skips.
inline constexpr int kSummaryWords = 3 + 2 * kNumTags + 2 * kNumTags + kNumTags * kReasonColumns + kNumTags;

struct ReportLaunch {
  const int32_t* num_invalid_rows;  // [1]
  const int32_t* reset_count;       // [1]
  int64_t* ring;                    // [ring_capacity, 8]
  int32_t* request_rows;            // [ring_capacity]
  uint32_t* summary;                // [kSummaryWords]; null where no report is wanted
};

// A value that other threads of the launch have written.
template <typename T>
KVC_HD T fresh(const T* value) {
#if defined(__CUDA_ARCH__)
  return __ldcg(value);
#else
  return *value;
#endif
}

// One thread's share of the report. Rows that the ring does not hold yet are zero, and belong to no request.
KVC_HD void write_report(const Log& log, const ReportLaunch& report, int64_t thread, int64_t threads) {
  const int32_t found = fresh(log.write_index);
  const int64_t rows = found < 0 || found > log.ring_capacity ? log.ring_capacity : found;
  for (int64_t i = thread; i < log.ring_capacity * kViolationFields; i += threads) {
    report.ring[i] = i < rows * kViolationFields ? fresh(&log.ring[i]) : 0;
  }
  for (int64_t i = thread; i < log.ring_capacity; i += threads) report.request_rows[i] = i < rows ? fresh(&log.request_rows[i]) : -1;

  const struct {
    const uint32_t* words;
    int count;
  } parts[] = {{reinterpret_cast<const uint32_t*>(log.write_index), 1},
               {reinterpret_cast<const uint32_t*>(report.num_invalid_rows), 1},
               {reinterpret_cast<const uint32_t*>(report.reset_count), 1},
               {reinterpret_cast<const uint32_t*>(log.kernel_runs), 2 * kNumTags},
               {reinterpret_cast<const uint32_t*>(log.slot_runs), 2 * kNumTags},
               {log.reasons, kNumTags * kReasonColumns},
               {log.skips, kNumTags}};
  uint32_t* summary = report.summary;
  for (const auto& part : parts) {
    for (int64_t i = thread; i < part.count; i += threads) summary[i] = fresh(&part.words[i]);
    summary += part.count;
  }
}

}  // namespace kvcanary
