#include "store/state/work_queue.h"

#include <algorithm>
#include <utility>

namespace memd {

void WorkQueue::add(Work work) {
  const JobId job = work.cost.job;
  waiting_[job].push_back(std::move(work));
  turns_.want(job);
}

std::optional<WorkQueue::Work> WorkQueue::take() {
  const auto job = turns_.next();
  if (!job) return std::nullopt;
  const auto line = waiting_.find(*job);
  Work work = std::move(line->second.front());
  line->second.pop_front();
  turns_.spend(*job, std::max<uint64_t>(work.cost.bytes, 1));
  if (line->second.empty()) {
    waiting_.erase(line);
    turns_.leave(*job);
  }
  return work;
}

}  // namespace memd
