// The private side of one job: optimizer state and values that only the daemon sees.
#pragma once

#include "store/state/early_updates.h"
#include "store/state/host_tier.h"
#include "store/state/moments.h"
#include "store/state/state_parts.h"
#include "store/state/tile_tasks.h"
#include "store/state/writeback.h"

namespace memd {

/// Owned by its Job from the moment that a store has it; the server thread calls everything;
/// nothing blocks. The five work on the tiles of the job's PrivateTiles: tasks one at a time on
/// each tile, and the others by tasks alone.
class PrivateState {
 public:
  explicit PrivateState(const StateParts& parts)
      : tasks_(parts,
               {.memory = [this] { return early_.drop_memory(); },
                .extents = [this] { return early_.free_extents(); }}),
        early_(parts, tasks_),
        writeback_(parts, tasks_),
        moments_(parts, tasks_, early_, writeback_),
        host_(parts, tasks_),
        parts_(parts) {}
  PrivateState(const PrivateState&) = delete;
  PrivateState& operator=(const PrivateState&) = delete;

  /// The references that it works with.
  const StateParts& parts() const { return parts_; }
  TileTasks& tasks() { return tasks_; }
  EarlyUpdates& early() { return early_; }
  const EarlyUpdates& early() const { return early_; }
  Writeback& writeback() { return writeback_; }
  Moments& moments() { return moments_; }
  HostTier& host() { return host_; }

  /// Drops clean tiles; none of the bucket's may be dirty.
  void drop_cached_tiles(const Bucket& bucket);
  /// Those that are clean, and speculative ones.
  void drop_clean_tiles();

 private:
  TileTasks tasks_;
  EarlyUpdates early_;
  Writeback writeback_;
  Moments moments_;
  HostTier host_;
  const StateParts parts_;
};

inline void PrivateState::drop_cached_tiles(const Bucket& bucket) {
  for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
    parts_.tiles.drop(tile_key(bucket.value->owner(), tile), parts_.private_side());
  }
}

inline void PrivateState::drop_clean_tiles() {
  parts_.tiles.drop_clean(parts_.private_side());
  while (early_.drop_memory()) {
  }
}

}  // namespace memd
