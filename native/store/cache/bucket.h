// Parameters that are fetched and updated together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "store/cache/entry.h"
#include "store/cache/shard_ids.h"
#include "store/format/catalogue.h"
#include "store/format/tile_rest.h"
#include "store/space/replica.h"

namespace memd {

/// Shards of one dtype that are fetched and updated together.
struct Bucket {
  uint64_t element_count = 0;
  ShardIds shards;
  Entry* value = nullptr;
  Entry* gradient = nullptr;
  ReplicaList rest;  // one for each tile
  DType dtype = DType::float32;
  /// The home of its values and their optimizer state: with tier host HostTiles, and in extents
  /// only where a snapshot wrote them since their last change.
  Tier tier = Tier::nvme;
  /// Steps update it, or may: room for its optimizer state was asked for.
  bool is_updated = false;
  /// A shard's state has a maximum, or may: room for it was asked for. Only of one that is updated.
  bool needs_maxima = false;
  /// Its tiles have a place for the maxima in memory, and from their next write on also on disk.
  /// Set where no tile is in memory, and never unset.
  bool keeps_maxima = false;

  size_t tile_count() const { return rest.size(); }
  /// As a catalogue describes it, without its tiles.
  BucketRecord record() const {
    return {
        .dtype = dtype, .element_count = element_count, .keeps_maxima = keeps_maxima, .tiles = {}};
  }
  bool is_host() const { return tier == Tier::host; }
  uint64_t tile_elements(size_t tile) const {
    return std::min(kTileElements, element_count - tile * kTileElements);
  }
  uint32_t rest_bytes(size_t tile) const {
    return rest_bytes_of(dtype, tile_elements(tile), keeps_maxima);
  }
  /// The length of a rest extent that was written before the bucket kept maxima: without them.
  uint32_t rest_bytes_narrow(size_t tile) const {
    return rest_bytes_of(dtype, tile_elements(tile), false);
  }
  /// With its value.
  uint64_t tile_bytes(size_t tile) const { return value->replica_bytes(tile) + rest_bytes(tile); }
  /// The sum over all tiles.
  uint64_t state_bytes() const;
  bool may_have_rest(size_t tile, uint32_t length_bytes) const {
    return length_bytes == rest_bytes(tile) || length_bytes == rest_bytes_narrow(tile);
  }
};

inline uint64_t Bucket::state_bytes() const {
  if (tile_count() == 0) return 0;
  // All but the last are equal.
  return (tile_count() - 1) * tile_bytes(0) + tile_bytes(tile_count() - 1);
}

/// For JobSpace, which fills and empties them.
inline ReplicaPlace value_place(const Bucket& bucket, size_t tile) {
  return bucket.value->replica_place(tile, bucket.is_host());
}
inline ReplicaPlace rest_place(Bucket& bucket, size_t tile) {
  return bucket.rest.place(tile, bucket.is_host());
}

// As many as parameters, where they are large.
static_assert(sizeof(Bucket) <= 64);

}  // namespace memd
