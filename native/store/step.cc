// ShardStore's steps and syncs: how one is accepted, started, and updates its buckets.
#include <algorithm>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/state/tile_update.h"
#include "store/step_state.h"

namespace memd {
namespace {

/// Whether `request` can be `earlier` asked for again, after its answer was lost: it names what
/// that consumes. By its number alone a second step would pass for it, and lose its gradients. Not
/// by its call: another daemon, or the ledger, may have it under an earlier one.
bool is_same_step(const StepRequest& earlier, const StepRequest& request) {
  const auto shards_of = [](const StepRequest& step) {
    std::set<uint32_t> shard_ids;
    for (const StepGroup& group : step.groups)
      shard_ids.insert(group.shard_ids.begin(), group.shard_ids.end());
    return shard_ids;
  };
  return shards_of(earlier) == shards_of(request) &&
         std::set(earlier.staged_buffers.begin(), earlier.staged_buffers.end()) ==
             std::set(request.staged_buffers.begin(), request.staged_buffers.end());
}

}  // namespace

// ---- Operations ---------------------------------------------------------------------------------

void ShardStore::enqueue(Job& job, const char* kind, Operations::Start start) {
  job.operations.enqueue(kind, clock_.now_ns(), std::move(start));
}

void ShardStore::end_operation(uint64_t job_id) {
  if (Job* const job = find(job_id)) job->operations.end();
}

void ShardStore::ask_for_flush(Job& job, std::optional<uint32_t> bucket) {
  const uint64_t key = bucket ? *bucket : ~uint64_t{0};
  if (!job.tiles.ask_flush(key)) return;
  enqueue(job, "flush", [this, &job, bucket, key](const Status& turn) {
    if (!turn.is_ok()) return;
    job.state().writeback().flush_tiles(
        bucket, std::make_shared<StepReport>(), [this, &job, bucket, key](const Status& status) {
          job.tiles.end_flush(key);
          if (!status.is_ok()) {
            bucket ? job.waiters().fail(*job.shards().bucket(*bucket).value, status)
                   : job.waiters().fail_for_room(status);
          }
          end_operation(job.job_id);
        });
  });
}

void ShardStore::read_moments(const MomentsRequest& request, Moments::Read done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status(), {}, {});
  Job* const job = owner.value();
  enqueue(*job, "moments", [this, job, request, done = std::move(done)](const Status& turn) {
    if (!turn.is_ok()) return done(turn, {}, {});
    job->state().moments().read(
        request,
        [this, job_id = job->job_id, done](
            const Status& status, std::vector<float> exp_avg, std::vector<float> exp_avg_sq) {
          done(status, std::move(exp_avg), std::move(exp_avg_sq));
          end_operation(job_id);
        });
  });
}

void ShardStore::write_moments(const MomentsRequest& request,
                               uint64_t generation,
                               std::vector<float> exp_avg,
                               std::vector<float> exp_avg_sq,
                               Done done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status());
  Job* const job = owner.value();
  auto moments = std::make_shared<std::pair<std::vector<float>, std::vector<float>>>(
      std::move(exp_avg), std::move(exp_avg_sq));
  enqueue(*job,
          "moments",
          [this, job, request, generation, moments, done = std::move(done)](const Status& turn) {
            if (!turn.is_ok()) return done(turn);
            job->state().moments().write(request,
                                         generation,
                                         std::move(moments->first),
                                         std::move(moments->second),
                                         [this, job, done](const Status& status) {
                                           done(status);
                                           end_operation(job->job_id);
                                         });
          });
}

// ---- Steps --------------------------------------------------------------------------------------

Status ShardStore::check_step(Job& job, const StepRequest& request) const {
  std::set<uint32_t> seen;
  for (const StepGroup& group : request.groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      const Entry* const gradient = job.shards().find_entry(shard_id, Part::gradient);
      if (gradient == nullptr) {
        return error(
            StatusCode::not_found, "job ", job.name, " has no parameter with shard id ", shard_id);
      }
      const Shard& shard = job.shards()[shard_id];
      const std::string who = concat("shard ", job.name, "/", shard.name());
      if (!seen.insert(shard_id).second) {
        return error(StatusCode::invalid_argument, who, " is in two groups of one step");
      }
      if (shard.gradient_session != request.session_id) {
        return error(StatusCode::invalid_argument,
                     who,
                     " has no gradient from this session; run backward first");
      }
      if (!shard.written) {
        return error(
            StatusCode::invalid_argument, who, " was never written; write its first value");
      }
      if (gradient->slot != nullptr &&
          job.slots().pins(*gradient->slot, shard.index_in_bucket).writers != 0) {
        return error(
            StatusCode::invalid_argument, who, ": its gradient is still leased for writing");
      }
    }
  }
  return check_staged(job, request);
}

