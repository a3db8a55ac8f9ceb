// Jobs that go back to a snapshot by themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

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

  /// Begins with the job, if it is one. One sentence that says so, or nothing.
  std::string begin(uint64_t job_id);
  /// Calls it when no job is on its way any more: at once, where none is.
  void when_ended(std::function<void()> then);

 private:
  void end(uint64_t job_id);

  const StoreParts& parts_;
  const Snapshots& snapshots_;
  JobSnapshots& operations_;
  std::set<uint64_t> job_ids_;
  std::vector<std::function<void()>> waiting_;
};

}  // namespace memd
