#include "cuda/launch.h"

namespace kvcanary::cuda {

cudaError_t resident_blocks(const void* kernel, int threads, size_t shared_bytes, int64_t wanted, unsigned* blocks) {
  constexpr size_t kSharedWithoutAsking = 48 * 1024;
  int device = 0, multiprocessors = 0, on_each = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) {
    return error;
  }
  if (shared_bytes > kSharedWithoutAsking) {
    const auto bytes = static_cast<int>(shared_bytes);
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); error != cudaSuccess) {
      return error;
    }
  }
  if (cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, shared_bytes); error != cudaSuccess) {
    return error;
  }
  const int64_t most = static_cast<int64_t>(multiprocessors) * (on_each < 1 ? 1 : on_each);
  *blocks = static_cast<unsigned>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
  return cudaSuccess;
}

}  // namespace kvcanary::cuda
