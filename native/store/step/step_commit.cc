#include "store/step/step_commit.h"

#include <string>
#include <utility>

#include "base/failpoint.h"

namespace memd {

void StepCommit::begin() {
  const StateParts& job = parts_.job;
  const Durability& durability = job.admission.durability();
  const JobProgress& progress = job.progress;
  is_in_memory_ = is_step_ && durability.is_in_memory();
  is_on_disk_ = !is_step_ ||
                durability.is_due(progress.committed_step() + 1 - progress.durable_step()) ||
                parts_.commits.catalogue_tag(job.job_id) == 0;
}

void StepCommit::declare_undurable(const Done& done) const {
  const uint64_t since = parts_.progress.committed_step() + 1;
  commit_catalogue(since, [this, done](const Status& status, double) {
    parts_.durable.note_change();
    done(status);
  });
}

bool StepCommit::is_needed(const StepReport& report) const {
  // A sync before this one may have left the disk at no step.
  const bool leaves_no_step = sync_ == Sync::all_tiers && parts_.progress.undurable_since() != 0;
  return is_step_ || parts_.durable.is_changed() || parts_.job.tiles.has_dirty() ||
         report.written_bytes != 0 || leaves_no_step;
}

void StepCommit::make(std::optional<size_t> place,
                      const std::shared_ptr<StepReport>& report,
                      Done done) {
  count_generations();
  shards_.end_ahead();
  if (is_step_) count(place);
  is_in_memory_ ? make_in_memory(std::move(done)) : make_on_disk(report, std::move(done));
}

// ---- Counting -----------------------------------------------------------------------------------

void StepCommit::count(std::optional<size_t> place) {
  JobProgress& progress = parts_.progress;
  progress.begin_step();
  is_counted_ = true;
  if (place) parts_.job.ledger.note_committing(*place, progress.committed_step());
}

void StepCommit::take_back(uint64_t failed_count) {
  const StateParts& job = parts_.job;
  take_back_generations();
  if (is_step_) {
    parts_.progress.undo_step();
    is_counted_ = false;
  }
  // After a failed write nobody knows whether N or N + 1 is on disk: every further commit is
  // refused, and a restart finds out.
  job.durable.note_change();
  // Memory would say N, and the disk maybe N + 1: the next daemon starts the job from disk. A sync
  // leaves both at N, and the catalogue's tag says which of them the ledger builds on.
  const bool is_outcome_unknown = is_step_ && job.durable.failed_commit_count() != failed_count;
  if (is_outcome_unknown) job.ledger.give_up();
}

void StepCommit::count_generations() const {
  for (const StepGroup& group : request_.groups) {
    for (const uint32_t shard_id : group.shard_ids) ++parts_.job.shards[shard_id].generation;
  }
}

void StepCommit::take_back_generations() const {
  for (const StepGroup& group : request_.groups) {
    for (const uint32_t shard_id : group.shard_ids) --parts_.job.shards[shard_id].generation;
  }
}

// ---- In memory and on disk ----------------------------------------------------------------------

void StepCommit::make_in_memory(Done done) {
  const StateParts& job = parts_.job;
  job.durable.note_change();
  staged_.forget_old_extents();
  MEMD_FAILPOINT("ledger.before_memory_commit");
  parts_.memory_commits.commit(parts_.commits.catalogue_tag(job.job_id),
                               [this, done = std::move(done)] {
                                 MEMD_FAILPOINT("ledger.memory_commit_recorded");
                                 parts_.job.tiles.clear_made();
                                 done(Status::ok());
                               });
}

void StepCommit::make_on_disk(const std::shared_ptr<StepReport>& report, Done done) {
  MEMD_FAILPOINT("step.before_commit");
  if (MEMD_PLANTED("step.gradient_released_early")) {
    parts_.gate.drop_gradients(shards_.buckets(),
                               [](const Shard& shard) { return shard.contributors.is_sealed(); });
  }
  const uint64_t failed_count = parts_.durable.failed_commit_count();
  write_to_disk(report, [this, failed_count, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) take_back(failed_count);
    done(status);
  });
}

void StepCommit::write_to_disk(const std::shared_ptr<StepReport>& report, Done done) {
  // The disk then has part of the job, of one step or several: no job may resume from it.
  const bool leaves_some = sync_ == Sync::plain && parts_.job.shards.declared().has_host_tier();
  const Done copied = [this, report, leaves_some, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) return done(status);
    commit_catalogue(leaves_some ? undurable_since_or_now() : 0,
                     [report, done](const Status& committed, double seconds) {
                       report->commit_seconds = seconds;
                       done(committed);
                     });
  };
  parts_.state.writeback().flush_tiles(
      std::nullopt, report, [this, report, copied](const Status& flushed) {
        if (!flushed.is_ok() || sync_ == Sync::plain) return copied(flushed);
        parts_.state.host().copy_to_disk(report, copied);
      });
}

uint64_t StepCommit::undurable_since_or_now() const {
  const uint64_t since = parts_.progress.undurable_since();
  return since != 0 ? since : parts_.progress.committed_step() + 1;
}

void StepCommit::commit_catalogue(uint64_t undurable_since, CatalogueDone done) const {
  const uint64_t before = parts_.progress.set_undurable_since(undurable_since);
  parts_.commits.commit(
      parts_.job.job_id,
      parts_.durable,
      [this, before, done = std::move(done)](const Status& status, double seconds) {
        if (!status.is_ok()) {
          parts_.progress.set_undurable_since(before);
          parts_.durable.note_change();
        }
        done(status, seconds);
      });
}

void StepCommit::mirror(const std::shared_ptr<StepReport>& report, Done done) {
  write_to_disk(report, [this, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) note_failed_mirror(status);
    done(Status::ok());
  });
}

void StepCommit::note_failed_mirror(const Status& why) const {
  JobProgress& progress = parts_.progress;
  const uint64_t since = parts_.durable.catalogue().undurable_since();
  const std::string on_disk = since == 0
                                  ? concat("; there it stays at step ", progress.durable_step())
                                  : concat("; what is there is no step since step ", since);
  progress.fail_on_disk(error(why.code(),
                              "job ",
                              parts_.job.job_name,
                              " is at step ",
                              progress.committed_step(),
                              " in memory, but its commit to the disk failed",
                              on_disk,
                              "; the next step or sync tries again: ",
                              why.message()));
}

}  // namespace memd
