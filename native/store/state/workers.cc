#include "store/state/workers.h"

#include <pthread.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "base/threads.h"

namespace memd {

UpdateWorkers::UpdateWorkers(uint32_t thread_count, int wake_fd) : wake_fd_(wake_fd) {
  MEMD_CHECK_GT(thread_count, 0u);
  status_ = start_threads(threads_, thread_count, [this] { run(); });
  for (std::thread& thread : threads_) pthread_setname_np(thread.native_handle(), "memd-update");
}

UpdateWorkers::~UpdateWorkers() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  available_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void UpdateWorkers::submit(std::function<void()> work, std::function<void()> done) {
  ++open_count_;
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back({std::move(work), std::move(done)});
  }
  available_.notify_one();
}

size_t UpdateWorkers::reap() {
  std::vector<std::function<void()>> finished;
  {
    const std::lock_guard lock(mutex_);
    finished.swap(finished_);
  }
  open_count_ -= finished.size();
  for (auto& done : finished) done();
  return finished.size();
}

void UpdateWorkers::run() {
  for (;;) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      available_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    job.work();
    {
      const std::lock_guard lock(mutex_);
      finished_.push_back(std::move(job.done));
    }
    const uint64_t one = 1;
    MEMD_CHECK_EQ(write(wake_fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
}

}  // namespace memd
