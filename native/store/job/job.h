// One training job: its shards, where their bytes are, its memory and its sessions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/workers.h"
#include "ring/shared_memory.h"
#include "store/cache/conditions.h"
#include "store/cache/entry.h"
#include "store/cache/job_cache.h"
#include "store/cache/job_memory.h"
#include "store/cache/labelled_specs.h"
#include "store/cache/lease_gates.h"
#include "store/cache/residencies.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/format/catalogue.h"
#include "store/job/statistics.h"
#include "store/journal/job_ledger.h"
#include "store/journal/progress.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/space/lost_shards.h"
#include "store/state/admission.h"
#include "store/state/catalogue_snapshot.h"
#include "store/state/durable_state.h"
#include "store/state/extent_log.h"
#include "store/state/job_journal.h"
#include "store/state/kept_memory.h"
#include "store/state/memory_commits.h"
#include "store/state/private_state.h"
#include "store/state/private_tiles.h"
#include "store/state/state_gate.h"
#include "store/step/operations.h"
#include "store/step/step_gate.h"
#include "store/step/steps.h"

namespace memd {

/// Makes the owners of one job's state, one for each folder below this one, and answers what needs
/// several of them: declarations, records and reports. Owned by the ShardStore; the server thread
/// is the only one that touches it. Nothing blocks.
class Job final : private ResidencyGates, private StateGate, private JobRecorder {
 public:
  struct Identity {
    uint64_t job_id = 0;
    std::string name;
    uint32_t uid = 0;
  };
  /// The daemon's part in a job.
  struct Connection {
    ExtentStore& extents;
    Workers& workers;
    const Clock& clock;
    Commits& commits;
    StepTimes& times;
    std::unique_ptr<LeaseGates> lease_gates;
    std::unique_ptr<StepGate> step_gate;
  };

  static Result<std::unique_ptr<Job>> create(Identity identity);
  /// From a catalogue; reserves nothing, and takes no extent of one that says that they are
  /// overwritten since, unless memory says more (`given_ids`). `given_ids`: of the record's shards,
  /// ascending in no order, or empty: counted from 0.
  static Result<std::unique_ptr<Job>> restore(const JobRecord& record,
                                              const std::vector<uint32_t>& given_ids = {});
  /// Once, before anybody leases anything.
  void connect(Connection connection);

  uint64_t job_id() const { return identity_.job_id; }
  const std::string& name() const { return identity_.name; }
  uint32_t uid() const { return identity_.uid; }

  // Owners of the rest of it.
  JobProgress& progress() { return progress_; }
  const JobProgress& progress() const { return progress_; }
  Admission& admission() { return admission_; }
  const Admission& admission() const { return admission_; }
  JobSpace& space() { return space_; }
  const JobSpace& space() const { return space_; }
  LostShards& lost() { return lost_; }
  const LostShards& lost() const { return lost_; }
  JobJournal& journal() { return journal_; }
  Shards& shards() { return shards_; }
  const Shards& shards() const { return shards_; }
  DurableState& durable() { return durable_; }
  const DurableState& durable() const { return durable_; }
  KeptMemory& kept() { return kept_; }
  /// nullptr before the first session attaches.
  JobMemory* memory() const { return kept_.memory().get(); }
  PrivateTiles& tiles() { return tiles_; }
  const PrivateTiles& tiles() const { return tiles_; }
  Conditions& conditions() { return conditions_; }
  const Conditions& conditions() const { return conditions_; }
  Operations& operations() { return operations_; }
  const Operations& operations() const { return operations_; }
  JobCache& cache() { return cache_; }
  const JobCache& cache() const { return cache_; }
  /// After connect().
  PrivateState& state() { return *state_; }
  const PrivateState& state() const { return *state_; }
  /// After connect().
  MemoryCommits& memory_commits() { return *memory_commits_; }
  /// After connect().
  Steps& steps() { return *steps_; }
  const Steps& steps() const { return *steps_; }

  /// Nobody attaches from here on, because it "is being dropped" or "is being restored"; nullptr:
  /// everybody may.
  void set_ending(const char* what) { ending_ = what; }
  const char* ending() const { return ending_; }

  /// Makes shards known. Existing ones are checked, new parameters are packed into buckets: nothing
  /// changes where one of them is refused, or where all that the job declared needs more than its
  /// quotas. Shards that an earlier daemon accepted are never refused.
  Result<std::vector<ShardInfo>> declare(LabelledSpecs declared);
  /// Forgets a blob; its extents are free after the next commit. Nothing leases it.
  void remove(uint32_t shard_id, uint64_t session_id, ExtentStore& extents);
  void drop_gradient(Entry& entry, ExtentStore& extents);
  /// Replica `replica` of the entry, or the rest of that tile, is gone from the disk.
  void lose(const Entry& entry, size_t replica, const Status& why) override;
  /// All extents that the job holds.
  std::vector<ExtentRecord> extents() const;

  ShardInfo info(uint32_t shard_id) const;
  JobInfo job_info() const;
  JobRecord record() const override;
  JobRecord fields() const override;
  /// Shards with bytes that the device failed to read, and that nobody has read since.
  std::set<uint32_t> unreadable_shards(const ExtentStore& extents) const;

 private:
  Job(Identity identity, SharedMemory shard_table);

  // ResidencyGates.
  const Slot* early_slot(const Entry& entry) const override;
  void before_change(uint32_t shard_id) override { snapshot_.before_change(shard_id); }
  void note_written(uint32_t shard_id) override;
  // JobRecorder.
  uint64_t catalogue_bytes() const override { return admission_.catalogue_bytes(); }
  void catalogue_bytes_changed() override { admission_.reserve_metadata(); }

  /// The id of a shard that was just added.
  uint32_t begin_shard(const ShardSpec& spec);

  const Identity identity_;
  JobProgress progress_;
  JobSpace space_;
  LostShards lost_;
  JobLedger ledger_;  // the memory tells it of segments, and so goes first
  JobJournal journal_;
  KeptMemory kept_;
  PrivateTiles tiles_;
  Conditions conditions_;
  Operations operations_;
  Shards shards_;
  CatalogueSnapshot snapshot_;
  DurableState durable_;
  Admission admission_;
  ExtentLog extent_log_;
  JobCache cache_;
  std::unique_ptr<PrivateState> state_;
  std::unique_ptr<MemoryCommits> memory_commits_;
  std::unique_ptr<StepGate> step_gate_;
  std::unique_ptr<Steps> steps_;
  const char* ending_ = nullptr;
};

/// Why a job cannot end now: a tensor of it is being sent or received over gRPC.
Status check_not_streamed(const Job& job);

}  // namespace memd
