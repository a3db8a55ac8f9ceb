// Jobs that go back to a snapshot by themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "store/job/store_parts.h"
#include "store/snapshot/job_snapshots.h"
#include "store/space/snapshots.h"

namespace memd {

/// A job with tier host whose memory is gone becomes what its last snapshot says. Owned by the
/// ShardStore; the server thread calls everything; nothing blocks.
class ReturnsToSnapshots {
 public:
  ReturnsToSnapshots(const StoreParts& parts, const Snapshots& snapshots, JobSnapshots& operations)
      : parts_(parts), snapshots_(snapshots), operations_(operations) {}
  ReturnsToSnapshots(const ReturnsToSnapshots&) = delete;
  ReturnsToSnapshots& operator=(const ReturnsToSnapshots&) = delete;

  /// Begins the job's return, if it has to make one. Returns a sentence for the log, or nothing.
  std::string begin(uint64_t job_id);
  /// Calls `then` when no return of the job is under way: at once if there is none.
  void when_ended(uint64_t job_id, std::function<void()> then);

 private:
  void end(uint64_t job_id);

  const StoreParts& parts_;
  const Snapshots& snapshots_;
  JobSnapshots& operations_;
  std::set<uint64_t> job_ids_;
  std::multimap<uint64_t, std::function<void()>> waiting_;  // by job
};

}  // namespace memd
