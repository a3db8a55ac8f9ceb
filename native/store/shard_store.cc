#include "store/shard_store.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/job_gates.h"

namespace memd {
namespace {

// Outside of every quota: the root, and catalogues of jobs that were admitted before catalogues
// counted. Old and new ones lie side by side during a commit.
constexpr uint64_t kCatalogueReserveBytesMin = 4_MiB;
uint64_t room_wait_ns(const Job& job) {
  return job.cache().waiters().counters_until_now().lease_wait_reason_ns[static_cast<size_t>(
      LeaseWait::room)];
}

uint64_t catalogue_reserve_bytes(uint64_t capacity_bytes) {
  return std::max(kCatalogueReserveBytesMin, capacity_bytes / 100);
}

// A client of ours waits for half a ring of leases at most, and prefetches are dropped within a
// turn: whoever has more open than this wants to fill our memory.
constexpr uint32_t kOpenRequestsMax = 4 * kRingEntries;

// A turn of one session: some 100 µs of leases that are resident. The rest waits until every other
// session had its turn, and the disk and the workers theirs.
constexpr uint32_t kRequestsATurn = 64;

}  // namespace

ShardStore::ShardStore(const ShardStoreParts& parts)
    : pool_(parts.pool),
      io_(parts.io),
      extents_(parts.extents),
      workers_(parts.workers),
      clock_(parts.clock),
      jobs_expected_(parts.jobs_expected),
      keepsakes_(parts.keeper),
      commits_(parts.extents, parts.clock),
      places_(commits_, jobs_),
      scrub_(verification_parts(), parts.clock),
      live_check_(verification_parts(), commits_, parts.clock) {}

VerificationParts ShardStore::verification_parts() {
  return {.extents = extents_,
          .workers = workers_,
          .places = places_,
          .write_anew = [this](uint64_t job_id) { write_catalogue_anew(job_id); }};
}

ShardStore::~ShardStore() {
  end_turns();
  for (auto& [job_id, job] : jobs_) {
    // A keeper keeps for the next daemon: nothing of this is noted.
    job->kept().end();
    for (const auto& session : job->cache().sessions()) job->cache().plans().end(*session);
    job->cache().sessions().clear();
    job->state().early().forget_all();
    job->kept().free_all();
  }
}

void ShardStore::connect(Job& job) {
  auto lease_gates = std::make_unique<JobGates>(
      job,
      JobGates::Calls{.ask_for_flush = [this, &job](auto bucket) { ask_for_flush(job, bucket); }});
  job.connect({.extents = extents_,
               .workers = workers_,
               .clock = clock_,
               .commits = commits_,
               .times = step_times_,
               .lease_gates = std::move(lease_gates),
               .step_gate = step_gate(job)});
}

// ---- Jobs and sessions --------------------------------------------------------------------------

Job* ShardStore::find(uint64_t job_id) const { return jobs_.find(job_id); }

JobInfo ShardStore::info_of(const Job& job) const {
  JobInfo info = job.job_info();
  for (const uint32_t shard_id : job.unreadable_shards(extents_))
    info.unreadable_shards.emplace_back(job.shards()[shard_id].name());
  return info;
}

Result<JobInfo> ShardStore::find_job(const std::string& name) const {
  if (const Job* const job = jobs_.find(name)) return info_of(*job);
  return error(StatusCode::not_found, "there is no job ", name, "; see `memd job list`");
}

std::vector<JobInfo> ShardStore::jobs() const {
  std::vector<JobInfo> infos;
  for (const auto& [job_id, job] : jobs_) infos.push_back(info_of(*job));
  std::sort(infos.begin(), infos.end(), [](const JobInfo& a, const JobInfo& b) {
    return a.job_id < b.job_id;
  });
  return infos;
}

Result<std::vector<ShardInfo>> ShardStore::shards(uint64_t job_id,
                                                  uint32_t first,
                                                  size_t count_max) {
  Job* const job = find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  job->cache().residencies().settle_all_pending();
  const std::set<uint32_t> unreadable = job->unreadable_shards(extents_);
  std::vector<ShardInfo> infos;
  for (uint32_t shard_id = first; shard_id < job->shards().size(); ++shard_id) {
    if (infos.size() == count_max) break;
    if (job->shards()[shard_id].deleted) continue;
    infos.push_back(job->info(shard_id));
    infos.back().unreadable = unreadable.contains(shard_id);
  }
  return infos;
}

Result<ShardInfo> ShardStore::find_shard(uint64_t job_id, const std::string& name) {
  Job* const job = find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  const auto found = job->shards().find(name);
  if (!found) {
    return error(StatusCode::not_found, "job ", job->name(), " holds nothing named ", name);
  }
  job->cache().residencies().settle_pending(*job->shards()[*found].value);
  ShardInfo info = job->info(*found);
  info.unreadable = job->unreadable_shards(extents_).contains(*found);
  return info;
}

uint64_t ShardStore::nvme_bytes_free() const {
  const uint64_t capacity_bytes = extents_.capacity_bytes();
  uint64_t taken_bytes = catalogue_reserve_bytes(capacity_bytes);
  for (const auto& [job_id, job] : jobs_) taken_bytes += job->space().quota_bytes();
  return capacity_bytes > taken_bytes ? capacity_bytes - taken_bytes : 0;
}

Status ShardStore::give_memory(Job& job) {
  const uint64_t segment_bytes = pool_.segment_bytes();
  const uint64_t count = divide_up(job.admission().host_bytes(), segment_bytes);
  const uint64_t count_min = JobMemory::segment_count_min(segment_bytes);
  if (count < count_min) {
    return error(StatusCode::invalid_argument,
                 "job ",
                 job.name(),
                 ": host_bytes is below what two tiles and a slot need; ask for at least ",
                 count_min * segment_bytes,
                 ": ",
                 job.admission().host_bytes(),
                 " bytes");
  }
  if (count > pool_.segment_count_free()) {
    return error(StatusCode::capacity,
                 "job ",
                 job.name(),
                 ": not enough host memory is free; ask for less (host_bytes), drop a job (memd "
                 "job list), or start the daemon "
                 "with a larger --host: wanted ",
                 count * segment_bytes,
                 " bytes, free ",
                 pool_.segment_count_free() * segment_bytes);
  }
  const uint64_t tag = commits_.catalogue_tag(job.job_id());
  if (Status opened = job.kept().open_ledger(keepsakes_, segment_bytes, tag); !opened.is_ok())
    return opened;
  std::vector<Segment> segments;
  MEMD_FAILPOINT("job.before_segments_taken");
  for (uint64_t i = 0; i < count; ++i) segments.push_back(*pool_.take());
  if (Status given = job.kept().give(segments, segment_bytes, io_); !given.is_ok()) {
    for (Segment& segment : segments) add_to_pool(std::move(segment));
    return given;
  }
  job.kept().keep(keepsakes_);
  MEMD_FAILPOINT("job.memory_given");
  job.kept().expect_shards();
  return Status::ok();
}

Result<Job*> ShardStore::admit(const OpenJobRequest& request) {
  const uint64_t segment_bytes = pool_.segment_bytes();
  const uint64_t nvme_free_bytes = nvme_bytes_free();
  if (request.nvme_bytes > nvme_free_bytes) {
    return error(StatusCode::capacity,
                 "job ",
                 request.name,
                 ": not enough disk space is free; ask for less (nvme_bytes), drop a job (memd job "
                 "list), or start the daemon with "
                 "a larger --nvme: wanted ",
                 request.nvme_bytes,
                 " bytes, free ",
                 nvme_free_bytes);
  }
  auto created =
      Job::create({.job_id = commits_.take_job_id(), .name = request.name, .uid = request.uid});
  if (!created.is_ok()) return created.status();
  std::unique_ptr<Job> job = std::move(created).value();
  const uint64_t share_bytes = pool_.segment_count_free() / jobs_expected_ * segment_bytes;
  job->admission().set_host_bytes(
      request.host_bytes != 0
          ? request.host_bytes
          : std::max(share_bytes, JobMemory::segment_count_min(segment_bytes) * segment_bytes));
  job->admission().set_durability(request.durability.value_or(Durability()));
  job->space().set_quota_bytes(request.nvme_bytes != 0 ? request.nvme_bytes
                                                       : nvme_free_bytes / jobs_expected_);
  if (Status status = give_memory(*job); !status.is_ok()) return status;
  job->durable().note_change();
  MEMD_FAILPOINT("job.admitted");
  connect(*job);
  return &jobs_.put(std::move(job));
}

Result<JobInfo> ShardStore::open_job(const OpenJobRequest& request) {
  if (request.name.empty() || request.name.size() > 256) {
    return error(StatusCode::invalid_argument,
                 "a job's name has 1 to 256 bytes; this one has ",
                 request.name.size());
  }
  const auto held = find_job(request.name);
  if (!held.is_ok()) {
    const auto job = admit(request);
    if (!job.is_ok()) return job.status();
    JobInfo info = info_of(*job.value());
    info.created = true;
    return info;
  }
  Job& job = *find(held.value().job_id);
  if (job.is_ending()) {
    return error(StatusCode::unavailable, "job ", job.name(), " is being dropped; try again");
  }
  if (!job.progress().stopped().is_ok()) return job.progress().stopped();
  if (Status status = set_durability(job, request); !status.is_ok()) return status;
  if (job.memory() == nullptr) {
    // It was admitted to another pool, maybe: what is asked for now counts.
    const uint64_t host_bytes_before = job.admission().host_bytes();
    if (request.host_bytes != 0) job.admission().set_host_bytes(request.host_bytes);
    if (Status status = give_memory(job); !status.is_ok()) {
      job.admission().set_host_bytes(host_bytes_before);
      return status;
    }
  }
  return info_of(job);
}

Status ShardStore::set_durability(Job& job, const OpenJobRequest& request) {
  if (!request.durability || *request.durability == job.admission().durability())
    return Status::ok();
  const bool busy = !job.cache().sessions().empty() || job.operations().is_running();
  if (busy) {
    return error(StatusCode::invalid_argument,
                 "job ",
                 job.name(),
                 " has durability \"",
                 job.admission().durability().text(),
                 "\", and it is in use; ask for the same, or close its other sessions first: \"",
                 request.durability->text(),
                 "\"");
  }
  const Durability before = job.admission().durability();
  job.admission().set_durability(*request.durability);
  if (Status opened = job.kept().open_tile_words(); !opened.is_ok()) {
    job.admission().set_durability(before);
    return opened;
  }
  job.kept().keep_tile_words(keepsakes_);
  job.durable().note_change();
  job.journal().note_layout();
  return Status::ok();
}

Status ShardStore::set_job_weight(uint64_t job_id, JobWeight weight) {
  Job* const job = find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  job->admission().set_weight(weight);
  apply_weight(job_id, weight);
  return Status::ok();
}

void ShardStore::apply_weight(uint64_t job_id, JobWeight weight) {
  io_.set_weight(JobId{job_id}, weight);
  workers_.set_weight(JobId{job_id}, weight);
}

bool ShardStore::is_unused(const Job& job) const {
  return job.cache().sessions().empty() && !job.cache().activities().any() &&
         job.cache().slots().service_lease_count() == 0 && job.cache().waiters().empty() &&
         job.operations().is_idle() && job.conditions().empty();
}

void ShardStore::return_to_disk(Job& job) {
  // If one of these fails, the job goes on being refused; the next turn tries again.
  auto restored = Job::restore(job.durable().record());
  if (!restored.is_ok()) return;
  std::set<std::pair<uint16_t, uint64_t>> named;
  restored.value()->shards().for_each_replica([&](const Replica& replica) {
    named.emplace(replica.extent().address.device, replica.extent().address.offset_bytes);
  });
  job.state().early().forget_all();
  for (const ExtentRecord& extent : job.take_extents()) {
    if (!named.contains({extent.address.device, extent.address.offset_bytes})) {
      extents_.release(extent);
    }
  }
  job.kept().free_all();
  std::unique_ptr<Job> fresh = std::move(restored).value();
  if (fresh->admission().weight() != job.admission().weight())
    fresh->admission().set_weight(job.admission().weight());
  fresh->cache().counters() = job.cache().counters();
  const uint64_t tag = commits_.catalogue_tag(job.job_id());
  const Status kept = fresh->kept().take_over(job.kept(), keepsakes_, pool_.segment_bytes(), tag);
  if (!kept.is_ok()) fresh->progress().stop(kept);  // it goes on being refused too
  connect(*fresh);
  jobs_.put(std::move(fresh));
}

void ShardStore::drop_job(uint64_t job_id, bool force, Done done) {
  Job* const job = find(job_id);
  if (job == nullptr) {
    return done(error(StatusCode::not_found, "there is no job with id ", job_id));
  }
  if (!job->cache().sessions().empty() && !force) {
    return done(error(StatusCode::in_use,
                      "job ",
                      job->name(),
                      " is in use; end its trainers first, or end their sessions too with `memd "
                      "job drop --force`: sessions attached ",
                      job->cache().sessions().size()));
  }
  if (job->cache().slots().service_lease_count() > 0) {
    return done(error(StatusCode::in_use,
                      "job ",
                      job->name(),
                      " is being streamed over gRPC; try again when that has ended"));
  }
  job->begin_end();
  MEMD_FAILPOINT("job.drop_asked");
  while (!job->cache().sessions().empty()) {
    const auto detached = detach(job->cache().sessions().list().back()->session_id);
    MEMD_CHECK(detached.is_ok());
  }
  enqueue(*job, "drop", [this, job, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) return done(status);
    job->conditions().add([job] { return !job->cache().activities().any(); },
                          [this, job, done] { drop_now(*job, done); });
  });
}

