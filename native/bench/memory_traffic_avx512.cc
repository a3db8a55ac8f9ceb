#include "bench/memory_traffic_loop.h"

#if defined(__x86_64__)
namespace memd::internal {

void traffic_avx512(const TrafficFp32& arrays, float one, float zero) {
  traffic_loop(arrays, one, zero);
}

void traffic_avx512(const TrafficBf16& arrays, float one, uint16_t zero) {
  traffic_loop(arrays, one, zero);
}

uint64_t read_avx512(const uint64_t* words, size_t count) { return read_loop(words, count); }

}  // namespace memd::internal
#endif
