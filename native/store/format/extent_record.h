// A place of bytes on disk, and their checksum.
#pragma once

#include <compare>
#include <cstdint>

#include "base/checksum.h"

namespace memd {

/// A contiguous range of one device with the checksum of what it holds. Written once, never
/// overwritten in place. `length_bytes` is a multiple of kBlockBytes; 0: there is no extent (state
/// that was never written is zero).
struct ExtentRecord {
  ExtentAddress address;
  uint32_t length_bytes = 0;
  uint64_t checksum = 0;

  bool exists() const { return length_bytes != 0; }
  auto operator<=>(const ExtentRecord&) const = default;
};

}  // namespace memd