void ShardStore::drop_now(Job& job, const Done& done) {
  MEMD_FAILPOINT("job.before_drop");
  job.state().early().forget_all();
  std::vector<ExtentRecord> extents = job.take_extents();
  const uint64_t job_id = job.job_id();
  KeptMemory::Left left = job.kept().take();
  dropped_memory_.add(job_id, std::move(left.ledger), std::move(left.segments));
  keepsakes_.forget_table(job_id);
  keepsakes_.forget_tiles(job_id);
  const std::list<LeaseWaiter> waiters = job.cache().waiters().take_all();
  const std::vector<Operations::Start> operations = job.operations().take_waiting();
  room_wait_ns_of_dropped_ += room_wait_ns(job);
  jobs_.remove(job_id);
  apply_weight(job_id, JobWeight());
  const Status gone = error(StatusCode::fenced, "the job was dropped: ", job_id);
  for (const LeaseWaiter& waiter : waiters) waiter.reply(gone, {});
  for (const Operations::Start& start : operations) start(gone);
  MEMD_FAILPOINT("job.dropped_from_memory");
  commits_.remove(job_id, std::move(extents), done);
}

void ShardStore::add_to_pool(Segment old_segment) {
  const uint64_t segment_id = old_segment.id();
  // Where the kernel has no memory for a fresh segment the pool is smaller from now on, which its
  // report shows.
  [[maybe_unused]] const Status status = pool_.give_back(std::move(old_segment));
  for (const uint64_t job_id : dropped_memory_.destroyed(segment_id))
    keepsakes_.forget_ledger(job_id);
}

