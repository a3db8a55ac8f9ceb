#include "base/workers.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
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

struct Workers::Pieces {
  const JobId job;
  const uint64_t bytes;
  const std::function<void(uint64_t, uint64_t)> piece;
  std::function<void()> done;
  uint64_t added_bytes = 0;
  uint64_t open_count = 0;  // added, and not ended
};

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
  if (bytes == 0) return submit({.job = job, .kind = WorkKind::bytes}, [] {}, std::move(done));
  ++open_count_;
  const auto pieces = std::make_shared<Pieces>(
      Pieces{.job = job, .bytes = bytes, .piece = std::move(piece), .done = std::move(done)});
  // One for each thread, and one behind them.
  for (uint64_t i = 0; i <= threads_.size(); ++i) add_piece(pieces);
}

void Workers::add_piece(const std::shared_ptr<Pieces>& pieces) {
  {
    const std::lock_guard lock(mutex_);
    const uint64_t offset = pieces->added_bytes;
    const uint64_t part = std::min(kPieceBytes, pieces->bytes - offset);
    if (part == 0) return;
    pieces->added_bytes += part;
    ++pieces->open_count;
    waiting_.add({.order = {.job = pieces->job, .bytes = 2 * part, .kind = WorkKind::bytes},
                  .work =
                      [this, pieces, offset, part] {
                        pieces->piece(offset, part);
                        end_piece(pieces);
                      },
                  .done = {}});
  }
  available_.notify_one();
}

void Workers::end_piece(const std::shared_ptr<Pieces>& pieces) {
  add_piece(pieces);
  {
    const std::lock_guard lock(mutex_);
    if (--pieces->open_count > 0) return;
  }
  finish(std::move(pieces->done));
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
  do_work(*std::move(work));
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
    do_work(*std::move(work));
  }
}

void Workers::do_work(WorkQueue::Work work) {
  {
    const WorkerBytes any_number;
    work.work();
  }
  if (work.done) finish(std::move(work.done));
}

void Workers::finish(std::function<void()> done) {
  {
    const std::lock_guard lock(mutex_);
    finished_.push_back(std::move(done));
  }
  const uint64_t one = 1;
  MEMD_CHECK_EQ(write(wake_fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

}  // namespace memd
