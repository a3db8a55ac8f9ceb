#include "store/snapshot/returns_to_snapshots.h"

#include <utility>

namespace memd {

std::string ReturnsToSnapshots::begin(uint64_t job_id) {
  const Job& job = *parts_.jobs.find(job_id);
  const JobProgress& progress = job.progress();
  // The job from before a load is newer than every other snapshot.
  if (progress.is_loading()) {
    take_back(job);
    return {};
  }
  const bool is_lost = !progress.stopped().is_ok() && progress.undurable_since() != 0;
  if (!is_lost || !job.shards().declared().has_host_tier()) return {};
  // A later one may be of steps that the job has gone back from. So may this one, if those that the
  // job stood on were dropped, and it trained past this one's step again.
  const Snapshot* const last = snapshots_.last_before(job_id, progress.undurable_since());
  if (last == nullptr) return {};
  std::string said = concat("job ",
                            job.name(),
                            " goes back to snapshot ",
                            last->entry.name,
                            ", at step ",
                            last->entry.step,
                            ": what was newer was in tier host, and that memory is gone");
  job_ids_.insert(job_id);
  // After a failure the job goes on saying that what is on disk is no step.
  operations_.restore(job_id,
                      std::string(last->entry.name),
                      [this, job_id](const Result<SnapshotInfo>&) { end(job_id); });
  return said;
}

void ReturnsToSnapshots::take_back(const Job& job) {
  // A failure is of one load: somebody has gone back to an older snapshot since.
  if (!job.progress().is_loading()) failures_.erase(job.job_id());
  const bool may_go = job.progress().is_loading() && job.cache().sessions().empty();
  // One that ends otherwise is being dropped.
  if (!may_go || job.ending() != nullptr || job_ids_.contains(job.job_id())) return;
  const uint64_t job_id = job.job_id();
  job_ids_.insert(job_id);
  operations_.take_back(job_id,
                        [this, job_id, name = job.name()](const Result<SnapshotInfo>& taken) {
                          taken_back(job_id, name, taken);
                        });
}

void ReturnsToSnapshots::taken_back(uint64_t job_id,
                                    const std::string& job_name,
                                    const Result<SnapshotInfo>& taken) {
  const Status& status = taken.status();
  if (status.is_ok()) {
    notes_.push_back(concat("job ",
                            job_name,
                            " went back to what it was before, snapshot ",
                            taken.value().name,
                            ", at step ",
                            taken.value().step,
                            ": the session that loaded a checkpoint into it ended before the load "
                            "was complete"));
    failures_.erase(job_id);
  } else if (status.code() != StatusCode::not_found) {
    Status& before = failures_[job_id];
    if (before.message() != status.message()) {
      notes_.push_back(concat(
          "job ", job_name, " stays half loaded, and nobody attaches to it: ", status.message()));
    }
    before = status;
  }
  end(job_id);
}

Status ReturnsToSnapshots::load_in_the_way(const Job& job) const {
  if (!job.cache().sessions().empty()) {
    return error(StatusCode::in_use,
                 "job ",
                 job.name(),
                 ": another session loads a checkpoint into it; try again when that is done");
  }
  const auto failure = failures_.find(job.job_id());
  if (failure == failures_.end()) {
    return error(StatusCode::unavailable,
                 "job ",
                 job.name(),
                 " goes back to what it was before a load that broke off; try again");
  }
  return error(failure->second.code(),
               "job ",
               job.name(),
               " is half loaded, since a load into it broke off, and memd could not take it back; "
               "go back to an older snapshot (memd snapshot restore), or start over (memd job drop "
               "--force): ",
               failure->second.message());
}

void ReturnsToSnapshots::end(uint64_t job_id) {
  job_ids_.erase(job_id);
  while (auto waiting = waiting_.extract(job_id)) waiting.mapped()();
}

void ReturnsToSnapshots::when_ended(uint64_t job_id, std::function<void()> then) {
  if (const Job* const job = parts_.jobs.find(job_id)) take_back(*job);
  if (!job_ids_.contains(job_id)) return then();
  waiting_.emplace(job_id, std::move(then));
}

}  // namespace memd