Result<std::shared_ptr<Session>> ShardStore::attach(uint64_t job_id, const SessionOwner& owner) {
  Job* const job = find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  if (job->is_ending()) {
    return error(StatusCode::unavailable, "job ", job->name(), " is being dropped; try again");
  }
  if (!job->progress().stopped().is_ok()) return job->progress().stopped();
  if (job->memory() == nullptr) {
    if (Status status = give_memory(*job); !status.is_ok()) return status;
  }
  auto session = sessions_.create(
      job_id, owner, job->cache().sessions().list(), job->journal().ledger().get());
  if (!session.is_ok()) return session.status();
  job->cache().sessions().attach(session.value());
  job->cache().plans().begin(*session.value());
  sessions_.add(session.value());
  return session;
}

Result<std::shared_ptr<Session>> ShardStore::resume_session(uint64_t session_id,
                                                            const SessionOwner& owner) {
  const auto resumed = sessions_.resume(session_id, owner);
  if (!resumed.is_ok()) return resumed;
  const std::shared_ptr<Session>& session = resumed.value();
  session->ring.discard_requests();
  PlanProgress::want_uses(*session);
  // Its client may come back to the daemon that it was with, which has taken some of them. What is
  // granted after the client has looked for such grants would be given back by nobody.
  for (LeaseWaiter& waiter :
       find(session->job_id)->cache().waiters().take([&](const LeaseWaiter& each) {
         return each.request.session_id == session_id && !each.request.for_service;
       })) {
    waiter.reply(error(StatusCode::unavailable, "the session came back: ask again"), {});
  }
  return resumed;
}

