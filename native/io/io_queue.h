// Asynchronous reads, writes and syncs of devices (volume files), one interface for io_uring,
// threads and memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/histogram.h"
#include "base/job_weight.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "base/units.h"

namespace memd {

/// The largest part of a request that is moved at once.
inline constexpr uint64_t kChunkBytesMax = 4_MiB;
/// And the smallest, but for what is left of one: below, a chunk costs more than its bytes.
inline constexpr uint64_t kChunkBytesMin = 64_KiB;
inline constexpr uint32_t kDepthMax = 1024;

/// How much a path is given at a time. As little as keeps it busy is best, since a demanded read
/// waits behind all of it.
struct IoPathLimits {
  uint32_t depth = 32;  // chunks in flight, 1 to kDepthMax
  // Larger requests are split; whole blocks. From pages that the kernel must find one by one, 1 MiB
  // takes the server thread 50 µs. A job that is alone moves longer chunks of other memory, up to
  // kChunkBytesMax; no more bytes are in flight then.
  uint64_t chunk_bytes = 1_MiB;

  uint64_t in_flight_bytes_max() const { return depth * chunk_bytes; }
};
/// Why they cannot be used, or ok.
Status check_limits(const IoPathLimits& limits);

/// The pages that memory lies on, of 4 KiB or of 2 MiB.
enum class PageKind : uint8_t { small, huge };

enum class IoKind : uint8_t { read, write, sync };
const char* io_kind_name(IoKind kind);

/// The order of one job's requests that wait: each class has a share of what the job gets of
/// the path, from most to least, and equal ones are started in the order of submission. Scrub is
/// below all jobs (io_scheduler.h).
enum class IoPriority : uint8_t { demand, prefetch, state, writeback, scrub };
inline constexpr size_t kIoPriorityCount = 5;
const char* io_priority_name(IoPriority priority);

/// One read or write of a contiguous range of one device, or a `sync` (fdatasync) of it. Offset,
/// length and the address of `data` are multiples of kBlockBytes. `data` stays valid until
/// `complete` ran. A sync covers the writes of its device whose completion was seen before it was
/// submitted, and nothing else: submit it after them.
struct IoRequest {
  IoKind kind = IoKind::read;
  IoPriority priority = IoPriority::demand;
  JobId job{};  // for whom; the daemon: for all of them
  uint16_t device = 0;
  uint64_t offset_bytes = 0;
  std::span<std::byte> data{};
  /// Runs exactly once, inside reap(), on the thread that owns the queue. It may submit further
  /// requests.
  std::function<void(const Status&)> complete{};
};

/// Requests of one kind on one device, counted since the queue was made.
struct IoKindStatistics {
  uint64_t bytes = 0;                            // of requests that succeeded
  SecondsHistogram seconds{kIoSecondsBounds};    // from submit() to completion, failed or not
  std::map<int, uint64_t> error_count_by_errno;  // requests that completed with an error

  uint64_t error_count() const {
    uint64_t sum = 0;
    for (const auto& [error_number, count] : error_count_by_errno) sum += count;
    return sum;
  }
};

struct IoDeviceStatistics {
  IoKindStatistics read;
  IoKindStatistics write;
  IoKindStatistics sync;

  IoKindStatistics& of(IoKind kind) {
    if (kind == IoKind::read) return read;
    return kind == IoKind::write ? write : sync;
  }
};

struct IoQueueStatistics {
  uint64_t in_flight_count = 0;  // requests submitted and not completed
  uint64_t resubmit_count = 0;   // chunks given to the kernel again: short, EAGAIN, EINTR
  bool registered_buffers = false;
  /// Removed, and still held by the kernel, which had no memory to let go of them; it is asked
  /// again. The bytes are not freed before.
  uint64_t removed_and_held_count = 0;
};

/// A request that was submitted and has not completed.
struct IoInFlight {
  IoKind kind = IoKind::read;
  IoPriority priority = IoPriority::demand;
  uint16_t device = 0;
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t age_ns = 0;   // since submit()
  bool started = false;  // given to the device, at least a part of it
};

/// Owned and called by one thread (the server thread), which polls IoQueueOptions::wake_fd together
/// with other descriptors: it is written when reap() has something to do. No method blocks, except
/// the destructor, which waits for what is in flight and completes it. Chunking, the order, short
/// and interrupted transfers and EAGAIN are handled in one place, with bounded retries; three
/// transfers of 0 bytes on end are an error. A failed write or sync is reported once and never
/// retried, and fences the queue: no write or sync of any device is started after it, those that
/// wait complete with its reason, and reads go on.
class IoQueue {
 public:
  virtual ~IoQueue() = default;

