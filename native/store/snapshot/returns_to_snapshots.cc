#include "store/snapshot/returns_to_snapshots.h"

#include <utility>

namespace memd {

std::string ReturnsToSnapshots::begin(uint64_t job_id) {
  const Job& job = *parts_.jobs.find(job_id);
  const JobProgress& progress = job.progress();
  const bool is_lost = !progress.stopped().is_ok() && progress.undurable_since() != 0;
  if (!is_lost || !job.shards().declared().has_host_tier()) return {};
  // A later one may be of steps that the job has gone back from. So may this one, if the job
  // trained past its step again and has none that was made since.
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

void ReturnsToSnapshots::end(uint64_t job_id) {
  job_ids_.erase(job_id);
  while (auto waiting = waiting_.extract(job_id)) waiting.mapped()();
}

void ReturnsToSnapshots::when_ended(uint64_t job_id, std::function<void()> then) {
  if (!job_ids_.contains(job_id)) return then();
  waiting_.emplace(job_id, std::move(then));
}

}  // namespace memd
