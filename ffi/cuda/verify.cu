// Verify on CUDA: one lane an entry, over a grid that the device's size bounds, not the plan's capacity.
//
// A warp takes neighbouring entries, which mostly are neighbouring positions of one row. So a record is read and hashed once,
// for its own entry, and its hash is handed to the next lane; only where the plan names another predecessor is that one read
// too. Records and short fingerprints lie anywhere in memory, so what counts is how many are on their way: they are copied to
// shared memory asynchronously, a batch of 32 entries ahead, and the plan is read two batches further ahead.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/warp.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDepth = 2;  // batches of a warp in shared memory: one being checked, the others on their way

// A batch in shared memory. Behind it lies a pair of words of each lane for each source that is read that way.
struct Batch {
  PlannedEntry planned[kWarp];
  WordPair halves[kWarp][2];  // of the records; every other four lanes have them swapped, against bank conflicts

  __device__ WordPair& half(int lane, int which) { return halves[lane][which ^ (lane / 4 % 2)]; }
  __device__ Record record(int lane) {
    const WordPair first = half(lane, 0), second = half(lane, 1);
    return {static_cast<int64_t>(first.low), static_cast<int64_t>(first.high), second.low, second.high};
  }
  __device__ WordPair& pair(int source, int lane) { return reinterpret_cast<WordPair*>(this + 1)[source * kWarp + lane]; }
};

__host__ __device__ constexpr size_t batch_bytes(int sources) { return sizeof(Batch) + sources * kWarp * sizeof(WordPair); }

KVC_HD bool is_pair(const Source& source) { return source.paired && source.num_words == 2; }

__device__ bool is_readable(const Endpoint& endpoint, const PlannedEntry& planned) {
  return planned.slot != 0 && planned.in_range(endpoint);  // slot 0 is padding
}

// The plan of a lane's entry; past the last one, of slot 0, which is skipped.
__device__ PlannedEntry plan_of(const VerifyLaunch& launch, int64_t entry, int64_t end) {
  return entry < end ? read_planned(launch, entry) : PlannedEntry{0, 0, 0, -1};
}

// Starts the copies of a batch. Two lanes copy a record, so that a sector is asked for once.
__device__ void fetch(const Endpoint& endpoint, const PlannedEntry& planned, Batch& batch) {
  const int lane = threadIdx.x % kWarp, half = lane % 2;
  const bool readable = is_readable(endpoint, planned);
  batch.planned[lane] = planned;
#pragma unroll
  for (int first = 0; first < kWarp; first += kWarp / 2) {
    const int owner = first + lane / 2;
    const int32_t slot = __shfl_sync(kFullMask, readable ? planned.slot : 0, owner);
    if (slot != 0) {
      __pipeline_memcpy_async(&batch.half(owner, half), reinterpret_cast<const WordPair*>(&endpoint.records[slot]) + half, sizeof(WordPair));
    }
  }
  for (int number = 0; number < endpoint.num_sources; ++number) {
    const Source& source = endpoint.sources[number];
    if (readable && is_pair(source)) {
      copy_kv_async(&batch.pair(number, lane), reinterpret_cast<const WordPair*>(source.slot_bytes(static_cast<uint32_t>(planned.slot))));
    }
  }
}

// The real-KV hash of a lane's slot in a batch that has come, by all lanes at once.
template <bool kLong>
__device__ uint64_t real_kv_hash_in(const Endpoint& endpoint, bool readable, int32_t slot, Batch& batch, RowStages* stages) {
  const int lane = threadIdx.x % kWarp;
  const auto hash_pair = [&](int number) {
    const WordPair pair = batch.pair(number, lane);
    return fold(fold(0, pair.low), pair.high);
  };
  uint64_t hash = 0;
  for (int number = 0; number < endpoint.num_sources; ++number) {
    const Source& source = endpoint.sources[number];
    hash = fold(hash, is_pair(source) ? hash_pair(number) : hash_rows<kLong>(source, readable, slot, stages));
  }
  return hash;
}

// What a lane has of the lane before, for its first entry of the next batch; of use to lane 0 only.
struct Neighbour {
  int32_t slot;   // that it could read, 0 for none
  uint64_t hash;  // of that record
};

// Checks a batch that has come, by all lanes at once.
template <bool kLong>
__device__ void check(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t entry, Batch& batch, RowStages* stages,
                      Neighbour* carried) {
  const int lane = threadIdx.x % kWarp, lane_before = (lane + kWarp - 1) % kWarp;
  const PlannedEntry planned = batch.planned[lane];
  const bool readable = is_readable(endpoint, planned);
  const int32_t last_slot = __shfl_sync(kFullMask, readable ? planned.slot : 0, lane_before);
  const int32_t slot_before = lane == 0 ? carried->slot : last_slot;
  const bool alone = readable && planned.prev_slot > 0 && planned.prev_slot != slot_before;
  Record predecessor{};
  if (alone) predecessor = endpoint.records[planned.prev_slot];

  const Record stored = batch.record(lane);  // not of use where nothing was copied
  const uint64_t last_hash = __shfl_sync(kFullMask, record_hash(stored), lane_before);
  const uint64_t hash_before = lane == 0 ? carried->hash : last_hash;
  *carried = {last_slot, last_hash};
  const uint64_t real_kv_hash = real_kv_hash_in<kLong>(endpoint, readable, planned.slot, batch, stages);

  if (readable) {
    const uint64_t expected = expected_chain_hash(planned.prev_slot, stored, [&](int64_t) {
      return alone ? record_hash(predecessor) : hash_before;
    });
    check_record(launch, endpoint, entry, planned, stored, expected, real_kv_hash);
  } else if (planned.slot != 0) {
    report_range(launch, endpoint, entry, planned);
  }
}

