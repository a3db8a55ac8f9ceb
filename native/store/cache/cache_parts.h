// References that the owners of one job's cache share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/workers.h"
#include "store/cache/activities.h"
#include "store/cache/eviction.h"
#include "store/cache/gradient_buckets.h"
#include "store/cache/job_counters.h"
#include "store/cache/job_memory.h"
#include "store/cache/lease_gates.h"
#include "store/cache/lease_waiters.h"
#include "store/cache/prefetch_window.h"
#include "store/cache/residencies.h"
#include "store/cache/session.h"
#include "store/cache/shard_table.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/training_group.h"
#include "store/cache/wait_lists.h"
#include "store/journal/job_ledger.h"
#include "store/journal/progress.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/space/lost_shards.h"

namespace memd {

/// References that live as long as the job.
struct CacheParts {
  const uint64_t job_id;
  const std::string& job_name;
  Shards& shards;
  Slots& slots;
  ShardTable& table;
  FarthestNextUse& policy;
  PrefetchWindow& window;
  Residencies& residencies;
  LeaseWaiters& waiters;
  WaitLists& waits;
  /// Not nullptr while there is a session.
  const std::unique_ptr<JobMemory>& memory;
  JobLedger& ledger;
  const std::vector<std::shared_ptr<Session>>& sessions;
  TrainingGroup& group;
  GradientBuckets& gradient_buckets;
  const JobProgress& progress;
  const JobSpace& space;
  LostShards& lost;
  JobCounters& counters;
  Activities& activities;
  LeaseGates& gates;
  ExtentStore& extents;
  Workers& workers;
  const Clock& clock;

  /// Replica `replica` of the entry is gone from the disk. A gradient is no shard's state: the next
  /// backward makes it again.
  void lose(const Entry& entry, size_t replica, const Status& why) const;
  /// Whether some of its bytes are lost.
  bool is_lost(const Entry& entry) const;
  /// "written", and the contributors to its gradient, for the ledger.
  void note_shard(uint32_t shard_id) const;
  /// It is attached.
  const std::shared_ptr<Session>& session(uint64_t session_id) const;
};

}  // namespace memd
