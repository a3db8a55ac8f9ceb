// Element types of shards. The numbers are stored on disk and travel over gRPC: append, never
// renumber.
#pragma once

#include <cstdint>

namespace memd {

enum class DType : uint8_t {
  unspecified = 0,
  float32 = 1,
  bfloat16 = 2,
  float16 = 3,
  float64 = 4,
  int8 = 5,
  int16 = 6,
  int32 = 7,
  int64 = 8,
  uint8 = 9,
  boolean = 10,
};

/// 0 for a number that is no DType.
constexpr uint64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::bfloat16:
    case DType::float16:
    case DType::int16:
      return 2;
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::int8:
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::unspecified:
      break;
  }
  return 0;
}

}  // namespace memd
