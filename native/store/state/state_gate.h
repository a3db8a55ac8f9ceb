// Questions of a job's private state to the rest of its job.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "store/cache/bucket.h"
#include "store/cache/entry.h"

namespace memd {

/// Implemented by Job. The server thread calls everything; nothing blocks.
class StateGate {
 public:
  virtual ~StateGate() = default;
  /// The next commit has something to write down.
  virtual void set_changed() = 0;
  /// These bytes of the entry are gone from the disk.
  virtual void lose(const Entry& entry, size_t replica, const Status& why) = 0;
  /// A step updates it, or somebody writes its moments.
  virtual void begin_updates(Bucket& bucket) = 0;
  /// Of all gradients, in whole blocks; 0 where they fit in the arena beside the largest bucket's
  /// values.
  virtual uint64_t gradient_bytes_to_spill() const = 0;
};

}  // namespace memd
