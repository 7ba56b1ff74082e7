// This project's side: the one place that fills its launch structures.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/launch.h"
#include "data.cuh"

namespace bench {

static_assert(sizeof(kvcanary::Record) == kRecordWords * sizeof(int64_t));
static_assert(kEndpoints <= kvcanary::kMaxEndpoints && kTags == kvcanary::kNumTags && kViolationWords == kvcanary::kViolationFields);

class Project : public Side {
 public:
  // Launches have at most max_rows rows and, where they write, max_tokens tokens.
  Project(int64_t num_slots, int64_t max_rows, int64_t max_tokens)
      : Side("project", num_slots),
        row_flags_(max_rows),
        requests_(max_rows),
        seeds_(kEndpoints * max_rows),
        starts_(max_rows),
        links_(max_tokens) {
    for (const DeviceArray<int32_t>* zeros : {&request_rows_, &row_flags_, &requests_}) zeros->fill_bytes(0);
    reasons_.fill_bytes(0);
    skips_.fill_bytes(0);
  }

  // All four endpoints: a step of requests that have nothing in the cache. Others: a write by itself.
  cudaError_t write(cudaStream_t stream, const WriteSet& set, const std::vector<EndpointView>& endpoints) const {
    if (endpoints.size() == kEndpoints) return step(stream, nullptr, set, endpoints);
    kvcanary::WriteLaunch launch = write_launch(set, endpoints);
    return kvcanary::cuda::launch_write(stream, launch);
  }

  // Heads, then tails with the links of the heads; each phase verifies the prefixes, where there are any, and writes behind them.
  cudaError_t step(cudaStream_t stream, const VerifySet* prefixes, const WriteSet& set, const std::vector<EndpointView>& endpoints) const {
    const auto tails = endpoints.begin() + kTailK;
    if (cudaError_t error = phase(stream, prefixes, set, {endpoints.begin(), tails}, false); error != cudaSuccess) return error;
    return phase(stream, prefixes, set, {tails, endpoints.end()}, true);
  }

  // How often a tag is counted in one write.
  static int64_t launches_in_write(size_t endpoints) { return endpoints == kEndpoints ? 2 : 1; }

  cudaError_t verify(cudaStream_t stream, const VerifySet& set, const std::vector<EndpointView>& endpoints) const {
    return kvcanary::cuda::launch_verify(stream, verify_launch(set, endpoints));
  }

 private:
  cudaError_t phase(cudaStream_t stream, const VerifySet* prefixes, const WriteSet& set, const std::vector<EndpointView>& endpoints,
                    bool carried) const {
    kvcanary::WriteLaunch write = write_launch(set, endpoints);
    write.carried = carried;
    if (prefixes != nullptr) return kvcanary::cuda::launch_phase(stream, verify_launch(*prefixes, endpoints), write, {});
    kvcanary::VerifyLaunch nothing = {};
    nothing.num_valid = nothing_.data();
    nothing.enable = check_positions_.data();
    nothing.log = write.log;
    nothing.endpoints = write.endpoints;
    return kvcanary::cuda::launch_phase(stream, nothing, write, {});
  }

  kvcanary::VerifyLaunch verify_launch(const VerifySet& set, const std::vector<EndpointView>& endpoints) const {
    kvcanary::VerifyLaunch launch = {};
    launch.slots = set.slots.narrow.data();
    launch.expected_tokens = set.expected_tokens.narrow.data();
    launch.expected_positions = set.positions.narrow.data();
    launch.prev_slots = set.prev_slots.narrow.data();
    launch.num_valid = set.num_valid.data();
    launch.enable = set.enable.data();
    launch.row_offsets = set.row_offsets.narrow.data();
    launch.capacity = set.capacity;
    launch.log = log_of(set.rows);
    launch.endpoints = list_of(endpoints);
    return launch;
  }

  kvcanary::WriteLaunch write_launch(const WriteSet& set, const std::vector<EndpointView>& endpoints) const {
    require(set.num_tokens() <= links_.size(), "a launch has more tokens than this side was made for");
    kvcanary::WriteLaunch launch = {};
    launch.offsets = set.offsets.narrow.data();
    launch.seed_slots = set.seed_slots.narrow.data();
    launch.num_rows = set.num_rows.data();
    launch.row_capacity = set.rows;
    launch.tokens = {set.tokens.narrow.data(), false};
    launch.positions = {set.positions.narrow.data(), false};
    launch.slots = {set.slots.narrow.data(), false};
    launch.num_tokens = set.num_tokens();
    launch.check_positions = check_positions_.data();
    launch.links = links_.data();
    launch.starts = starts_.data();
    launch.seeds = seeds_.data();
    launch.finished = finished_.data();
    launch.log = log_of(set.rows);
    launch.endpoints = list_of(endpoints);
    return launch;
  }

  static kvcanary::EndpointList list_of(const std::vector<EndpointView>& views) {
    kvcanary::EndpointList list = {};
    for (const EndpointView& view : views) {
      kvcanary::Endpoint& endpoint = list.items[list.size++];
      endpoint.records = reinterpret_cast<kvcanary::Record*>(view.records);
      endpoint.num_slots = view.num_slots;
      endpoint.tag = view.tag;
      endpoint.num_sources = view.real_kv_bytes > 0 ? 1 : 0;
      kvcanary::Source& source = endpoint.sources[0];
      source.data = view.real_kv;
      source.page_stride = kRowBytes;
      source.slot_stride = kRowBytes;
      source.page_size = 1;
      source.num_words = static_cast<uint32_t>(view.real_kv_bytes / 8);
      source.paired = true;
    }
    return list;
  }

  kvcanary::Log log_of(int64_t rows) const {
    require(rows <= row_flags_.size(), "a launch has more rows than this side was made for");
    kvcanary::Log view = {};
    view.ring = log.ring.data();
    view.request_rows = request_rows_.data();
    view.write_index = log.write_index.data();
    view.kernel_runs = log.kernel_runs.data();
    view.slot_runs = log.slot_runs.data();
    view.reasons = reasons_.data();
    view.skips = skips_.data();
    view.row_flags = row_flags_.data();
    view.requests = requests_.data();
    view.ring_capacity = kRingCapacity;
    view.num_rows = rows;
    return view;
  }

  DeviceArray<int32_t> request_rows_{kRingCapacity};
  DeviceArray<uint32_t> reasons_{kTags * kvcanary::kReasonColumns};
  DeviceArray<uint32_t> skips_{kTags};
  DeviceArray<int32_t> row_flags_, requests_;  // [max_rows]
  DeviceArray<int32_t> check_positions_{std::vector<int32_t>{1}};
  DeviceArray<int32_t> nothing_{std::vector<int32_t>{0}};
  DeviceArray<kvcanary::Seed> seeds_;  // [kEndpoints, max_rows]
  DeviceArray<uint64_t> starts_;       // [max_rows]
  DeviceArray<kvcanary::Link> links_;  // [max_tokens]
  DeviceArray<uint32_t> finished_{1};
};

}  // namespace bench
