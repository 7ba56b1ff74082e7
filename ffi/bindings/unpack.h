// From FFI buffers and attributes to the launch structures, shared by the CPU and the CUDA handlers. Shapes and dtypes
// were checked in Python; what could read or write outside a buffer is checked again here.
#pragma once

#include <cstdint>
#include <string>

#include "kvcanary/report.h"
#include "kvcanary/verify.h"
#include "kvcanary/write.h"
#include "xla/ffi/api/ffi.h"

namespace kvcanary {

namespace ffi = xla::ffi;

using Int32s = ffi::BufferR1<ffi::S32>;
using Records = ffi::Buffer<ffi::U8, 2>;
using Sizes = ffi::Span<const int64_t>;

// What describes the endpoints of a launch beside their arrays, which follow the log among the remaining operands: all
// canary buffers, then all sources, endpoint after endpoint.
struct EndpointAttrs {
  Sizes tags;             // [endpoints]
  Sizes source_counts;    // [endpoints]
  Sizes source_geometry;  // [sources, 5]: page size, bytes read, byte offset, page stride, slot stride
};
inline constexpr size_t kGeometryFields = 5;

inline ffi::Error invalid(const std::string& operation, const std::string& problem) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, operation + ": " + problem);
}

// Fixed part of every launch's results: the log, aliased to the first of the remaining operands.
inline constexpr size_t kLogArrays = 8;
inline constexpr size_t kReportArrays = 4;

// The aliased results hold the log's content: XLA copies it there where the operands were not donated.
inline ffi::Error unpack_log(const std::string& operation, const Int32s& requests, ffi::RemainingRets results, Log* log) {
  auto ring = results.get<ffi::Buffer<ffi::U32, 3>>(0);
  auto write_index = results.get<Int32s>(1);
  auto kernel_runs = results.get<ffi::Buffer<ffi::U32, 2>>(2);
  auto slot_runs = results.get<ffi::Buffer<ffi::U32, 2>>(3);
  auto reasons = results.get<ffi::Buffer<ffi::U32, 2>>(4);
  auto skips = results.get<ffi::BufferR1<ffi::U32>>(5);
  auto request_rows = results.get<Int32s>(6);
  auto row_flags = results.get<Int32s>(7);
  const bool typed = ring.has_value() && write_index.has_value() && kernel_runs.has_value() && slot_runs.has_value() &&
                     reasons.has_value() && skips.has_value() && request_rows.has_value() && row_flags.has_value();
  const bool sound = typed && (*ring)->element_count() % (2 * kViolationFields) == 0 && (*write_index)->element_count() == 1 &&
                     (*kernel_runs)->element_count() == 2 * kNumTags && (*slot_runs)->element_count() == 2 * kNumTags &&
                     (*reasons)->element_count() == kNumTags * kReasonColumns && (*skips)->element_count() == kNumTags &&
                     (*request_rows)->element_count() * 2 * kViolationFields == (*ring)->element_count() &&
                     (*row_flags)->element_count() == requests.element_count();
  if (!sound) return invalid(operation, "the arrays of the device state have unexpected types or sizes.");
  log->ring = reinterpret_cast<int64_t*>((*ring)->typed_data());
  log->write_index = (*write_index)->typed_data();
  log->kernel_runs = reinterpret_cast<uint64_t*>((*kernel_runs)->typed_data());
  log->slot_runs = reinterpret_cast<uint64_t*>((*slot_runs)->typed_data());
  log->reasons = (*reasons)->typed_data();
  log->skips = (*skips)->typed_data();
  log->request_rows = (*request_rows)->typed_data();
  log->row_flags = (*row_flags)->typed_data();
  log->requests = requests.typed_data();
  log->num_rows = static_cast<int64_t>(requests.element_count());
  log->ring_capacity = static_cast<int64_t>((*ring)->element_count() / (2 * kViolationFields));
  return ffi::Error::Success();
}

