// Bytes that a writer which is gone left in the arena of one job: none is ever read, and what
// others wrote beside it stays.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "base/join.h"
#include "store/cache/cache_parts.h"
#include "store/cache/mends.h"
#include "store/format/block_bytes.h"

namespace memd {

/// Owns the repairs that wait for the disk or a worker; an entry is draining meanwhile. Owned by
/// the Job; the server thread calls everything; nothing blocks.
class HalfWritten {
 public:
  explicit HalfWritten(const CacheParts& parts) : parts_(parts) {}
  HalfWritten(const HalfWritten&) = delete;
  HalfWritten& operator=(const HalfWritten&) = delete;

  /// All that a session was writing when it ended. Each wait for the disk is a branch of
  /// `discarded`.
  void discard(const Session& session, Join& discarded);
  /// Shards of a parameter's slot, by their counter, are again what the disk has of them, or as if
  /// they had never been written.
  void discard(Entry& entry, const std::set<uint32_t>& torn, Done discarded);

 private:
  void start_mend(Entry& entry);
  /// Reads what the disk has, then repair().
  void mend(Entry& entry);
  void repair(Entry& entry, const Mends::Torn& torn, const std::shared_ptr<BlockBytes>& on_disk);
  void end_mend(Entry& entry, const Status& status);

  const CacheParts parts_;
  Mends mends_;
};

}  // namespace memd
