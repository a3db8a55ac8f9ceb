// Writes from memory to new extents: values that a user wrote, and tiles of commits in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/join.h"
#include "store/state/state_parts.h"
#include "store/state/tile_tasks.h"

namespace memd {

/// Writes one job's dirty entries and tiles to disk. Owned by its PrivateState; the server thread
/// calls everything; nothing blocks. Steps
/// and syncs call it before they update and before they commit, spills for one entry.
class Writeback {
 public:
  Writeback(const StateParts& parts, TileTasks& tasks) : parts_(parts), tasks_(tasks) {}

  /// Writes one dirty, unleased entry to new extents; it is draining meanwhile and clean
  /// afterwards.
  void write_back(Entry& entry, const std::shared_ptr<StepReport>& report, Done done);
  /// All that are dirty. `with_bytes`: blobs and buffers too, which a commit in memory leaves where
  /// they are.
  void write_back_all(bool with_bytes, const std::shared_ptr<StepReport>& report, Done done);
  /// Writes tiles whose newest bytes are in private memory alone; of all buckets, or of one.
  void flush_tiles(std::optional<uint32_t> bucket,
                   const std::shared_ptr<StepReport>& report,
                   Done done);

 private:
  bool is_due(const Entry& entry, bool with_bytes) const;
  TileTask value_task(Entry& entry, size_t index);
  void end(Entry& entry, const Status& status);

  const StateParts parts_;
  TileTasks& tasks_;
};

}  // namespace memd