Status ShardStore::check_staged(const Job& job, const StepRequest& request) const {
  std::set<uint32_t> seen;
  for (const auto& [staged, buffer] : request.staged_buffers) {
    const bool known = staged < job.shards().size() && buffer < job.shards().size() &&
                       staged != buffer && !job.shards()[staged].deleted &&
                       !job.shards()[buffer].deleted;
    if (!known)
      return error(
          StatusCode::not_found, "job ", job.name, " has no buffers ", staged, ", ", buffer);
    if (!seen.insert(staged).second || !seen.insert(buffer).second) {
      return error(StatusCode::invalid_argument,
                   "buffers ",
                   job.shards()[staged].name(),
                   " and ",
                   job.shards()[buffer].name(),
                   " of job ",
                   job.name,
                   ": one of them is named twice in a step");
    }
    const ShardSpec from = job.shards()[staged].spec();
    const ShardSpec to = job.shards()[buffer].spec();
    if (from.kind != ShardKind::buffer || to.kind != ShardKind::buffer || from.dtype != to.dtype ||
        from.shape != to.shape) {
      return error(StatusCode::invalid_argument,
                   "buffers ",
                   from.name,
                   " and ",
                   to.name,
                   " of job ",
                   job.name,
                   " differ in kind, shape or dtype");
    }
  }
  return Status::ok();
}

// What the step used is gone: whatever is there now came after it, and "ok" would lose it silently.
Status ShardStore::check_repeated(Job& job, const StepRequest& request) {
  const auto refusal = [&](const Shard& shard, const char* what) {
    return error(StatusCode::fenced,
                 "this session has closed step ",
                 request.step,
                 " of job ",
                 job.name,
                 " already, and ",
                 what,
                 " of shard ",
                 shard.name(),
                 " came after it; the job stands at step ",
                 job.progress.committed_step(),
                 ": connect anew and resume from there");
  };
  for (const StepGroup& group : request.groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      if (shard_id >= job.shards().size()) continue;
      const Shard& shard = job.shards()[shard_id];
      if (shard.gradient_session == request.session_id) return refusal(shard, "a gradient");
    }
  }
  for (const auto& [staged_id, buffer_id] : request.staged_buffers) {
    if (staged_id >= job.shards().size() || job.shards()[staged_id].deleted) continue;
    const Shard& staged = job.shards()[staged_id];
    job.residencies().settle_pending(*staged.value);
    if (staged.written) return refusal(staged, "the bytes");
  }
  return Status::ok();
}

bool ShardStore::joins_earlier_step(Job& job, const StepRequest& request, StepDone& done) {
  if (request.step == 0 || MEMD_PLANTED("step.made_again_when_repeated")) return false;
  for (const auto& state : job.closed_steps) {
    if (state->request.session_id != request.session_id || state->request.step != request.step)
      continue;
    if (!is_same_step(state->request, request)) {
      const Status refusal =
          error(StatusCode::invalid_argument,
                "this session closes step ",
                request.step,
                " of job ",
                job.name,
                " twice, each time over other shards; wait for the answer to one step before the "
                "next is asked for");
      note_call_failed(job, request, refusal);
      done(refusal, {});
      return true;
    }
    state->also_done.push_back(std::move(done));
    state->request.call = request.call;
    if (!state->is_undoing) let_lease_after(request);
    return true;
  }
  if (request.step > job.progress.committed_step()) return false;
  if (request.step <= sessions_.at(request.session_id)->step_committed) {
    const Status repeated = check_repeated(job, request);
    StepReport report;
    report.committed_step = job.progress.committed_step();
    report.durable_step = job.progress.durable_step();
    report.disk_error = job.progress.disk_error().message();
    repeated.is_ok() ? let_lease_after(request) : note_call_failed(job, request, repeated);
    done(repeated, report);
  } else {
    // That its own gradients made this step is not known: silence could lose one.
    const Status refusal =
        error(StatusCode::fenced,
              "job ",
              job.name,
              " stands at step ",
              job.progress.committed_step(),
              ", which another session made; go on from there: this one closes step ",
              request.step);
    note_call_failed(job, request, refusal);
    done(refusal, {});
  }
  return true;
}

