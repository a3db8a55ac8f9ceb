// Sizes in bytes and alignment arithmetic.
#pragma once

#include <cstdint>

namespace memd {

constexpr uint64_t operator""_KiB(unsigned long long value) { return value << 10; }
constexpr uint64_t operator""_MiB(unsigned long long value) { return value << 20; }
constexpr uint64_t operator""_GiB(unsigned long long value) { return value << 30; }

/// `alignment` is a power of two.
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}
constexpr uint64_t align_down(uint64_t value, uint64_t alignment) {
  return value & ~(alignment - 1);
}
constexpr bool is_aligned(uint64_t value, uint64_t alignment) {
  return (value & (alignment - 1)) == 0;
}

constexpr uint64_t divide_up(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// The alignment that O_DIRECT accepts on every device we know, and the unit of extents and slots.
inline constexpr uint64_t kBlockBytes = 4_KiB;

/// Views start here: BLAS kernels round differently on other alignments, and "the same bits" would
/// end there.
inline constexpr uint64_t kViewAlignmentBytes = 64;

/// A tile is the part of a bucket that is updated at once.
inline constexpr uint64_t kTileElements = 256 * 1024;

}  // namespace memd
