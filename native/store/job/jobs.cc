#include "store/job/jobs.h"

#include <utility>

#include "base/check.h"

namespace memd {

Job* Jobs::find(uint64_t job_id) const {
  const auto found = all_.find(job_id);
  return found == all_.end() ? nullptr : found->second.get();
}

Job* Jobs::find(const std::string& name) const {
  for (const auto& [job_id, job] : all_) {
    if (job->name() == name) return job.get();
  }
  return nullptr;
}

Job* Jobs::find_behind(uint64_t job_id) const {
  if (all_.empty()) return nullptr;
  const auto behind = all_.upper_bound(job_id);
  return (behind == all_.end() ? all_.begin() : behind)->second.get();
}

Job& Jobs::put(std::unique_ptr<Job> job) {
  auto& place = all_[job->job_id()];
  place = std::move(job);
  return *place;
}

std::unique_ptr<Job> Jobs::take(uint64_t job_id) {
  auto node = all_.extract(job_id);
  MEMD_CHECK(!node.empty());
  return std::move(node.mapped());
}

std::vector<uint64_t> Jobs::ids() const {
  std::vector<uint64_t> ids;
  ids.reserve(all_.size());
  for (const auto& [job_id, job] : all_) ids.push_back(job_id);
  return ids;
}

std::optional<VerifiedJob> Jobs::verified(uint64_t job_id) const {
  const Job* const job = find(job_id);
  if (job == nullptr || job->ending() != nullptr) return std::nullopt;
  return VerifiedJob{.name = job->name(),
                     .shards = job->shards(),
                     .space = job->space(),
                     .durable = job->durable().catalogue(),
                     .tiles = job->tiles(),
                     .lost = job->lost(),
                     .progress = job->progress()};
}

void Jobs::lose(uint64_t job_id, const Entry& entry, size_t replica, const Status& why) const {
  if (Job* const job = find(job_id)) job->lose(entry, replica, why);
}

}  // namespace memd
