// The buffers that a step replaces as a whole.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/step/step_parts.h"

namespace memd {

/// Pairs of a staged shard, which was put before the step, and the buffer whose place it takes.
/// Owned by its Step; the server thread calls everything; nothing blocks.
///
/// apart → swapped → dropped (the step is committed), or back to apart (it is undone).
class StagedBuffers {
 public:
  using Pairs = std::vector<std::pair<uint32_t, uint32_t>>;

  StagedBuffers(const StepParts& parts, const Pairs& pairs) : parts_(parts), pairs_(pairs) {}

  bool names(uint32_t shard_id) const;
  bool is_swapped() const { return is_swapped_; }
  /// Staged buffers take the places of what they replace, once nobody writes them.
  Status swap();
  /// And go back to their own, or again to the others'.
  void exchange(bool swapped);
  /// A buffer's bytes on disk are older than a step in memory, and no record may call them the
  /// step's.
  void forget_old_extents();
  /// Replaced buffers go: the step is committed.
  void drop();
  template <typename Visit>
  void for_each_entry(const Visit& visit) const {
    for (const auto& [staged, buffer] : pairs_) {
      visit(parts_.job.shards[staged].value);
      visit(parts_.job.shards[buffer].value);
    }
  }

 private:
  Status check() const;

  const StepParts& parts_;
  const Pairs pairs_;
  bool is_swapped_ = false;
  std::vector<bool> buffer_was_written_;  // of each pair
};

}  // namespace memd
