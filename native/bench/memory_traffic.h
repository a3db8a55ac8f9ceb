// The memory's limit for an update: a loop that reads and writes what Adam does, and computes next
// to nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/adam.h"

namespace memd {

/// The arrays of `adam_update`, `count` elements each. Every element is read and written, except
/// for gradients, which are read; none changes.
struct TrafficFp32 {
  size_t count;
  float* parameter;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient;
};

struct TrafficBf16 {
  size_t count;
  uint16_t* half;
  int16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  const uint16_t* gradient;
};

void memory_traffic(Isa isa, const TrafficFp32& arrays);
void memory_traffic(Isa isa, const TrafficBf16& arrays);

namespace internal {

void traffic_plain(const TrafficFp32& arrays, float one, float zero);
void traffic_plain(const TrafficBf16& arrays, float one, uint16_t zero);
#if defined(__x86_64__)
void traffic_avx2(const TrafficFp32& arrays, float one, float zero);
void traffic_avx2(const TrafficBf16& arrays, float one, uint16_t zero);
void traffic_avx512(const TrafficFp32& arrays, float one, float zero);
void traffic_avx512(const TrafficBf16& arrays, float one, uint16_t zero);
#endif

}  // namespace internal
}  // namespace memd
