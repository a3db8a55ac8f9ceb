// One XXH3 per instruction set; checksum.cc chooses. Each is compiled in its own file with
// everything internal, so that no wide instruction leaks into code that runs on every processor.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace memd::internal {

uint64_t xxh3_plain(const void* bytes, size_t count, uint64_t seed);
#if defined(__x86_64__)
uint64_t xxh3_avx2(const void* bytes, size_t count, uint64_t seed);
uint64_t xxh3_avx512(const void* bytes, size_t count, uint64_t seed);
#endif

}  // namespace memd::internal
