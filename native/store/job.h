// One training job: its shards, where their bytes are, its memory and its sessions.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ring/server_ring.h"
#include "store/cache/activities.h"
#include "store/cache/conditions.h"
#include "store/cache/entry.h"
#include "store/cache/eviction.h"
#include "store/cache/fetches.h"
#include "store/cache/half_written.h"
#include "store/cache/job_memory.h"
#include "store/cache/lease_waiters.h"
#include "store/cache/leases.h"
#include "store/cache/pins.h"
#include "store/cache/plan_progress.h"
#include "store/cache/prefetch_window.h"
#include "store/cache/prefetcher.h"
#include "store/cache/residencies.h"
#include "store/cache/room.h"
#include "store/cache/session.h"
#include "store/cache/shard_table.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/wait_lists.h"
#include "store/format/catalogue.h"
#include "store/format/durability.h"
#include "store/journal/progress.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/space/lost_shards.h"
#include "store/state/durable_state.h"
#include "store/state/extent_log.h"
#include "store/state/job_journal.h"
#include "store/state/private_state.h"
#include "store/state/private_tiles.h"
#include "store/state/state_gate.h"
#include "store/statistics.h"
#include "store/step/operations.h"
#include "store/step/step_gate.h"
#include "store/step/steps.h"

namespace memd {

/// Owned by the ShardStore; the server thread is the only one that touches it.
class Job final : private ResidencyGates, private StateGate, private JobRecorder {
 public:
  struct Identity {
    uint64_t job_id = 0;
    std::string name;
    uint32_t uid = 0;
  };

  static Result<std::unique_ptr<Job>> create(Identity identity);

  // Owners of the rest of it.
  Slots& slots() { return slots_; }
  const Slots& slots() const { return slots_; }
  ShardTable& table() { return table_; }
  FarthestNextUse& policy() { return policy_; }
  PrefetchWindow& prefetch_window() { return prefetch_window_; }
  Residencies& residencies() { return residencies_; }
  WaitLists& waits() { return waits_; }
  PlanProgress& plans() { return plans_; }
  ExtentLog& extent_log() { return extent_log_; }
  /// After open_state().
  PrivateState& state() { return *state_; }
  const PrivateState& state() const { return *state_; }
  /// Once, before connect(): what the job's private state works with.
  void open_state(ExtentStore& extents, UpdateWorkers& workers, const Clock& clock);
  /// After open_steps().
  Steps& steps() { return *steps_; }
  const Steps& steps() const { return *steps_; }
  /// Once, after connect().
  void open_steps(Commits& commits, StepTimes& times, std::unique_ptr<StepGate> gate);
  // With connect() alone.
  LeaseWaiters& waiters() { return connected_->waiters; }
  const LeaseWaiters& waiters() const { return connected_->waiters; }
  Room& room() { return connected_->room; }
  HalfWritten& half_written() { return connected_->half_written; }
  Prefetcher& prefetcher() { return connected_->prefetcher; }
  Leases& leases() { return connected_->leases; }
  /// Once, before anybody leases anything.
  void connect(ExtentStore& extents, const Clock& clock, std::unique_ptr<LeaseGates> gates);
  JobJournal& journal() { return journal_; }
  const JobJournal& journal() const { return journal_; }
  DurableState& durable() { return durable_; }
  const DurableState& durable() const { return durable_; }

  /// Makes shards known. Existing ones are checked, new parameters are packed into buckets: nothing
  /// changes where one of them is refused, or where all that the job declared needs more than its
  /// quotas. What an earlier daemon was told of is never refused.
  Result<std::vector<ShardInfo>> declare(const std::vector<ShardSpec>& specs);
  /// Forgets a blob; its extents are free after the next commit. Nothing leases it.
  void remove(uint32_t shard_id, ExtentStore& extents);
  /// Tells the memory what the arena would like to hold. A shard more costs no look at the others:
  /// blobs are declared one by one.
  void expect_memory();
  Shards& shards() { return shards_; }
  const Shards& shards() const { return shards_; }
  /// Whether all gradients fit beside the largest bucket's parameters.
  bool gradients_fit() const;
  /// A step updates it, whatever was declared.
  void begin_updates(Bucket& bucket) override;
  /// The part of nvme_bytes that all of its shards need, written and updated.
  SpaceNeeded space_needed() const;
  /// Bytes of the catalogue, on disk and as the next commit writes it, side by side.
  uint64_t metadata_bytes() const;
  ShardInfo info(uint32_t shard_id) const;
  JobInfo job_info() const;
  /// Its share of what other jobs want too: devices and workers. On disk with the next commit.
  JobWeight weight() const { return weight_; }
  void set_weight(JobWeight weight);
  JobRecord record() const override;
  /// From a catalogue; reserves nothing, and takes no extent of one that says that they are
  /// overwritten since, unless memory says more (`given_ids`). `given_ids`: of the record's shards,
  /// ascending in no order, or empty: counted from 0.
  static Result<std::unique_ptr<Job>> restore(const JobRecord& record,
                                              const std::vector<uint32_t>& given_ids = {});
  /// Replica `replica` of the entry, or the rest of that tile, is gone from the disk. A gradient is
  /// no shard's state: the next backward makes it again.
  void lose(const Entry& entry, size_t replica, const Status& why) override;
  /// Shards with bytes that the device failed to read, and that nobody has read since.
  std::set<uint32_t> unreadable_shards(const ExtentStore& extents) const;