  /// "io_uring", "threads" or "memory".
  virtual std::string_view name() const = 0;

  /// A file opened O_DIRECT for reading and writing; the queue keeps the descriptor. Returns the
  /// device's index, from 0.
  virtual uint16_t add_device(OwnedFd file, std::string path) = 0;

  /// For what is started from now on; without it a device may take the whole depth of the queue.
  /// `limits` passed check_limits(). Queues of tests may have none.
  virtual void set_limits(uint16_t /*device*/, const IoPathLimits& /*limits*/) {}
  virtual IoPathLimits limits(uint16_t /*device*/) const { return {}; }
  /// Its share of each path that others want as well, from now on. Queues of tests may have no
  /// jobs.
  virtual void set_weight(JobId /*job*/, JobWeight /*weight*/) {}

  /// Bytes that transfers will use, kept registered with the kernel where that is allowed; huge
  /// pages only where not much else is, since the kernel would look through all of it. Each reap()
  /// registers one piece (4 or 32 MiB; no chunk lies across two). Never fails: what is not or
  /// cannot be registered is used unregistered, and statistics() say so.
  virtual void add_memory(std::span<std::byte> memory, PageKind pages) = 0;
  /// Nothing in `memory` is in flight. Never fails: see IoQueueStatistics::removed_and_held_count.
  virtual void remove_memory(std::span<std::byte> memory) = 0;

  virtual void submit(IoRequest request) = 0;
  /// Until end_batch() requests gather, and the devices get them together: each handing over costs
  /// a system call. Queues of tests may hand over each at once. end_batch() is true where there was
  /// something to hand over.
  virtual void begin_batch() {}
  virtual bool end_batch() { return false; }
  /// Somebody waits for what is prefetched into `memory` of the job: what is not yet started of it
  /// is demanded from here on. Queues of tests may have no classes.
  virtual void raise(JobId /*job*/, std::span<const std::byte> /*memory*/) {}

  /// Runs `complete` of every request that is done, or of as many as IoQueueOptions::turn has time
  /// for; returns how many.
  virtual size_t reap() = 0;

  virtual IoQueueStatistics statistics() const = 0;
  /// The oldest first.
  virtual std::vector<IoInFlight> in_flight() const = 0;
  virtual IoDeviceStatistics device_statistics(uint16_t device) const = 0;
};

enum class IoEngine : uint8_t { automatic, io_uring, threads };

struct IoQueueOptions {
  IoEngine engine = IoEngine::automatic;
  uint32_t depth = 32;         // chunks in flight, over all devices
  int wake_fd = -1;            // eventfd written when reap() has something to do; not owned
  TurnBudget* turn = nullptr;  // that reap() is a part of; nullptr: reap() does all there is
  /// Before a buffer is unregistered: 0, or the errno with which a test lets that fail. io_uring
  /// alone.
  std::function<int()> fail_unregister{};
};

/// The engine that was chosen, and why io_uring was not, if it was not.
struct IoQueueChoice {
  std::unique_ptr<IoQueue> queue;
  /// Empty for io_uring; else for example "io_uring_setup: Operation not permitted".
  std::string reason;
};

/// `automatic` tries io_uring and falls back to threads. Asking for io_uring where it is forbidden
/// is an error.
Result<IoQueueChoice> make_io_queue(const IoQueueOptions& options);

}  // namespace memd
