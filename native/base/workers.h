// Threads for what is bound by the processor: Adam, checksums, copies.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/job_weight.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "base/units.h"
#include "base/work_queue.h"

namespace memd {

/// Work runs on any of the threads; `done` runs on the server thread, inside reap(). The wake
/// descriptor is written when there is something to reap. Which job's work is next: WorkQueue.
class Workers {
 public:
  /// As many threads as the machine gives, up to `thread_count`; status() says where it gives none.
  /// `turn`: that reap() is a part of; nullptr: reap() does all there is.
  Workers(uint32_t thread_count, int wake_fd, TurnBudget* turn = nullptr);
  /// No threads: a test runs what waits, with run_next().
  struct ByHand {};
  Workers(ByHand, int wake_fd, TurnBudget* turn = nullptr) : wake_fd_(wake_fd), turn_(turn) {}
  /// Finishes what was submitted; what was not reaped is dropped.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// ok, or why there is no thread, so that nothing that is submitted would be done.
  const Status& status() const { return status_; }
  /// The job's share from now on, where others have work as well.
  void set_weight(JobId job, JobWeight weight);
  void submit(WorkOrder order, std::function<void()> work, std::function<void()> done);
  /// Runs `piece` for each part of `bytes`, on any of the threads: parts are small, so that other
  /// jobs get a turn between them. Runs `done` once, after the last. `bytes` may be 0. The cost to
  /// the caller does not grow with the number of parts: a few are queued at a time, and each one
  /// that ends queues the next.
  void submit_pieces(JobId job,
                     uint64_t bytes,
                     std::function<void(uint64_t offset, uint64_t bytes)> piece,
                     std::function<void()> done);
  /// Runs `done` of all work that is finished, or of as much as the turn has time for; returns how
  /// many.
  size_t reap();
  /// Submitted and not reaped. On the thread that submits.
  size_t open_count() const { return open_count_; }
  uint32_t thread_count() const { return static_cast<uint32_t>(threads_.size()); }
  /// On the caller's thread; returns which, or nothing where nothing waits.
  std::optional<WorkOrder> run_next();

 private:
  // Some 100 µs of a copy.
  static constexpr uint64_t kPieceBytes = 1_MiB;
  /// Parts of some bytes that wait or are being done.
  struct Pieces;

  void run();
  /// The first that is not there yet, if any is left.
  void add_piece(const std::shared_ptr<Pieces>& pieces);
  void end_piece(const std::shared_ptr<Pieces>& pieces);
  void do_work(WorkQueue::Work work);
  void finish(std::function<void()> done);

  const int wake_fd_;
  TurnBudget* const turn_;
  size_t open_count_ = 0;
  std::deque<std::function<void()>> reaped_;  // that an earlier turn had no time for
  std::mutex mutex_;
  std::condition_variable available_;
  WorkQueue waiting_;
  std::vector<std::function<void()>> finished_;
  bool stopping_ = false;
  Status status_;
  std::vector<std::thread> threads_;
};

}  // namespace memd
