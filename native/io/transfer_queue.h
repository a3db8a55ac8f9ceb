// The part that all queues share: splitting requests into chunks, retries and statistics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/turn_budget.h"
#include "io/io_queue.h"
#include "io/io_scheduler.h"

namespace memd {

/// One chunk of a request, and the unit that an engine runs. `data`, `offset_bytes` and
/// `length_bytes` are the part that is still to be moved.
struct IoOp {
  std::shared_ptr<Transfer> transfer;  // null while the op is free
  IoKind kind = IoKind::read;
  uint16_t device = 0;
  uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  uint64_t length_bytes = 0;
  uint64_t chunk_bytes = 0;  // as it was started
  uint32_t retry_count = 0;  // after EAGAIN and EINTR
  uint32_t empty_count = 0;  // transfers of 0 blocks on end
};

/// The chunk state machine under every engine. An engine starts ops and hands their results to
/// on_result() from collect(); everything else is here. Used by one thread; engines may run ops on
/// others. An engine's destructor calls drain().
class TransferQueue : public IoQueue {
 public:
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;
  ~TransferQueue() override;

  void submit(IoRequest request) final;
  void raise(JobId job, std::span<const std::byte> memory) final { scheduler_.raise(job, memory); }
  void begin_batch() final { is_gathering_ = true; }
  bool end_batch() final;
  size_t reap() final;
  void set_limits(uint16_t device, const IoPathLimits& limits) final;
  IoPathLimits limits(uint16_t device) const final { return scheduler_.limits(device); }
  void set_weight(JobId job, JobWeight weight) final { scheduler_.set_weight(job, weight); }
  IoQueueStatistics statistics() const override;
  std::vector<IoInFlight> in_flight() const final;
  IoDeviceStatistics device_statistics(uint16_t device) const final;

 protected:
  TransferQueue(uint32_t depth, int wake_fd, const Clock& clock, TurnBudget* turn);

  /// Takes the op; its result reaches on_result() from a later collect(), never from here.
  virtual void start(IoOp& op) = 0;
  /// Hands the kernel what start() gathered.
  virtual void flush() {}
  /// Calls on_result() for every op that is done. Never blocks.
  virtual void collect() = 0;
  /// Blocks until collect() has something to do; only called with ops in flight.
  virtual void wait_for_result() = 0;
  /// The bytes from one place on that can be moved at once, at least a block.
  struct Stretch {
    uint64_t length_bytes = 0;
    bool is_light = false;  // to start 4 MiB costs the processor less than 1 MiB of other memory
  };
  /// The first of `length_bytes` at `data`.
  virtual Stretch stretch(const std::byte* data, uint64_t length_bytes) const;
  /// `transfer` is over and its `complete` runs next.
  virtual void before_complete(const Transfer&) {}

  uint16_t add_device_path(std::string path);
  /// `result` is what pread, pwrite and fdatasync would return, or a negative errno.
  void on_result(IoOp& op, int64_t result);
  /// Runs until every request completed.
  void drain();
  /// Makes the owner call reap().
  void wake() const;
  /// Orders submissions and completions of this queue.
  uint64_t next_sequence() { return ++sequence_; }
  size_t device_count() const { return devices_.size(); }
  /// For tests of the queue alone, which go on after a failure.
  void lift_fence() { fence_ = Status::ok(); }

 private:
  struct Device {
    std::string path;
    IoDeviceStatistics statistics;
  };

  /// True where something was started.
  bool start_waiting();
  bool is_turn_spent() const { return turn_ != nullptr && turn_->is_spent(); }
  /// Returns its bytes.
  uint64_t start_next_chunk(const std::shared_ptr<Transfer>& transfer);
  void start_again(IoOp& op);
  void finish_op(IoOp& op, Status status);
  bool is_refused(const IoRequest& request) const {
    return request.kind != IoKind::read && !fence_.is_ok();
  }
  Status refusal() const;
  Status op_error(const IoOp& op, int error_number, const char* detail) const;
  void complete(Transfer& transfer);

  const Clock& clock_;
  const int wake_fd_;
  TurnBudget* const turn_;
  std::vector<Device> devices_;
  std::vector<IoOp> ops_;  // one per chunk in flight, never resized: engines keep the addresses
  std::vector<IoOp*> ops_free_;
  IoScheduler scheduler_;
  std::deque<std::shared_ptr<Transfer>> done_;
  uint64_t request_count_ = 0;  // submitted and not completed
  uint64_t resubmit_count_ = 0;
  uint64_t sequence_ = 0;
  bool reaping_ = false;
  bool is_gathering_ = false;  // between begin_batch() and end_batch()
  Status fence_;               // the first failure of a write or sync, after which none is started
};

}  // namespace memd
