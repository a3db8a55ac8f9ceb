// How ShardStore's steps and syncs end: committed in memory or on disk, or undone.
#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/units.h"
#include "store/step_state.h"

namespace memd {
namespace {

/// What of a job that goes on in memory is on disk.
std::string on_disk(const Job& job) {
  const uint64_t since = job.durable().catalogue().undurable_since();
  if (since == 0) return concat("; there it stays at step ", job.progress.durable_step());
  return concat("; what is there is no step since step ", since);
}

/// What is left of a job whose memory is lost, and what to do: as Job::restore() says it.
std::string way_on(const Job& job) {
  const uint64_t since = job.durable().catalogue().undurable_since();
  if (since == 0) {
    return concat("; connect again to go on from the last step on disk, which is ",
                  job.progress.durable_step());
  }
  return concat(", and it ran on without durability since step ",
                since,
                ": what is on disk is no step; start over with connect(fresh=True), or drop it "
                "with `memd job drop`");
}

}  // namespace

void ShardStore::finish_updates(const std::shared_ptr<StepState>& state, const Status& status) {
  MEMD_FAILPOINT("update.finished");
  if (status.is_ok()) return state->in_memory ? commit_in_memory(state) : commit_step(state);
  if ((state->in_memory && state->updating) || state->job->tiles.has_made()) {
    Job& job = *state->job;
    // Memory is between two steps: no daemon goes on with it.
    job.journal().give_up();
    job.progress.stop(
        error(status.code(),
              "job ",
              job.name,
              ": step ",
              job.progress.committed_step() + 1,
              " failed while its state was updated in place, and cannot be undone with "
              "durability \"",
              job.durability.text(),
              "\"",
              way_on(job),
              ": ",
              status.message()));
    job.progress.return_to_disk();
    job.table().withdraw_all();
    return undo_step(state, job.progress.stopped());
  }
  undo_step(state, status);
}

void ShardStore::unseal(StepState& state) {
  for (const auto& [shard_id, group] : state.group_of) {
    state.job->shards()[shard_id].gradient_session = state.request.session_id;
    state.job->journal().note_shard(shard_id);
  }
  // A session that has ended meanwhile tries no second time.
  if (sessions_.contains(state.request.session_id)) return;
  // The next daemon would miss gradients of a step that is still closed.
  forget_step(state);
  drop_gradients_of(*state.job, [&](const Shard& shard) {
    return shard.gradient_session == state.request.session_id;
  });
}

void ShardStore::undo_step(const std::shared_ptr<StepState>& state, const Status& why) {
  // What was published may be on its way from the disk, from extents that go back now.
  state->is_undoing = true;
  Job& job = *state->job;
  const auto session = sessions_.find(state->request.session_id);
  if (session != sessions_.end()) session->second->ring.set_resident_call(0);
  for (Entry* const entry : state->held) {
    if (!entry->is_ahead) continue;
    entry->audience = kNobody;
    job.table().withdraw(*entry);
  }
  const auto is_still = [state] {
    return std::none_of(state->held.begin(), state->held.end(), [](const Entry* entry) {
      return entry->is_ahead && entry->task_count != 0;
    });
  };
  job.conditions.add(is_still, [this, state, why] {
    undo_now(state);
    finish_step(state, why);
  });
}

void ShardStore::undo_now(const std::shared_ptr<StepState>& state) {
  MEMD_FAILPOINT("step.undoing");
  // N stays: nothing of N + 1 may be seen.
  Job& job = *state->job;
  let_go_of_entries(*state);
  state->is_over = true;
  if (state->updating) {
    // In memory there is nothing to go back to: the job is stopped.
    if (!state->in_memory) job.state().drop_clean_tiles();
    for (const uint32_t index : state->buckets) {
      Entry& value = *job.shards().bucket(index).value;
      if (value.bytes == 0) continue;
      if (value.residency() == Residency::filling)
        job.residencies().move(value, Residency::filling, Residency::absent);
      if (value.is_resident()) job.residencies().move(value, value.residency(), Residency::absent);
      if (value.slot != nullptr) job.slots().retire(std::move(value.slot));
    }
    if (!state->in_memory) job.space.roll_back(extents_);
  }
  if (state->swapped) exchange_buffers(*state, false);
  publish_values(*state);
  unseal(*state);
}

// They are everybody's again, as they are now.
void ShardStore::publish_values(const StepState& state) {
  Job& job = *state.job;
  for (const uint32_t index : state.buckets) {
    Entry& value = *job.shards().bucket(index).value;
    --value.steps_before;
    job.table().withdraw(value);
    job.table().publish(value);
  }
}

void ShardStore::commit_step(const std::shared_ptr<StepState>& state) {
  Job& job = *state->job;
  if (!state->is_step && !job.durable().is_changed() && !job.tiles.has_dirty() &&
      state->report->written_bytes == 0) {
    let_go_of_entries(*state);
    return finish_step(state, Status::ok());
  }
  for (const auto& [shard_id, group] : state->group_of) {
    ++job.shards()[shard_id].generation;
    job.shards()[shard_id].is_ahead = false;
  }
  if (state->is_step) {
    job.progress.begin_step();
    state->is_counted = true;
    if (state->place)
      job.journal().ledger()->note_committing(*state->place, job.progress.committed_step());
  }
  MEMD_FAILPOINT("step.before_commit");
  if (MEMD_PLANTED("step.gradient_released_early")) {
    drop_gradients_of(job,
                      [](const Shard& shard) { return shard.gradient_session == kSealedGradient; });
  }
  const bool was_broken = !extents_.broken().is_ok();
  commit_to_disk(state, [this, state, was_broken](const Status& status) {
    Job& its = *state->job;
    if (!status.is_ok()) {
      for (const auto& [shard_id, group] : state->group_of) --its.shards()[shard_id].generation;
      if (state->is_step) {
        its.progress.undo_step();
        state->is_counted = false;
      }
      // Where it was a write that failed, whether N or N + 1 is on disk is not known: every further
      // commit is refused, and a restart finds out.
      its.durable().note_change();
      // Memory would say N, and the disk maybe N + 1: the next daemon starts the job from disk. A
      // sync leaves both at N, and the catalogue's tag says which of them the ledger builds on.
      const bool is_outcome_unknown = state->is_step && !was_broken && !extents_.broken().is_ok();
      if (is_outcome_unknown) its.journal().give_up();
      return undo_step(state, status);
    }
    publish_step(state);
    finish_step(state, Status::ok());
  });
}

void ShardStore::publish_step(const std::shared_ptr<StepState>& state) {
  Job& job = *state->job;
  let_go_of_entries(*state);
  state->is_over = true;
  drop_staged(*state);
  for (const uint32_t index : state->buckets) {
    const Entry& value = *job.shards().bucket(index).value;
    if (value.is_resident()) job.slots().note(value);
  }
  publish_values(*state);
  MEMD_FAILPOINT("step.before_gradients_dropped");
  drop_gradients_of(
      job, [&](const Shard& shard) { return state->group_of.contains(job.shards().id_of(shard)); });
  job.plans().end_updates(state->request.session_id, state->request.step);
}

void ShardStore::commit_in_memory(const std::shared_ptr<StepState>& state) {
  Job& job = *state->job;
  for (const auto& [shard_id, group] : state->group_of) ++job.shards()[shard_id].generation;
  job.progress.begin_step();
  state->is_counted = true;
  job.durable().note_change();
  if (state->place)
    job.journal().ledger()->note_committing(*state->place, job.progress.committed_step());
  for (const auto& [staged_id, buffer_id] : state->request.staged_buffers) {
    // What lies on disk of a dirty buffer is older than the step, and no record may call it the
    // step's.
    Entry& fresh = *job.shards()[buffer_id].value;
    if (fresh.residency() != Residency::dirty) continue;
    for (size_t i = 0; i < fresh.replicas.size(); ++i) {
      if (fresh.replicas[i].exists()) job.space.release(fresh.replicas[i], extents_);
      job.extent_log().note_value(fresh, i);
    }
  }
  MEMD_FAILPOINT("ledger.before_memory_commit");
  // With this record the step is committed.
  job.journal().commit_in_memory(commits_.catalogue_tag(job.job_id));
  MEMD_FAILPOINT("ledger.memory_commit_recorded");
  job.tiles.clear_made();
  publish_step(state);
  // The step is made, whatever becomes of the disk.
  const auto session = sessions_.find(state->request.session_id);
  if (session != sessions_.end() && state->request.step != 0) {
    session->second->step_committed = state->request.step;
  }
  // While the disk is written its buffers may be put again: those bytes are not the step's.
  forget_step(*state);
  if (!state->to_disk) return finish_step(state, Status::ok());
  commit_to_disk(state, [this, state](const Status& status) {
    Job& its = *state->job;
    // An error would say that the step was not made. The next one is due on disk as well.
    if (!status.is_ok()) {
      its.progress.fail_on_disk(error(status.code(),
                                      "job ",
                                      its.name,
                                      " is at step ",
                                      its.progress.committed_step(),
                                      " in memory, but its commit to the disk failed",
                                      on_disk(its),
                                      "; the next step or sync tries again: ",
                                      status.message()));
    }
    finish_step(state, Status::ok());
  });
}

void ShardStore::commit_to_disk(const std::shared_ptr<StepState>& state, Done done) {
  Job& job = *state->job;
  set_phase(job, "commits");
  job.state().writeback().flush_tiles(
      std::nullopt, state->report, [this, state, done = std::move(done)](const Status& flushed) {
        if (!flushed.is_ok()) return done(flushed);
        Job& its = *state->job;
        const uint64_t undurable_since = its.progress.set_undurable_since(0);
        commits_.commit(its.job_id,
                        its.durable(),
                        [state, undurable_since, done](const Status& status, double seconds) {
                          state->report->commit_seconds = seconds;
                          if (!status.is_ok()) {
                            state->job->progress.set_undurable_since(undurable_since);
                            state->job->durable().note_change();
                          }
                          done(status);
                        });
      });
}

void ShardStore::forget_step(StepState& state) {
  if (!state.place) return;
  const auto session = sessions_.find(state.request.session_id);
  if (session != sessions_.end())
    sessions_.note(state.job->journal().ledger().get(), *session->second);
  MEMD_FAILPOINT("ledger.step_done");
  state.job->journal().ledger()->forget_step(*std::exchange(state.place, std::nullopt));
}

void ShardStore::finish_step(const std::shared_ptr<StepState>& state, const Status& status) {
  Job& job = *state->job;
  job.space.end_update();
  job.space.end_promise();
  state->report->committed_step = job.progress.committed_step();
  state->report->durable_step = job.progress.durable_step();
  state->report->disk_error = job.progress.disk_error().message();
  if (state->is_step && status.is_ok()) {
    step_phases_.add(*state->report);
    job.plans().count_moved(state->report->read_bytes + state->report->written_bytes);
    step_seconds_.add(static_cast<double>(clock_.now_ns() - state->started_ns) * 1e-9);
  }
  const uint64_t job_id = job.job_id;
  if (state->is_step) {
    std::erase(job.closed_steps, state);
    if (!status.is_ok()) note_call_failed(job, state->request, status);
    const auto session = sessions_.find(state->request.session_id);
    if (status.is_ok() && session != sessions_.end() && state->request.step != 0)
      session->second->step_committed = state->request.step;
    forget_step(*state);
  }
  MEMD_FAILPOINT("step.before_acknowledgement");
  state->answer(status);
  MEMD_FAILPOINT("step.acknowledged");
  end_operation(job_id);
}

}  // namespace memd
