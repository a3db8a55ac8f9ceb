// References that the owners of a job's private state share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/workers.h"
#include "store/cache/activities.h"
#include "store/cache/conditions.h"
#include "store/cache/eviction.h"
#include "store/cache/job_counters.h"
#include "store/cache/job_memory.h"
#include "store/cache/residencies.h"
#include "store/cache/shard_table.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/wait_lists.h"
#include "store/journal/job_ledger.h"
#include "store/journal/progress.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/space/lost_shards.h"
#include "store/state/admission.h"
#include "store/state/durable_state.h"
#include "store/state/extent_log.h"
#include "store/state/host_tiles.h"
#include "store/state/job_journal.h"
#include "store/state/private_tiles.h"
#include "store/state/state_gate.h"

namespace memd {

/// All of it outlives the PrivateState that is made with it.
struct StateParts {
  uint64_t job_id = 0;
  const std::string& job_name;
  // The daemon's.
  ExtentStore& extents;
  Workers& workers;
  const Clock& clock;
  // The job's. There is memory while anything is asked of its private state.
  Shards& shards;
  Slots& slots;
  ShardTable& table;
  Residencies& residencies;
  FarthestNextUse& policy;
  Conditions& conditions;
  WaitLists& waits;
  JobCounters& counters;
  Activities& activities;
  const std::unique_ptr<JobMemory>& memory;
  JobLedger& ledger;
  JobSpace& space;
  const JobProgress& progress;
  Admission& admission;
  /// The next commit has something to write down: note_change().
  DurableState& durable;
  JobJournal& journal;
  const LostShards& lost;
  PrivateTiles& tiles;
  HostTiles& host_tiles;
  ExtentLog& log;
  StateGate& gate;

  Arena& arena() const { return memory->arena(); }
  Arena& private_side() const { return memory->private_side(); }
  Arena& host_side() const { return memory->host_side(); }
};

}  // namespace memd
