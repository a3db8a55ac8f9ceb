// Frozen records of what the store did; metrics, status and tests read nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "arena/pool.h"
#include "base/histogram.h"
#include "io/io_queue.h"
#include "ring/layout.h"

namespace memd {

struct JobInfo {
  uint64_t job_id = 0;
  std::string name;
  uint32_t uid = 0;
  bool created = false;
  uint64_t committed_step = 0;
  /// The last step that is on disk; 0 as well where "none" has given that up.
  uint64_t durable_step = 0;
  std::string durability;
  uint32_t session_count = 0;
  uint64_t host_bytes = 0;
  uint64_t host_bytes_used = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_used = 0;
  uint32_t shard_count = 0;
  uint64_t element_count = 0;
  uint32_t lease_count = 0;
  /// Names of shards whose bytes on disk are gone: no step or sync is accepted any more.
  std::vector<std::string> lost_shards;
};

/// What one step (or sync) did. Times are sums over tiles, which overlap; commit is wall time from
/// the last tile to the durable superblock.
struct StepReport {
  uint64_t committed_step = 0;  // survives the process where its memory is kept
  uint64_t durable_step = 0;    // survives a power cut
  double read_seconds = 0;
  double update_seconds = 0;
  double write_seconds = 0;
  double commit_seconds = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  /// Empty, or why the step is in memory alone though its turn to be on disk has come.
  std::string disk_error;

  /// What was done for the step before it was closed.
  void add(const StepReport& early) {
    read_seconds += early.read_seconds;
    update_seconds += early.update_seconds;
    write_seconds += early.write_seconds;
    read_bytes += early.read_bytes;
    written_bytes += early.written_bytes;
  }
};

/// Why what was made of a step ahead of it was thrown away. The names are labels of a metric.
enum class EarlyDiscard : uint8_t {
  settings,  // the step has others than were expected
  gradient,  // it was written again, or dropped
  state,     // somebody writes the parameter or its moments
  step,      // another session's, or one over other shards
  failed,    // a read or write did, or there was no room on disk
  room,      // somebody else needed its room on disk
};
inline constexpr size_t kEarlyDiscardCount = 6;
inline constexpr std::array<const char*, kEarlyDiscardCount> kEarlyDiscardNames{
    "settings", "gradient", "state", "step", "failed", "room"};

struct JobCounters {
  uint64_t lease_hits = 0;
  uint64_t lease_misses = 0;
  uint64_t lease_wait_ns = 0;
  /// By LeaseWait, also of leases that wait still or waited in vain; prefetches aside.
  std::array<uint64_t, kLeaseWaitCount> lease_wait_reason_ns{};
  uint64_t fetched_bytes = 0;
  uint64_t evicted_bytes = 0;
  uint64_t spilled_bytes = 0;
  /// Of fetched_bytes, what a plan brought up before it was asked for.
  uint64_t prefetched_bytes = 0;
  /// And what of that went without having been used.
  uint64_t prefetch_unused_bytes = 0;
  /// Uses that found what a plan had brought up, and those that came before it was there.
  uint64_t prefetch_hits = 0;
  uint64_t prefetch_late = 0;
  /// Uses by sessions that their plan foresaw, and others.
  uint64_t uses_foreseen = 0;
  uint64_t uses_unforeseen = 0;
  /// Read and written in the periods of plans that ended with a step, and what farthest next use
  /// moves of them with all of the job's memory but what tiles in flight take.
  uint64_t plan_moved_bytes = 0;
  uint64_t plan_necessary_bytes = 0;
  /// Tiles that were updated before their step was closed: those that it took over, and the others.
  uint64_t early_tiles_adopted = 0;
  std::array<uint64_t, kEarlyDiscardCount> early_tiles_discarded{};
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
  /// Of the whole set: nothing is written until the daemon starts anew.
  bool fenced = false;
  IoPathLimits limits;
  IoDeviceStatistics io;
};

/// Of StepReport's times, one observation a step.
struct StepPhases {
  SecondsHistogram read{kStepSecondsBounds};
  SecondsHistogram update{kStepSecondsBounds};
  SecondsHistogram write{kStepSecondsBounds};
  SecondsHistogram commit{kStepSecondsBounds};

  void add(const StepReport& report) {
    read.add(report.read_seconds);
    update.add(report.update_seconds);
    write.add(report.write_seconds);
    commit.add(report.commit_seconds);
  }
};

/// Something that was begun and is not done.
struct Activity {
  /// "read", "write", "sync" of a volume; "lease", "step", "sync", "moments", "drop" of a job;
  /// "commit".
  std::string kind{};
  uint64_t job_id = 0;  // 0: of no job
  std::string job{};
  uint32_t uid = 0;        // the job's
  std::string what{};      // volume and range; shard; phase of a step
  std::string waits_on{};  // empty where it is being done
  std::string priority{};  // of I/O
  uint64_t age_ns = 0;
};

/// "step of job gpt (updates tiles) for 3.2 s": the oldest `count` of them.
std::string describe(const std::vector<Activity>& activities, size_t count);

/// Of the verification in the background.
struct ScrubStatistics {
  uint64_t bytes_per_second = 0;  // at most; 0: it is off
  uint64_t bytes = 0;             // read since the start
  uint64_t errors = 0;            // extents found damaged, in each pass anew
  uint64_t pass_count = 0;        // that were finished
  uint64_t last_pass_age_ns = 0;  // since the last of them ended
  bool in_pass = false;
  uint64_t pass_bytes = 0;  // of the pass that runs, or was the last
  uint64_t pass_bytes_all = 0;
  std::string last_error;
};

struct ServerStatistics {
  PoolReport pool;
  uint64_t pool_bytes_free = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_free = 0;
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
  ScrubStatistics scrub;
};

}  // namespace memd
