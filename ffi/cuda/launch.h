// Launchers on a CUDA stream: they enqueue kernels and do nothing else, so that they can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include "kvcanary/verify.h"
#include "kvcanary/write.h"

namespace kvcanary::cuda {

cudaError_t launch_verify(cudaStream_t stream, const VerifyLaunch& launch);
cudaError_t launch_write(cudaStream_t stream, const WriteLaunch& launch);

// Blocks that fill the current device, at most `wanted`, at least one.
cudaError_t grid_blocks(int64_t wanted, unsigned* blocks);

}  // namespace kvcanary::cuda
