// Questions of a job's private state to the rest of its job.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "store/cache/entry.h"

namespace memd {

/// Implemented by Job. The server thread calls everything; nothing blocks.
class StateGate {
 public:
  virtual ~StateGate() = default;
  /// These bytes of the entry are gone from the disk.
  virtual void lose(const Entry& entry, size_t replica, const Status& why) = 0;
};

}  // namespace memd
