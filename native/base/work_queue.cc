#include "base/work_queue.h"

#include <algorithm>
#include <utility>

namespace memd {

void WorkQueue::add(Work work) {
  const JobId job = work.order.job;
  Line& line = waiting_[job];
  (work.order.kind == WorkKind::bytes ? line.bytes : line.updates).push_back(std::move(work));
  turns_.want(job);
}

std::optional<WorkQueue::Work> WorkQueue::take() {
  const auto job = turns_.next();
  if (!job) return std::nullopt;
  const auto line = waiting_.find(*job);
  auto& first = line->second.bytes.empty() ? line->second.updates : line->second.bytes;
  Work work = std::move(first.front());
  first.pop_front();
  turns_.spend(*job, std::max<uint64_t>(work.order.bytes, 1));
  if (line->second.is_empty()) {
    waiting_.erase(line);
    turns_.leave(*job);
  }
  return work;
}

}  // namespace memd
