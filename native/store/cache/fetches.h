// How one job's entries come from the disk into the arena.
#pragma once

#include "io/io_queue.h"
#include "store/cache/cache_parts.h"

namespace memd {

/// Owned by the Job; the server thread calls everything; nothing blocks.
class Fetches {
 public:
  explicit Fetches(const CacheParts& parts) : parts_(parts) {}
  Fetches(const Fetches&) = delete;
  Fetches& operator=(const Fetches&) = delete;

  /// Reads all of an entry that is filling into its slot. It is clean when `done` runs; or absent
  /// and without a slot, and whoever waits for it is told after `done`.
  void fetch(Entry& entry, IoPriority priority, Done done);
  /// The same where the disk has nothing of it: zeros.
  void zero(Entry& entry);
  /// Somebody waits for it.
  void raise(const Entry& entry);

 private:
  void finish(Entry& entry, const Status& status, const Done& done);

  const CacheParts parts_;
};

}  // namespace memd
