// Which chunk goes to a device next: classes of I/O with shares, and a bound for what is in flight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "io/io_queue.h"

namespace memd {

/// A request on its way: chunks not yet started, chunks in flight, and the first error.
struct Transfer {
  IoRequest request;
  uint64_t sequence = 0;  // when it was submitted, see TransferQueue::next_sequence()
  uint64_t submit_ns = 0;
  uint64_t started_bytes = 0;
  uint32_t op_count = 0;
  bool started = false;  // else it was refused, and no device failed
  Status error;

  bool is_all_started() const { return started_bytes == request.data.size() && started; }
};

/// Requests that wait for a path (a device), and how many chunks each path works on. It does no I/O
/// and looks at no clock. Owned and called by the thread of its queue.
///
/// A path has at most IoPathLimits::depth chunks in flight, whatever they are: that bounds what a
/// demanded read waits behind. Among what waits, classes take turns by bytes, so that each gets its
/// share of a path that all want, and all of one that nobody else wants (self-clocked fair
/// queueing). A demanded request that finds no other one waiting is next. Within a class the order
/// is that of submission.
class IoScheduler {
 public:
  using TransferPointer = std::shared_ptr<Transfer>;

  /// Returns the path's index, from 0.
  uint16_t add_path(const IoPathLimits& limits);
  void set_limits(uint16_t path, const IoPathLimits& limits) { paths_.at(path).limits = limits; }
  const IoPathLimits& limits(uint16_t path) const { return paths_.at(path).limits; }

  void add(TransferPointer transfer);

  /// Whose chunk is started next, or null where nothing waits or no path has room; paths take
  /// turns. Before that, `refuse` is asked about whatever would be next: what it refuses waits no
  /// longer. The transfer goes on waiting until started() was told of its last byte.
  TransferPointer next(const std::function<bool(const TransferPointer&)>& refuse);
  /// A chunk of the transfer that next() returned, of `bytes` (0: a sync), is in flight;
  /// Transfer::started_bytes counts it already.
  void started(const TransferPointer& transfer, uint64_t bytes);
  /// A chunk of this path is not in flight any more.
  void finished(uint16_t path);

  /// Prefetches that wait, with what is not started of them, and whose data lie in `memory` stand
  /// in the line of demand from here on, behind who is there. Returns how many.
  size_t raise(std::span<const std::byte> memory);

  uint32_t in_flight_count(uint16_t path) const { return paths_.at(path).in_flight_count; }
  void for_each_waiting(const std::function<void(const TransferPointer&)>& look) const;

 private:
  /// Virtual time counts bytes times the class's stride: of two classes that wait all the time, the
  /// one with half the stride moves twice the bytes.
  struct Class {
    std::deque<TransferPointer> waiting;
    uint64_t turn = 0;  // virtual time at which the first waiting chunk was due to start
  };
  struct Path {
    IoPathLimits limits;
    std::array<Class, kIoPriorityCount> classes;  // by IoPriority
    uint32_t in_flight_count = 0;
    uint64_t now = 0;  // virtual time: of the chunk that was started last
  };

  static void add_to(Path& path, TransferPointer transfer);
  TransferPointer next_of(Path& path, const std::function<bool(const TransferPointer&)>& refuse);

  std::vector<Path> paths_;
  size_t last_path_ = 0;
};

}  // namespace memd
