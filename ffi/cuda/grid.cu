#include "cuda/launch.h"

namespace kvcanary::cuda {

cudaError_t grid_blocks(int64_t wanted, unsigned* blocks) {
  constexpr int kBlocksPerMultiprocessor = 8;
  int device = 0, multiprocessors = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) {
    return error;
  }
  const int64_t most = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  *blocks = static_cast<unsigned>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
  return cudaSuccess;
}

}  // namespace kvcanary::cuda
