// Jobs that are opened: found, or admitted to memory and disk.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/job_weight.h"
#include "base/status.h"
#include "store/format/durability.h"
#include "store/host_memory.h"
#include "store/job/job_operations.h"
#include "store/job/store_parts.h"
#include "store/store_reports.h"

namespace memd {

struct OpenJobRequest {
  std::string name;
  uint32_t uid = 0;
  uint64_t host_bytes = 0;  // 0: ShardStoreParts::jobs_expected decides
  uint64_t nvme_bytes = 0;
  bool fresh = false;
  /// An existing job keeps its own where nothing is said.
  std::optional<Durability> durability;
};

/// Knows how much of host memory and disk is left for a new job; the terms are each job's
/// Admission. Owned by the ShardStore; the server thread calls everything; nothing blocks.
class JobAdmissions {
 public:
  struct Parts {
    const StoreParts& store;
    HostMemory& memory;
    JobOperations& operations;
    const StoreReports& reports;
    /// A job that names no quota gets this part of what is free: 1 / jobs_expected.
    uint32_t jobs_expected = 2;
  };

  explicit JobAdmissions(const Parts& parts) : parts_(parts), store_(parts.store) {}
  JobAdmissions(const JobAdmissions&) = delete;
  JobAdmissions& operator=(const JobAdmissions&) = delete;

  /// Finds the job or admits it; who wants it `fresh` drops it first.
  Result<JobInfo> open(const OpenJobRequest& request);
  /// The job's share of devices and workers that others want as well, from now on.
  Status set_weight(uint64_t job_id, JobWeight weight);
  /// Devices and workers learn it.
  void apply_weight(uint64_t job_id, JobWeight weight);

 private:
  Result<Job*> admit(const OpenJobRequest& request);
  Status set_durability(Job& job, const OpenJobRequest& request);
  uint64_t nvme_bytes_free() const;

  const Parts parts_;
  const StoreParts& store_;
};

}  // namespace memd
