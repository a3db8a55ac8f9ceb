// One piece of work on one tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "base/join.h"
#include "store/cache/bucket.h"
#include "store/cache/entry.h"
#include "store/state/speculative_bucket.h"
#include "store/state/step_report.h"

namespace memd {

/// The bytes that a task works on. Only the daemon maps them, except `arena_value` and an unspilled
/// gradient.
struct TileBytes {
  std::byte* value = nullptr;
  std::byte* rest = nullptr;
  const std::byte* gradient = nullptr;
  /// The place where the value is published, or comes from; nullptr: none.
  std::byte* arena_value = nullptr;
  uint64_t value_bytes = 0;  // whole blocks
  uint64_t rest_bytes = 0;
  uint64_t elements = 0;  // of a bucket's tile
  bool keeps_maxima = false;

  /// Those before it are updated already.
  uint64_t element_first = 0;
  /// Nothing, or to be called before each piece is changed, by its number; in their order.
  std::function<void(uint64_t piece)> begin_piece;
};

/// Replica `index` of `entry`, and with `bucket` the tile's rest. The bytes that the entry has in
/// the arena are used by `work` alone.
struct TileTask {
  Entry* entry = nullptr;
  size_t index = 0;
  Bucket* bucket = nullptr;

  bool reads_value = false;
  /// The arena's copy may serve instead of a read, after it was copied and its checksum matched.
  bool value_in_arena = false;
  bool writes_value = false;
  bool reads_rest = false;  // zeros where there is none
  bool writes_rest = false;
  /// If there is room, the tile stays in memory, dirty, and is not written.
  bool may_stay = false;
  /// Bytes of the tiles that its step updates after it. They take precedence in memory.
  uint64_t later_bytes = 0;
  /// In tier host everything else stays in memory: with this, new extents have the tile as well.
  bool copies_to_disk = false;
  const Entry* gradient = nullptr;
  /// Set for speculative values. It takes what was written, and what stays of it in memory;
  /// replicas and the arena's copy stay those of N, and nothing is logged. Without an error, before
  /// `done`.
  std::function<void(const SpeculativeTile&)> keep;
  const Slot* shadow = nullptr;  // where the value is published then, if anywhere
  /// As `value_in_arena`, in the shadow until `work` replaces it.
  bool value_in_shadow = false;

  /// Nothing, or called before the task's memory is looked for: the entry may get a slot then.
  std::function<void()> starting;
  /// On a worker.
  std::function<void(const TileBytes&)> work;
  std::shared_ptr<StepReport> report;
  /// On the server thread; new extents are in place, not yet committed.
  Done done;
};

}  // namespace memd
