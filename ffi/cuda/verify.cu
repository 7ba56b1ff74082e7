// Verify on CUDA: one thread an entry, over a grid that the device's size bounds, not the plan's capacity.
#include "cuda/launch.h"

namespace kvcanary::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) verify_kernel(const __grid_constant__ VerifyLaunch launch) {
  const Endpoint& endpoint = launch.endpoints.items[blockIdx.y];
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_verify(launch, endpoint);
  if (*launch.enable == 0) return;
  const int64_t entries = verify_entries(launch);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < entries; i += stride) {
    verify_entry(launch, endpoint, i);
  }
}

}  // namespace

cudaError_t launch_verify(cudaStream_t stream, const VerifyLaunch& launch) {
  if (launch.endpoints.size == 0) return cudaSuccess;
  unsigned blocks = 0;
  if (cudaError_t error = grid_blocks((launch.capacity + kThreads - 1) / kThreads, &blocks); error != cudaSuccess) return error;
  verify_kernel<<<dim3(blocks, launch.endpoints.size), kThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace kvcanary::cuda
