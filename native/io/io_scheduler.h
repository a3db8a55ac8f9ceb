// Which chunk goes to a device next: first the job, then the class, and bounds for what is in
// flight.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/job_turns.h"
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
/// A path has at most IoPathLimits::depth chunks in flight, and as many bytes as they have where
/// none is long: that bounds what a demanded read waits behind. Jobs take turns by the bytes that
/// they move (JobTurns). While several want the path, each has in flight what its weight gives it
/// of the depth, and the rest stays free for jobs that come back. The daemon's own work counts as
/// one more job without that bound.
///
/// Among what a job waits for, classes take turns by bytes as well, so that each gets its share of
/// what the job gets, and all of it where no other class waits (self-clocked fair queueing). A
/// demanded request that finds no other one of its job waiting is the job's next. Within a class
/// the order is that of submission. Scrub is below all jobs, and moves where nobody else does, and
/// one byte in kScrubStride. It has one chunk in flight, and more the longer nobody else wants the
/// path: a job that pauses between two transfers finds little in its way when it goes on.
///
/// A pick costs the same however many requests and jobs wait, added up over many.
class IoScheduler {
 public:
  using TransferPointer = std::shared_ptr<Transfer>;

  /// Returns the path's index, from 0.
  uint16_t add_path(const IoPathLimits& limits);
  void set_limits(uint16_t path, const IoPathLimits& limits);
  const IoPathLimits& limits(uint16_t path) const { return paths_.at(path).limits; }
  /// On each path.
  void set_weight(JobId job, JobWeight weight);

  void add(TransferPointer transfer);

  /// The transfer whose chunk is started next, or null if nothing waits or no path has room; paths
  /// take turns. Before that, `refuse` is asked about each that would be next: one that it refuses
  /// waits no longer. The transfer goes on waiting until started() was told of its last byte.
  TransferPointer next(const std::function<bool(const TransferPointer&)>& refuse);
  /// A chunk of the transfer that next() returned, of `bytes` (0: a sync), is in flight;
  /// Transfer::started_bytes counts it already.
  void started(const TransferPointer& transfer, uint64_t bytes);
  /// It is not in flight any more.
  void finished(const IoRequest& request, uint64_t bytes);

  /// Prefetches of the job that wait, with what is not started of them, and whose data lie in
  /// `memory` stand in its line of demand from here on, behind who is there. Returns how many.
  size_t raise(JobId job, std::span<const std::byte> memory);

  /// As much as a chunk of the transfer that next() returned may move. Longer ones than
  /// IoPathLimits::chunk_bytes, which save the processor work, are for a job that is alone, and
  /// never for scrub: nobody waits longer for them than for as many bytes in more chunks.
  uint64_t chunk_bytes(const Transfer& transfer, bool may_be_long) const;

  uint32_t in_flight_count(uint16_t path) const { return paths_.at(path).in_flight_count; }
  void for_each_waiting(const std::function<void(const TransferPointer&)>& look) const;

  /// While jobs want the path, bytes that they move for each byte of scrub.
  static constexpr uint64_t kScrubStride = 512;

 private:
  using Refuse = std::function<bool(const TransferPointer&)>;
  static constexpr size_t kJobClassCount = static_cast<size_t>(IoPriority::scrub);

  /// Virtual time counts bytes times the class's stride: of two classes that wait all the time, the
  /// one with half the stride moves twice the bytes.
  struct Class {
    std::deque<TransferPointer> waiting;
    uint64_t turn = 0;  // virtual time at which the first waiting chunk was due to start
  };
  /// A job's chunks that wait or are in flight; nothing for one that has neither.
  struct Line {
    std::array<Class, kJobClassCount> classes;  // by IoPriority
    uint64_t now = 0;                           // virtual time: of the chunk that was started last
    uint32_t in_flight_count = 0;
    uint64_t in_flight_bytes = 0;

    bool is_waiting() const;
  };
  struct Path {
    explicit Path(const IoPathLimits& path_limits)
        : limits(path_limits), turns(path_limits.chunk_bytes) {}

    bool has_room() const;

    IoPathLimits limits;
    uint32_t in_flight_count = 0;
    uint64_t in_flight_bytes = 0;
    std::unordered_map<JobId, Line> lines;
    JobTurns turns;
    std::deque<TransferPointer> scrubs;
    uint64_t passed_scrub_bytes = 0;  // by jobs, while a scrub waits
    bool scrub_gave_way = false;      // to a demanded chunk, when it was its turn
    uint32_t scrub_in_flight_count = 0;
    uint32_t scrub_in_flight_max = 1;  // grows by one when so many have ended without a job beside
    uint32_t scrub_alone_count = 0;    // that have ended since it grew
  };

  static void add_to(Line& line, TransferPointer transfer);
  static TransferPointer next_of(Path& path, const Refuse& refuse);
  static TransferPointer next_of_jobs(Path& path, const Refuse& refuse);
  static TransferPointer next_of_line(Line& line, uint64_t chunk_bytes, const Refuse& refuse);
  static bool is_turn_of_scrub(Path& path, const Transfer& other);
  static bool has_its_share(const Path& path, JobId job, const Line& line);

  std::vector<Path> paths_;
  std::unordered_map<JobId, JobWeight> weights_;  // for paths that are added later
  size_t last_path_ = 0;
};

}  // namespace memd
