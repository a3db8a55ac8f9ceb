#include "store/state/maxima.h"

#include "base/check.h"
#include "base/failpoint.h"

namespace memd {

void keep_maxima(const StateParts& parts, const std::vector<uint32_t>& buckets) {
  std::vector<uint32_t> changed;
  for (const uint32_t index : buckets) {
    Bucket& bucket = parts.shards.bucket(index);
    if (bucket.keeps_maxima) continue;
    MEMD_CHECK(!parts.tiles.has_dirty(index, bucket.tile_count()));
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile)
      parts.tiles.drop(tile_key(index, tile), parts.private_side());
    bucket.keeps_maxima = true;
    changed.push_back(index);
  }
  if (changed.empty()) return;
  parts.durable.note_change();
  MEMD_FAILPOINT("maxima.before_layout");
  // Before the first tile is written with them: the next daemon must know how long it is.
  parts.journal.note_places_of_maxima(changed);
  MEMD_FAILPOINT("maxima.kept");
}

}  // namespace memd
