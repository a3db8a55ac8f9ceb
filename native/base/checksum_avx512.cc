// GCC 12 sees an uninitialised variable in its own intrinsics (https://gcc.gnu.org/PR105593),
// wherever they are inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define XXH_INLINE_ALL  // every function of xxhash.h is static here
#include <xxhash.h>

#include "base/checksum_variants.h"

#if defined(__x86_64__)
static_assert(XXH_VECTOR == XXH_AVX512);
namespace memd::internal {

uint64_t xxh3_avx512(const void* bytes, size_t count, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes, count, seed);
}

}  // namespace memd::internal
#endif
