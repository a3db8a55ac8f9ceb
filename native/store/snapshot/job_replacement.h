// A job that becomes what a catalogue on disk says of it, while it keeps its memory's segments.
#pragma once

#include <functional>
#include <memory>

#include "store/job/job.h"
#include "store/job/job_operations.h"
#include "store/job/store_parts.h"

namespace memd {

/// Used by the ShardStore and JobSnapshots, on the server thread; owns nothing.
///
/// A fresh job was made of the last catalogue on disk, and takes the place of one that nobody uses
/// and that ends. Extents that the fresh one alone names are held from then on; so far only
/// snapshots name them. Those that the other alone names are released.
class JobReplacement {
 public:
  JobReplacement(const StoreParts& parts, JobOperations& operations)
      : parts_(parts), operations_(operations) {}

  /// At once: in time that grows with both jobs.
  void replace(Job& job, std::unique_ptr<Job> fresh) const;
  /// Over turns, as the operation of `job` that runs. Nobody attaches meanwhile: the job, and then
  /// the fresh one, says that it is being restored. `done` runs when all is exchanged. Operations
  /// that wait behind it are refused.
  void go_back(Job& job, std::unique_ptr<Job> fresh, std::function<void()> done) const;

 private:
  struct Exchange;
  using ExchangePointer = std::shared_ptr<Exchange>;

  /// Any thread, while nobody changes either job.
  static void compare(Exchange& exchange);
  /// Up to `count` extents; true once all are held.
  bool hold(Exchange& exchange, size_t count) const;
  /// The fresh job takes its place.
  Job& put(Exchange& exchange) const;
  /// Up to `count` extents; true once all are released.
  bool release(Exchange& exchange, size_t count) const;
  void hold_over_turns(const ExchangePointer& exchange) const;
  void put_over_turns(const ExchangePointer& exchange) const;
  void release_over_turns(const ExchangePointer& exchange, Job& fresh) const;

  const StoreParts& parts_;
  JobOperations& operations_;
};

}  // namespace memd
