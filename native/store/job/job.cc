#include "store/job/job.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {
namespace {

Status no_step_on_disk(const JobRecord& record, bool has_host_tier) {
  return error(StatusCode::integrity,
               "job ",
               record.name,
               has_host_tier ? " kept parameters in tier host alone since step "
                             : " ran on without durability since step ",
               record.undurable_since,
               ", and its memory is gone: what is on disk is no step; go back to a "
               "snapshot (memd snapshot restore), start over with "
               "connect(fresh=True), or drop it with `memd job drop`");
}

}  // namespace

Job::Job(Identity identity, SharedMemory shard_table)
    : identity_(std::move(identity)),
      journal_({.job_id = identity_.job_id,
                .job_name = identity_.name,
                .recorder = *this,
                .shards = shards_,
                .ledger = ledger_}),
      kept_({.job_id = identity_.job_id,
             .shards = shards_,
             .durability = admission_.durability(),
             .ledger = ledger_,
             .journal = journal_,
             .tiles = tiles_,
             .cache = cache_}),
      shards_(identity_.name),
      snapshot_(*this, shards_),
      durable_({.recorder = *this,
                .shards = shards_,
                .snapshot = snapshot_,
                .space = space_,
                .progress = progress_,
                .ledger = ledger_}),
      admission_({.job_name = identity_.name,
                  .shards = shards_,
                  .space = space_,
                  .durable = durable_,
                  .progress = progress_,
                  .journal = journal_,
                  .memory = kept_.memory()}),
      extent_log_(ledger_, space_, tiles_),
      cache_({.job_id = identity_.job_id,
              .job_name = identity_.name,
              .shards = shards_,
              .memory = kept_.memory(),
              .ledger = ledger_,
              .progress = progress_,
              .durability = admission_.durability(),
              .space = space_,
              .lost = lost_,
              .gates = *this},
             std::move(shard_table)) {}

