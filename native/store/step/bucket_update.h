// How a step updates one bucket: a task for each tile, and where the new values are published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/join.h"
#include "store/state/speculative_bucket.h"
#include "store/state/tile_task.h"
#include "store/step/step_parts.h"

namespace memd {

/// Questions of a bucket's update to its step.
struct BucketUpdateParts {
  /// nullptr: the step does not update this shard.
  std::function<const AdamSettings*(uint32_t shard_id)> settings_of;
  /// Finds room in the arena for the new values, where there is none.
  std::function<void(Entry& value)> make_slot;
  std::shared_ptr<StepReport> report;
  /// The step is committed in memory: updated tiles may stay there.
  bool may_stay = false;
  /// Bytes of the tiles of buckets that the step updates later.
  uint64_t later_bytes = 0;
};

/// Lives while it makes the tasks; on the server thread; nothing blocks.
class BucketUpdate {
 public:
  /// `made`: what was made of the bucket ahead of the step, or nullptr; it is adopted.
  BucketUpdate(const StepParts& parts,
               const BucketUpdateParts& step,
               Bucket& bucket,
               const std::shared_ptr<SpeculativeBucket>& made);

  /// Submits the tasks, each with a branch of `updated`.
  void submit(Join& updated);

 private:
  /// A tile that was updated before, and how.
  enum class Made : uint8_t { no, half_by_daemon_before, by_daemon_before, early };

  void adopt(SpeculativeBucket& made);
  void find_place();
  Made made(size_t tile) const;
  TileTask publish_task(size_t tile) const;
  TileTask update_task(size_t tile) const;

  const StepParts& parts_;
  const BucketUpdateParts& step_;
  Bucket& bucket_;
  Entry& value_;
  std::vector<bool> made_early_;
  std::unique_ptr<Slot> shadow_;
  bool is_in_shadow_ = false;  // published there already
  bool was_in_place_ = false;  // the shadow was N's slot
  bool is_away_ = false;       // a fetch brings it when it is wanted
  bool in_place_ = false;      // in its own slot, which nobody leases
};

}  // namespace memd
