// The fp32 number that a bf16 parameter is: see adam_update() in adam.h.
#pragma once

#include <cstdint>
#include <optional>

namespace memd {

/// Its bits, of the published half and its remainder.
inline uint32_t bf16_master(uint16_t half, int16_t remainder) {
  return (uint32_t{half} << 16) + static_cast<uint32_t>(int32_t{remainder});
}

/// The remainder beside `half` of the number with these bits; nothing if another half is published
/// of it. Any NaN is published as any other.
inline std::optional<int16_t> bf16_remainder(uint32_t bits, uint16_t half) {
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return (half & 0x7FFFU) > 0x7F80U ? std::optional<int16_t>(0) : std::nullopt;
  }
  if ((bits + 0x8000U) >> 16 != half) return std::nullopt;
  return static_cast<int16_t>(bits - (uint32_t{half} << 16));
}

}  // namespace memd
