#include "store/job.h"

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

// A JobRecord without its name, buckets and shards; catalogue_test.cc compares.
constexpr uint64_t kJobRecordBytes = 114;

constexpr uint64_t kRecordMemoryBytesMin = 16_MiB;

/// What is had in one piece is had in many a moment later: only the server thread allocates so
/// much. Nothing that is made of it has to be undone then.
bool can_allocate(uint64_t bytes) {
  const std::unique_ptr<std::byte[]> piece(new (std::nothrow) std::byte[bytes]);
  return piece != nullptr;
}

}  // namespace

Result<std::unique_ptr<Job>> Job::create(Identity identity) {
  auto table = SharedMemory::create("memd-table", sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  return std::unique_ptr<Job>(new Job(std::move(identity), std::move(table).value()));
}

void Job::expect_memory() {
  if (memory != nullptr) memory->expect_arena_bytes(shards_.entry_bytes());
}

Result<std::vector<ShardInfo>> Job::declare(const std::vector<ShardSpec>& specs) {
  const auto planned = shards_.plan(specs, arena_bytes_max());
  if (!planned.is_ok()) return planned.status();
  const Declaration& declaration = planned.value();
  if (declaration.asks_for_more) {
    if (Status room = check_space(declaration.wanted); !room.is_ok()) return room;
  }
  shards_.add(declaration);
  std::vector<uint32_t> added_ids;  // without parameters
  for (const ShardSpec* spec : declaration.parameters) begin_shard(*spec);
  for (const ShardSpec* spec : declaration.bytes) added_ids.push_back(begin_shard(*spec));
  reserve_metadata();
  if (!declaration.parameters.empty()) {
    journal_.note_layout();
  } else if (!added_ids.empty()) {
    journal_.note_added(added_ids);
  }
  expect_memory();
  std::vector<ShardInfo> infos;
  infos.reserve(specs.size());
  for (const ShardSpec& spec : specs) infos.push_back(info(shards_.id_of(spec.name)));
  return infos;
}

uint32_t Job::begin_shard(const ShardSpec& spec) {
  const uint32_t shard_id = shards_.id_of(spec.name);
  // The id may have been another shard's.
  journal_.reset_shard(shard_id);
  durable_.note_change();
  return shard_id;
}

uint64_t Job::arena_bytes_max() const {
  return memory == nullptr ? std::numeric_limits<uint64_t>::max() : memory->arena_bytes_max();
}

void Job::begin_updates(Bucket& bucket) {
  if (shards_.begin_updates(bucket)) reserve_metadata();
}

uint64_t Job::catalogue_bytes(const DeclaredSpace& declared) const {
  const uint64_t bytes = kJobRecordBytes + name.size() + declared.catalogue_bytes();
  return align_up(bytes, kBlockBytes);
}

Job::Connected::Connected(Job& job,
                          ExtentStore& extents,
                          const Clock& clock,
                          std::unique_ptr<LeaseGates> lease_gates)
    : gates(std::move(lease_gates)),
      waiters(job.shards_, job.slots_, job.waits_, job.counters, clock),
      parts{.job_id = job.job_id,
            .job_name = job.name,
            .shards = job.shards_,
            .slots = job.slots_,
            .table = job.table_,
            .policy = job.policy_,
            .window = job.prefetch_window_,
            .residencies = job.residencies_,
            .waiters = waiters,
            .waits = job.waits_,
            .memory = job.memory,
            .ledger = job.journal_.ledger(),
            .sessions = job.sessions,
            .progress = job.progress,
            .space = job.space,
            .lost = job.lost,
            .counters = job.counters,
            .activities = job.activities,
            .gates = *gates,
            .extents = extents,
            .clock = clock},
      room(parts),
      fetches(parts),
      half_written(parts),
      prefetcher(parts, job.plans_, room, fetches),
      leases(parts, room, fetches, half_written) {}

void Job::connect(ExtentStore& extents, const Clock& clock, std::unique_ptr<LeaseGates> gates) {
  MEMD_CHECK(connected_ == nullptr);
  connected_ = std::make_unique<Connected>(*this, extents, clock, std::move(gates));
}

SpaceNeeded Job::space_needed(const DeclaredSpace& declared) const {
  SpaceNeeded needed = declared.needed(durability, arena_bytes_max(), kTilesInFlight);
  needed.catalogue_bytes = 2 * catalogue_bytes(declared);
  return needed;
}

SpaceNeeded Job::space_needed() const { return space_needed(shards_.declared()); }

uint64_t Job::metadata_bytes() const {
  // After shards were deleted, the one on disk may be larger than the next.
  const uint64_t next_bytes = catalogue_bytes(shards_.declared());
  return next_bytes + std::max(next_bytes, durable_.catalogue_bytes_max());
}

void Job::reserve_metadata() {
  const bool is_within = space_needed().total() <= space.quota_bytes();
  space.set_metadata_bytes(is_within ? metadata_bytes() : 0);
}

Status Job::check_space(const DeclaredSpace& wanted) const {
  // A job without memory is in nobody's use: it is being made from what was accepted before.
  if (memory == nullptr) return Status::ok();
  if (const SpaceNeeded needed = space_needed(wanted); needed.total() > space.quota_bytes()) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would need more than its disk quota; declare less, or start it anew with a "
                 "larger nvme_bytes: ",
                 needed.total(),
                 " bytes = ",
                 needed.text(),
                 "; nvme_bytes ",
                 space.quota_bytes());
  }
  // Records lie outside the pool: each job has room for a model of some ten thousand shards, and
  // more where it was admitted to more memory.
  const uint64_t memory_bytes_max = kRecordMemoryBytesMin + host_bytes / 2;
  const uint64_t memory_bytes = wanted.memory_bytes();
  if (memory_bytes > memory_bytes_max) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would have more shards than the daemon keeps records of; make fewer and larger "
                 "ones, or start it anew with a larger host_bytes: ",
                 memory_bytes,
                 " bytes of records, at most ",
                 kRecordMemoryBytesMin,
                 " + half of host_bytes (",
                 host_bytes,
                 ")");
  }
  const uint64_t more_bytes =
      memory_bytes - std::min(memory_bytes, shards_.declared().memory_bytes());
  if (!can_allocate(more_bytes)) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 ": the daemon has no memory for records of these shards; declare fewer, or give "
                 "its process more: ",
                 more_bytes,
                 " bytes");
  }
  return Status::ok();
}

