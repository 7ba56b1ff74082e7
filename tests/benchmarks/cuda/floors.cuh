// What no implementation can beat: the chain of one request in registers, and the bytes that verify has to read.
#pragma once

#include <cstdint>

#include "data.cuh"
#include "kvcanary/hash.h"

namespace bench::floors {

// One thread. Tokens and positions come from registers, so that nothing but the dependent hashes is on the path. They follow
// from the thread's number: values that are the same for a whole warp by construction would take the uniform datapath, which
// is a quarter faster on this chain and which no value from memory can take.
static __global__ void chain_kernel(int64_t steps, uint64_t token, uint64_t* hash) {
  uint64_t running = kvcanary::kAnchorHash, position = threadIdx.x;
  token += threadIdx.x;
#pragma unroll 8
  for (int64_t step = 0; step < steps; ++step) {
    running = kvcanary::mix3(running, token, position);
    ++token;
    ++position;
  }
  hash[threadIdx.x] = running;
}

inline constexpr int kWarp = 32;
inline constexpr int kReadThreads = 256;
inline constexpr int kLoadsPerLane = kRowBytes / (kWarp * sizeof(ulonglong2));
static_assert(kLoadsPerLane * kWarp * sizeof(ulonglong2) == kRowBytes);

// One warp a row, 16 bytes a load; each warp stores what its rows fold to, so that no load can be left out.
static __global__ void __launch_bounds__(kReadThreads)
    read_kernel(const uint8_t* rows, const int32_t* slots, int64_t entries, uint64_t* folds) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kReadThreads + threadIdx.x) / kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kReadThreads / kWarp);
  uint64_t folded = 0;
  for (int64_t i = warp; i < entries; i += warps) {
    const auto* row = reinterpret_cast<const ulonglong2*>(rows + slots[i] * kRowBytes);
#pragma unroll
    for (int load = 0; load < kLoadsPerLane; ++load) {
      const ulonglong2 pair = row[load * kWarp + lane];
      folded ^= pair.x ^ pair.y;
    }
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) folded ^= __shfl_xor_sync(0xFFFFFFFFu, folded, distance);
  if (lane == 0) folds[warp] = folded;
}

inline double chain_us(cudaStream_t stream, int64_t steps) {
  DeviceArray<uint64_t> hash(1);
  return device_us(stream, {8, 7}, [&](int i) {
    chain_kernel<<<1, 1, 0, stream>>>(steps, static_cast<uint64_t>(i), hash.data());
    return cudaGetLastError();
  });
}

// The rows of a set's entries, one set after the other.
inline double read_us(cudaStream_t stream, Timing timing, const Pool& pool, const std::vector<VerifySet>& sets) {
  const unsigned blocks = full_grid(read_kernel, kReadThreads);
  DeviceArray<uint64_t> folds(static_cast<int64_t>(blocks) * (kReadThreads / kWarp));
  return device_us(stream, timing, [&](int i) {
    const VerifySet& set = sets[i % sets.size()];
    read_kernel<<<blocks, kReadThreads, 0, stream>>>(reinterpret_cast<const uint8_t*>(pool.k.data()), set.slots.narrow.data(),
                                                     set.num_entries(), folds.data());
    return cudaGetLastError();
  });
}

// A device-to-device copy that moves as many bytes, reads and writes together.
inline double copy_us(cudaStream_t stream, Timing timing, const Pool& pool, int64_t bytes_moved) {
  const int64_t bytes = bytes_moved / 2, parts = static_cast<int64_t>(pool.k.bytes()) / bytes;
  require(parts > 0, "the pool is smaller than the copy");
  DeviceArray<uint8_t> target(bytes);
  return device_us(stream, timing, [&](int i) {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(pool.k.data()) + i % parts * bytes;
    return cudaMemcpyAsync(target.data(), source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
  });
}

}  // namespace bench::floors
