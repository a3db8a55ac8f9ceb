// Included once by the file of each instruction set, which is compiled for it; everything here is
// internal to it. `one` and `zero` are what they are called, and unknown to the compiler.
#pragma once

#include <array>

#include "bench/memory_traffic.h"

namespace memd::internal {
namespace {

inline void traffic_loop(const TrafficFp32& arrays, float one, float zero) {
  float* __restrict const parameter = arrays.parameter;
  float* __restrict const exp_avg = arrays.exp_avg;
  float* __restrict const exp_avg_sq = arrays.exp_avg_sq;
  const float* __restrict const gradient = arrays.gradient;
  for (size_t i = 0; i < arrays.count; ++i) {
    const float nothing = gradient[i] * zero;
    parameter[i] = parameter[i] * one + nothing;
    exp_avg[i] = exp_avg[i] * one + nothing;
    exp_avg_sq[i] = exp_avg_sq[i] * one + nothing;
  }
}

inline void traffic_loop(const TrafficBf16& arrays, float one, uint16_t zero) {
  uint16_t* __restrict const half = arrays.half;
  int16_t* __restrict const remainder = arrays.remainder;
  float* __restrict const exp_avg = arrays.exp_avg;
  float* __restrict const exp_avg_sq = arrays.exp_avg_sq;
  const uint16_t* __restrict const gradient = arrays.gradient;
  for (size_t i = 0; i < arrays.count; ++i) {
    const auto nothing = static_cast<uint16_t>(gradient[i] & zero);
    half[i] = static_cast<uint16_t>(half[i] ^ nothing);
    remainder[i] = static_cast<int16_t>(remainder[i] ^ nothing);
    exp_avg[i] = exp_avg[i] * one;
    exp_avg_sq[i] = exp_avg_sq[i] * one;
  }
}

inline uint64_t read_loop(const uint64_t* words, size_t count) {
  // More sums than one register holds: a single one would wait for itself.
  constexpr size_t kSums = 64;
  std::array<uint64_t, kSums> sums{};
  size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (size_t j = 0; j < kSums; ++j) sums[j] ^= words[i + j];
  }
  for (; i < count; ++i) sums[0] ^= words[i];
  uint64_t all = 0;
  for (const uint64_t sum : sums) all ^= sum;
  return all;
}

}  // namespace
}  // namespace memd::internal
