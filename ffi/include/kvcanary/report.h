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
  int32_t* row_flags;               // [num_rows of the log]
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

// One thread's share of the report before there are findings: all rows zero, and of no request.
KVC_HD void blank_report(const ReportLaunch& report, int64_t ring_capacity, int64_t thread, int64_t threads) {
  KVC_ROLLED
  for (int64_t i = thread; i < ring_capacity * kViolationFields; i += threads) report.ring[i] = 0;
  KVC_ROLLED
  for (int64_t i = thread; i < ring_capacity; i += threads) report.request_rows[i] = -1;
}

// One word of the summary.
KVC_HD uint32_t summary_word(const Log& log, const ReportLaunch& report, int word) {
  const void* part = log.write_index;
  const auto skip_to = [&](int words_before, const void* next) {
    if (word < words_before) return false;
    word -= words_before;
    part = next;
    return true;
  };
  (void)(skip_to(1, report.num_invalid_rows) && skip_to(1, report.reset_count) && skip_to(1, log.kernel_runs) &&
         skip_to(2 * kNumTags, log.slot_runs) && skip_to(2 * kNumTags, log.reasons) && skip_to(kNumTags * kReasonColumns, log.skips));
  return fresh(static_cast<const uint32_t*>(part) + word);
}

// One thread's share of what there is to report: the rows that the ring holds, the flags, and the summary.
KVC_HD void fill_report(const Log& log, const ReportLaunch& report, int64_t thread, int64_t threads) {
  const int32_t found = fresh(log.write_index);
  const int64_t rows = found < 0 || found > log.ring_capacity ? log.ring_capacity : found;
  KVC_ROLLED
  for (int64_t word = thread; word < kSummaryWords; word += threads) report.summary[word] = summary_word(log, report, static_cast<int>(word));
  KVC_ROLLED
  for (int64_t i = thread; i < rows * kViolationFields; i += threads) report.ring[i] = fresh(&log.ring[i]);
  KVC_ROLLED
  for (int64_t i = thread; i < rows; i += threads) report.request_rows[i] = fresh(&log.request_rows[i]);
  KVC_ROLLED
  for (int64_t i = thread; i < log.num_rows; i += threads) report.row_flags[i] = fresh(&log.row_flags[i]);
}

}  // namespace kvcanary
