// What every case needs: checked CUDA calls, device memory, random data, the device time of a launch, rows of the table.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvcanary/hash.h"

namespace bench {

[[noreturn]] inline void fail(const std::string& problem) {
  std::fprintf(stderr, "%s\n", problem.c_str());
  std::exit(1);
}

inline void check(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) fail(std::string(doing) + ": " + cudaGetErrorString(error));
}

inline void require(bool holds, const std::string& problem) {
  if (!holds) fail(problem);
}

// The measured stream does not wait for the default stream, on which memory is copied and filled: both ends of such an
// operation wait for the whole device.
inline void finish(const char* doing) { check(cudaDeviceSynchronize(), doing); }

struct FreeDevice {
  void operator()(void* data) const { cudaFree(data); }
};

// An array in device memory, unspecified until it is filled.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : size_(size) {
    void* data = nullptr;
    check(cudaMalloc(&data, bytes()), "allocating device memory");
    data_.reset(static_cast<T*>(data));
  }

  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    check(cudaMemcpy(data(), values.data(), bytes(), cudaMemcpyHostToDevice), "copying to the device");
    finish("copying to the device");
  }

  T* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(size_) * sizeof(T); }

  void fill_bytes(int byte) const {
    finish("waiting before filling device memory");
    check(cudaMemset(data(), byte, bytes()), "filling device memory");
    finish("filling device memory");
  }

  T at(int64_t index) const {
    T value;
    finish("waiting before reading device memory");
    check(cudaMemcpy(&value, data() + index, sizeof(T), cudaMemcpyDeviceToHost), "copying from the device");
    return value;
  }

  void set(int64_t index, T value) const {
    finish("waiting before changing device memory");
    check(cudaMemcpy(data() + index, &value, sizeof(T), cudaMemcpyHostToDevice), "copying to the device");
    finish("copying to the device");
  }

 private:
  int64_t size_;
  std::unique_ptr<T, FreeDevice> data_;
};

// As many blocks of a kernel as run at once on the device.
template <typename Kernel>
unsigned full_grid(Kernel kernel, int threads) {
  int device = 0, multiprocessors = 0, blocks_each = 0;
  check(cudaGetDevice(&device), "asking for the device");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "asking for the multiprocessors");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, threads, 0), "asking for the occupancy");
  return static_cast<unsigned>(multiprocessors * blocks_each);
}

// A fixed sequence, the same on host and device: value i of the generator with a seed.
KVC_HD uint64_t random_value(uint64_t seed, uint64_t i) {
  return kvcanary::splitmix64(kvcanary::splitmix64(seed + 1) + (i + 1) * 0x9E3779B97F4A7C15ull);
}

static __global__ void random_kernel(uint64_t* words, int64_t count, uint64_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    words[i] = random_value(seed, static_cast<uint64_t>(i));
  }
}

inline DeviceArray<uint64_t> random_words(int64_t count, uint64_t seed) {
  constexpr int kThreads = 256;
  DeviceArray<uint64_t> words(count);
  random_kernel<<<full_grid(random_kernel, kThreads), kThreads>>>(words.data(), count, seed);
  check(cudaGetLastError(), "launching the generator");
  finish("generating random data");
  return words;
}

// [first, last) in random order.
inline std::vector<int64_t> permutation(int64_t first, int64_t last, uint64_t seed) {
  std::vector<int64_t> values(static_cast<size_t>(last - first));
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<int64_t>(i);
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random_value(seed, i) % i]);
  return values;
}

struct Timing {
  int launches;  // in one replay of the graph
  int repeats;   // timed replays
};

// Microseconds of device time of one launch, the median over replays of a graph. launch(i) enqueues launch i of the graph
// on the stream, each on another data set than the one before it, so that what it reads is not in a cache already.
template <typename Launch>
double device_us(cudaStream_t stream, Timing timing, Launch launch) {
  finish("waiting before a measurement");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  for (int i = 0; i < timing.launches; ++i) check(launch(i), "capturing a launch");
  check(cudaStreamEndCapture(stream, &graph), "ending a capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "instantiating a graph");

  std::vector<cudaEvent_t> marks(static_cast<size_t>(timing.repeats) + 1);
  for (cudaEvent_t& mark : marks) check(cudaEventCreate(&mark), "creating an event");
  // Everything is enqueued at once, behind an untimed replay, so that the device never waits for the host.
  for (cudaEvent_t mark : marks) {
    check(cudaGraphLaunch(replay, stream), "launching a graph");
    check(cudaEventRecord(mark, stream), "recording an event");
  }
  check(cudaStreamSynchronize(stream), "measuring");

  std::vector<float> milliseconds(static_cast<size_t>(timing.repeats));
  for (size_t i = 0; i < milliseconds.size(); ++i) {
    check(cudaEventElapsedTime(&milliseconds[i], marks[i], marks[i + 1]), "reading an event");
  }
  for (cudaEvent_t mark : marks) check(cudaEventDestroy(mark), "destroying an event");
  check(cudaGraphExecDestroy(replay), "destroying a graph");
  check(cudaGraphDestroy(graph), "destroying a graph");
  std::sort(milliseconds.begin(), milliseconds.end());
  return 1e3 * milliseconds[milliseconds.size() / 2] / timing.launches;
}

// One line of JSON for kernel_rows.py. The texts have nothing in them that JSON would escape.
inline void print_row(const std::string& work, const std::string& mode, double measured_us, const std::string& reference,
                      double reference_us, std::optional<double> limit = std::nullopt) {
  const std::string limit_text = limit ? std::to_string(*limit) : "null";
  std::printf("{\"work\": \"%s\", \"mode\": \"%s\", \"measured_us\": %.4f, \"reference\": \"%s\", \"reference_us\": %.4f, \"limit\": %s}\n",
              work.c_str(), mode.c_str(), measured_us, reference.c_str(), reference_us, limit_text.c_str());
  std::fflush(stdout);
}

}  // namespace bench
