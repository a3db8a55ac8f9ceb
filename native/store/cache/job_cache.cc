#include "store/cache/job_cache.h"

#include <utility>

#include "base/check.h"

namespace memd {

JobCache::JobCache(const Parts& parts, SharedMemory shard_table)
    : parts_(parts),
      group_(sessions_.list(), parts.ledger),
      slots_(parts.shards.entries(), sessions_.list(), parts.memory, parts.ledger, waits_),
      table_(std::move(shard_table), parts.shards, slots_, group_, parts.progress),
      window_(counters_),
      residencies_({.entries = parts.shards.entries(),
                    .slots = slots_,
                    .table = table_,
                    .policy = policy_,
                    .window = window_,
                    .waits = waits_,
                    .gates = parts.gates}),
      plans_({.shards = parts.shards,
              .sessions = sessions_.list(),
              .group = group_,
              .memory = parts.memory,
              .durability = parts.durability,
              .policy = policy_,
              .window = window_,
              .counters = counters_}) {}

JobCache::Connected::Connected(JobCache& cache,
                               ExtentStore& extents,
                               const Clock& clock,
                               std::unique_ptr<LeaseGates> lease_gates)
    : gates(std::move(lease_gates)),
      waiters(cache.parts_.shards, cache.slots_, cache.waits_, cache.counters_, clock),
      parts{.job_id = cache.parts_.job_id,
            .job_name = cache.parts_.job_name,
            .shards = cache.parts_.shards,
            .slots = cache.slots_,
            .table = cache.table_,
            .policy = cache.policy_,
            .window = cache.window_,
            .residencies = cache.residencies_,
            .waiters = waiters,
            .waits = cache.waits_,
            .memory = cache.parts_.memory,
            .ledger = cache.parts_.ledger,
            .sessions = cache.sessions_.list(),
            .group = cache.group_,
            .gradient_buckets = cache.gradient_buckets_,
            .progress = cache.parts_.progress,
            .space = cache.parts_.space,
            .lost = cache.parts_.lost,
            .counters = cache.counters_,
            .activities = cache.activities_,
            .gates = *gates,
            .extents = extents,
            .workers = extents.workers(),
            .clock = clock},
      room(parts),
      fetches(parts),
      fills(parts),
      half_written(parts),
      prefetcher(parts, cache.plans_, room, fetches),
      leases(parts, room, fetches, fills, half_written) {}

void JobCache::connect(ExtentStore& extents,
                       const Clock& clock,
                       std::unique_ptr<LeaseGates> gates) {
  MEMD_CHECK(connected_ == nullptr);
  connected_ = std::make_unique<Connected>(*this, extents, clock, std::move(gates));
}

}  // namespace memd
