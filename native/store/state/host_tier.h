// Passes over the tiles of a job's parameters of tier host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "base/join.h"
#include "store/state/state_parts.h"
#include "store/state/step_report.h"
#include "store/state/tile_tasks.h"
#include "store/state/writeback.h"

namespace memd {

/// Owned by the job's PrivateState; an operation of the job calls it, on the server thread; nothing
/// blocks.
class HostTier {
 public:
  HostTier(const StateParts& parts, TileTasks& tasks) : parts_(parts), tasks_(tasks) {}

  /// For a snapshot: afterwards extents have every tile, and memory goes on having it. Tiles that
  /// did not change since the last time have them still.
  void copy_to_disk(const std::shared_ptr<StepReport>& report, Done done);
  /// Tiles of these buckets whose places are too short, because no step updated them so far, or
  /// none kept maxima, get longer ones. Before a step changes anything, which could not be undone
  /// for lack of a place.
  void give_places(const std::set<uint32_t>& buckets,
                   const std::shared_ptr<StepReport>& report,
                   Done done);

  /// Tiles that one turn looks at.
  static constexpr size_t kLookedAtMax = 64;

 private:
  struct Pass;

  void look(const std::shared_ptr<Pass>& pass);
  void submit(const std::shared_ptr<Pass>& pass);
  uint64_t bytes_held(const Bucket& bucket, size_t tile) const;

  const StateParts parts_;
  TileTasks& tasks_;
};

}  // namespace memd
