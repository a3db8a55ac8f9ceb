// Frozen records of what the store did; metrics, status and tests read nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "arena/pool.h"
#include "base/histogram.h"
#include "base/turn_phases.h"
#include "io/io_queue.h"
#include "ring/layout.h"
#include "store/cache/job_counters.h"
#include "store/state/step_report.h"
#include "store/step/activity.h"
#include "store/verify/scrub_statistics.h"

namespace memd {

struct JobInfo {
  uint64_t job_id = 0;
  std::string name;
  uint32_t uid = 0;
  bool created = false;
  uint64_t committed_step = 0;
  /// The step that the job is at after a power cut: the last one on disk, and with tier host the
  /// last snapshot's; 0 as well where "none" has given that up.
  uint64_t durable_step = 0;
  std::string durability;
  double weight = 1;  // JobWeight::value()
  uint32_t session_count = 0;
  uint64_t host_bytes = 0;
  uint64_t host_bytes_used = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_used = 0;  // by state
  uint64_t metadata_bytes = 0;   // by the catalogue, old and new: also of nvme_bytes
  uint64_t snapshot_bytes = 0;   // by snapshots, as if each shared nothing: also of nvme_bytes
  uint32_t snapshot_count = 0;
  /// Parameters of tier host and their optimizer state: on disk only in snapshots.
  uint64_t host_tier_bytes = 0;
  uint32_t shard_count = 0;
  uint64_t element_count = 0;
  uint32_t lease_count = 0;
  /// Names of shards whose bytes on disk are gone: no step or sync is accepted any more.
  std::vector<std::string> lost_shards;
  /// Names of shards that the device could not read when they were last asked for. Nothing stops:
  /// whoever uses one tries again.
  std::vector<std::string> unreadable_shards;
};

/// A committed step that its job keeps.
struct SnapshotInfo {
  uint64_t job_id = 0;
  std::string name;
  uint64_t step = 0;
  uint64_t created_s = 0;  // since 1970
  uint64_t bytes = 0;      // on disk, some of which the job or other snapshots may name too
  uint64_t extent_count = 0;
  bool is_lost = false;                  // its catalogue is damaged, so its contents are unknown
  std::vector<std::string> lost_shards;  // with bytes that are gone
  bool is_exported = false;              // an export reads it now
  double exported_part = 0;              // how much of it that export has read, 0 to 1
};

/// Reads of snapshots for exports.
struct SnapshotReadingStatistics {
  uint64_t count = 0;   // at this moment
  uint64_t bytes = 0;   // read and verified since the start
  uint64_t errors = 0;  // extents that were damaged or could not be read
};

struct JobStatistics {
  JobInfo job;
  JobCounters counters;
  Stalls stalls;  // what the clients of its sessions say of themselves
  uint64_t arena_bytes = 0;
  uint64_t arena_bytes_used = 0;
  uint64_t private_bytes = 0;
  uint64_t private_bytes_used = 0;
};

struct DeviceStatistics {
  std::string path;
  uint64_t bytes = 0;
  uint64_t bytes_free = 0;
  uint64_t checksum_failures = 0;
  /// The whole set is fenced: nothing is written until the daemon starts anew.
  bool fenced = false;
  IoPathLimits limits;
  IoDeviceStatistics io;
};

/// Times of the server thread's turns that had something to do.
struct TurnStatistics {
  SecondsHistogram cpu_seconds{kTurnSecondsBounds};
  SecondsHistogram wall_seconds{kTurnSecondsBounds};
  double cpu_seconds_max = 0;  // since the start
  double wall_seconds_max = 0;
  TurnPhaseSeconds phases_of_cpu_max{};  // of the turn that took cpu_seconds_max
  TurnPhaseSeconds phases_of_wall_max{};
};

struct ServerStatistics {
  PoolReport pool;
  uint64_t pool_bytes_free = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_free = 0;
  uint64_t nvme_bytes_of_snapshots = 0;  // that no job names any more
  /// Why nothing is committed until the daemon starts anew; empty where it is.
  std::string fence_reason;
  std::vector<DeviceStatistics> devices;
  std::vector<JobStatistics> jobs;
  uint32_t session_count = 0;
  uint64_t ring_protocol_errors = 0;
  uint64_t room_wait_ns = 0;  // time that leases waited for room, not for the disk or a writer
  SecondsHistogram step_seconds{kStepSecondsBounds};
  SecondsHistogram commit_seconds{kStepSecondsBounds};
  StepPhases step_phases;
  TurnStatistics turns;
  ScrubStatistics scrub;
  SnapshotReadingStatistics exports;
};

}  // namespace memd