Result<std::unique_ptr<Job>> Job::create(Identity identity) {
  auto table = SharedMemory::create("memd-table", sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  return std::unique_ptr<Job>(new Job(std::move(identity), std::move(table).value()));
}

void Job::connect(Connection connection) {
  cache_.connect(connection.extents, connection.clock, std::move(connection.lease_gates));
  state_ = std::make_unique<PrivateState>(StateParts{.job_id = job_id(),
                                                     .job_name = name(),
                                                     .extents = connection.extents,
                                                     .workers = connection.workers,
                                                     .clock = connection.clock,
                                                     .shards = shards_,
                                                     .slots = cache_.slots(),
                                                     .table = cache_.table(),
                                                     .residencies = cache_.residencies(),
                                                     .policy = cache_.policy(),
                                                     .conditions = conditions_,
                                                     .waits = cache_.waits(),
                                                     .counters = cache_.counters(),
                                                     .activities = cache_.activities(),
                                                     .memory = kept_.memory(),
                                                     .ledger = ledger_,
                                                     .space = space_,
                                                     .progress = progress_,
                                                     .admission = admission_,
                                                     .durable = durable_,
                                                     .journal = journal_,
                                                     .lost = lost_,
                                                     .tiles = tiles_,
                                                     .host_tiles = kept_.host_tiles(),
                                                     .log = extent_log_,
                                                     .gate = *this});
  memory_commits_ =
      std::make_unique<MemoryCommits>(MemoryCommits::Parts{.job_id = job_id(),
                                                           .snapshot = snapshot_,
                                                           .ledger = ledger_,
                                                           .tiles = tiles_,
                                                           .workers = connection.workers});
  step_gate_ = std::move(connection.step_gate);
  steps_ = std::make_unique<Steps>(StepParts{.job = state_->parts(),
                                             .state = *state_,
                                             .sessions = cache_.sessions().list(),
                                             .group = cache_.group(),
                                             .progress = progress_,
                                             .durable = durable_,
                                             .journal = journal_,
                                             .plans = cache_.plans(),
                                             .room = cache_.room(),
                                             .operations = operations_,
                                             .commits = connection.commits,
                                             .memory_commits = *memory_commits_,
                                             .times = connection.times,
                                             .gate = *step_gate_});
}

Result<std::vector<ShardInfo>> Job::declare(LabelledSpecs declared) {
  const std::vector<ShardSpec>& specs = declared.specs();
  const auto planned = shards_.plan(specs, admission_.arena_bytes_max());
  if (!planned.is_ok()) return planned.status();
  const Declaration& declaration = planned.value();
  if (declaration.asks_for_more) {
    Status room = admission_.make_room(declaration.wanted);
    if (!room.is_ok() && declaration.wanted.host_tier_bytes() != 0) {
      // Tiles that are only cached give way.
      state_->drop_clean_tiles();
      room = admission_.make_room(declaration.wanted);
    }
    if (!room.is_ok()) return room;
  }
  const size_t bucket_begin = shards_.buckets().size();
  shards_.add(declaration, declared);
  admission_.settle_host_tier();
  std::vector<uint32_t> added_ids;
  for (const ShardSpec* spec : declaration.parameters) added_ids.push_back(begin_shard(*spec));
  for (const ShardSpec* spec : declaration.bytes) added_ids.push_back(begin_shard(*spec));
  admission_.reserve_metadata();
  std::vector<uint32_t> changed_ids;
  for (const auto& [shard_id, keeps] : declaration.maxima_changed) {
    snapshot_.before_change(shard_id);
    shards_[shard_id].keeps_maximum = keeps;
    changed_ids.push_back(shard_id);
    durable_.note_change();
  }
  // First what came: it must be told once, and a maximum may be told again.
  if (!added_ids.empty()) journal_.note_added(added_ids, bucket_begin);
  if (!changed_ids.empty()) journal_.note_maxima(changed_ids);
  kept_.expect_shards();
  std::vector<ShardInfo> infos;
  infos.reserve(specs.size());
  for (const ShardSpec& spec : specs) {
    const uint32_t shard_id = shards_.id_of(spec.name);
    cache_.residencies().settle_pending(*shards_[shard_id].value);
    infos.push_back(info(shard_id));
  }
  return infos;
}

uint32_t Job::begin_shard(const ShardSpec& spec) {
  const uint32_t shard_id = shards_.id_of(spec.name);
  // The id may have been another shard's.
  ledger_.reset_shard(shard_id);
  snapshot_.added(shard_id);
  durable_.note_change();
  return shard_id;
}

ShardInfo Job::info(uint32_t shard_id) const {
  const Shard& shard = shards_[shard_id];
  return {.shard_id = shard_id,
          .spec = shard.spec(),
          .generation = shard.generation,
          .written = shard.written,
          .bytes = shard.bytes,
          .lost = lost_.contains(shard_id),
          .unreadable = false};
}

JobInfo Job::job_info() const {
  const JobMemory* const held = memory();
  return {.job_id = job_id(),
          .name = name(),
          .uid = uid(),
          .created = false,
          .committed_step = progress_.committed_step(),
          .durable_step = progress_.durable_step(),
          .durability = admission_.durability_asked().text(),
          .weight = admission_.weight().value(),
          .session_count = static_cast<uint32_t>(cache_.sessions().size()),
          .host_bytes = held == nullptr ? 0 : held->bytes(),
          .host_bytes_used = held == nullptr
                                 ? 0
                                 : held->arena().used_bytes() + held->private_side().used_bytes() +
                                       held->host_side().used_bytes(),
          .nvme_bytes = space_.quota_bytes(),
          .nvme_bytes_used = space_.used_bytes(),
          .metadata_bytes = admission_.metadata_bytes(),
          .snapshot_bytes = space_.snapshots().kept_bytes(),
          .snapshot_count = space_.snapshots().count,
          .host_tier_bytes = shards_.declared().host_tier_bytes(),
          .shard_count = static_cast<uint32_t>(shards_.count()),
          .element_count = shards_.sums().element_count(),
          .lease_count = cache_.slots().lease_count(),
          .lost_shards = lost_.names(),
          .unreadable_shards = {}};
}

JobRecord Job::fields() const {
  JobRecord record{.job_id = job_id(),
                   .uid = uid(),
                   .name = name(),
                   .step = progress_.committed_step(),
                   .shards = {},
                   .buckets = {},
                   .undurable_since = progress_.undurable_since()};
  admission_.write(record);
  return record;
}

JobRecord Job::record() const {
  JobRecord record = fields();
  shards_.write(record);
  return record;
}

Result<std::unique_ptr<Job>> Job::restore(const JobRecord& record,
                                          const std::vector<uint32_t>& given_ids) {
  if (record.undurable_since != 0 && given_ids.empty() && record.names_extents()) {
    return restore(record.without_extents());
  }
  auto created = create({.job_id = record.job_id, .name = record.name, .uid = record.uid});
  if (!created.is_ok()) return created.status();
  std::unique_ptr<Job> job = std::move(created).value();
  job->admission_.restore(record);
  const bool is_durable = record.undurable_since == 0;
  job->progress_.restore(record.step, is_durable ? record.step : 0, record.undurable_since);
  job->shards_.restore(record, given_ids);
  job->admission_.settle_host_tier();
  if (!is_durable)
    job->progress_.stop(no_step_on_disk(record, job->shards_.declared().has_host_tier()));
  job->space_.count(job->shards_.each_replica());
  job->durable_.restore(record);
  job->durable_.set_catalogue_bytes(job->admission_.catalogue_bytes());
  job->admission_.reserve_metadata();
  return job;
}

const Slot* Job::early_slot(const Entry& entry) const {
  return state_ == nullptr ? nullptr : state_->early().slot_of(entry);
}

void Job::note_written(uint32_t shard_id) {
  snapshot_.before_change(shard_id);
  shards_[shard_id].written = true;
  // A catalogue says the same of scratch whether it is written or not.
  if (!is_scratch(*shards_[shard_id].value)) durable_.note_change();
  journal_.note_shard(shard_id);
}

void Job::lose(const Entry& entry, size_t replica, const Status& why) {
  cache_.lose(entry, replica, why);
}

std::set<uint32_t> Job::unreadable_shards(const ExtentStore& extents) const {
  std::set<uint32_t> all;
  if (extents.unreadable_places().empty()) return all;
  const auto look = [&](const Entry& entry, const auto& replicas) {
    for (size_t i = 0; i < replicas.size(); ++i) {
      const Replica& replica = replicas[i];
      if (!replica.exists() || !extents.unreadable_places().contains(replica.extent().address))
        continue;
      const std::vector<uint32_t> inside = shards_.shards_in(entry, i);
      all.insert(inside.begin(), inside.end());
    }
  };
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr) look(*entry, entry->replicas());
  }
  for (const Bucket& bucket : shards_.buckets()) look(*bucket.value, bucket.rest);
  return all;
}