Result<Job*> ShardStore::job_of(uint64_t session_id) const {
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) {
    return error(StatusCode::fenced,
                 "the daemon gave this session up (its process ended, or it detached); connect "
                 "again: session ",
                 session_id);
  }
  return find(found->second->job_id);
}

Result<uint32_t> ShardStore::detach(uint64_t session_id) {
  const auto owner = job_of(session_id);
  if (!owner.is_ok()) return owner.status();
  Job& job = *owner.value();
  const std::shared_ptr<Session> session = sessions_.at(session_id);
  session->ring.end_resident_leases();
  const std::list<LeaseWaiter> given_up = job.cache().waiters().take(
      [&](const LeaseWaiter& waiter) { return waiter.request.session_id == session_id; });
  const uint32_t lease_count = job.cache().slots().lease_count(*session);
  MEMD_FAILPOINT("session.before_discard");
  // Only then, so that a daemon that takes over meanwhile ends the session again.
  const auto discarded = Join::start([this, &job, session, session_id](const Status&) {
    session->ring.end();
    sessions_.forget(job.journal().ledger().get(), session_id);
  });
  if (!MEMD_PLANTED("session.half_written_shown"))
    job.cache().half_written().discard(*session, *discarded);
  MEMD_FAILPOINT("session.before_pins_dropped");
  discarded->finish(Status::ok());
  // Its tag may be the next session's, before which nothing of this is committed.
  for (Entry* const entry : job.shards().entries()) {
    if (entry == nullptr || !entry->is_ahead || entry->audience != session->ring.tag()) continue;
    entry->audience = kNobody;
    job.cache().table().withdraw(*entry);
  }
  if (!MEMD_PLANTED("session.pins_kept")) job.cache().sessions().detach(session);
  job.state().early().forget_session(session_id);
  job.cache().plans().end(*session);
  sessions_.remove(session_id);
  // Its pins are gone, and what it has half written.
  job.cache().waits().wake_all();
  if (job.memory() != nullptr) job.cache().slots().free_retired();
  drop_gradients_of(job, [session_id](const Shard& shard) {
    if (MEMD_PLANTED("session.sealed_gradients_dropped")) return shard.gradient_session != 0;
    return shard.gradient_session == session_id;
  });
  MEMD_FAILPOINT("session.detached");
  for (const LeaseWaiter& waiter : given_up) {
    waiter.reply(error(StatusCode::fenced, "the session has ended: ", session_id), {});
  }
  return lease_count;
}

