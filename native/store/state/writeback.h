// Writes from memory to new extents: values that a user wrote, and tiles of commits in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/join.h"
#include "store/state/state_parts.h"
#include "store/state/tile_tasks.h"

namespace memd {

/// Writes one job's dirty entries and tiles to disk. Owned by its PrivateState; the server thread
/// calls everything; nothing blocks. Steps
/// and syncs call it before they update and before they commit, one after the other; spills for one
/// entry.
class Writeback {
 public:
  Writeback(const StateParts& parts, TileTasks& tasks) : parts_(parts), tasks_(tasks) {}

  /// Writes one dirty, unleased entry to new extents; it is draining meanwhile and clean
  /// afterwards.
  void write_back(Entry& entry, const std::shared_ptr<StepReport>& report, Done done);
  /// All that are dirty now, kSubmittedMax in a turn. `with_bytes`: blobs and buffers too, which a
  /// commit in memory leaves where they are.
  void write_back_all(bool with_bytes, const std::shared_ptr<StepReport>& report, Done done);
  /// Writes tiles whose newest bytes are in private memory alone by now; of all buckets, or of
  /// these, which ascend. As many in a turn.
  void flush_tiles(std::optional<std::vector<uint32_t>> buckets,
                   const std::shared_ptr<StepReport>& report,
                   Done done);

  /// Entries or tiles that one turn begins to write: some 2 µs each.
  static constexpr size_t kSubmittedMax = 32;
  /// Dirty tiles that one turn looks at: some became dirty behind who asks.
  static constexpr size_t kLookedAtMax = 256;

 private:
  void write_back_awaited(bool with_bytes,
                          const std::shared_ptr<StepReport>& report,
                          const std::shared_ptr<Join>& all);
  struct Flush;
  void flush_next(const std::shared_ptr<Flush>& flush);
  bool is_due(const Entry& entry, bool with_bytes) const;
  TileTask value_task(Entry& entry, size_t index);
  void end(Entry& entry, const Status& status);

  const StateParts parts_;
  TileTasks& tasks_;
};

}  // namespace memd
