// The queue for machines that forbid io_uring: pread, pwrite and fdatasync on a few threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/transfer_queue.h"

namespace memd {

class ThreadQueue final : public TransferQueue {
 public:
  /// As many threads as the machine gives; status() says where it gives none.
  explicit ThreadQueue(const IoQueueOptions& options);
  ~ThreadQueue() override;

  const Status& status() const { return status_; }
  std::string_view name() const override { return "threads"; }
  uint16_t add_device(OwnedFd file, std::string path) override;
  void add_memory(std::span<std::byte>, PageKind) override {}  // system calls take any memory
  void remove_memory(std::span<std::byte>) override {}

 private:
  struct Task {
    IoOp* op = nullptr;
    int fd = -1;
  };

  void start(IoOp& op) override;
  void collect() override;
  void wait_for_result() override;
  void run_tasks();
  static int64_t run_op(const IoOp& op, int fd);

  std::vector<OwnedFd> files_;
  std::mutex mutex_;
  std::condition_variable task_added_;
  std::condition_variable result_added_;
  std::deque<Task> tasks_;                          // guarded by mutex_
  std::vector<std::pair<IoOp*, int64_t>> results_;  // guarded by mutex_
  bool stopping_ = false;                           // guarded by mutex_
  Status status_;
  std::vector<std::thread> threads_;
};

}  // namespace memd
