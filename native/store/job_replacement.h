// A job that becomes what a catalogue on disk says of it, while it keeps its memory's segments.
#pragma once

#include <memory>

#include "store/job.h"
#include "store/job_operations.h"
#include "store/store_parts.h"

namespace memd {

/// Used by the ShardStore and JobSnapshots, on the server thread; owns nothing.
class JobReplacement {
 public:
  JobReplacement(const StoreParts& parts, JobOperations& operations)
      : parts_(parts), operations_(operations) {}

  /// `fresh` was made of the last catalogue on disk, and takes the place of `job`, which nobody
  /// uses and which ends. Extents that it alone names are released; those that only snapshots name
  /// so far are held from now on.
  void replace(Job& job, std::unique_ptr<Job> fresh) const;

 private:
  const StoreParts& parts_;
  JobOperations& operations_;
};

}  // namespace memd
