// Reports of the store: jobs, operations in flight, statistics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/job/statistics.h"
#include "store/job/store_parts.h"
#include "store/snapshot/snapshot_readings.h"
#include "store/step/step_parts.h"
#include "store/verify/live_check.h"
#include "store/verify/scrub.h"

namespace memd {

/// Reads the other owners, and owns what is counted of jobs and sessions that have ended. Owned by
/// the ShardStore; the server thread calls everything; nothing blocks.
class StoreReports {
 public:
  struct Parts {
    const StoreParts& store;
    const StepTimes& step_times;
    const Scrub& scrub;
    const LiveCheck& live_check;
    const SnapshotReadings& snapshot_readings;
  };

  explicit StoreReports(const Parts& parts) : parts_(parts), store_(parts.store) {}
  StoreReports(const StoreReports&) = delete;
  StoreReports& operator=(const StoreReports&) = delete;

  JobInfo info(const Job& job) const;
  Result<JobInfo> find_job(const std::string& name) const;
  /// In the order of their ids.
  std::vector<JobInfo> jobs() const;
  /// In the order of their ids: from `first` on, at most `count_max`.
  Result<std::vector<ShardInfo>> shards(
      uint64_t job_id,
      uint32_t first = 0,
      size_t count_max = std::numeric_limits<size_t>::max()) const;
  /// not_found where the job has none of that name.
  Result<ShardInfo> find_shard(uint64_t job_id, const std::string& name) const;
  /// How many more bytes of the disk quota the session's job would need if all of these parameters
  /// kept maxima. Changes nothing.
  Result<uint64_t> bytes_of_maxima(uint64_t session_id,
                                   const std::vector<uint32_t>& shard_ids) const;
  ServerStatistics statistics() const;
  /// Work that has been begun and is not done, the oldest first.
  std::vector<Activity> in_flight() const;

  void count_protocol_error() { ++ring_protocol_errors_; }
  /// Its leases' waits count on.
  void count_dropped(const Job& job);

 private:
  JobStatistics statistics(const Job& job) const;
  void add_transfers(std::vector<Activity>& all) const;

  const Parts parts_;
  const StoreParts& store_;
  uint64_t ring_protocol_errors_ = 0;
  uint64_t room_wait_ns_of_dropped_ = 0;
};

}  // namespace memd
