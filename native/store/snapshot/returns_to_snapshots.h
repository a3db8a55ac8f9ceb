// Jobs that go back to a snapshot by themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/job/store_parts.h"
#include "store/snapshot/job_snapshots.h"
#include "store/space/snapshots.h"

namespace memd {

/// A job with tier host whose memory is gone becomes what its last snapshot says, and one of which
/// a load broke off what it was before. Owned by the ShardStore; the server thread calls
/// everything; nothing blocks.
class ReturnsToSnapshots {
 public:
  ReturnsToSnapshots(const StoreParts& parts, const Snapshots& snapshots, JobSnapshots& operations)
      : parts_(parts), snapshots_(snapshots), operations_(operations) {}
  ReturnsToSnapshots(const ReturnsToSnapshots&) = delete;
  ReturnsToSnapshots& operator=(const ReturnsToSnapshots&) = delete;

  /// Begins the job's return, if it has to make one: at a start, when it becomes what the disk
  /// says, and when a session of it has ended. Returns a sentence for the log where memory is gone.
  std::string begin(uint64_t job_id);
  /// Calls `then` when no return of the job is under way: at once if there is none. One that failed
  /// is tried again before.
  void when_ended(uint64_t job_id, std::function<void()> then);
  /// Why nobody attaches to a job that is loading: its session is at it, or it could not go back.
  Status load_in_the_way(const Job& job) const;
  /// One sentence for each load that broke off: its job has gone back since the last call, or could
  /// not.
  std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

 private:
  /// If the session that loaded has ended.
  void take_back(const Job& job);
  void taken_back(uint64_t job_id, const std::string& job_name, const Result<SnapshotInfo>& taken);
  void end(uint64_t job_id);

  const StoreParts& parts_;
  const Snapshots& snapshots_;
  JobSnapshots& operations_;
  std::set<uint64_t> job_ids_;
  std::map<uint64_t, Status> failures_;                     // of the last try, by job
  std::multimap<uint64_t, std::function<void()>> waiting_;  // by job
  std::vector<std::string> notes_;
};

}  // namespace memd
