#include "io/thread_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/threads.h"

namespace memd {
namespace {

// Each moves a whole chunk at a time, so a few keep a device busy.
constexpr uint32_t kThreadCountMax = 8;

}  // namespace

ThreadQueue::ThreadQueue(const IoQueueOptions& options)
    : TransferQueue(options.depth, options.wake_fd, steady_clock(), options.turn) {
  status_ =
      start_threads(threads_, std::min(options.depth, kThreadCountMax), [this] { run_tasks(); });
}

ThreadQueue::~ThreadQueue() {
  drain();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  task_added_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

uint16_t ThreadQueue::add_device(OwnedFd file, std::string path) {
  files_.push_back(std::move(file));
  return add_device_path(std::move(path));
}

void ThreadQueue::start(IoOp& op) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back({.op = &op, .fd = files_[op.device].get()});
  }
  task_added_.notify_one();
}

void ThreadQueue::collect() {
  std::vector<std::pair<IoOp*, int64_t>> results;
  {
    const std::lock_guard lock(mutex_);
    results.swap(results_);
  }
  for (const auto& [op, result] : results) on_result(*op, result);
}

void ThreadQueue::wait_for_result() {
  std::unique_lock lock(mutex_);
  result_added_.wait(lock, [this] { return !results_.empty(); });
}

void ThreadQueue::run_tasks() {
  std::unique_lock lock(mutex_);
  while (true) {
    task_added_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const Task task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    const int64_t result = run_op(*task.op, task.fd);
    lock.lock();
    results_.emplace_back(task.op, result);
    if (results_.size() == 1) wake();  // later results are found by the same reap()
    result_added_.notify_one();
  }
}

int64_t ThreadQueue::run_op(const IoOp& op, int fd) {
  const auto offset = static_cast<off_t>(op.offset_bytes);
  int64_t result = -1;
  switch (op.kind) {
    case IoKind::read:
      result = ::pread(fd, op.data, op.length_bytes, offset);
      break;
    case IoKind::write:
      result = ::pwrite(fd, op.data, op.length_bytes, offset);
      break;
    case IoKind::sync:
      result = ::fdatasync(fd);
      break;
  }
  return result < 0 ? -errno : result;
}

}  // namespace memd