void ShardStore::detach_all() {
  while (!sessions_.all().empty()) {
    const auto detached = detach(sessions_.all().begin()->first);
    MEMD_CHECK(detached.is_ok());
  }
}

Result<std::pair<std::vector<ShardInfo>, bool>> ShardStore::declare(
    uint64_t session_id, const std::vector<ShardSpec>& specs) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return job.status();
  job.value()->cache().residencies().settle_all_pending();
  MEMD_FAILPOINT("shards.before_declared");
  const Owed owed(OwedPlace::shards_declared);
  auto infos = job.value()->declare(specs);
  if (!infos.is_ok()) return infos.status();
  return std::pair(std::move(infos).value(), job.value()->admission().gradients_fit());
}

// ---- Leases -------------------------------------------------------------------------------------

void ShardStore::lease(const LeaseRequest& request, LeaseReply reply) {
  if (request.part > Part::gradient || request.mode > LeaseMode::overwrite) {
    return reply(error(StatusCode::invalid_argument, "unknown part or mode of a lease"), {});
  }
  const auto found = job_of(request.session_id);
  if (!found.is_ok()) return reply(found.status(), {});
  Job& job = *found.value();
  if (!job.progress().stopped().is_ok()) return reply(job.progress().stopped(), {});
  if (job.shards().find_entry(request.shard_id, request.part) == nullptr) {
    return reply(error(StatusCode::not_found,
                       "job ",
                       job.name(),
                       " has no such shard, or it has no gradient; declare it first: shard ",
                       request.shard_id),
                 {});
  }
  job.cache().leases().acquire(request, std::move(reply));
}

void ShardStore::release_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard) {
  Job* const job = find(job_id);
  MEMD_CHECK(job != nullptr);  // a job with service leases is not dropped
  job->cache().leases().release_service(grant, discard);
}

bool ShardStore::look_ahead() {
  bool progress = false;
  for (const auto& [job_id, job] : jobs_) progress |= job->cache().prefetcher().look_ahead();
  return progress;
}

// ---- Gradients and deletion ---------------------------------------------------------------------

void ShardStore::drop_gradients_of(Job& job, const std::function<bool(const Shard&)>& chosen) {
  for (uint32_t index = 0; index < job.shards().buckets().size(); ++index)
    drop_gradients_of(job, index, chosen);
}

void ShardStore::drop_gradients_of(Job& job,
                                   uint32_t index,
                                   const std::function<bool(const Shard&)>& chosen) {
  Bucket& bucket = job.shards().bucket(index);
  bool any = false;
  bool all = true;
  for (const uint32_t shard_id : bucket.shards) {
    Shard& shard = job.shards()[shard_id];
    if (shard.gradient_session != 0 && chosen(shard)) {
      job.state().early().forget_gradient(shard_id);
      shard.gradient_session = 0;
      job.cache().waits().wake(*bucket.gradient);
      job.journal().note_shard(shard_id);
      any = true;
    }
    all = all && shard.gradient_session == 0;
  }
  if (!any || !all) return;
  Entry* const entry = bucket.gradient;
  const auto settled = [entry] {
    return entry->task_count() == 0 && entry->residency() != Residency::filling &&
           entry->residency() != Residency::draining;
  };
  if (settled()) return job.drop_gradient(bucket, extents_);
  job.conditions().add(settled, [this, &job, index] {
    Bucket& later = job.shards().bucket(index);
    const bool unused = std::none_of(later.shards.begin(), later.shards.end(), [&](uint32_t id) {
      return job.shards()[id].gradient_session != 0;
    });
    if (unused) job.drop_gradient(later, extents_);
  });
}

Status ShardStore::drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return job.status();
  std::vector<bool> chosen(job.value()->shards().size(), shard_ids.empty());
  for (const uint32_t shard_id : shard_ids) {
    if (shard_id >= chosen.size()) {
      return error(StatusCode::not_found, "job ", job.value()->name(), " has no shard ", shard_id);
    }
    chosen[shard_id] = true;
  }
  const Shards& shards = job.value()->shards();
  drop_gradients_of(*job.value(), [&](const Shard& shard) {
    return shard.gradient_session == session_id && chosen[shards.id_of(shard)];
  });
  return Status::ok();
}

Status ShardStore::expect_step(uint64_t session_id, const std::vector<StepGroup>& groups) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return job.status();
  return job.value()->state().early().expect(session_id, groups);
}

void ShardStore::gradient_is_final(uint64_t session_id, uint32_t shard_id) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return;
  job.value()->state().early().gradient_is_final(session_id, shard_id);
}