uint64_t ShardStore::closing_step(uint64_t job_id) const {
  const Job* const job = find(job_id);
  if (job == nullptr || job->closed_steps.empty()) return 0;
  return job->progress.committed_step() + (job->closed_steps.front()->is_counted ? 0 : 1);
}

void ShardStore::step(StepRequest request, StepDone done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status(), {});
  Job& job = *owner.value();
  note_call(request);
  if (joins_earlier_step(job, request, done)) return;
  if (Status status = check_step(job, request); !status.is_ok()) {
    note_call_failed(job, request, status);
    return done(status, {});
  }
  std::optional<size_t> place;
  if (job.journal().ledger() != nullptr && !MEMD_PLANTED("ledger.step_not_recorded")) {
    const auto closed = job.journal().ledger()->close_step(request);
    if (!closed.is_ok()) {
      note_call_failed(job, request, closed.status());
      return done(closed.status(), {});
    }
    place = closed.value();
    MEMD_FAILPOINT("ledger.step_closed");
  }
  accept_step(job, std::move(request), place, std::move(done));
}

void ShardStore::note_call(const StepRequest& request) {
  const auto session = sessions_.find(request.session_id);
  if (session == sessions_.end()) return;
  session->second->call_seen = std::max(session->second->call_seen, request.call);
  // Asked again it may well be made.
  if (request.call == session->second->call_failed) session->second->call_failed = 0;
}

// What the step updates is in the table for nobody, or as the step has made it.
void ShardStore::let_lease_after(const StepRequest& request) {
  const auto session = sessions_.find(request.session_id);
  if (session != sessions_.end()) session->second->ring.set_resident_call(request.call);
}

// Whoever follows it in the ring would compute with what it was to replace.
void ShardStore::note_call_failed(const Job& job, const StepRequest& request, const Status& why) {
  const auto session = sessions_.find(request.session_id);
  if (session == sessions_.end() || request.call == 0) return;
  session->second->call_failed = request.call;
  session->second->call_failure = error(why.code(),
                                        "the step before it was not made; the job stands at step ",
                                        job.progress.committed_step(),
                                        ": ",
                                        why.message());
}

void ShardStore::accept_step(
    Job& job, StepRequest request, std::optional<size_t> place, StepDone done, bool is_redo) {
  auto state = std::make_shared<StepState>();
  state->job = &job;
  state->is_step = true;
  state->is_redo = is_redo;
  state->started_ns = clock_.now_ns();
  for (size_t group = 0; group < request.groups.size(); ++group) {
    for (const uint32_t shard_id : request.groups[group].shard_ids) {
      state->group_of[shard_id] = group;
      state->buckets.insert(job.shards()[shard_id].bucket);
      job.shards()[shard_id].gradient_session = kSealedGradient;
      job.journal().note_shard(shard_id);
    }
  }
  for (const uint32_t index : state->buckets) {
    job.begin_updates(job.shards().bucket(index));
    Entry& value = *job.shards().bucket(index).value;
    ++value.steps_before;
    job.table().withdraw(value);
  }
  note_call(request);
  let_lease_after(request);
  state->update_order = job.plans().in_order_of_use(request.session_id, state->buckets);
  job.plans().close_step(request.session_id, request.step, state->update_order);
  state->request = std::move(request);
  state->place = place;
  state->done = std::move(done);
  job.closed_steps.push_back(state);
  MEMD_FAILPOINT("step.closed");
  enqueue(job, "step", [this, state](const Status& status) {
    status.is_ok() ? start_step(state) : state->answer(status);
  });
}

void ShardStore::sync(uint64_t session_id, StepDone done) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return done(job.status(), {});
  sync_job(job.value()->job_id, std::move(done));
}

