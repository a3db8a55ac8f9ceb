#include "store/shard_store.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/free_on_worker.h"
#include "base/memory_reserve.h"
#include "base/units.h"
#include "store/job_load.h"
#include "store/snapshot/job_replacement.h"

namespace memd {
namespace {

// A client of ours waits for half a ring of leases at most, and prefetches are dropped within a
// turn: whoever has more open than this wants to fill our memory.
constexpr uint32_t kOpenRequestsMax = 4 * kRingEntries;

// A turn of one session: some 100 µs of leases that are resident. The rest waits until every other
// session had its turn, and the disk and the workers theirs.
constexpr uint32_t kRequestsATurn = 64;

bool declares_host_tier(const std::vector<ShardSpec>& specs) {
  return std::any_of(specs.begin(), specs.end(), [](const ShardSpec& spec) {
    return spec.kind == ShardKind::parameter && spec.tier == Tier::host;
  });
}

bool is_unused(const Job& job) {
  return job.cache().sessions().empty() && !job.cache().activities().any() &&
         job.cache().slots().service_lease_count() == 0 && job.cache().waiters().empty() &&
         job.operations().is_idle() && job.conditions().empty();
}

}  // namespace

ShardStore::ShardStore(const ShardStoreParts& parts)
    : extents_(parts.extents),
      clock_(parts.clock),
      turn_(parts.turn == nullptr ? without_bound_ : *parts.turn),
      keepsakes_(parts.keeper),
      commits_(parts.extents, parts.workers, parts.clock),
      parts_{.pool = parts.pool,
             .io = parts.io,
             .extents = parts.extents,
             .workers = parts.workers,
             .clock = parts.clock,
             .keepsakes = keepsakes_,
             .commits = commits_,
             .jobs = jobs_,
             .sessions = sessions_},
      snapshots_([this](uint64_t job_id, const KeptStep& step) {
        Job* const job = jobs_.find(job_id);
        if (job == nullptr) return;
        job->admission().remove_snapshots(
            {.count = 0, .bytes = 0, .memory_bytes = 0, .steps = {step}});
      }),
      places_(commits_, jobs_, snapshots_),
      scrub_(verification_parts(), parts.clock),
      live_check_(verification_parts(), commits_, parts.clock),
      memory_(parts_),
      gradients_(parts_),
      operations_(parts_, gradients_),
      snapshot_readings_(parts_, snapshots_),
      job_snapshots_(parts_, snapshots_, snapshot_readings_, operations_),
      returns_(parts_, snapshots_, job_snapshots_),
      reports_({.store = parts_,
                .step_times = operations_.times(),
                .scrub = scrub_,
                .live_check = live_check_,
                .snapshot_readings = snapshot_readings_}),
      admissions_({.store = parts_,
                   .memory = memory_,
                   .operations = operations_,
                   .reports = reports_,
                   .jobs_expected = parts.jobs_expected}),
      turn_parts_({.jobs = jobs_,
                   .commits = commits_,
                   .extents = extents_,
                   .scrub = scrub_,
                   .live_check = live_check_,
                   .turn = turn_,
                   .serve_sessions = [this] { return serve_sessions(); },
                   .end_unused_jobs = [this] { return end_unused_jobs(); }}) {}

Status ShardStore::load(const std::function<Status()>& turn, KeptDescriptors* kept) {
  JobLoad load({.store = parts_,
                .memory = memory_,
                .operations = operations_,
                .admissions = admissions_,
                .snapshots = snapshots_,
                .notes = load_notes_},
               kept);
  if (Status loaded = load.run(turn); !loaded.is_ok()) return loaded;
  for (const uint64_t job_id : jobs_.ids()) {
    std::string note = returns_.begin(job_id);
    if (!note.empty()) load_notes_.push_back(std::move(note));
  }
  return Status::ok();
}

VerificationParts ShardStore::verification_parts() {
  return {.extents = extents_,
          .workers = parts_.workers,
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

// ---- Jobs and sessions --------------------------------------------------------------------------

void ShardStore::return_to_disk(Job& job) {
  // If this fails, the job goes on being refused; the next turn tries again.
  auto restored = Job::restore(job.durable().record());
  if (!restored.is_ok()) return;
  const uint64_t job_id = job.job_id();
  JobReplacement(parts_, operations_).replace(job, std::move(restored).value());
  returns_.begin(job_id);
}

void ShardStore::drop_job(uint64_t job_id, bool force, Done done) {
  Job* const job = jobs_.find(job_id);
  if (job == nullptr) {
    return done(error(StatusCode::not_found, "there is no job with id ", job_id));
  }
  if (Status status = check_droppable(*job); !status.is_ok() && !force) return done(status);
  if (Status status = check_not_streamed(*job); !status.is_ok()) return done(status);
  job->set_ending("is being dropped");
  MEMD_FAILPOINT("job.drop_asked");
  while (!job->cache().sessions().empty()) {
    const auto detached = detach(job->cache().sessions().list().back()->session_id);
    MEMD_CHECK(detached.is_ok());
  }
  operations_.enqueue(*job, "drop", [this, job, force, done = std::move(done)](const Status& turn) {
    if (!turn.is_ok()) return done(turn);
    job->set_ending("is being dropped");  // an operation before this one may have given up
    // A snapshot may have been under way.
    if (Status status = check_droppable(*job); !status.is_ok() && !force) {
      job->set_ending(nullptr);
      done(status);
      return operations_.end(job->job_id());
    }
    job->conditions().add([job] { return !job->cache().activities().any(); },
                          [this, job, done] { drop_now(*job, done); });
  });
}

Status ShardStore::check_droppable(const Job& job) const {
  if (const size_t count = job.cache().sessions().size(); count != 0) {
    return error(
        StatusCode::in_use,
        "job ",
        job.name(),
        " is in use; end its trainers first, or end their sessions too with `memd job drop "
        "--force`: sessions attached ",
        count);
  }
  const std::string names = snapshots_.names_text(job.job_id());
  if (names.empty()) return Status::ok();
  return error(StatusCode::in_use,
               "job ",
               job.name(),
               " has snapshots; drop them first (memd snapshot drop), or all with it by `memd job "
               "drop --force`: ",
               names);
}

void ShardStore::drop_now(Job& job, const Done& done) {
  MEMD_FAILPOINT("job.before_drop");
  job.state().early().forget_all();
  std::vector<ExtentRecord> extents = job.extents();
  const uint64_t job_id = job.job_id();
  memory_.release(job_id, job.kept().take());
  keepsakes_.forget_table(job_id);
  keepsakes_.forget_tiles(job_id);
  std::list<LeaseWaiter> waiters = job.cache().waiters().take_all();
  const std::vector<Operations::Start> operations = job.operations().take_waiting();
  reports_.count_dropped(job);
  const uint64_t snapshot_bytes = job.space().snapshots().memory_bytes;
  const uint64_t record_bytes = job.shards().declared().memory_bytes();
  free_on_worker(parts_.workers, JobId{job_id}, record_bytes, jobs_.take(job_id));
  admissions_.apply_weight(job_id, JobWeight());
  const Status gone = error(StatusCode::fenced, "the job was dropped: ", job_id);
  for (LeaseWaiter& waiter : waiters) waiter.refuse(gone);
  for (const Operations::Start& start : operations) start(gone);
  MEMD_FAILPOINT("job.dropped_from_memory");
  std::vector<Snapshot> snapshots = snapshots_.take_all(job_id);
  std::vector<PinnedList> pinned;
  for (const Snapshot& each : snapshots) pinned.push_back(each.extents);
  free_on_worker(parts_.workers, JobId{job_id}, snapshot_bytes, std::move(snapshots));
  commits_.remove(job_id, std::move(extents), std::move(pinned), done);
}

Result<std::shared_ptr<Session>> ShardStore::attach(uint64_t job_id, const SessionOwner& owner) {
  Job* const job = jobs_.find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  if (job->ending() != nullptr) {
    return error(StatusCode::unavailable, "job ", job->name(), " ", job->ending(), "; try again");
  }
  if (job->progress().is_loading()) return returns_.load_in_the_way(*job);
  if (!job->progress().stopped().is_ok()) return job->progress().stopped();
  if (job->memory() == nullptr) {
    if (Status status = memory_.give(*job); !status.is_ok()) return status;
  }
  auto session = sessions_.create(job_id, owner, job->kept().ledger());
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
  // Its client may come back to the daemon that it was with, which has taken some of them. Nobody
  // would give back a grant that came after the client has looked for such grants.
  for (LeaseWaiter& waiter :
       jobs_.find(session->job_id)->cache().waiters().take([&](const LeaseWaiter& each) {
         return each.request().session_id == session_id && !each.request().for_service;
       })) {
    waiter.refuse(error(StatusCode::unavailable, "the session came back: ask again"));
  }
  return resumed;
}

Result<uint32_t> ShardStore::detach(uint64_t session_id) {
  const auto owner = parts_.job_of(session_id);
  if (!owner.is_ok()) return owner.status();
  Job& job = *owner.value();
  const std::shared_ptr<Session> session = sessions_.at(session_id);
  session->ring.end_resident_leases();
  std::list<LeaseWaiter> given_up = job.cache().waiters().take(
      [&](const LeaseWaiter& waiter) { return waiter.request().session_id == session_id; });
  const uint32_t lease_count = job.cache().slots().lease_count(*session);
  MEMD_FAILPOINT("session.before_discard");
  // Only then, so that a daemon that takes over meanwhile ends the session again.
  const auto discarded = Join::start([this, &job, session, session_id](const Status&) {
    session->ring.end();
    sessions_.forget(job.kept().ledger(), session_id);
  });
  if (!MEMD_PLANTED("session.half_written_shown"))
    job.cache().half_written().discard(*session, *discarded);
  MEMD_FAILPOINT("session.before_pins_dropped");
  discarded->finish(Status::ok());
  if (!MEMD_PLANTED("session.pins_kept")) job.cache().sessions().detach(session);
  job.state().early().forget_session(session_id);
  job.cache().plans().end(*session);
  job.shards().free_ids().end_session(session_id);
  sessions_.remove(session_id);
  // Its pins are gone, and what it has half written.
  job.cache().waits().wake_all();
  if (job.memory() != nullptr) job.cache().slots().free_retired();
  gradients_.drop(job, session_id);
  if (MEMD_PLANTED("session.sealed_gradients_dropped")) {
    std::set<uint32_t> all;
    for (uint32_t i = 0; i < job.shards().buckets().size(); ++i) all.insert(i);
    gradients_.drop(job, all, [](const Shard& shard) { return !shard.contributors.empty(); });
  }
  // No gradient names its seat any more.
  if (job.cache().group().leave(session_id)) job.cache().table().withdraw_uncommitted();
  MEMD_FAILPOINT("session.detached");
  for (LeaseWaiter& waiter : given_up) {
    waiter.refuse(error(StatusCode::fenced, "the session has ended: ", session_id));
  }
  if (job.progress().is_loading()) returns_.begin(job.job_id());
  return lease_count;
}

void ShardStore::detach_all() {
  while (!sessions_.all().empty()) {
    const auto detached = detach(sessions_.all().begin()->first);
    MEMD_CHECK(detached.is_ok());
  }
}

Result<std::pair<std::vector<ShardInfo>, bool>> ShardStore::declare(uint64_t session_id,
                                                                    LabelledSpecs declared) {
  const auto job = parts_.job_of(session_id);
  if (!job.is_ok()) return job.status();
  MEMD_FAILPOINT("shards.before_declared");
  if (declares_host_tier(declared.specs()) && !job.value()->shards().declared().has_host_tier()) {
    // Commits will be in memory: what is said of tiles is kept before the first of them.
    if (Status opened = job.value()->kept().open_host_words(); !opened.is_ok()) return opened;
    job.value()->kept().keep_tile_words(keepsakes_);
  }
  auto infos = job.value()->declare(std::move(declared));
  if (!infos.is_ok()) return infos.status();
  return std::pair(std::move(infos).value(), job.value()->admission().gradients_fit());
}

// ---- Leases -------------------------------------------------------------------------------------

void ShardStore::lease(const LeaseRequest& asked, LeaseReply reply) {
  LeaseRequest request = asked;
  if (request.part > Part::rank_sum || request.mode > LeaseMode::overwrite) {
    return reply(error(StatusCode::invalid_argument, "unknown part or mode of a lease"), {});
  }
  if (!has_reserve()) return reply(no_memory_for("a lease"), {});
  const auto found = parts_.job_of(request.session_id);
  if (!found.is_ok()) return reply(found.status(), {});
  Job& job = *found.value();
  if (!job.progress().stopped().is_ok()) return reply(job.progress().stopped(), {});
  if (request.part == Part::rank_sum) {
    const auto rank = job.cache().group().ranks().rank_of(request.session_id);
    if (!rank) return reply(error(StatusCode::invalid_argument, "the session is no rank"), {});
    request.rank = *rank;
    if (job.shards().find_entry(request.shard_id, Part::gradient) != nullptr)
      job.shards().rank_sums().make(*rank, job.shards()[request.shard_id].bucket);
  }
  if (find_entry(job.shards(), request) == nullptr) {
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
  Job* const job = jobs_.find(job_id);
  MEMD_CHECK(job != nullptr);  // a job with service leases is not dropped
  job->cache().leases().release_service(grant, discard);
}

// ---- Gradients and deletion ---------------------------------------------------------------------

void ShardStore::delete_shard(uint64_t session_id,
                              const std::string& name,
                              const std::function<void(Result<bool>)>& done) {
  const auto owner = parts_.job_of(session_id);
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
  if (entry->pending() != nullptr) {
    return done(error(StatusCode::invalid_argument,
                      "shard ",
                      job.name(),
                      "/",
                      name,
                      " is still being written; release the tensor first"));
  }
  const auto still = [&job, entry, shard_id] {
    // A blob that a closed step names stays until that is made, which must find it.
    return entry->task_count() == 0 && entry->residency() != Residency::filling &&
           entry->residency() != Residency::draining &&
           !job.cache().residencies().is_awaited(*entry) && !job.steps().names(shard_id);
  };
  const auto remove = [this, &job, name, session_id, done] {
    // It may have gone, or come back under the same name, while its bytes were being moved.
    const auto again = job.shards().find(name);
    if (!again) return done(false);
    job.cache().waiters().fail(
        *job.shards()[*again].value,
        error(StatusCode::not_found, "shard ", job.name(), "/", name, " was deleted"));
    MEMD_FAILPOINT("shard.before_removed");
    job.remove(*again, session_id, extents_);
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

bool ShardStore::serve_sessions() {
  bool progress = false;
  std::vector<uint64_t> broken;
  const size_t count = sessions_.all().size();
  auto each = sessions_.all().begin();
  const size_t first = count == 0 ? 0 : serve_first_ % count;
  std::advance(each, first);
  for (size_t looked_at = 1; looked_at <= count; ++looked_at) {
    const auto& [session_id, session] = *each;
    const bool followed = jobs_.find(session->job_id)->cache().plans().follow_uses(*session, turn_);
    const bool served = serve(*session);
    if (session->ring.broken()) broken.push_back(session_id);
    if (++each == sessions_.all().end()) each = sessions_.all().begin();
    if (!followed && !served) continue;
    progress = true;
    if (!turn_.is_spent()) continue;
    serve_first_ = (first + looked_at) % count;
    break;
  }
  for (const uint64_t session_id : broken) {
    reports_.count_protocol_error();
    const auto detached = detach(session_id);
    MEMD_CHECK(detached.is_ok());
    progress = true;
  }
  return progress;
}

bool ShardStore::serve(Session& session) {
  uint32_t count = 0;
  for (; count < kRequestsATurn; ++count) {
    if (count > 0 && turn_.is_spent()) break;
    const auto polled = session.ring.poll();
    if (!polled) break;
    const Request& request = *polled;
    if (session.request_count_open >= kOpenRequestsMax) {
      session.ring.refuse_client();
      break;
    }
    const bool known = request.opcode >= Opcode::lease && request.opcode <= Opcode::scratch_ended;
    const bool valid =
        known && request.part <= Part::rank_sum && request.mode <= LeaseMode::overwrite;
    const uint64_t session_id = session.session_id;
    if (!valid) {
      reports_.count_protocol_error();
      Completion completion{};
      completion.request_id = request.request_id;
      session.ring.publish(completion,
                           error(StatusCode::invalid_argument, "the request is malformed"));
      continue;
    }
    if (request.opcode == Opcode::gradient_is_final) {
      gradients_.is_final(session_id, request.shard_id);
      continue;
    }
    if (request.opcode == Opcode::gradient_unused) {
      gradients_.unused(session_id, request.shard_id);
      continue;
    }
    if (request.opcode == Opcode::rank_sum_ended) {
      gradients_.end_rank_sum(session_id, request.shard_id);
      continue;
    }
    if (request.opcode == Opcode::scratch_ended) {
      gradients_.scratch().end(session_id, request.shard_id);
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
           .is_expected = request.is_expected != 0 && request.part == Part::gradient},
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

bool ShardStore::end_unused_jobs() {
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
  // One that could not return tries again in the next turn, which need not come at once.
  return false;
}

void ShardStore::write_catalogue_anew(uint64_t job_id) {
  // The root is written by every commit.
  for (const auto& [id, job] : jobs_) {
    if (job->ending() != nullptr || (job_id != 0 && id != job_id)) continue;
    // A job that commits nothing any more writes no root either; the next pass finds it again.
    if (!job->progress().stopped().is_ok() || job->lost().count() != 0) continue;
    job->durable().note_change();
    return operations_.sync_job(id, [](const Status&, const StepReport&) {});
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
         snapshot_readings_.is_idle() &&
         std::all_of(jobs_.begin(), jobs_.end(), [](const auto& it) {
           const Job& job = *it.second;
           return job.operations().is_idle() && job.conditions().empty() &&
                  !job.cache().activities().any();
         });
}

void ShardStore::give_up_waiting() {
  scrub_.set_rate(0);
  live_check_.give_up();
  snapshot_readings_.give_up();
  for (const auto& [job_id, job] : jobs_) {
    for (LeaseWaiter& waiter : job->cache().waiters().take_all()) {
      waiter.refuse(error(StatusCode::unavailable, "the daemon is stopping; job ", job_id));
    }
  }
}

}  // namespace memd
