// Devices in memory, for tests: faults, chosen orders, a clock held still, a speed, and power cuts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/sparse_bytes.h"
#include "io/transfer_queue.h"

namespace memd {

/// A write that no sync has made durable.
struct UnsyncedWrite {
  uint64_t offset_bytes = 0;
  std::vector<std::byte> bytes{};
  uint64_t transfer_sequence = 0;
  uint64_t complete_sequence = 0;  // 0: its request did not complete, so no sync may cover it
};

/// The bytes of one device. Outlives its queue, so that a test can start again on what a power cut
/// left. Reads see every write; only synced ones survive a crash for certain.
class MemoryDisk {
 public:
  explicit MemoryDisk(uint64_t size_bytes) : bytes_(size_bytes), durable_(size_bytes) {}

  /// Bytes that reads see. A test that changes them, or the durable bytes, corrupts the device.
  std::span<std::byte> bytes() { return bytes_.bytes(); }
  std::span<std::byte> durable_bytes() { return durable_.bytes(); }
  /// In the order in which the device did them.
  const std::vector<UnsyncedWrite>& unsynced_writes() const { return unsynced_; }

  /// Power is cut: of the unsynced writes those that `keep` chooses reached the medium.
  void crash(const std::function<bool(const UnsyncedWrite&)>& keep);

 private:
  friend class MemoryQueue;

  void write(UnsyncedWrite write);
  void completed(uint64_t transfer_sequence, uint64_t complete_sequence);
  /// Makes durable what completed before `submit_sequence`.
  void sync(uint64_t submit_sequence);

  // Zeroing two vectors took two thirds of the native tests' time.
  SparseBytes bytes_;
  SparseBytes durable_;
  std::vector<UnsyncedWrite> unsynced_;
};

enum class MemoryFaultKind : uint8_t {
  error,           // fails with error_number; EAGAIN and EINTR are tried again by the queue
  short_transfer,  // moves transferred_bytes only
  zero_progress,   // moves nothing and says so
  stall,           // not done until release_stalled()
  flipped_bit,     // bit `bit` of the chunk's bytes is wrong: in memory after a read, else on disk
  misdirected,     // uses redirect_offset_bytes instead of its own offset
  lost_write,      // reports success and changes nothing; of a sync: nothing becomes durable
};

/// A fault of the chunks that match; chunks are counted as they are started.
struct MemoryFault {
  MemoryFaultKind kind = MemoryFaultKind::error;
  std::optional<IoKind> io_kind{};         // any, where absent
  std::optional<uint16_t> device{};        // any, where absent
  std::optional<uint64_t> offset_bytes{};  // chunks that touch this byte; any, where absent
  uint64_t skip_count = 0;                 // matching chunks that pass first
  uint64_t count = 1;                      // matching chunks that are hit
  int error_number = 5;                    // EIO
  uint64_t transferred_bytes = 0;
  uint64_t bit = 0;
  uint64_t redirect_offset_bytes = 0;
};

struct MemoryQueueOptions {
  uint32_t depth = 32;
  int wake_fd = -1;
  /// Chunks are done as soon as their latency has passed, and reap() finds them. Otherwise the test
  /// says when, with complete_next(), complete_at() and complete_all().
  bool automatic = false;
  /// Held still by the test; complete_*() moves it on to the end of the latency. Outlives the
  /// queue.
  ManualClock* clock = nullptr;
  uint64_t latency_ns = 0;
  /// Each device's speed. It moves one chunk after the other, in the order in which they were
  /// started; the latency comes on top of that. 0: no limit.
  uint64_t bytes_per_second = 0;
  /// Chunks are done in this random order; absent: in the order of their times, oldest first.
  std::optional<uint64_t> order_seed{};
  TurnBudget* turn = nullptr;        // as IoQueueOptions::turn
  PageKind pages = PageKind::small;  // of all memory
};

/// Answers EINVAL, as a file opened O_DIRECT does, to an operation that does not consist of whole
/// blocks.
class MemoryQueue final : public TransferQueue {
 public:
  explicit MemoryQueue(const MemoryQueueOptions& options);
  /// Releases what is stalled and completes everything.
  ~MemoryQueue() override;

  std::string_view name() const override { return "memory"; }
  /// A device of the file's size, all zero. Every operation of a descriptor that is not open fails.
  uint16_t add_device(OwnedFd file, std::string path) override;
  uint16_t add_disk(std::shared_ptr<MemoryDisk> disk, std::string path);
  void add_memory(std::span<std::byte>, PageKind) override {}
  void remove_memory(std::span<std::byte>) override {}

  MemoryDisk& disk(uint16_t device);
  void add_fault(const MemoryFault& fault) { faults_.push_back({.fault = fault, .seen_count = 0}); }
  void clear_faults() { faults_.clear(); }
  /// Chunks that a fault happened to.
  uint64_t fault_hit_count() const { return fault_hit_count_; }
  /// Chunks started so far: what a fault's skip_count counts where it matches any.
  uint64_t started_count() const { return started_count_; }
  bool has_stalled() const;
  /// Those that touch this byte; all, where absent.
  void release_stalled(std::optional<uint64_t> offset_bytes = std::nullopt);
  using TransferQueue::lift_fence;

  /// Chunks that complete_at() can choose from: in flight and not stalled, oldest first.
  size_t ready_count() const;
  /// Does one chunk and reaps; false where none is ready.
  bool complete_next();
  /// When the next chunk that is not stalled is done by the clock; nothing where there is none.
  std::optional<uint64_t> next_ready_ns() const;
  void complete_at(size_t index);
  /// Until nothing but stalled chunks is in flight.
  void complete_all();

  /// Power is cut on every device: whatever is in flight may or may not have reached the medium, as
  /// `keep` says; it and all that follows fails with EIO. Start again with a new queue.
  void crash(const std::function<bool(uint16_t device, const UnsyncedWrite&)>& keep);

 private:
  struct InFlight {
    IoOp* op = nullptr;
    uint64_t ready_ns = 0;
    std::optional<MemoryFault> fault{};
    bool stalled = false;
  };
  struct ArmedFault {
    MemoryFault fault;
    uint64_t seen_count = 0;
  };

  explicit MemoryQueue(const MemoryQueueOptions& options, std::unique_ptr<ManualClock> own_clock);

  void start(IoOp& op) override;
  void collect() override;
  void wait_for_result() override;
  Stretch stretch(const std::byte* data, uint64_t length_bytes) const override;
  void before_complete(const Transfer& transfer) override;

  std::optional<MemoryFault> next_fault(const IoOp& op);
  std::vector<size_t> ready_indices() const;
  size_t choose(const std::vector<size_t>& indices);
  uint64_t ready_ns(const IoOp& op);
  void run(size_t in_flight_index);
  int64_t transfer_bytes(const IoOp& op, const std::optional<MemoryFault>& fault);

  const std::unique_ptr<ManualClock> own_clock_;
  ManualClock& clock_;
  const MemoryQueueOptions options_;
  std::vector<std::shared_ptr<MemoryDisk>> disks_;  // null: a descriptor that is not open
  std::vector<uint64_t> busy_until_ns_;             // by device, where there is a speed
  std::vector<ArmedFault> faults_;
  uint64_t fault_hit_count_ = 0;
  uint64_t started_count_ = 0;
  std::vector<InFlight> in_flight_;                 // oldest first
  std::vector<std::pair<IoOp*, int64_t>> results_;  // done, to be seen by the next reap()
  std::mt19937_64 order_;
  bool crashed_ = false;
};

}  // namespace memd