void ShardStore::sync_job(uint64_t job_id, StepDone done) {
  Job* const job = find(job_id);
  if (job == nullptr)
    return done(error(StatusCode::not_found, "there is no job with id ", job_id), {});
  // Nothing of it can be made durable, and nobody is left who could be told.
  if (!job->progress.stopped().is_ok() && job->sessions.empty()) return done(Status::ok(), {});
  auto state = std::make_shared<StepState>();
  state->job = job;
  state->started_ns = clock_.now_ns();
  state->done = std::move(done);
  enqueue(*job, "sync", [this, state](const Status& status) {
    status.is_ok() ? start_step(state) : state->done(status, {});
  });
}

Status ShardStore::check_start(const StepState& state) const {
  if (!state.job->progress.stopped().is_ok()) return state.job->progress.stopped();
  if (Status status = extents_.check_writable(); !status.is_ok()) return status;
  if (Status status = state.job->lost.check(state.job->name); !status.is_ok()) return status;
  const uint64_t step_next = state.job->progress.committed_step() + 1;
  if (state.request.step != 0 && state.request.step != step_next) {
    return error(StatusCode::fenced,
                 "this session closes step ",
                 state.request.step,
                 " of job ",
                 state.job->name,
                 ", whose next step is ",
                 step_next,
                 ": another session has trained it meanwhile; connect anew and resume from there");
  }
  return Status::ok();
}

// What a writer still holds is not whole: it can't be part of what is committed.
Status ShardStore::check_writers(const Job& job) {
  for (Entry* const entry : job.shards().entries()) {
    if (entry == nullptr || entry->kind != EntryKind::parameter || entry->slot == nullptr) continue;
    if (!job.slots().has_writer(*entry->slot)) continue;
    return error(StatusCode::invalid_argument,
                 "shard ",
                 job.shards().describe(*entry),
                 " is still leased for writing; let go of the tensor first");
  }
  return Status::ok();
}

void ShardStore::start_step(const std::shared_ptr<StepState>& state) {
  set_phase(*state->job, "waits until nothing it names is being read or written");
  const auto settled = [this, state] {
    if (state->is_redo && !may_redo_) return false;
    const Job& its = *state->job;
    const auto still = [](const Entry& entry) {
      return entry.task_count == 0 && entry.residency() != Residency::filling &&
             entry.residency() != Residency::draining;
    };
    for (Entry* const entry : its.shards().entries()) {
      if (entry == nullptr || entry->kind == EntryKind::gradient) continue;
      // A parameter that this step does not touch may well be fetched meanwhile.
      const bool fetched_only =
          entry->kind == EntryKind::parameter && !state->buckets.contains(entry->owner);
      if (fetched_only ? entry->residency() == Residency::draining : !still(*entry)) return false;
    }
    return std::all_of(state->buckets.begin(), state->buckets.end(), [&](uint32_t index) {
      return still(*its.shards().bucket(index).gradient);
    });
  };
  state->job->conditions.add(settled, [this, state] {
    MEMD_FAILPOINT("step.started");
    Job& job = *state->job;
    // What an earlier daemon began to update can only be finished, and that daemon had written back
    // what was dirty. What was written since then is of the next commit, whoever still writes it.
    const bool is_begun = job.tiles.has_made();
    Status status = check_start(*state);
    if (status.is_ok() && !is_begun) status = check_writers(job);
    if (status.is_ok()) status = check_staged(*state->job, state->request);
    if (!status.is_ok()) return finish_updates(state, status);
    state->in_memory = state->is_step && job.durability.is_in_memory();
    state->to_disk =
        !state->is_step ||
        job.durability.is_due(job.progress.committed_step() + 1 - job.progress.durable_step()) ||
        commits_.catalogue_tag(job.job_id) == 0;
    hold_entries(*state);
    MEMD_FAILPOINT("step.entries_held");
    job.operations.hold_writers(!is_begun);
    set_phase(job, "prepares the disk");
    prepare_disk(state, [this, state, is_begun](const Status& prepared) {
      Job& its = *state->job;
      its.operations.hold_writers(false);
      Status ready = prepared;
      if (ready.is_ok()) ready = swap_staged_buffers(state);
      if (!ready.is_ok()) return finish_updates(state, ready);
      if (is_begun) return begin_updates(state);
      set_phase(its, "writes back what is dirty");
      state->job->state().writeback().write_back_all(
          state->to_disk, state->report, [this, state](const Status& written) {
            written.is_ok() ? begin_updates(state) : finish_updates(state, written);
          });
    });
  });
}