void ShardStore::gradient_unused(uint64_t session_id, uint32_t shard_id) {
  const auto found = job_of(session_id);
  if (!found.is_ok()) return;
  Job& job = *found.value();
  const Entry* const gradient = job.shards().find_entry(shard_id, Part::gradient);
  if (gradient == nullptr) return;
  for (LeaseWaiter& waiter : job.cache().waiters().take(*gradient, [&](const LeaseWaiter& each) {
         const LeaseRequest& request = each.request;
         return request.session_id == session_id && request.shard_id == shard_id &&
                request.is_ahead && !request.for_service;
       })) {
    waiter.refuse(error(StatusCode::deadline, "nobody waits for it any more"));
  }
  drop_gradients_of(job, job.shards()[shard_id].bucket, [&](const Shard& shard) {
    return &shard == &job.shards()[shard_id] && shard.gradient_session == session_id &&
           shard.is_gradient_unsure;
  });
}

void ShardStore::delete_shard(uint64_t session_id,
                              const std::string& name,
                              const std::function<void(Result<bool>)>& done) {
  const auto owner = job_of(session_id);
  if (!owner.is_ok()) return done(owner.status());
  Job& job = *owner.value();
  const auto found = job.shards().find(name);
  if (!found) return done(false);
  const uint32_t shard_id = *found;
  if (job.shards()[shard_id].kind == ShardKind::parameter) {
    return done(error(StatusCode::invalid_argument,
                      "shard ",
                      job.name(),
                      "/",
                      name,
                      " is a parameter; drop the job, or start over with connect(fresh=True)"));
  }
  Entry* const entry = job.shards()[shard_id].value;
  job.cache().residencies().settle_pending(*entry);
  if (entry->pending != nullptr) {
    return done(error(StatusCode::invalid_argument,
                      "shard ",
                      job.name(),
                      "/",
                      name,
                      " is still being written; let go of the tensor first"));
  }
  const auto still = [&job, entry, shard_id] {
    // A blob that a closed step names stays until that is made, which must find it.
    return entry->task_count() == 0 && entry->residency() != Residency::filling &&
           entry->residency() != Residency::draining && !job.steps().names(shard_id);
  };
  const auto remove = [this, &job, name, done] {
    // It may have gone, or come back under the same name, while its bytes were being moved.
    const auto again = job.shards().find(name);
    if (!again) return done(false);
    job.cache().waiters().fail(
        *job.shards()[*again].value,
        error(StatusCode::not_found, "shard ", job.name(), "/", name, " was deleted"));
    MEMD_FAILPOINT("shard.before_removed");
    job.remove(*again, extents_);
    done(true);
  };
  if (still()) return remove();
  job.conditions().add(
      [&job, name, still, entry] {
        const auto again = job.shards().find(name);
        return !again || job.shards()[*again].value != entry || still();
      },
      [&job, name, entry, remove, session_id, done, this] {
        const auto again = job.shards().find(name);
        if (!again || job.shards()[*again].value == entry) return remove();
        delete_shard(session_id, name, done);
      });
}

// ---- Turning ------------------------------------------------------------------------------------

bool ShardStore::serve(Session& session) {
  uint32_t count = 0;
  for (; count < kRequestsATurn; ++count) {
    const auto polled = session.ring.poll();
    if (!polled) break;
    const Request& request = *polled;
    if (session.request_count_open >= kOpenRequestsMax) {
      session.ring.refuse_client();
      break;
    }
    const bool known = request.opcode >= Opcode::lease && request.opcode <= Opcode::gradient_unused;
    const bool valid =
        known && request.part <= Part::gradient && request.mode <= LeaseMode::overwrite;
    const uint64_t session_id = session.session_id;
    if (!valid) {
      ++ring_protocol_errors_;
      Completion completion{};
      completion.request_id = request.request_id;
      session.ring.publish(completion,
                           error(StatusCode::invalid_argument, "the request is malformed"));
      continue;
    }
    if (request.opcode == Opcode::gradient_is_final) {
      gradient_is_final(session_id, request.shard_id);
      continue;
    }
    if (request.opcode == Opcode::gradient_unused) {
      gradient_unused(session_id, request.shard_id);
      continue;
    }
    const bool prefetch = request.opcode == Opcode::prefetch;
    ++session.request_count_open;
    lease({.session_id = session_id,
           .shard_id = request.shard_id,
           .part = request.part,
           .mode = prefetch ? LeaseMode::read : request.mode,
           .timeout_ns = request.timeout_ns,
           .for_service = false,
           .prefetch = prefetch,
           .after_call = request.after_call,
           .is_ahead = request.is_ahead != 0 && request.part == Part::gradient},
          [this, session_id, prefetch, request_id = request.request_id](const Status& status,
                                                                        const LeaseGrant& grant) {
            const auto found = sessions_.find(session_id);
            if (found == sessions_.end()) return;
            --found->second->request_count_open;
            if (prefetch) return;
            Completion completion{};
            completion.request_id = request_id;
            if (status.is_ok()) {
              completion.pin = grant.slot->pin_first + grant.index;
              completion.offset_bytes = grant.offset_bytes;
              completion.length_bytes = grant.length_bytes;
              completion.generation = grant.generation;
            }
            completion.wait_ns = grant.wait_ns;
            completion.wait_reason = static_cast<uint32_t>(grant.wait_reason);
            found->second->ring.publish(completion, status);
          });
  }
  return count > 0;
}

