// Adam over one tile of a bucket, as a step runs it on a worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "optim/adam.h"
#include "store/cache/bucket.h"
#include "store/cache/shard.h"
#include "store/state/tile_task.h"

namespace memd {

/// Elements `begin` to `end` of a tile, of one parameter before its tail or in it, with one group's
/// scalars.
struct TileSpan {
  uint64_t begin = 0;
  uint64_t end = 0;
  AdamScalars scalars{};
};

/// Adds, for the update after its generation, what of the bucket's shard lies in the tile: two
/// spans where its tail begins there.
void add_span(const Shard& shard,
              const Bucket& bucket,
              size_t tile,
              const AdamSettings& settings,
              std::vector<TileSpan>& spans);

/// A TileTask's work: updates what the spans cover, and publishes the tile's values.
std::function<void(const TileBytes&)> update_work(DType dtype, std::vector<TileSpan> spans);

}  // namespace memd
