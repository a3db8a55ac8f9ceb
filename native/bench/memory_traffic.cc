#include "bench/memory_traffic.h"

namespace memd {
namespace {

const volatile float kOne = 1;
const volatile uint16_t kZero = 0;

}  // namespace

void memory_traffic(Isa isa, const TrafficFp32& arrays) {
  const float zero = kZero;
#if defined(__x86_64__)
  if (isa == Isa::avx512) return internal::traffic_avx512(arrays, kOne, zero);
  if (isa == Isa::avx2) return internal::traffic_avx2(arrays, kOne, zero);
#endif
  (void)isa;
  internal::traffic_plain(arrays, kOne, zero);
}

void memory_traffic(Isa isa, const TrafficBf16& arrays) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return internal::traffic_avx512(arrays, kOne, kZero);
  if (isa == Isa::avx2) return internal::traffic_avx2(arrays, kOne, kZero);
#endif
  (void)isa;
  internal::traffic_plain(arrays, kOne, kZero);
}

uint64_t memory_read(Isa isa, const uint64_t* words, size_t count) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return internal::read_avx512(words, count);
  if (isa == Isa::avx2) return internal::read_avx2(words, count);
#endif
  (void)isa;
  return internal::read_plain(words, count);
}

}  // namespace memd