void ShardStore::begin_updates(const std::shared_ptr<StepState>& state) {
  if (state->is_step) take_early(*state);
  if (state->in_memory) {
    Status room = promise_space(*state);
    if (!room.is_ok() && !state->early.empty()) {
      // The step alone may need less at a time.
      for (auto& [bucket, early] : std::exchange(state->early, {})) {
        state->job->state().early().give_back(*early, EarlyDiscard::failed);
      }
      room = promise_space(*state);
    }
    if (!room.is_ok()) return finish_updates(state, room);
  }
  update_buckets(state);
}

void ShardStore::take_early(StepState& state) {
  for (const uint32_t index : state.buckets) {
    auto early = state.job->state().early().take(
        index, state.request.session_id, [&state](uint32_t shard_id) -> const AdamSettings* {
          const auto group = state.group_of.find(shard_id);
          if (group == state.group_of.end()) return nullptr;
          return &state.request.groups[group->second].settings;
        });
    if (early != nullptr) state.early[index] = std::move(early);
  }
}

// A step in memory cannot be undone: what it may need of the disk must be there before, also where
// everything that is cached or stays is displaced by somebody else's need of memory.
Status ShardStore::promise_space(const StepState& state) {
  Job& job = *state.job;
  const bool is_begun = job.tiles.has_made();
  const std::vector<uint64_t> dirty_keys = job.tiles.dirty_keys();
  std::set<uint64_t> keys(dirty_keys.begin(), dirty_keys.end());
  for (const uint32_t index : state.buckets) {
    for (size_t tile = 0; tile < job.shards().bucket(index).tile_count(); ++tile)
      keys.insert(tile_key(index, tile));
  }
  uint64_t needed_bytes = 0;
  uint64_t replaced_count = 0;
  uint64_t replaced_bytes_max = 0;
  for (const uint64_t key : keys) {
    const Bucket& bucket = job.shards().bucket(key >> 32);
    const auto tile = static_cast<uint32_t>(key);
    // It has its new extents already.
    const auto early = state.early.find(static_cast<uint32_t>(key >> 32));
    if (early != state.early.end() && early->second->tiles[tile]) continue;
    bool is_replaced = job.tiles.is_dirty(key);
    const auto need = [&](const Replica& replica, uint64_t bytes) {
      const bool is_own = replica.exists() && !replica.referenced;
      is_replaced = is_replaced || is_own;
      if (!is_own) needed_bytes += bytes;
      return bytes;
    };
    const uint64_t bytes = need(bucket.value->replicas[tile], bucket.value->replica_bytes(tile)) +
                           need(bucket.rest[tile], bucket.rest_bytes(tile));
    // The new extents come before the old ones go, one tile after the other.
    if (!is_replaced) continue;
    ++replaced_count;
    replaced_bytes_max = std::max(replaced_bytes_max, bytes);
  }
  needed_bytes += std::min<uint64_t>(replaced_count, kTilesInFlight) * replaced_bytes_max;
  // Early tiles of other buckets take what this step needs.
  while (!job.space.has_room(SpaceUse::state, needed_bytes) && job.state().early().free_extents())
    continue;
  job.space.promise(needed_bytes);
  // What an earlier daemon began had its room then.
  if (is_begun || job.space.has_room(SpaceUse::state, needed_bytes)) return Status::ok();
  return error(StatusCode::capacity,
               "job ",
               job.name,
               " has no room on disk for its next step; sync, so that what the last commit on disk "
               "holds becomes free, or raise nvme_bytes: ",
               job.space.used_bytes(),
               " of ",
               job.space.quota_bytes(),
               " bytes used, ",
               needed_bytes,
               " more needed");
}

