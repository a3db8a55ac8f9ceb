#include "base/workers.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/join.h"
#include "base/threads.h"

namespace memd {

Workers::Workers(uint32_t thread_count, int wake_fd, TurnBudget* turn)
    : wake_fd_(wake_fd), turn_(turn) {
  MEMD_CHECK_GT(thread_count, 0u);
  status_ = start_threads(threads_, thread_count, [this] { run(); });
  for (std::thread& thread : threads_) pthread_setname_np(thread.native_handle(), "memd-update");
}

Workers::~Workers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  available_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Workers::set_weight(JobId job, JobWeight weight) {
  const std::lock_guard lock(mutex_);
  waiting_.set_weight(job, weight);
}

void Workers::submit(WorkOrder order, std::function<void()> work, std::function<void()> done) {
  ++open_count_;
  {
    const std::lock_guard lock(mutex_);
    waiting_.add({.order = order, .work = std::move(work), .done = std::move(done)});
  }
  available_.notify_one();
}

void Workers::submit_pieces(JobId job,
                            uint64_t bytes,
                            std::function<void(uint64_t, uint64_t)> piece,
                            std::function<void()> done) {
  const auto work = std::make_shared<std::function<void(uint64_t, uint64_t)>>(std::move(piece));
  const auto join = Join::start([done = std::move(done)](const Status&) { done(); });
  uint64_t offset = 0;
  do {
    const uint64_t part = std::min(kPieceBytes, bytes - offset);
    submit(
        {.job = job, .bytes = 2 * part, .kind = WorkKind::bytes},
        [work, offset, part] { (*work)(offset, part); },
        [finished = join->branch()] { finished(Status::ok()); });
    offset += part;
  } while (offset < bytes);
  join->finish(Status::ok());
}

size_t Workers::reap() {
  if (open_count_ == 0) return 0;
  {
    const std::lock_guard lock(mutex_);
    std::move(finished_.begin(), finished_.end(), std::back_inserter(reaped_));
    finished_.clear();
  }
  size_t count = 0;
  while (!reaped_.empty()) {
    const auto done = std::move(reaped_.front());
    reaped_.pop_front();
    --open_count_;
    done();
    ++count;
    if (!reaped_.empty() && turn_ != nullptr && turn_->is_spent()) break;
  }
  return count;
}

std::optional<WorkOrder> Workers::run_next() {
  std::optional<WorkQueue::Work> work;
  {
    const std::lock_guard lock(mutex_);
    work = waiting_.take();
  }
  if (!work) return std::nullopt;
  const WorkOrder order = work->order;
  finish(*std::move(work));
  return order;
}

void Workers::run() {
  for (;;) {
    std::optional<WorkQueue::Work> work;
    {
      std::unique_lock lock(mutex_);
      available_.wait(lock, [this] { return stopping_ || !waiting_.is_empty(); });
      work = waiting_.take();
    }
    if (!work) return;
    finish(*std::move(work));
  }
}

void Workers::finish(WorkQueue::Work work) {
  {
    const WorkerBytes any_number;
    work.work();
  }
  {
    const std::lock_guard lock(mutex_);
    finished_.push_back(std::move(work.done));
  }
  const uint64_t one = 1;
  MEMD_CHECK_EQ(write(wake_fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

}  // namespace memd
