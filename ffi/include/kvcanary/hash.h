// Hashes of the contract, for the host compiler and nvcc. All arithmetic is unsigned 64-bit with wrap-around.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVC_HD __host__ __device__ __forceinline__
#else
#define KVC_HD inline
#endif

// Before a loop of a kernel that runs once or twice, whose copies would only be code to fetch.
#if defined(__CUDA_ARCH__)
#define KVC_ROLLED _Pragma("unroll 1")
#else
#define KVC_ROLLED
#endif

namespace kvcanary {

inline constexpr uint64_t kChainAnchor = 0xC0FFEE1234567890ull;

// The finaliser alone, with no increment: splitmix64(0) == 0.
KVC_HD constexpr uint64_t splitmix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

KVC_HD constexpr uint64_t mix3(uint64_t a, uint64_t b, uint64_t c) {
  return splitmix64(splitmix64(splitmix64(a) ^ b) ^ c);
}

// Takes one more word into a hash of words.
KVC_HD constexpr uint64_t fold(uint64_t hash, uint64_t word) { return splitmix64(hash ^ word); }

// The hash that a chain starts from.
inline constexpr uint64_t kAnchorHash = splitmix64(kChainAnchor);

}  // namespace kvcanary
