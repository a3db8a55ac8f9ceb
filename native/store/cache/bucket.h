// Parameters that are fetched and updated together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "store/cache/entry.h"
#include "store/cache/shard_ids.h"
#include "store/format/catalogue.h"
#include "store/space/declared_space.h"
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
  /// Steps update it, or may: room for its optimizer state was asked for.
  bool is_updated = false;

  size_t tile_count() const { return rest.size(); }
  uint64_t tile_elements(size_t tile) const {
    return std::min(kTileElements, element_count - tile * kTileElements);
  }
  uint32_t rest_bytes(size_t tile) const { return rest_bytes_of(dtype, tile_elements(tile)); }
};

// As many as parameters, where they are large.
static_assert(sizeof(Bucket) <= 64);

}  // namespace memd
