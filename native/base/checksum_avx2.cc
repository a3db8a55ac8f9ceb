#define XXH_INLINE_ALL  // every function of xxhash.h is static here
#include <xxhash.h>

#include "base/checksum_variants.h"

#if defined(__x86_64__)
static_assert(XXH_VECTOR == XXH_AVX2);
namespace memd::internal {

uint64_t xxh3_avx2(const void* bytes, size_t count, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, count, seed);
}

}  // namespace memd::internal
#endif