void ShardStore::prepare_disk(const std::shared_ptr<StepState>& state, Done done) {
  Job& job = *state->job;
  // What can be undone returns to what is on disk.
  if (!state->in_memory)
    return job.state().writeback().flush_tiles(std::nullopt, state->report, std::move(done));
  if (!job.durability.is_none() || job.progress.undurable_since() != 0) return done(Status::ok());
  // Whatever the disk has, memory builds on it: where there are dirty tiles of an earlier
  // durability they are written first. From here on extents of the last commit are overwritten, and
  // the disk says so before.
  job.state().writeback().flush_tiles(
      std::nullopt, state->report, [this, state, done = std::move(done)](const Status& flushed) {
        if (!flushed.is_ok()) return done(flushed);
        Job& its = *state->job;
        its.progress.set_undurable_since(its.progress.committed_step() + 1);
        commits_.commit(its.job_id, its.durable(), [state, done](const Status& status, double) {
          if (!status.is_ok()) state->job->progress.set_undurable_since(0);
          state->job->durable().note_change();
          done(status);
        });
      });
}

void ShardStore::hold_entries(StepState& state) {
  Job& job = *state.job;
  for (const uint32_t index : state.buckets) {
    state.held.push_back(job.shards().bucket(index).value);
    state.held.push_back(job.shards().bucket(index).gradient);
  }
  for (const auto& [staged_id, buffer_id] : state.request.staged_buffers) {
    state.held.push_back(job.shards()[staged_id].value);
    state.held.push_back(job.shards()[buffer_id].value);
  }
  for (Entry* const entry : state.held) {
    ++entry->task_count;
    entry->is_in_step = true;
  }
}

void ShardStore::let_go_of_entries(StepState& state) {
  MEMD_FAILPOINT("step.letting_go");
  for (Entry* const entry : state.held) {
    if (!entry->is_ahead) --entry->task_count;
    entry->is_in_step = false;
    entry->is_ahead = false;
  }
  state.held.clear();
  for (const auto& [shard_id, group] : state.group_of)
    state.job->shards()[shard_id].is_ahead = false;
}

// The session of the step goes on with the new values at once. Everybody else sees what is
// committed.
void ShardStore::publish_bucket(StepState& state, const Bucket& bucket) {
  Job& job = *state.job;
  Entry& value = *bucket.value;
  for (const uint32_t shard_id : bucket.shards)
    job.shards()[shard_id].is_ahead = state.group_of.contains(shard_id);
  value.is_ahead = true;
  const auto session = sessions_.find(state.request.session_id);
  value.audience = session == sessions_.end() ? kNobody : session->second->ring.tag();
  if (value.residency() == Residency::filling)
    job.residencies().move(value, Residency::filling, Residency::clean);
  --value.task_count;
  // Where it is not resident it may be brought up now.
  if (!value.is_resident()) job.policy().look_again_at(value.id);
  job.policy().want_look_ahead();
  MEMD_FAILPOINT("step.bucket_published");
}

std::optional<WaitsFor> ShardStore::update_before(const Job& job,
                                                  const LeaseRequest& request,
                                                  const Entry& entry) {
  for (const auto& state : job.closed_steps) {
    if (state->is_over || !state->buckets.contains(entry.owner)) continue;
    const bool is_own = !request.for_service && state->request.session_id == request.session_id;
    if (is_own && !state->group_of.contains(request.shard_id) && !entry.is_in_step) continue;
    // What an earlier daemon has begun is as good as begun.
    const bool has_begun = !state->held.empty() || state->is_redo;
    if (!is_own && !has_begun) continue;
    const bool can_be_read = is_own && has_begun && entry.is_ahead && !state->is_undoing;
    if (can_be_read && request.mode == LeaseMode::read) continue;
    return is_own && request.mode == LeaseMode::read ? WaitsFor::update : WaitsFor::step;
  }
  return std::nullopt;
}

Status ShardStore::swap_staged_buffers(const std::shared_ptr<StepState>& state) {
  Job& job = *state->job;
  for (const auto& [staged_id, buffer_id] : state->request.staged_buffers) {
    Shard& staged = job.shards()[staged_id];
    Shard& buffer = job.shards()[buffer_id];
    job.residencies().settle_pending(*staged.value);
    job.residencies().settle_pending(*buffer.value);
    if (!staged.written || staged.value->pending != nullptr) {
      return error(
          StatusCode::invalid_argument, "shard ", job.name, "/", staged.name(), " was not put yet");
    }
    if (buffer.value->pending != nullptr) {
      return error(StatusCode::invalid_argument,
                   "shard ",
                   job.name,
                   "/",
                   buffer.name(),
                   " is still leased for writing; let go of the tensor first");
    }
  }
  for (const auto& [staged_id, buffer_id] : state->request.staged_buffers)
    state->buffer_was_written.push_back(job.shards()[buffer_id].written);
  exchange_buffers(*state, true);
  if (!state->request.staged_buffers.empty()) job.durable().note_change();
  MEMD_FAILPOINT("step.buffers_swapped");
  return Status::ok();
}

