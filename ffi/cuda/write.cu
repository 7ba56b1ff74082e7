// Write on CUDA, three kernels:
//
//   claim        reads every row's seed before any record changes, and lets each entry put its row's number into the
//                real-KV field of its slot's record; where two rows name one slot, one number survives;
//   chain        one warp a row: the chain or tree, the checks, and the first three fields of the records that the row
//                owns, so that a slot named by two rows gets one whole record;
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

// What an entry of a warp's batch of 32 follows, and whether that is there to follow.
struct Before {
  Link link;
  bool sound;
};

// Of a chain: every lane walks the whole batch and keeps the end before its own entry. `end` is moved behind the batch.
__device__ Before walk_chain(const Entry& entry, int lane, Link* end) {
  const unsigned advancing = __ballot_sync(kFullMask, entry.slot >= 0);
  uint64_t before = end->hash;
#pragma unroll 4
  for (int step = 0; step < kWarp; ++step) {
    const int64_t token = __shfl_sync(kFullMask, entry.token, step);
    const int64_t position = __shfl_sync(kFullMask, entry.position, step);
    if (step == lane) before = end->hash;
    if (advancing >> step & 1) end->hash = advance(end->hash, token, position);
  }
  // The entry before mine that was not skipped: one of this batch, or the last one of the batches before.
  const unsigned earlier = advancing & ((1u << lane) - 1);
  const int64_t neighbour = __shfl_sync(kFullMask, entry.position, earlier != 0 ? 31 - __clz(static_cast<int>(earlier)) : 0);
  const Before result = {{before, earlier != 0 ? neighbour : end->position}, true};
  const int64_t last = __shfl_sync(kFullMask, entry.position, advancing != 0 ? 31 - __clz(static_cast<int>(advancing)) : 0);
  if (advancing != 0) end->position = last;
  return result;
}

// Of a tree: in each round the lanes whose parent's end is known compute their own, so that a batch takes as many rounds
// as it has levels. Ends are kept for later batches; a parent stands before its children, so that every lane gets its turn.
__device__ Before walk_tree(const WriteLaunch& launch, int e, const RowRange& range, int64_t base, const Entry& entry, int lane,
                            const Link& seed) {
  const int64_t i = base + lane;
  const bool live = i < range.end;
  const Parent parent = live ? parent_of(launch, range, i) : Parent{-1, true};
  const bool in_batch = parent.entry >= base;
  const int source = in_batch ? static_cast<int>(parent.entry - base) : lane;
  Link before = parent.entry >= 0 && !in_batch ? launch.end(e, parent.entry) : seed;
  Link end = before;
  bool pending = live;
  for (unsigned done = __ballot_sync(kFullMask, !pending); done != kFullMask; done = __ballot_sync(kFullMask, !pending)) {
    const Link from = {__shfl_sync(kFullMask, end.hash, source), __shfl_sync(kFullMask, end.position, source)};
    if (pending && (!in_batch || (done >> source & 1))) {
      if (in_batch) before = from;
      end = entry.slot < 0 ? before : Link{advance(before.hash, entry.token, entry.position), entry.position};
      pending = false;
    }
  }
  if (live) launch.end(e, i) = end;
  return {before, parent.sound};
}

template <bool kTree>
__global__ void __launch_bounds__(kChainWarps * kWarp) chain_kernel(const __grid_constant__ WriteLaunch launch) {
  const Endpoint& endpoint = launch.endpoints.items[blockIdx.y];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kChainWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= write_rows(launch)) return;
  const RowRange range = row_range(launch, row);
  if (lane == 0) check_row(launch, endpoint, row, range);
  if (range.empty()) return;

  const Link seed = launch.seed(blockIdx.y, row);
  const bool seeded = has_seed(endpoint, launch.seed_slots[row]);
  const bool check_positions = *launch.check_positions != 0 && seeded;
  Link end = seed;  // of a chain
  uint64_t stored = 0;

  for (int64_t base = range.begin; base < range.end; base += kWarp) {
    const int64_t i = base + lane;
    const Entry entry = i < range.end ? read_entry(launch, i) : Entry{-1, 0, 0};
    const bool owned = endpoint.holds(entry.slot) && endpoint.records[entry.slot].real_kv_hash == static_cast<uint64_t>(row);
    const Before before = kTree ? walk_tree(launch, blockIdx.y, range, base, entry, lane, seed) : walk_chain(entry, lane, &end);
    if (entry.slot >= 0) {
      if (!before.sound) report_parent(launch, endpoint, row, i, entry, before.link.hash);
      check_entry(launch, endpoint, row, i, entry, before.link.hash, check_positions && before.sound, before.link.position);
    }

    // Of entries that name one slot the last one stays.
    const unsigned same_slot = __match_any_sync(kFullMask, entry.slot);
    if (owned && lane == 31 - __clz(static_cast<int>(same_slot))) {
      Record* target = &endpoint.records[entry.slot];
      *reinterpret_cast<longlong2*>(target) = make_longlong2(entry.token, entry.position);
      target->prev_hash = before.link.hash;
    }
    stored += __popc(__ballot_sync(kFullMask, endpoint.holds(entry.slot)));
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
  const dim3 rows_grid(static_cast<unsigned>((rows + kChainWarps - 1) / kChainWarps), endpoints);
  const auto chain = launch.tree ? chain_kernel<true> : chain_kernel<false>;
  chain<<<rows_grid, kChainWarps * kWarp, 0, stream>>>(launch);
  if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  fingerprint_kernel<<<entries_grid, kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