void Job::remove(uint32_t shard_id, uint64_t session_id, ExtentStore& extents) {
  Shard& shard = shards_[shard_id];
  Entry& entry = *shard.value;
  MEMD_CHECK_EQ(entry.task_count(), 0u);
  cache_.table().withdraw(entry);
  durable_.keep(shard_id);
  // From here on it has no bytes, whoever reads the ledger.
  ledger_.reset_shard(shard_id);
  if (entry.is_resident()) cache_.residencies().move(entry, entry.residency(), Residency::absent);
  MEMD_CHECK(entry.residency() == Residency::absent);
  if (entry.slot() != nullptr) cache_.slots().retire(entry.take_slot());
  if (entry.pending() != nullptr) cache_.slots().retire(entry.take_pending());
  for (size_t i = 0; i < entry.replicas().size(); ++i) {
    if (!entry.replicas()[i].exists()) continue;
    if (is_scratch(entry)) {
      space_.replace_gradient(entry.replica_place(i), {}, extents);
    } else {
      space_.release(entry.replica_place(i), extents);
    }
  }
  journal_.forget_extents(entry);
  space_.forget(entry.replicas());
  lost_.remove(shard_id);
  std::set<uint64_t> known_to;
  for (const auto& session : cache_.sessions()) known_to.insert(session->session_id);
  known_to.erase(session_id);
  shards_.remove(shard_id, std::move(known_to));
  cache_.waits().wake(WaitList::room);
  admission_.reserve_metadata();
  durable_.note_change();
  journal_.note_removed(shard_id);
}

std::vector<ExtentRecord> Job::extents() const {
  std::vector<ExtentRecord> extents = space_.superseded();
  const auto add = [&extents](const auto& replicas) {
    for (const Replica& replica : replicas) {
      if (replica.exists()) extents.push_back(replica.extent());
    }
  };
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr) add(entry->replicas());
  }
  for (const Bucket& bucket : shards_.buckets()) add(bucket.rest);
  return extents;
}

void Job::drop_gradient(Entry& entry, ExtentStore& extents) {
  MEMD_FAILPOINT("gradient.before_drop");
  if (entry.is_resident()) cache_.residencies().move(entry, entry.residency(), Residency::absent);
  if (entry.slot() != nullptr) cache_.slots().retire(entry.take_slot());
  cache_.waits().wake(WaitList::room);
  for (size_t i = 0; i < entry.replicas().size(); ++i) {
    space_.replace_gradient(entry.replica_place(i), {}, extents);
    extent_log_.note_value(entry, i);
  }
}

Status check_not_streamed(const Job& job) {
  if (job.cache().slots().service_lease_count() == 0) return Status::ok();
  return error(StatusCode::in_use,
               "job ",
               job.name(),
               " is being streamed over gRPC; try again when that has ended");
}

}  // namespace memd
