// Bytes of a tile's optimizer state, on disk and in memory.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/units.h"

namespace memd {

/// The place of max_exp_avg_sq: behind exp_avg, exp_avg_sq and, for bf16, the remainder, which are
/// in the same places without it.
inline uint64_t maxima_offset_bytes(DType dtype, uint64_t element_count) {
  return element_count * (dtype == DType::bfloat16 ? 10 : 8);
}

/// Bytes of a tile beside its parameter, in whole blocks. The padding is zero: of a state that is
/// written without maxima, all that lies behind `maxima_offset_bytes` reads as maxima that are
/// zero.
inline uint32_t rest_bytes_of(DType dtype, uint64_t element_count, bool keeps_maxima) {
  const uint64_t maxima_bytes = keeps_maxima ? element_count * sizeof(float) : 0;
  return static_cast<uint32_t>(
      align_up(maxima_offset_bytes(dtype, element_count) + maxima_bytes, kBlockBytes));
}

}  // namespace memd
