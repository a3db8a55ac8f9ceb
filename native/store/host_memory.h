// The pool's segments on their way to jobs and back.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "arena/segment.h"
#include "base/status.h"
#include "store/dropped_memory.h"
#include "store/job/store_parts.h"
#include "store/journal/job_ledger.h"
#include "store/state/kept_memory.h"

namespace memd {

/// Owns the memory of dropped jobs until it is destroyed; a job's own is in its KeptMemory. Owned
/// by the ShardStore; the server thread calls everything. add() and destroy_*() may take
/// milliseconds and are for the start; nothing else blocks.
class HostMemory {
 public:
  explicit HostMemory(const StoreParts& parts) : parts_(parts) {}
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  /// As much as the job was admitted to, with a ledger if somebody keeps it. If they cannot be
  /// mapped, its segments are released.
  Status give(Job& job);
  /// A dropped job's, until its segments are replaced.
  void release(uint64_t job_id, KeptMemory::Left left) {
    if (left.memory != nullptr)
      dropped_.add(job_id, std::move(left.ledger), std::move(left.memory));
  }
  /// One of them, for Replacement::make() on another thread; nullptr: there is none.
  std::shared_ptr<Pool::Replacement> begin_replacement();
  void end_replacement(Pool::Replacement& replacement);
  /// A segment that nobody uses any more.
  void add(Segment old_segment);

  // At start: segments of the daemon before.
  void destroy_claimed(const JobLedger& ledger);
  void destroy_unclaimed();

 private:
  const StoreParts& parts_;
  DroppedMemory dropped_;
};

}  // namespace memd