inline ffi::Error unpack_source(const std::string& operation, const ffi::AnyBuffer& array, const int64_t* geometry, int64_t num_slots,
                                Source* source) {
  const int64_t page_size = geometry[0], read_bytes = geometry[1], offset = geometry[2];
  const int64_t page_stride = geometry[3], slot_stride = geometry[4];
  const bool sound = page_size > 0 && page_size <= INT32_MAX && read_bytes >= 8 && read_bytes % 8 == 0 && read_bytes / 8 <= INT32_MAX &&
                     offset >= 0 && offset % 8 == 0 && page_stride >= 8 && page_stride % 8 == 0 && slot_stride >= 8 && slot_stride % 8 == 0;
  if (!sound) return invalid(operation, "a real-KV source has an impossible geometry.");
  // The last byte is in the last slot or, where pages overlap, in the last slot of the last whole page.
  const int64_t whole_pages = num_slots / page_size, rest = num_slots % page_size;
  int64_t last = 0;
  if (rest > 0) last = whole_pages * page_stride + (rest - 1) * slot_stride;
  if (whole_pages > 0) {
    const int64_t last_of_page = (whole_pages - 1) * page_stride + (page_size - 1) * slot_stride;
    last = last_of_page > last ? last_of_page : last;
  }
  if (offset + last + read_bytes > static_cast<int64_t>(array.size_bytes())) {
    return invalid(operation, "a real-KV source ends before the last slot of its canary buffer.");
  }
  source->data = static_cast<const uint8_t*>(array.untyped_data()) + offset;
  source->page_stride = page_stride;
  source->slot_stride = slot_stride;
  source->page_size = static_cast<uint32_t>(page_size);
  source->num_words = static_cast<uint32_t>(read_bytes / 8);
  source->paired = reinterpret_cast<uintptr_t>(source->data) % 16 == 0 && page_stride % 16 == 0 && slot_stride % 16 == 0 && read_bytes % 16 == 0;
  return ffi::Error::Success();
}

inline ffi::Error unpack_endpoints(const std::string& operation, ffi::RemainingArgs arrays, const EndpointAttrs& attrs,
                                   EndpointList* endpoints) {
  const size_t count = attrs.tags.size();
  if (count > kMaxEndpoints || attrs.source_counts.size() != count || arrays.size() < kLogArrays + count) {
    return invalid(operation, "the list of endpoints does not match the operands.");
  }
  endpoints->size = static_cast<int32_t>(count);
  size_t next_source = 0;
  for (size_t e = 0; e < count; ++e) {
    auto buffer = arrays.get<Records>(kLogArrays + e);
    if (buffer.has_error()) return buffer.error();
    const int64_t tag = attrs.tags[e], sources = attrs.source_counts[e], num_slots = buffer->dimensions()[0];
    const bool sound = buffer->dimensions()[1] == sizeof(Record) && num_slots <= INT32_MAX && tag >= 0 && tag < kNumTags && sources >= 0 &&
                       sources <= kMaxSources && attrs.source_geometry.size() >= (next_source + sources) * kGeometryFields &&
                       arrays.size() >= kLogArrays + count + next_source + sources;
    if (!sound) return invalid(operation, "an endpoint's buffer, tag or number of sources is out of bounds.");
    Endpoint& endpoint = endpoints->items[e];
    endpoint.records = reinterpret_cast<Record*>(buffer->typed_data());
    endpoint.num_slots = num_slots;
    endpoint.tag = static_cast<int32_t>(tag);
    endpoint.num_sources = static_cast<int32_t>(sources);
    for (int64_t s = 0; s < sources; ++s, ++next_source) {
      auto array = arrays.get<ffi::AnyBuffer>(kLogArrays + count + next_source);
      if (array.has_error()) return array.error();
      const int64_t* geometry = attrs.source_geometry.begin() + next_source * kGeometryFields;
      if (ffi::Error error = unpack_source(operation, *array, geometry, num_slots, &endpoint.sources[s]); error.failure()) return error;
    }
  }
  return ffi::Error::Success();
}

using Words = ffi::BufferR1<ffi::U32>;

inline size_t link_bytes(const WriteLaunch& launch) {
  return static_cast<size_t>(launch.num_tokens) * sizeof(Link) + static_cast<size_t>(launch.row_capacity) * sizeof(uint64_t);
}

