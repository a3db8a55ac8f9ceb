// The name of a tile within its job.
#pragma once

#include <cstdint>

namespace memd {

/// Stored in TileWords.
constexpr uint64_t tile_key(uint32_t bucket, uint64_t tile) {
  return (uint64_t{bucket} << 32) | tile;
}
constexpr uint32_t bucket_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
constexpr uint32_t tile_of(uint64_t key) { return static_cast<uint32_t>(key); }

}  // namespace memd
