#include "base/checksum.h"

#include "base/checksum_variants.h"
#include "base/failpoint.h"

namespace memd {
namespace {

using Xxh3 = uint64_t (*)(const void* bytes, size_t count, uint64_t seed);

Xxh3 widest_xxh3() {
#if defined(__x86_64__)
  // Those that its file is compiled for, as in optim/adam.cc.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return internal::xxh3_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return internal::xxh3_avx2;
#endif
  return internal::xxh3_plain;
}

uint64_t xxh3(std::span<const std::byte> bytes, uint64_t seed) {
  static const Xxh3 function = widest_xxh3();
  return function(bytes.data(), bytes.size(), seed);
}

/// A bijection in which every bit of the result depends on every bit of `value` (splitmix64's
/// finaliser).
constexpr uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

/// Offsets of one device never share a seed, as mix() is a bijection; the constant keeps device 0,
/// offset 0 away from the seed of record_checksum().
constexpr uint64_t address_seed(ExtentAddress address) {
  return mix(mix(uint64_t{address.device} + 0x9E3779B97F4A7C15U) ^ address.offset_bytes);
}

}  // namespace

#if defined(MEMD_WITHOUT_CHECKSUMS)

const bool kExtentsAreHashed = false;

uint64_t extent_checksum(std::span<const std::byte>, ExtentAddress address) {
  return address_seed(address);
}

#else

const bool kExtentsAreHashed = true;

uint64_t extent_checksum(std::span<const std::byte> bytes, ExtentAddress address) {
  if (MEMD_PLANTED("extent.address_not_in_checksum")) return xxh3(bytes, 1);
  return xxh3(bytes, address_seed(address));
}

#endif

uint64_t record_checksum(std::span<const std::byte> bytes) { return xxh3(bytes, 0); }

}  // namespace memd