bool ShardStore::is_named(const StepState& state, uint32_t shard_id) {
  const auto& pairs = state.request.staged_buffers;
  return std::any_of(pairs.begin(), pairs.end(), [shard_id](const auto& pair) {
    return pair.first == shard_id || pair.second == shard_id;
  });
}

void ShardStore::exchange_buffers(StepState& state, bool swapped) {
  MEMD_CHECK(state.swapped != swapped);
  for (size_t i = 0; i < state.request.staged_buffers.size(); ++i) {
    const auto& [staged_id, buffer_id] = state.request.staged_buffers[i];
    Job& job = *state.job;
    Shard& staged = job.shards()[staged_id];
    Shard& buffer = job.shards()[buffer_id];
    job.table().withdraw(*staged.value);
    job.table().withdraw(*buffer.value);
    std::swap(staged.value, buffer.value);
    std::swap(staged.value->owner, buffer.value->owner);
    staged.written = !swapped;
    buffer.written = swapped || state.buffer_was_written[i];
    job.table().publish(*staged.value);
    job.table().publish(*buffer.value);
  }
  state.swapped = swapped;
}

void ShardStore::drop_staged(const StepState& state) {
  Job& job = *state.job;
  MEMD_FAILPOINT("step.before_staged_dropped");
  for (const auto& [staged_id, buffer_id] : state.request.staged_buffers) {
    Entry& old = *job.shards()[staged_id].value;
    if (old.is_resident()) job.residencies().move(old, old.residency(), Residency::absent);
    if (old.slot != nullptr) job.slots().retire(std::move(old.slot));
    for (Replica& replica : old.replicas) {
      if (replica.exists()) job.space.release(replica, extents_);
    }
    MEMD_FAILPOINT("ledger.old_buffer_dropped");
    // Now the staged bytes are the buffer's, also for whoever goes on after this daemon.
    Entry& fresh = *job.shards()[buffer_id].value;
    old.kept_owner = staged_id;
    fresh.kept_owner = buffer_id;
    job.slots().note(fresh);
    job.table().publish(fresh);
    // Of bytes in memory alone too: the old ones' extents are nobody's.
    for (size_t i = 0; i < fresh.replicas.size(); ++i) job.extent_log().note_value(fresh, i);
    for (size_t i = 0; i < old.replicas.size(); ++i) job.extent_log().note_value(old, i);
    job.journal().note_shard(buffer_id);
    job.journal().note_shard(staged_id);
  }
}

void ShardStore::update_buckets(const std::shared_ptr<StepState>& state) {
  Job& job = *state->job;
  set_phase(job, "updates tiles");
  if (state->is_step) {
    if (!state->in_memory) job.space.begin_update(job.shards().each_replica());
    state->updating = true;
  }
  auto join = Join::start([this, state](const Status& status) { finish_updates(state, status); });
  for (const uint32_t index : state->update_order) {
    Bucket& bucket = job.shards().bucket(index);
    auto updated = Join::start([this, state, &bucket, done = join->branch()](const Status& status) {
      if (status.is_ok() && state->is_step) publish_bucket(*state, bucket);
      done(status);
    });
    update_bucket(state, bucket, updated);
    updated->finish(Status::ok());
  }
  join->finish(Status::ok());
}

