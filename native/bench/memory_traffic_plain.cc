#include "bench/memory_traffic_loop.h"

namespace memd::internal {

void traffic_plain(const TrafficFp32& arrays, float one, float zero) {
  traffic_loop(arrays, one, zero);
}

void traffic_plain(const TrafficBf16& arrays, float one, uint16_t zero) {
  traffic_loop(arrays, one, zero);
}

uint64_t read_plain(const uint64_t* words, size_t count) { return read_loop(words, count); }

}  // namespace memd::internal
