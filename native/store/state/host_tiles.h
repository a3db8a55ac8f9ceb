// Which tiles of parameters of tier host are in memory, and where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include "arena/arena.h"
#include "store/cache/bucket.h"
#include "store/state/tile_key.h"

namespace memd {

/// Value and rest of a tile lie in one place of the host side, which the tile keeps: updates change
/// it there. Its bytes are the newest; extents have them too only where a snapshot wrote them since
/// the last change. A tile that is not here has all its bytes in extents, or none yet. The unit is
/// a tile, and one task at a time works on each. Owned by its Job; the server thread calls
/// everything; nothing blocks.
class HostTiles {
 public:
  struct Place {
    uint64_t offset_bytes = 0;
    /// Value and rest, or, of one that no step updates, the value alone.
    uint64_t bytes = 0;
  };

  bool contains(uint64_t key) const { return places_.contains(key); }
  /// nullptr: not in memory.
  const Place* find(uint64_t key) const;
  /// Whether all tiles of the bucket are here.
  bool contains_all(const Bucket& bucket) const;
  /// Whether the tile has a place for optimizer state, here or on disk, or gets one.
  bool has_rest(const Bucket& bucket, size_t tile) const;
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const auto& [key, place] : places_) visit(key, place);
  }
  uint64_t bytes() const { return bytes_; }

  /// False: another task works on it.
  bool begin_task(uint64_t key) { return working_.insert(key).second; }
  void end_task(uint64_t key) { working_.erase(key); }
  /// It lies there from here on; the caller frees the place that it had.
  void put(uint64_t key, const Place& place);

  /// At the job's end, or when the job returns to disk.
  void drop_all(Arena& side);

 private:
  std::unordered_map<uint64_t, Place> places_;
  std::unordered_map<uint32_t, size_t> counts_;  // by bucket
  std::unordered_set<uint64_t> working_;
  uint64_t bytes_ = 0;
};

}  // namespace memd
