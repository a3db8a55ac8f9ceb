// The cache of one job: which of its bytes are in the arena, who leases them and what goes next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "ring/shared_memory.h"
#include "store/cache/activities.h"
#include "store/cache/attached_sessions.h"
#include "store/cache/cache_parts.h"
#include "store/cache/entry.h"
#include "store/cache/eviction.h"
#include "store/cache/fetches.h"
#include "store/cache/gradient_buckets.h"
#include "store/cache/half_written.h"
#include "store/cache/job_counters.h"
#include "store/cache/job_memory.h"
#include "store/cache/lease_gates.h"
#include "store/cache/lease_waiters.h"
#include "store/cache/leases.h"
#include "store/cache/plan_progress.h"
#include "store/cache/prefetch_window.h"
#include "store/cache/prefetcher.h"
#include "store/cache/residencies.h"
#include "store/cache/room.h"
#include "store/cache/shard_table.h"
#include "store/cache/shards.h"
#include "store/cache/slot_fills.h"
#include "store/cache/slots.h"
#include "store/cache/training_group.h"
#include "store/cache/wait_lists.h"
#include "store/format/durability.h"
#include "store/journal/job_ledger.h"
#include "store/journal/progress.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/space/lost_shards.h"

namespace memd {

/// Makes the owners of a job's cache, in the order in which they need each other, and hands them
/// out; each of them owns its own state. Owned by the Job; the server thread calls everything;
/// nothing blocks.
class JobCache {
 public:
  /// The parts of its job that the cache works with; they outlive it.
  struct Parts {
    const uint64_t job_id;
    const std::string& job_name;
    Shards& shards;
    const std::unique_ptr<JobMemory>& memory;
    JobLedger& ledger;
    const JobProgress& progress;
    const Durability& durability;
    const JobSpace& space;
    LostShards& lost;
    ResidencyGates& gates;
  };

  JobCache(const Parts& parts, SharedMemory shard_table);
  JobCache(const JobCache&) = delete;
  JobCache& operator=(const JobCache&) = delete;
  /// Once, before anybody leases anything.
  void connect(ExtentStore& extents, const Clock& clock, std::unique_ptr<LeaseGates> gates);

  AttachedSessions& sessions() { return sessions_; }
  const AttachedSessions& sessions() const { return sessions_; }
  TrainingGroup& group() { return group_; }
  const TrainingGroup& group() const { return group_; }
  GradientBuckets& gradient_buckets() { return gradient_buckets_; }
  Activities& activities() { return activities_; }
  const Activities& activities() const { return activities_; }
  /// Owners of the cache and of the private state count there.
  JobCounters& counters() { return counters_; }
  const JobCounters& counters() const { return counters_; }
  WaitLists& waits() { return waits_; }
  FarthestNextUse& policy() { return policy_; }
  Slots& slots() { return slots_; }
  const Slots& slots() const { return slots_; }
  ShardTable& table() { return table_; }
  const ShardTable& table() const { return table_; }
  PrefetchWindow& window() { return window_; }
  Residencies& residencies() { return residencies_; }
  PlanProgress& plans() { return plans_; }

  // After connect().
  LeaseWaiters& waiters() { return connected_->waiters; }
  const LeaseWaiters& waiters() const { return connected_->waiters; }
  Room& room() { return connected_->room; }
  HalfWritten& half_written() { return connected_->half_written; }
  Prefetcher& prefetcher() { return connected_->prefetcher; }
  Leases& leases() { return connected_->leases; }

  /// Replica `replica` of the entry, or the rest of that tile, is gone from the disk. A gradient is
  /// no shard's state: the next backward makes it again.
  void lose(const Entry& entry, size_t replica, const Status& why) const {
    connected_->parts.lose(entry, replica, why);
  }

 private:
  /// Owners that need the store's devices and clock.
  struct Connected {
    Connected(JobCache& cache,
              ExtentStore& extents,
              const Clock& clock,
              std::unique_ptr<LeaseGates> lease_gates);

    const std::unique_ptr<LeaseGates> gates;
    LeaseWaiters waiters;
    const CacheParts parts;
    Room room;
    Fetches fetches;
    SlotFills fills;
    HalfWritten half_written;
    Prefetcher prefetcher;
    Leases leases;
  };

  const Parts parts_;
  AttachedSessions sessions_;
  TrainingGroup group_;
  GradientBuckets gradient_buckets_;
  WaitLists waits_;
  Activities activities_{waits_};
  JobCounters counters_;
  FarthestNextUse policy_;
  Slots slots_;
  ShardTable table_;
  PrefetchWindow window_;
  Residencies residencies_;
  PlanProgress plans_;
  std::unique_ptr<Connected> connected_;
};

}  // namespace memd