void ShardStore::update_bucket(const std::shared_ptr<StepState>& state,
                               Bucket& bucket,
                               const std::shared_ptr<Join>& join) {
  Job& job = *state->job;
  Entry& value = *bucket.value;
  if (value.bytes == 0) return;  // empty tensors only
  std::vector<bool> made_early(bucket.tile_count());
  std::unique_ptr<Slot> shadow;
  bool was_in_place = false;
  bool is_away = false;
  if (const auto early = state->early.extract(value.owner); !early.empty()) {
    SpeculativeBucket& taken = *early.mapped();
    state->report->add(*taken.report);
    shadow = std::move(taken.shadow);
    was_in_place = shadow != nullptr && taken.is_in_place;
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
      if (!taken.tiles[tile]) continue;
      made_early[tile] = true;
      // A fetch brings what is wanted of it, when it is wanted.
      is_away = is_away || (shadow == nullptr && !taken.tiles[tile]->private_offset_bytes);
    }
    job.state().early().adopt(bucket, taken);
  }
  const bool is_in_shadow = shadow != nullptr;
  bool in_place = value.residency() == Residency::clean;
  if (in_place && (is_in_shadow || is_away || !job.table().take_away(value))) {
    // A live view is never written: the new parameter goes elsewhere.
    job.residencies().move(value, Residency::clean, Residency::absent);
    job.slots().retire(std::move(value.slot));
    in_place = false;
  }
  if (in_place) {
    job.residencies().move(value, Residency::clean, Residency::filling);
  } else if (is_in_shadow) {
    value.slot = std::move(shadow);
    job.residencies().move(value, Residency::absent, Residency::filling);
  }
  // When its first tile starts: by then the session is farther, and needs less of what is resident.
  const auto find_slot = [this, state, &value] { make_slot_for_update(*state, value); };
  const bool is_unpublished = !in_place && !is_in_shadow && !is_away;
  // Tiles that are made already do not start.
  const bool is_begun = job.tiles.has_made() ||
                        std::find(made_early.begin(), made_early.end(), true) != made_early.end();
  if (is_unpublished && is_begun) find_slot();

  for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
    TileTask task;
    task.entry = &value;
    task.index = tile;
    task.bucket = &bucket;
    task.reads_value = true;
    const MadeTile* const made = job.tiles.made(tile_key(value.owner, tile));
    const bool is_whole = made != nullptr && made->is_whole;
    if (is_whole || made_early[tile]) {
      // It was done before, by an earlier daemon or early; what is left is to publish it.
      if (value.slot == nullptr || (made_early[tile] && is_in_shadow)) continue;
      task.reads_rest = true;
      task.work = [](const TileBytes& bytes) {
        copy_bytes(bytes.arena_value, bytes.value, bytes.value_bytes);
      };
      task.report = state->report;
      task.done = join->branch();
      job.state().tasks().submit(std::move(task));
      continue;
    }
    task.value_in_arena = in_place || was_in_place;
    if (tile == 0 && is_unpublished && !is_begun) task.starting = find_slot;
    task.writes_value = true;
    task.reads_rest = true;
    task.writes_rest = true;
    task.may_stay = state->in_memory;
    task.gradient = bucket.gradient;
    std::vector<TileSpan> spans;
    for (const uint32_t shard_id : bucket.shards) {
      const auto group = state->group_of.find(shard_id);
      if (group == state->group_of.end()) continue;
      const AdamSettings& settings = state->request.groups[group->second].settings;
      add_span(job.shards()[shard_id], bucket, tile, settings, spans);
    }
    task.work = update_work(bucket.dtype, std::move(spans));
    task.report = state->report;
    task.done = join->branch();
    // Whoever makes room for others would write out what is half of one step.
    const bool is_half_made = made != nullptr;
    is_half_made ? job.state().tasks().submit_first(std::move(task))
                 : job.state().tasks().submit(std::move(task));
  }
}

// Published where there is room, or something goes for it that is used later; a fetch brings it up
// otherwise.
void ShardStore::make_slot_for_update(const StepState& state, Entry& value) {
  Job& job = *state.job;
  if (value.slot != nullptr) return;
  const uint64_t distance = job.plans().distance(state.request.session_id, value.id);
  auto slot = job.slots().make(value.bytes, job.shards().shard_count(value));
  while (slot == nullptr &&
         (job.memory->grow_arena() ||
          (distance != kNeverUsed && job.room().evict_for(value.bytes, distance + 1)))) {
    slot = job.slots().make(value.bytes, job.shards().shard_count(value));
  }
  if (slot == nullptr) return;
  value.slot = std::move(slot);
  job.residencies().move(value, Residency::absent, Residency::filling);
}

}  // namespace memd