bool ShardStore::advance() {
  bool progress = false;
  std::vector<uint64_t> broken;
  for (const auto& [session_id, session] : sessions_.all()) {
    progress |= find(session->job_id)->cache().plans().follow_uses(*session);
    progress |= serve(*session);
    if (session->ring.broken()) broken.push_back(session_id);
  }
  for (const uint64_t session_id : broken) {
    ++ring_protocol_errors_;
    const auto detached = detach(session_id);
    MEMD_CHECK(detached.is_ok());
    progress = true;
  }
  // A continuation may open or drop jobs.
  std::vector<uint64_t> job_ids;
  for (const auto& [job_id, job] : jobs_) job_ids.push_back(job_id);
  const auto advance_tiles = [&] {
    for (const uint64_t job_id : job_ids) {
      if (Job* const job = find(job_id)) job->state().tasks().advance();
    }
  };
  advance_tiles();
  for (const uint64_t job_id : job_ids) {
    if (Job* const job = find(job_id)) progress |= job->cache().leases().advance();
  }
  progress |= look_ahead();
  for (const uint64_t job_id : job_ids) progress |= advance_conditions(job_id);
  for (const auto& [job_id, job] : jobs_) {
    if (job->state().early().has_waiting() && !job->operations().is_running())
      job->state().early().advance();
  }
  advance_tiles();
  std::vector<Job*> unused;
  for (const auto& [job_id, job] : jobs_) {
    if (job->progress().goes_to_disk() && is_unused(*job)) unused.push_back(job.get());
  }
  for (Job* const job : unused) {
    // A job that no catalogue names has nothing to return to.
    if (commits_.catalogue_tag(job->job_id()) == 0) {
      drop_job(job->job_id(), false, [](const Status&) {});
    } else {
      return_to_disk(*job);
    }
  }
  progress |= extents_.advance();
  progress |= scrub_.advance();
  progress |= live_check_.advance();
  // Woken after the leases had their turn.
  for (const auto& [job_id, job] : jobs_) progress |= job->cache().waiters().has_woken();
  end_turn();
  return progress;
}

bool ShardStore::advance_conditions(uint64_t job_id) {
  bool progress = false;
  size_t position = 0;
  for (Job* job = find(job_id); job != nullptr; job = find(job_id)) {
    const auto then = job->conditions().take_next(position);
    if (!then) break;
    (*then)();
    progress = true;
  }
  return progress;
}

void ShardStore::write_catalogue_anew(uint64_t job_id) {
  // The root is written by every commit.
  for (const auto& [id, job] : jobs_) {
    if (job->is_ending() || (job_id != 0 && id != job_id)) continue;
    // A job that commits nothing any more writes no root either; the next pass finds it again.
    if (!job->progress().stopped().is_ok() || job->lost().count() != 0) continue;
    job->durable().note_change();
    return sync_job(id, [](const Status&, const StepReport&) {});
  }
}

bool ShardStore::wants_releases() const {
  return std::any_of(jobs_.begin(), jobs_.end(), [](const auto& it) {
    return !it.second->conditions().empty() || it.second->cache().waiters().wants_releases();
  });
}

void ShardStore::look_for_releases() {
  for (const auto& [job_id, job] : jobs_) {
    JobCache& cache = job->cache();
    if (cache.waiters().any_for_room()) cache.room().look_for_all_releases();
  }
}

uint64_t ShardStore::next_deadline_ns() const {
  uint64_t next = std::numeric_limits<uint64_t>::max();
  for (const auto& [job_id, job] : jobs_)
    next = std::min(next, job->cache().waiters().next_deadline_ns());
  for (const uint64_t due_ns : {scrub_.next_ns(), live_check_.next_ns(), extents_.next_ns()}) {
    if (due_ns != 0) next = std::min(next, due_ns);
  }
  return next == std::numeric_limits<uint64_t>::max() ? 0 : next;
}

bool ShardStore::is_idle() const {
  return commits_.is_idle() && scrub_.is_idle() && live_check_.is_idle() &&
         std::all_of(jobs_.begin(), jobs_.end(), [](const auto& it) {
           const Job& job = *it.second;
           return job.operations().is_idle() && job.conditions().empty() &&
                  !job.cache().activities().any();
         });
}

void ShardStore::give_up_waiting() {
  scrub_.set_rate(0);
  live_check_.give_up();
  for (const auto& [job_id, job] : jobs_) {
    for (const LeaseWaiter& waiter : job->cache().waiters().take_all()) {
      waiter.reply(error(StatusCode::unavailable, "the daemon is stopping; job ", job_id), {});
    }
  }
}