ShardInfo Job::info(uint32_t shard_id) const {
  const Shard& shard = shards_[shard_id];
  return {.shard_id = shard_id,
          .spec = shard.spec(),
          .generation = shard.generation,
          .written = shard.written,
          .bytes = shard.bytes,
          .lost = lost.contains(shard_id),
          .unreadable = false};
}

void Job::set_weight(JobWeight weight) {
  weight_ = weight;
  durable_.note_change();
  journal_.note_layout();
}

JobInfo Job::job_info() const {
  return {.job_id = job_id,
          .name = name,
          .uid = uid,
          .created = false,
          .committed_step = progress.committed_step(),
          .durable_step = progress.durable_step(),
          .durability = durability.text(),
          .weight = weight_.value(),
          .session_count = static_cast<uint32_t>(sessions.size()),
          .host_bytes = memory == nullptr ? 0 : memory->bytes(),
          .host_bytes_used = memory == nullptr ? 0
                                               : memory->arena().used_bytes() +
                                                     memory->private_side().used_bytes(),
          .nvme_bytes = space.quota_bytes(),
          .nvme_bytes_used = space.used_bytes(),
          .metadata_bytes = metadata_bytes(),
          .shard_count = static_cast<uint32_t>(shards_.count()),
          .element_count = shards_.element_count(),
          .lease_count = slots_.lease_count(),
          .lost_shards = lost.names(),
          .unreadable_shards = {}};
}

JobRecord Job::record() const {
  JobRecord record{.job_id = job_id,
                   .uid = uid,
                   .name = name,
                   .step = progress.committed_step(),
                   .host_bytes = host_bytes,
                   .nvme_bytes = space.quota_bytes(),
                   .shards = {},
                   .buckets = {},
                   .durability = durability.code(),
                   .undurable_since = progress.undurable_since(),
                   .weight = weight_.code()};
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
  job->durability = Durability::of_code(record.durability);
  job->weight_ = JobWeight::of_code(record.weight);
  const bool is_durable = record.undurable_since == 0;
  job->progress.restore(record.step, is_durable ? record.step : 0, record.undurable_since);
  if (!is_durable) {
    job->progress.stop(
        error(StatusCode::integrity,
              "job ",
              record.name,
              " ran on without durability since step ",
              record.undurable_since,
              ", and its memory is gone: what is on disk is no step; start over with "
              "connect(fresh=True), or drop it with `memd job drop`"));
  }
  job->host_bytes = record.host_bytes;
  job->space.set_quota_bytes(record.nvme_bytes);
  job->shards_.restore(record, given_ids);
  job->space.count(job->shards_.each_replica());
  job->durable_.restore(record);
  job->durable_.set_catalogue_bytes(job->catalogue_bytes(job->shards_.declared()));
  job->reserve_metadata();
  return job;
}

const Slot* Job::early_slot(const Entry& entry) const {
  return state_ == nullptr ? nullptr : state_->early().slot_of(entry);
}

