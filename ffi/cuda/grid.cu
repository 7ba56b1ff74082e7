#include "cuda/launch.h"

namespace kvcanary::cuda {

cudaError_t resident_blocks(const void* kernel, int threads, SharedBytes shared, int64_t wanted, unsigned* blocks) {
  int device = 0, multiprocessors = 0, on_each = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) {
    return error;
  }
  if (shared.most > 0) {
    // More than 48 KiB have to be asked for, and what a kernel has of its own counts towards them. The most that any launch of
    // it takes, since other threads may be launching it, too.
    const auto bytes = static_cast<int>(shared.most);
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); error != cudaSuccess) {
      return error;
    }
  }
  if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, shared.launch); error != cudaSuccess) {
    return error;
  }
  const int64_t most = static_cast<int64_t>(multiprocessors) * (on_each < 1 ? 1 : on_each);
  *blocks = static_cast<unsigned>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
  return cudaSuccess;
}

}  // namespace kvcanary::cuda