// Checks the entries [begin, end) by one warp.
template <bool kLong>
__device__ void check_entries(const VerifyLaunch& launch, const Endpoint& endpoint, int64_t begin, int64_t end, unsigned char* batches,
                              size_t bytes, RowStages* stages) {
  const auto batch_at = [&](int64_t number) -> Batch& { return *reinterpret_cast<Batch*>(batches + number % kDepth * bytes); };
  const int64_t count = (end - begin + kWarp - 1) / kWarp, first = begin + threadIdx.x % kWarp;
  PlannedEntry planned = plan_of(launch, first, end), planned_next = plan_of(launch, first + kWarp, end);
  int64_t fetched = 0;
  const auto fetch_next = [&] {
    if (fetched < count) fetch(endpoint, planned, batch_at(fetched));
    __pipeline_commit();
    ++fetched;
    planned = planned_next;
    planned_next = plan_of(launch, first + (fetched + 1) * kWarp, end);
  };
  for (int ahead = 0; ahead < kDepth - 1; ++ahead) fetch_next();
  Neighbour carried = {0, 0};
  for (int64_t number = 0; number < count; ++number) {
    fetch_next();
    __pipeline_wait_prior(kDepth - 1);
    __syncwarp();
    check<kLong>(launch, endpoint, first + number * kWarp, batch_at(number), stages, &carried);
    __syncwarp();  // before the batch's place is fetched into again
  }
}

// What the write behind this launch must know of the records as they are now. The grid's last threads do it, while its first
// ones check.
__device__ void prepare_write(const EndpointList& endpoints, const BeforeWrite& before, int64_t thread, int64_t threads) {
  const int64_t number = threads - 1 - thread;
  if (number == 0) *before.finished = 0;
  if (before.report.summary != nullptr) blank_report(before.report, before.ring_capacity, number, threads);
  const int64_t wanted = *before.num_rows, rows = wanted < before.row_capacity ? wanted : before.row_capacity;
  KVC_ROLLED
  for (int64_t row = number; row < rows; row += threads) {
    const int32_t seed_slot = before.seed_slots[row];
    KVC_ROLLED
    for (int e = 0; e < endpoints.size; ++e) before.seeds[e * before.row_capacity + row] = read_seed(endpoints.items[e], seed_slot);
  }
}

template <bool kLong, bool kBeforeWrite>
__global__ void __launch_bounds__(kThreads) verify_kernel(const __grid_constant__ VerifyLaunch launch,
                                                          const __grid_constant__ BeforeWrite before, size_t bytes) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp;
  unsigned char* batches = shared + warp * kDepth * bytes;
  RowStages* stages = kLong ? reinterpret_cast<RowStages*>(shared + kWarps * kDepth * bytes) + warp : nullptr;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, threads = static_cast<int64_t>(gridDim.x) * kThreads;
  if (thread < launch.endpoints.size) begin_verify(launch, launch.endpoints.items[thread]);
  if constexpr (kBeforeWrite) prepare_write(launch.endpoints, before, thread, threads);
  if (*launch.enable == 0) return;

  // Warps take turns between the endpoints; each has one piece of the plan.
  const unsigned endpoints = launch.endpoints.size, number = blockIdx.x * kWarps + warp, in_turn = gridDim.x * kWarps / endpoints;
  const unsigned mine = number / endpoints;
  if (mine >= in_turn) return;
  const auto entries = static_cast<unsigned>(verify_entries(launch));  // the plan's count is an int32
  const unsigned piece = ((entries + kWarp - 1) / kWarp + in_turn - 1) / in_turn * kWarp;
  const int64_t begin = static_cast<int64_t>(mine) * piece, end = begin + piece < entries ? begin + piece : entries;
  check_entries<kLong>(launch, launch.endpoints.items[number - mine * endpoints], begin, end, batches, bytes, stages);
}

template <bool kLong>
cudaError_t enqueue(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite* before) {
  const auto kernel = before != nullptr ? verify_kernel<kLong, true> : verify_kernel<kLong, false>;
  int sources = 0;
  for (int e = 0; e < launch.endpoints.size; ++e) sources = std::max(sources, launch.endpoints.items[e].num_sources);
  const size_t bytes = batch_bytes(sources);
  const auto shared_with = [](size_t bytes) { return kWarps * (kDepth * bytes + (kLong ? sizeof(RowStages) : 0)); };
  const SharedBytes shared = {shared_with(bytes), shared_with(batch_bytes(kMaxSources))};
  unsigned blocks = 0;
  const int64_t wanted = (launch.capacity * launch.endpoints.size + kThreads - 1) / kThreads;
  if (cudaError_t error = resident_blocks(reinterpret_cast<const void*>(kernel), kThreads, shared, wanted, &blocks); error != cudaSuccess) {
    return error;
  }
  kernel<<<blocks, kThreads, shared.launch, stream>>>(launch, before != nullptr ? *before : BeforeWrite{}, bytes);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_verify(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite* before) {
  if (launch.endpoints.size == 0) return cudaSuccess;
  return has_long_rows(launch.endpoints) ? enqueue<true>(stream, launch, before) : enqueue<false>(stream, launch, before);
}

}  // namespace kvcanary::cuda
