// Launchers on a CUDA stream: they enqueue kernels and do nothing else, so that they can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include "kvcanary/report.h"
#include "kvcanary/verify.h"
#include "kvcanary/write.h"

namespace kvcanary::cuda {

// What a verify does beside its checks for the write behind it: no record changes before its last thread is done.
struct BeforeWrite {
  const int32_t* seed_slots;  // [row_capacity]
  const int32_t* num_rows;    // [1]
  int64_t row_capacity;
  Seed* seeds;         // [endpoints, row_capacity]: read from the records
  uint32_t* finished;  // [1]: set to 0
  ReportLaunch report;
  int64_t ring_capacity;
};

cudaError_t launch_verify(cudaStream_t stream, const VerifyLaunch& launch, const BeforeWrite* before = nullptr);
cudaError_t launch_write(cudaStream_t stream, const WriteLaunch& launch);

// One phase of a step: verify, write and, where `report` has somewhere to write it, the step's report.
cudaError_t launch_phase(cudaStream_t stream, const VerifyLaunch& verify, const WriteLaunch& write, const ReportLaunch& report);

// Dynamic shared memory of a block: in this launch, and the most in any launch of the kernel.
struct SharedBytes {
  size_t launch, most;
};

// As many blocks of a kernel as the current device runs at once, at most `wanted`, at least one.
cudaError_t resident_blocks(const void* kernel, int threads, SharedBytes shared, int64_t wanted, unsigned* blocks);

}  // namespace kvcanary::cuda
