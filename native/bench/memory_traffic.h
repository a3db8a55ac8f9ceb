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

/// Reads `count` words and does next to nothing with them: the limit of a checksum. The result is
/// their exclusive or.
uint64_t memory_read(Isa isa, const uint64_t* words, size_t count);

namespace internal {

void traffic_plain(const TrafficFp32& arrays, float one, float zero);
void traffic_plain(const TrafficBf16& arrays, float one, uint16_t zero);
uint64_t read_plain(const uint64_t* words, size_t count);
#if defined(__x86_64__)
void traffic_avx2(const TrafficFp32& arrays, float one, float zero);
void traffic_avx2(const TrafficBf16& arrays, float one, uint16_t zero);
uint64_t read_avx2(const uint64_t* words, size_t count);
void traffic_avx512(const TrafficFp32& arrays, float one, float zero);
void traffic_avx512(const TrafficBf16& arrays, float one, uint16_t zero);
uint64_t read_avx512(const uint64_t* words, size_t count);
#endif

}  // namespace internal
}  // namespace memd
