// Frozen records of what the store did; metrics, status and tests read nothing else.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "arena/pool.h"
#include "io/io_queue.h"

namespace memd {

/// Upper bounds in seconds of the histograms below; a last bucket counts what is slower. Powers of
/// two from 1 ms.
inline constexpr std::array<double, 16> kSecondsBounds{0.001,
                                                       0.002,
                                                       0.004,
                                                       0.008,
                                                       0.016,
                                                       0.032,
                                                       0.064,
                                                       0.128,
                                                       0.256,
                                                       0.512,
                                                       1.024,
                                                       2.048,
                                                       4.096,
                                                       8.192,
                                                       16.384,
                                                       32.768};

struct SecondsHistogram {
  std::array<uint64_t, kSecondsBounds.size() + 1> counts{};
  double sum_seconds = 0;

  void add(double seconds) {
    size_t bucket = 0;
    while (bucket < kSecondsBounds.size() && seconds > kSecondsBounds[bucket]) ++bucket;
    ++counts[bucket];
    sum_seconds += seconds;
  }
};

struct JobInfo {
  uint64_t job_id = 0;
  std::string name;
  uint32_t uid = 0;
  bool created = false;
  uint64_t committed_step = 0;
  uint32_t session_count = 0;
  uint64_t host_bytes = 0;
  uint64_t host_bytes_used = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_used = 0;
  uint32_t shard_count = 0;
  uint64_t element_count = 0;
  uint32_t lease_count = 0;
};

/// What one step (or sync) did. Times are sums over tiles, which overlap; commit is wall time from
/// the last tile to the durable superblock.
struct StepReport {
  uint64_t committed_step = 0;
  double read_seconds = 0;
  double update_seconds = 0;
  double write_seconds = 0;
  double commit_seconds = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

struct JobCounters {
  uint64_t lease_hits = 0;
  uint64_t lease_misses = 0;
  uint64_t lease_wait_ns = 0;
  uint64_t fetched_bytes = 0;
  uint64_t evicted_bytes = 0;
  uint64_t spilled_bytes = 0;
  uint64_t step_count = 0;
  double step_read_seconds = 0;
  double step_update_seconds = 0;
  double step_write_seconds = 0;
  double step_commit_seconds = 0;
};

struct JobStatistics {
  JobInfo job;
  JobCounters counters;
  uint64_t arena_bytes = 0;
  uint64_t arena_bytes_used = 0;
  uint64_t private_bytes = 0;
  uint64_t private_bytes_used = 0;
};

struct DeviceStatistics {
  std::string path;
  uint64_t bytes = 0;
  uint64_t bytes_free = 0;
  IoDeviceStatistics io;
};

struct ServerStatistics {
  PoolReport pool;
  uint64_t pool_bytes_free = 0;
  uint64_t nvme_bytes = 0;
  uint64_t nvme_bytes_free = 0;
  std::vector<DeviceStatistics> devices;
  std::vector<JobStatistics> jobs;
  uint32_t session_count = 0;
  uint64_t checksum_failures = 0;
  uint64_t ring_protocol_errors = 0;
  SecondsHistogram step_seconds;
  SecondsHistogram commit_seconds;
};

}  // namespace memd