void Job::open_steps(Commits& commits, StepTimes& times, std::unique_ptr<StepGate> gate) {
  step_gate_ = std::move(gate);
  steps_ = std::make_unique<Steps>(StepParts{.job = state_->parts(),
                                             .state = *state_,
                                             .sessions = sessions,
                                             .progress = progress,
                                             .durable = durable_,
                                             .journal = journal_,
                                             .plans = plans_,
                                             .room = room(),
                                             .operations = operations,
                                             .commits = commits,
                                             .times = times,
                                             .gate = *step_gate_});
}

void Job::open_state(ExtentStore& extents, UpdateWorkers& workers, const Clock& clock) {
  state_ = std::make_unique<PrivateState>(StateParts{.job_id = job_id,
                                                     .job_name = name,
                                                     .extents = extents,
                                                     .workers = workers,
                                                     .clock = clock,
                                                     .shards = shards_,
                                                     .slots = slots_,
                                                     .table = table_,
                                                     .residencies = residencies_,
                                                     .policy = policy_,
                                                     .conditions = conditions,
                                                     .waits = waits_,
                                                     .counters = counters,
                                                     .activities = activities,
                                                     .memory = memory,
                                                     .ledger = journal_.ledger(),
                                                     .space = space,
                                                     .progress = progress,
                                                     .durability = durability,
                                                     .lost = lost,
                                                     .tiles = tiles,
                                                     .log = extent_log_,
                                                     .gate = *this});
}

void Job::note_written(uint32_t shard_id) {
  shards_[shard_id].written = true;
  durable_.note_change();
  journal_.note_shard(shard_id);
}

void Job::lose(const Entry& entry, size_t replica, const Status& why) {
  if (entry.kind == EntryKind::gradient) return;
  for (const uint32_t shard_id : shards_.shards_in(entry, replica)) {
    lost.add(shard_id, std::string(shards_[shard_id].name()), why);
  }
}

std::set<uint32_t> Job::unreadable_shards(const ExtentStore& extents) const {
  std::set<uint32_t> all;
  if (!extents.has_unreadable()) return all;
  const auto look = [&](const Entry& entry, const auto& replicas) {
    for (size_t i = 0; i < replicas.size(); ++i) {
      const Replica& replica = replicas[i];
      if (!replica.exists() || !extents.is_unreadable(replica.extent())) continue;
      const std::vector<uint32_t> inside = shards_.shards_in(entry, i);
      all.insert(inside.begin(), inside.end());
    }
  };
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr) look(*entry, entry->replicas);
  }
  for (const Bucket& bucket : shards_.buckets()) look(*bucket.value, bucket.rest);
  return all;
}

void Job::remove(uint32_t shard_id, ExtentStore& extents) {
  Shard& shard = shards_[shard_id];
  Entry& entry = *shard.value;
  MEMD_CHECK_EQ(entry.task_count(), 0u);
  table_.withdraw(entry);
  // From here on it has no bytes, whoever reads the ledger.
  journal_.reset_shard(shard_id);
  if (entry.is_resident()) residencies_.move(entry, entry.residency(), Residency::absent);
  MEMD_CHECK(entry.residency() == Residency::absent);
  if (entry.slot != nullptr) slots_.retire(std::move(entry.slot));
  if (entry.pending != nullptr) slots_.retire(std::move(entry.pending));
  for (Replica& replica : entry.replicas) {
    if (replica.exists()) space.release(replica, extents);
  }
  journal_.forget_extents(entry);
  space.forget(entry.replicas);
  durable_.keep(shard_id);
  lost.remove(shard_id);
  shards_.remove(shard_id);
  reserve_metadata();
  durable_.note_change();
  journal_.note_removed(shard_id);
}

std::vector<ExtentRecord> Job::take_extents() {
  std::vector<ExtentRecord> extents = space.take_superseded();
  const auto take = [&extents](ReplicaList& replicas) {
    for (Replica& replica : replicas) {
      if (replica.exists()) extents.push_back(replica.extent());
      replica = {};
    }
  };
  for (Entry* const entry : shards_.entries()) {
    if (entry != nullptr) take(entry->replicas);
  }
  for (Bucket& bucket : shards_.buckets()) take(bucket.rest);
  return extents;
}

bool Job::gradients_fit() const {
  if (memory == nullptr) return true;
  return shards_.gradient_bytes() + shards_.largest_gradient_bytes() <= memory->arena_bytes_max();
}

void Job::drop_gradient(Bucket& bucket, ExtentStore& extents) {
  Entry& entry = *bucket.gradient;
  MEMD_FAILPOINT("gradient.before_drop");
  if (entry.is_resident()) residencies_.move(entry, entry.residency(), Residency::absent);
  if (entry.slot != nullptr) slots_.retire(std::move(entry.slot));
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    space.replace_gradient(entry.replicas[i], {}, extents);
    extent_log_.note_value(entry, i);
  }
}

}  // namespace memd