std::vector<Activity> ShardStore::in_flight() const {
  const uint64_t now_ns = clock_.now_ns();
  std::vector<Activity> all;
  for (const IoInFlight& each : io_.in_flight()) {
    Activity activity{.kind = io_kind_name(each.kind),
                      .what = extents_.path(each.device),
                      .waits_on = each.started ? "" : "its turn",
                      .priority = io_priority_name(each.priority),
                      .age_ns = each.age_ns};
    if (each.kind != IoKind::sync) {
      activity.what += concat(" at ", each.offset_bytes, ", ", each.length_bytes, " bytes");
    }
    all.push_back(std::move(activity));
  }
  for (const ExtentStore::WaitingRead& each : extents_.waiting_reads()) {
    const ExtentRecord& extent = each.extent;
    all.push_back({.kind = "read",
                   .what = concat(extents_.path(extent.address.device),
                                  " at ",
                                  extent.address.offset_bytes,
                                  ", ",
                                  extent.length_bytes,
                                  " bytes"),
                   .waits_on = "its next try, since the device failed it",
                   .age_ns = now_ns - each.since_ns});
  }
  const auto add = [&](const Job* job, uint64_t job_id, Activity activity, uint64_t since_ns) {
    activity.job_id = job_id;
    activity.job = job != nullptr ? job->name() : concat("id ", job_id);
    activity.uid = job != nullptr ? job->uid() : 0;
    activity.age_ns = now_ns - since_ns;
    all.push_back(std::move(activity));
  };
  for (const auto& [job_id, owned] : jobs_) {
    const Job* const job = owned.get();
    job->cache().waiters().for_each([&](const LeaseWaiter& waiter) {
      const LeaseRequest& request = waiter.request;
      std::string what = concat("shard ", job->shards()[request.shard_id].name());
      if (request.part == Part::gradient) what += " gradient";
      what += request.mode == LeaseMode::read ? ", to read" : ", to write";
      add(job,
          job->job_id(),
          {.kind = "lease",
           .what = std::move(what),
           .waits_on = job->cache().waiters().describe(waiter)},
          waiter.started_ns);
    });
    const std::vector<Operations::Open> operations = job->operations().open();
    for (size_t i = 0; i < operations.size(); ++i) {
      const Operations::Open& each = operations[i];
      std::string before = i == 0 ? "" : concat("the ", operations.front().kind, " before it");
      add(job,
          job->job_id(),
          {.kind = each.kind, .what = each.phase, .waits_on = std::move(before)},
          each.since_ns);
    }
  }
  for (const Commits::Open& each : commits_.open()) {
    add(find(each.job_id),
        each.job_id,
        {.kind = "commit", .waits_on = each.running ? "" : "the commit before it"},
        each.since_ns);
  }
  if (auto activity = live_check_.activity()) all.push_back(std::move(*activity));
  std::stable_sort(all.begin(), all.end(), [](const Activity& a, const Activity& b) {
    return a.age_ns > b.age_ns;
  });
  return all;
}

ServerStatistics ShardStore::statistics() const {
  ServerStatistics out;
  out.pool = pool_.report();
  out.pool_bytes_free = pool_.segment_count_free() * pool_.segment_bytes();
  out.nvme_bytes = extents_.capacity_bytes();
  out.nvme_bytes_free = extents_.free_bytes();
  out.fence_reason = extents_.check_writable().message();
  for (uint16_t device = 0; device < extents_.device_count(); ++device) {
    out.devices.push_back({.path = extents_.path(device),
                           .bytes = extents_.device_bytes(device),
                           .bytes_free = extents_.free_bytes(device),
                           .checksum_failures = extents_.checksum_failure_count(device),
                           .fenced = !extents_.broken().is_ok(),
                           .limits = io_.limits(device),
                           .io = io_.device_statistics(device)});
  }
  for (const auto& [job_id, job] : jobs_) {
    out.room_wait_ns += room_wait_ns(*job);
    JobStatistics statistics{.job = info_of(*job),
                             .counters = job->cache().waiters().counters_until_now(),
                             .stalls = job->cache().sessions().stalls()};
    if (job->memory() != nullptr) {
      statistics.arena_bytes = job->memory()->arena().capacity_bytes();
      statistics.arena_bytes_used = job->memory()->arena().used_bytes();
      statistics.private_bytes = job->memory()->private_side().capacity_bytes();
      statistics.private_bytes_used = job->memory()->private_side().used_bytes();
    }
    out.jobs.push_back(std::move(statistics));
  }
  out.session_count = static_cast<uint32_t>(sessions_.all().size());
  out.ring_protocol_errors = ring_protocol_errors_;
  out.room_wait_ns += room_wait_ns_of_dropped_;
  out.step_seconds = step_times_.seconds;
  out.commit_seconds = commits_.seconds();
  out.step_phases = step_times_.phases;
  out.scrub = scrub_.statistics();
  return out;
}

}  // namespace memd
