// Answers about a job that need the whole of it.
#pragma once

#include <cstdint>

#include "store/format/catalogue.h"

namespace memd {

/// Implemented by the Job.
class JobRecorder {
 public:
  /// The job as a catalogue would describe it now: a walk over all of it.
  virtual JobRecord record() const = 0;
  /// The same without shards and buckets.
  virtual JobRecord fields() const = 0;
  /// Bytes of the next catalogue, at most.
  virtual uint64_t catalogue_bytes() const = 0;
  /// Catalogues on disk take more of the quota than before, or less.
  virtual void catalogue_bytes_changed() = 0;

 protected:
  ~JobRecorder() = default;
};

}  // namespace memd
