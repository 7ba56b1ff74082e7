// Verify on CUDA: one lane an entry, over a grid that the device's size bounds, not the plan's capacity.
//
// Neighbouring lanes have neighbouring entries, which mostly are neighbouring positions of one row. So a record is read and
// hashed once, for its own entry, and handed to the next lane; only where the plan names another predecessor is that one
// read too. A warp has the loads of several entries a lane in flight before it checks the first.
#include "cuda/launch.h"
#include "cuda/warp.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRounds = 2;  // entries of a lane in flight

__device__ Record load_record(const Endpoint& endpoint, int64_t slot) {
  const auto* halves = reinterpret_cast<const longlong2*>(&endpoint.records[slot]);
  const longlong2 first = halves[0], second = halves[1];
  return {first.x, first.y, static_cast<uint64_t>(second.x), static_cast<uint64_t>(second.y)};
}

// One lane's entry on its way through the check.
struct Lane {
  PlannedEntry planned;
  Record stored;
  uint64_t before;      // hash of the planned predecessor's record
  uint64_t real_kv_hash;
  bool live, readable;  // it is an entry to check; it names a record
};

// Checks the entries of the warp's lanes from `base` on, for all lanes at once.
template <bool kLong>
__device__ void check_rounds(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t base, int rounds, int64_t entries,
                             RowStages* stages) {
  const int lane = threadIdx.x % kWarp;
  Lane lanes[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int64_t i = base + r * kWarp + lane;
    Lane& mine = lanes[r];
    mine.live = r < rounds && i < entries;
    mine.planned = mine.live ? read_planned(launch, i) : PlannedEntry{0, 0, 0, -1};
    mine.live = mine.planned.slot != 0;  // slot 0 is padding
    mine.readable = mine.live && mine.planned.in_range(endpoint);
  }

  // Where the lane before has the predecessor, its record is not read again.
  bool neighbour[kRounds];
  Record predecessors[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    Lane& mine = lanes[r];
    if (mine.readable) mine.stored = load_record(endpoint, mine.planned.slot);
    const int64_t readable_slot = mine.readable ? mine.planned.slot : 0;
    int64_t slot_before = __shfl_up_sync(kFullMask, readable_slot, 1);
    if (r > 0) {
      const int64_t last = __shfl_sync(kFullMask, lanes[r - 1].readable ? lanes[r - 1].planned.slot : 0, kWarp - 1);
      if (lane == 0) slot_before = last;
    } else if (lane == 0) {
      slot_before = 0;
    }
    neighbour[r] = mine.planned.prev_slot > 0 && slot_before == mine.planned.prev_slot;
    if (mine.readable && mine.planned.prev_slot > 0 && !neighbour[r]) predecessors[r] = load_record(endpoint, mine.planned.prev_slot);
  }

#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (r < rounds) lanes[r].real_kv_hash = real_kv_hash_of<kLong>(endpoint, lanes[r].readable, lanes[r].planned.slot, stages);
  }

  uint64_t last_hash = 0;
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    Lane& mine = lanes[r];
    const uint64_t own_hash = mine.readable ? record_hash(mine.stored) : 0;
    uint64_t hash_before = __shfl_up_sync(kFullMask, own_hash, 1);
    if (lane == 0) hash_before = last_hash;
    last_hash = __shfl_sync(kFullMask, own_hash, kWarp - 1);
    const int64_t i = base + r * kWarp + lane;
    if (mine.readable) {
      const uint64_t expected = expected_chain_hash(mine.planned.prev_slot, mine.stored, [&](int64_t) {
        return neighbour[r] ? hash_before : record_hash(predecessors[r]);
      });
      check_record(launch, endpoint, i, mine.planned, mine.stored, expected, mine.real_kv_hash);
    } else if (mine.live) {
      report_range(launch, endpoint, i, mine.planned);
    }
  }
}

__device__ void prepare_write(const EndpointList& endpoints, const BeforeWrite& before, int64_t thread, int64_t threads) {
  if (thread == 0) *before.finished = 0;
  const int64_t wanted = *before.num_rows, rows = wanted < before.row_capacity ? wanted : before.row_capacity;
  for (int64_t item = thread; item < rows * endpoints.size; item += threads) {
    const int64_t e = item / rows, row = item % rows;
    before.seeds[e * before.row_capacity + row] = read_seed(endpoints.items[e], before.seed_slots[row]);
  }
}

template <bool kLong, bool kBeforeWrite>
__global__ void __launch_bounds__(kThreads) verify_kernel(const __grid_constant__ VerifyLaunch launch,
                                                          const __grid_constant__ BeforeWrite before) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp;
  RowStages* stages = kLong ? reinterpret_cast<RowStages*>(shared) + warp : nullptr;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, threads = static_cast<int64_t>(gridDim.x) * kThreads;
  if (thread < launch.endpoints.size) begin_verify(launch, launch.endpoints.items[thread]);
  if constexpr (kBeforeWrite) prepare_write(launch.endpoints, before, thread, threads);
  if (*launch.enable == 0) return;

  const int64_t entries = verify_entries(launch);
  const int64_t warps = threads / kWarp, first = thread / kWarp;
  const int rounds = entries > warps * kWarp ? kRounds : 1;
  const int64_t chunk = static_cast<int64_t>(rounds) * kWarp;
  for (int64_t base = first * chunk; base < entries; base += warps * chunk) {
    for (int e = 0; e < launch.endpoints.size; ++e) {
      check_rounds<kLong>(launch, launch.endpoints.items[e], base, rounds, entries, stages);
    }
  }
}

template <bool kLong, bool kBeforeWrite>
cudaError_t enqueue(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite& before) {
  const auto kernel = verify_kernel<kLong, kBeforeWrite>;
  const size_t shared_bytes = kLong ? kWarps * sizeof(RowStages) : 0;
  unsigned blocks = 0;
  const int64_t wanted = (launch.capacity + kThreads - 1) / kThreads;
  if (cudaError_t error = resident_blocks(reinterpret_cast<const void*>(kernel), kThreads, shared_bytes, wanted, &blocks); error != cudaSuccess) {
    return error;
  }
  kernel<<<blocks, kThreads, shared_bytes, stream>>>(launch, before);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_verify(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite* before) {
  if (launch.endpoints.size == 0) return cudaSuccess;
  const bool has_long = has_long_rows(launch.endpoints);
  if (before != nullptr) return has_long ? enqueue<true, true>(stream, launch, *before) : enqueue<false, true>(stream, launch, *before);
  return has_long ? enqueue<true, false>(stream, launch, {}) : enqueue<false, false>(stream, launch, {});
}

}  // namespace kvcanary::cuda
