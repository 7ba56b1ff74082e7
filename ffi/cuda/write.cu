// Write on CUDA, in two parts with a barrier between them, which are two kernels, or for small launches two halves of one:
//
//   link   finds what each entry follows: one chain a row, shared by all endpoints whose seeds agree. Beside it, every
//          entry claims its slot in the real-KV field of the record, and the highest one keeps it.
//   store  checks each entry and stores its record, all entries and endpoints at once. Rows whose seed differs from the
//          one that the links start from are walked again here.
//
// Seeds are read before any record changes. Claims leave them as they are: the real-KV field is no part of a record's hash.
// A launch that gets its links from another one, as the TAIL does from the HEAD, has no first part.
#include "cuda/launch.h"
#include "cuda/links.cuh"
#include "cuda/store.cuh"

namespace kvcanary::cuda {
namespace {

constexpr int kLinkThreads = 128;
constexpr int kStoreThreads = 128;

template <bool kTree>
__global__ void __launch_bounds__(kLinkThreads) link_kernel(const __grid_constant__ WriteLaunch launch, unsigned walkers) {
  __shared__ LinkTiles tiles;
  if (blockIdx.x >= walkers) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x - walkers) * kLinkThreads + threadIdx.x;
    claim_slots(launch, thread, static_cast<int64_t>(gridDim.x - walkers) * kLinkThreads);
    return;
  }
  const int64_t rows = write_rows(launch);
  for (int64_t row = blockIdx.x; row < rows; row += walkers) {
    if (threadIdx.x < launch.endpoints.size) read_seed_of(launch, threadIdx.x, row);
    __syncthreads();
    const RowRange range = row_range(launch, row);
    if constexpr (kTree) {
      if (threadIdx.x < kWarp) link_tree(launch, row, range);
    } else {
      link_chain(launch, row, range, tiles);
    }
    __syncthreads();
  }
}

template <bool kLong>
__global__ void __launch_bounds__(kStoreThreads, kLong ? 4 : 6) store_kernel(const __grid_constant__ WriteLaunch launch,
                                                              const __grid_constant__ ReportLaunch report) {
  extern __shared__ __align__(16) unsigned char shared[];
  store_entries<kLong>(launch, launch.carried ? Keeper::kCarried : Keeper::kClaim, reinterpret_cast<RowStages*>(shared));
  finish(launch, report);
}

// Both parts in one block.
__global__ void __launch_bounds__(kMaxSmallTokens) small_write_kernel(const __grid_constant__ WriteLaunch launch,
                                                                      const __grid_constant__ ReportLaunch report) {
  __shared__ SmallChain chain;
  link_small(launch, chain);
  __syncthreads();
  store_entries<false>(launch, Keeper::kCarried, nullptr);
  finish(launch, report);
}

bool is_small(const WriteLaunch& launch) {
  return !launch.tree && launch.num_tokens <= kMaxSmallTokens && !has_long_rows(launch.endpoints);
}

cudaError_t enqueue_links(cudaStream_t stream, const WriteLaunch& launch) {
  const auto kernel = launch.tree ? link_kernel<true> : link_kernel<false>;
  unsigned walkers = 0, claimers = 0;
  const int64_t chunks = (launch.num_tokens + kLinkThreads - 1) / kLinkThreads;
  const auto* function = reinterpret_cast<const void*>(kernel);
  if (cudaError_t error = resident_blocks(function, kLinkThreads, {}, launch.row_capacity, &walkers); error != cudaSuccess) return error;
  if (cudaError_t error = resident_blocks(function, kLinkThreads, {}, chunks, &claimers); error != cudaSuccess) return error;
  kernel<<<walkers + claimers, kLinkThreads, 0, stream>>>(launch, walkers);
  return cudaGetLastError();
}

template <bool kLong>
cudaError_t enqueue_store(cudaStream_t stream, const WriteLaunch& launch, const ReportLaunch& report) {
  const auto kernel = store_kernel<kLong>;
  const size_t shared_bytes = kLong ? kStoreThreads / kWarp * sizeof(RowStages) : 0;
  const int64_t lanes = (launch.num_tokens > launch.row_capacity ? launch.num_tokens : launch.row_capacity) * launch.endpoints.size;
  unsigned blocks = 0;
  const auto* function = reinterpret_cast<const void*>(kernel);
  if (cudaError_t error = resident_blocks(function, kStoreThreads, {shared_bytes, shared_bytes}, (lanes + kStoreThreads - 1) / kStoreThreads, &blocks);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<blocks, kStoreThreads, shared_bytes, stream>>>(launch, report);
  return cudaGetLastError();
}

cudaError_t enqueue_write(cudaStream_t stream, const WriteLaunch& launch, const ReportLaunch& report) {
  if (!launch.carried && is_small(launch)) {
    const int64_t threads = (launch.num_tokens * launch.endpoints.size + kWarp - 1) / kWarp * kWarp;
    constexpr int64_t kFewest = kMaxEndpoints * kWarp;
    small_write_kernel<<<1, static_cast<unsigned>(threads < kFewest ? kFewest : (threads < kMaxSmallTokens ? threads : kMaxSmallTokens)), 0,
                         stream>>>(launch, report);
    return cudaGetLastError();
  }
  if (!launch.carried) {
    if (cudaError_t error = enqueue_links(stream, launch); error != cudaSuccess) return error;
  }
  return has_long_rows(launch.endpoints) ? enqueue_store<true>(stream, launch, report) : enqueue_store<false>(stream, launch, report);
}

}  // namespace

cudaError_t launch_write(cudaStream_t stream, const WriteLaunch& launch) {
  return launch.endpoints.size == 0 ? cudaSuccess : enqueue_write(stream, launch, {});
}

cudaError_t launch_phase(cudaStream_t stream, const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report) {
  if (write.endpoints.size == 0) return cudaSuccess;
  const BeforeWrite before{write.seed_slots, write.num_rows, write.row_capacity, write.seeds, write.finished, report,
                           write.log.ring_capacity};
  if (cudaError_t error = launch_verify(stream, verify, &before); error != cudaSuccess) return error;
  return enqueue_write(stream, write, report);
}

}  // namespace kvcanary::cuda
