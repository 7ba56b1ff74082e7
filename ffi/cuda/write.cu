// Write on CUDA, three kernels:
//
//   claim        reads every row's seed before any record changes, and lets each entry put its row's number into the
//                real-KV field of its slot's record; where two rows name one slot, one number survives;
//   chain        one warp a row: the chain, the checks, and the first three fields of the records that the row owns,
//                so that a slot named by two rows gets one whole record;
//   fingerprint  the real-KV hash of every slot written. It depends on the slot alone, so it needs no owner and
//                spreads over the whole device.
//
// A seed's own real-KV field is no part of its hash, so claims do not disturb seeds.
#include "cuda/launch.h"

namespace kvcanary::cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xFFFFFFFFu;
constexpr int kThreads = 256;     // claim and fingerprint
constexpr int kChainWarps = 4;    // rows in one block of the chain kernel
constexpr int64_t kMaxGridY = 65535;

// Calls body(row, entry) for every entry of every row: blockIdx.x strides over chunks of a row's entries, blockIdx.y
// over rows.
template <typename Body>
__device__ void for_each_entry(const WriteLaunch& launch, Body body) {
  const int64_t rows = write_rows(launch);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const RowRange range = row_range(launch, row);
    for (int64_t i = range.begin + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < range.end; i += stride) {
      body(row, i);
    }
  }
}

__global__ void __launch_bounds__(kThreads) claim_kernel(const __grid_constant__ WriteLaunch launch) {
  const Endpoint& endpoint = launch.endpoints.items[blockIdx.z];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (blockIdx.y == 0) add(&launch.log.kernel_runs[endpoint.tag], uint64_t{1});
    const int64_t rows = write_rows(launch);
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) launch.seed(blockIdx.z, row) = read_seed(launch, endpoint, row);
  }
  for_each_entry(launch, [&](int64_t row, int64_t i) {
    const int64_t slot = launch.slots[i];
    if (endpoint.holds(slot)) endpoint.records[slot].real_kv_hash = static_cast<uint64_t>(row);
  });
}

__global__ void __launch_bounds__(kChainWarps * kWarp) chain_kernel(const __grid_constant__ WriteLaunch launch) {
  const Endpoint& endpoint = launch.endpoints.items[blockIdx.y];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kChainWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= write_rows(launch)) return;
  const RowRange range = row_range(launch, row);
  if (lane == 0) check_row(launch, endpoint, row, range);
  if (range.empty()) return;

  const Seed seed = launch.seed(blockIdx.y, row);
  const bool seeded = has_seed(endpoint, launch.seed_slots[row]);
  const bool check_positions = *launch.check_positions != 0 && seeded;
  uint64_t running = seed.hash;
  int64_t previous = seed.position;
  uint64_t stored = 0;

  for (int64_t base = range.begin; base < range.end; base += kWarp) {
    const int64_t i = base + lane;
    const Entry entry = i < range.end ? read_entry(launch, i) : Entry{-1, 0, 0};
    const bool owned = endpoint.holds(entry.slot) && endpoint.records[entry.slot].real_kv_hash == static_cast<uint64_t>(row);
    const unsigned advancing = __ballot_sync(kFullMask, entry.slot >= 0);

    // Every lane walks the chain and keeps the hash before its own entry.
    uint64_t before = running;
#pragma unroll 4
    for (int step = 0; step < kWarp; ++step) {
      const int64_t token = __shfl_sync(kFullMask, entry.token, step);
      const int64_t position = __shfl_sync(kFullMask, entry.position, step);
      if (step == lane) before = running;
      if (advancing >> step & 1) running = advance(running, token, position);
    }

    // The entry before mine that was not skipped: one of this batch, or the last one of the batches before.
    const unsigned earlier = advancing & ((1u << lane) - 1);
    const int neighbour = earlier != 0 ? 31 - __clz(static_cast<int>(earlier)) : 0;
    const int64_t neighbour_position = __shfl_sync(kFullMask, entry.position, neighbour);
    if (entry.slot >= 0) {
      check_entry(launch, endpoint, i, entry, before, check_positions, earlier != 0 ? neighbour_position : previous);
    }

    // Of entries that name one slot the last one stays.
    const unsigned same_slot = __match_any_sync(kFullMask, entry.slot);
    if (owned && lane == 31 - __clz(static_cast<int>(same_slot))) {
      Record* target = &endpoint.records[entry.slot];
      *reinterpret_cast<longlong2*>(target) = make_longlong2(entry.token, entry.position);
      target->prev_hash = before;
    }
    stored += __popc(__ballot_sync(kFullMask, endpoint.holds(entry.slot)));
    if (advancing != 0) previous = __shfl_sync(kFullMask, entry.position, 31 - __clz(static_cast<int>(advancing)));
    __syncwarp();
  }
  if (lane == 0) add(&launch.log.slot_runs[endpoint.tag], stored);
}

__global__ void __launch_bounds__(kThreads) fingerprint_kernel(const __grid_constant__ WriteLaunch launch) {
  const Endpoint& endpoint = launch.endpoints.items[blockIdx.z];
  for_each_entry(launch, [&](int64_t, int64_t i) {
    const int64_t slot = launch.slots[i];
    if (endpoint.holds(slot)) endpoint.records[slot].real_kv_hash = endpoint.real_kv_hash_of(slot);
  });
}

}  // namespace

cudaError_t launch_write(cudaStream_t stream, const WriteLaunch& launch) {
  const unsigned endpoints = static_cast<unsigned>(launch.endpoints.size);
  if (endpoints == 0) return cudaSuccess;
  const int64_t rows = launch.row_capacity < 1 ? 1 : launch.row_capacity;
  unsigned chunks = 0;
  if (cudaError_t error = grid_blocks((launch.num_tokens + kThreads - 1) / kThreads, &chunks); error != cudaSuccess) return error;
  const dim3 entries_grid(chunks, static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY), endpoints);

  claim_kernel<<<entries_grid, kThreads, 0, stream>>>(launch);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  chain_kernel<<<dim3(static_cast<unsigned>((rows + kChainWarps - 1) / kChainWarps), endpoints), kChainWarps * kWarp, 0, stream>>>(launch);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  fingerprint_kernel<<<entries_grid, kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
