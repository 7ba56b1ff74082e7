// Verify on CUDA: one lane an entry, over a grid that the device's size bounds, not the plan's capacity.
//
// A warp takes neighbouring entries, which mostly are neighbouring positions of one row. So a record is read and hashed once,
// for its own entry, and its hash is handed to the next lane; only where the plan names another predecessor is that one read
// too. While a warp checks 32 entries, the records of the next 32 and the plan of those behind them are on their way.
#include "cuda/launch.h"
#include "cuda/warp.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ Record load_record(const Endpoint& endpoint, int64_t slot) {
  const auto* halves = reinterpret_cast<const longlong2*>(&endpoint.records[slot]);
  const longlong2 first = halves[0], second = halves[1];
  return {first.x, first.y, static_cast<uint64_t>(second.x), static_cast<uint64_t>(second.y)};
}

// A lane's entry whose records are on their way.
struct Fetched {
  PlannedEntry planned;
  Record stored, predecessor;
  bool readable;   // it names a record
  bool neighbour;  // its predecessor is the record of the lane before
};

// The plan of a lane's entry; past the last one, of slot 0, which is skipped.
__device__ PlannedEntry plan_of(const VerifyLaunch& launch, int64_t entry, int64_t end) {
  return entry < end ? read_planned(launch, entry) : PlannedEntry{0, 0, 0, -1};
}

// Starts the loads of an entry. `slot_before` is the slot that the warp's last lane had read 32 entries earlier, 0 for none.
__device__ Fetched fetch(const Endpoint& endpoint, const PlannedEntry& planned, int32_t slot_before) {
  Fetched fetched;
  fetched.planned = planned;
  fetched.readable = planned.slot != 0 && planned.in_range(endpoint);
  const int32_t before = __shfl_up_sync(kFullMask, fetched.readable ? planned.slot : 0, 1);
  fetched.neighbour = planned.prev_slot > 0 && planned.prev_slot == (threadIdx.x % kWarp == 0 ? slot_before : before);
  if (fetched.readable) {
    fetched.stored = load_record(endpoint, planned.slot);
    if (planned.prev_slot > 0 && !fetched.neighbour) fetched.predecessor = load_record(endpoint, planned.prev_slot);
    for (int s = 0; s < endpoint.num_sources; ++s) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(endpoint.sources[s].slot_bytes(static_cast<uint32_t>(planned.slot))));
    }
  }
  return fetched;
}

// Checks an entry whose records have come; `hash_before` is that of the record that the warp's last lane had 32 entries
// earlier, and becomes that of the present one.
template <bool kLong>
__device__ void check(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry, const Fetched& fetched, RowStages* stages,
                      uint64_t* hash_before) {
  const uint64_t real_kv_hash = real_kv_hash_of<kLong>(endpoint, fetched.readable, fetched.planned.slot, stages);
  const uint64_t own_hash = fetched.readable ? record_hash(fetched.stored) : 0;
  uint64_t before = __shfl_up_sync(kFullMask, own_hash, 1);
  if (threadIdx.x % kWarp == 0) before = *hash_before;
  *hash_before = __shfl_sync(kFullMask, own_hash, kWarp - 1);
  if (fetched.readable) {
    const uint64_t expected = expected_chain_hash(fetched.planned.prev_slot, fetched.stored, [&](int64_t) {
      return fetched.neighbour ? before : record_hash(fetched.predecessor);
    });
    check_record(launch, endpoint, entry, fetched.planned, fetched.stored, expected, real_kv_hash);
  } else if (fetched.planned.slot != 0) {
    report_range(launch, endpoint, entry, fetched.planned);
  }
}

// Checks the entries [begin, end) by one warp.
template <bool kLong>
__device__ void check_entries(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t begin, int64_t end, RowStages* stages) {
  const int64_t first = begin + threadIdx.x % kWarp;
  uint64_t hash_before = 0;
  Fetched fetched = fetch(endpoint, plan_of(launch, first, end), 0);
  PlannedEntry planned = plan_of(launch, first + kWarp, end);
  for (int64_t base = begin; base < end; base += kWarp) {
    const int64_t entry = base + threadIdx.x % kWarp;
    const Fetched current = fetched;
    fetched = fetch(endpoint, planned, __shfl_sync(kFullMask, current.readable ? current.planned.slot : 0, kWarp - 1));
    planned = plan_of(launch, entry + 2 * kWarp, end);
    check<kLong>(launch, endpoint, entry, current, stages, &hash_before);
  }
}

// What the write behind this launch must know of the records as they are now. The grid's last threads do it, while its first
// ones check.
__device__ void prepare_write(const EndpointList& endpoints, const BeforeWrite& before, int64_t thread, int64_t threads) {
  const int64_t number = threads - 1 - thread;
  if (number == 0) *before.finished = 0;
  if (before.report.summary != nullptr) blank_report(before.report, before.ring_capacity, number, threads);
  const int64_t wanted = *before.num_rows, rows = wanted < before.row_capacity ? wanted : before.row_capacity;
  for (int64_t item = number; item < rows * endpoints.size; item += threads) {
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

  // Warps take turns between the endpoints; each has one piece of the plan.
  const int endpoints = launch.endpoints.size;
  const int64_t number = thread / kWarp / endpoints, in_turn = threads / kWarp / endpoints;
  if (number >= in_turn) return;
  const int64_t entries = verify_entries(launch), batches = (entries + kWarp - 1) / kWarp;
  const int64_t piece = (batches + in_turn - 1) / in_turn * kWarp, begin = number * piece;
  const int64_t end = begin + piece < entries ? begin + piece : entries;
  check_entries<kLong>(launch, launch.endpoints.items[thread / kWarp % endpoints], begin, end, stages);
}

template <bool kLong, bool kBeforeWrite>
cudaError_t enqueue(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite& before) {
  const auto kernel = verify_kernel<kLong, kBeforeWrite>;
  const size_t shared_bytes = kLong ? kWarps * sizeof(RowStages) : 0;
  unsigned blocks = 0;
  const int64_t wanted = (launch.capacity * launch.endpoints.size + kThreads - 1) / kThreads;
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