  /// All extents of the job, for release; the job is at its end.
  std::vector<ExtentRecord> take_extents();

  bool is_tile_dirty(const Entry& entry, size_t tile) const {
    return entry.kind == EntryKind::parameter && tiles.is_dirty(tile_key(entry.owner, tile));
  }
  void drop_gradient(Bucket& bucket, ExtentStore& extents);

  const uint64_t job_id;
  const std::string name;
  const uint32_t uid;
  JobProgress progress;
  Durability durability;
  uint64_t host_bytes = 0;
  JobSpace space;

 private:
  JobJournal journal_;  // `memory` tells it of segments, and so goes first

 public:
  /// Nothing before the first session attaches: an idle job holds disk only.
  std::unique_ptr<JobMemory> memory;
  PrivateTiles tiles;
  Conditions conditions;
  Operations operations;

  const Slot* early_slot(const Entry& entry) const override;
  void note_written(uint32_t shard_id) override;
  void set_changed() override { durable_.note_change(); }
  uint64_t gradient_bytes_to_spill() const override {
    return gradients_fit() ? 0 : shards_.gradient_bytes();
  }

  std::vector<std::shared_ptr<Session>> sessions;
  Activities activities;
  JobCounters counters;
  Stalls stalls_ended;  // of sessions that have ended
  LostShards lost;
  /// Its turn to be dropped will come: nobody attaches any more.
  bool ending = false;

 private:
  Job(Identity identity, SharedMemory shard_table)
      : job_id(identity.job_id),
        name(std::move(identity.name)),
        uid(identity.uid),
        journal_({.job_id = job_id,
                  .job_name = name,
                  .recorder = *this,
                  .shards = shards_,
                  .tiles = tiles}),
        shards_(name),
        durable_({.recorder = *this,
                  .shards = shards_,
                  .space = space,
                  .progress = progress,
                  .journal = journal_}),
        slots_(shards_.entries(), sessions, memory, journal_.ledger()),
        table_(std::move(shard_table), shards_, slots_, progress),
        prefetch_window_(counters),
        residencies_({.entries = shards_.entries(),
                      .slots = slots_,
                      .table = table_,
                      .policy = policy_,
                      .window = prefetch_window_,
                      .waits = waits_,
                      .gates = *this}),
        plans_({.shards = shards_,
                .sessions = sessions,
                .memory = memory,
                .durability = durability,
                .policy = policy_,
                .window = prefetch_window_,
                .counters = counters}) {}

  /// Owners that need the store's devices and clock.
  struct Connected {
    Connected(Job& job,
              ExtentStore& extents,
              const Clock& clock,
              std::unique_ptr<LeaseGates> lease_gates);

    const std::unique_ptr<LeaseGates> gates;
    LeaseWaiters waiters;
    const CacheParts parts;
    Room room;
    Fetches fetches;
    HalfWritten half_written;
    Prefetcher prefetcher;
    Leases leases;
  };

  void catalogue_bytes_changed() override { reserve_metadata(); }
  /// The id of a shard that was just added.
  uint32_t begin_shard(const ShardSpec& spec);
  uint64_t arena_bytes_max() const;
  uint64_t catalogue_bytes(const DeclaredSpace& declared) const;
  SpaceNeeded space_needed(const DeclaredSpace& declared) const;
  /// Tells the quota what metadata_bytes() is. A job that was admitted when catalogues were in no
  /// quota, and that has declared more than its quota holds with them, keeps all for its state: it
  /// trains on.
  void reserve_metadata();
  /// Whether the quotas hold the job with `wanted` in the place of what it has now.
  Status check_space(const DeclaredSpace& wanted) const;
  WaitLists waits_;
  FarthestNextUse policy_;
  Shards shards_;
  DurableState durable_;
  Slots slots_;
  ShardTable table_;
  PrefetchWindow prefetch_window_;
  Residencies residencies_;
  PlanProgress plans_;
  ExtentLog extent_log_{journal_.ledger(), space, tiles};
  std::unique_ptr<PrivateState> state_;
  std::unique_ptr<Connected> connected_;
  std::unique_ptr<StepGate> step_gate_;
  std::unique_ptr<Steps> steps_;

  JobWeight weight_;
};

}  // namespace memd