inline void unpack_links(void* data, WriteLaunch* launch) {
  launch->links = static_cast<Link*>(data);
  launch->starts = reinterpret_cast<uint64_t*>(launch->links + launch->num_tokens);
}

// The scratch of a write, which is a result so that XLA allocates it: seeds; the ends of trees; a word, in 16 bytes of its own;
// links, where they are in no array of their own.
inline ffi::Error unpack_scratch(const std::string& operation, ffi::Result<Words> scratch, bool has_links, WriteLaunch* launch) {
  const size_t count = static_cast<size_t>(launch->endpoints.size);
  const size_t num_seeds = count * static_cast<size_t>(launch->row_capacity);
  const size_t num_ends = launch->tree ? count * static_cast<size_t>(launch->num_tokens) : 0;
  const size_t bytes = num_seeds * sizeof(Seed) + (num_ends + 1) * sizeof(Link);
  if (scratch->size_bytes() < bytes + (has_links ? link_bytes(*launch) : 0)) return invalid(operation, "the scratch memory is too small.");
  launch->seeds = reinterpret_cast<Seed*>(scratch->typed_data());
  launch->ends = reinterpret_cast<Link*>(launch->seeds + num_seeds);
  launch->finished = reinterpret_cast<uint32_t*>(launch->ends + num_ends);
  if (has_links) unpack_links(launch->ends + num_ends + 1, launch);
  return ffi::Error::Success();
}

// The canary buffers among the results, aliased to the operands. Launches that write go to the results, which hold the buffers'
// content as the log's results do.
inline ffi::Error unpack_buffer_results(const std::string& operation, ffi::RemainingRets results, size_t first, EndpointList* endpoints) {
  const size_t count = static_cast<size_t>(endpoints->size);
  if (results.size() != first + count) return invalid(operation, "the results do not match the list of endpoints.");
  for (size_t e = 0; e < count; ++e) {
    auto buffer = results.get<Records>(first + e);
    if (buffer.has_error()) return buffer.error();
    if ((*buffer)->dimensions()[0] != endpoints->items[e].num_slots || (*buffer)->dimensions()[1] != sizeof(Record)) {
      return invalid(operation, "a result has another size than its operand.");
    }
    endpoints->items[e].records = reinterpret_cast<Record*>((*buffer)->typed_data());
  }
  return ffi::Error::Success();
}

// A report's arrays among the results.
inline ffi::Error unpack_report(const std::string& operation, ffi::RemainingRets results, size_t first, const Log& log,
                                ReportLaunch* report) {
  auto ring = results.get<ffi::Buffer<ffi::U32, 3>>(first);
  auto request_rows = results.get<Int32s>(first + 1);
  auto row_flags = results.get<Int32s>(first + 2);
  auto summary = results.get<Words>(first + 3);
  const auto capacity = static_cast<size_t>(log.ring_capacity);
  const bool sound = ring.has_value() && request_rows.has_value() && row_flags.has_value() && summary.has_value() &&
                     (*ring)->element_count() == capacity * 2 * kViolationFields && (*request_rows)->element_count() == capacity &&
                     static_cast<int64_t>((*row_flags)->element_count()) == log.num_rows && (*summary)->element_count() == kSummaryWords;
  if (!sound) return invalid(operation, "the arrays of the report have unexpected types or sizes.");
  report->ring = reinterpret_cast<int64_t*>((*ring)->typed_data());
  report->request_rows = (*request_rows)->typed_data();
  report->row_flags = (*row_flags)->typed_data();
  report->summary = (*summary)->typed_data();
  return ffi::Error::Success();
}

inline ffi::Error unpack_integers(const std::string& operation, const ffi::AnyBuffer& array, int64_t length, Integers* integers) {
  const ffi::DataType type = array.element_type();
  if ((type != ffi::S32 && type != ffi::S64) || static_cast<int64_t>(array.element_count()) != length) {
    return invalid(operation, "the token arrays must be int32 or int64 and of one length.");
  }
  *integers = {array.untyped_data(), type == ffi::S64};
  return ffi::Error::Success();
}

}  // namespace kvcanary
