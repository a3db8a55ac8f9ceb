// Questions of a job's steps to the rest of the daemon.
#pragma once

#include <cstdint>
#include <functional>
#include <set>

#include "store/cache/session.h"
#include "store/cache/shard.h"

namespace memd {

/// Implemented by the ShardStore, for each job. The server thread calls everything; nothing blocks.
class StepGate {
 public:
  virtual ~StepGate() = default;
  /// The daemon has ended the sessions of dead owners: steps that an earlier daemon closed may run.
  virtual bool may_redo() const = 0;
  virtual void note_session(const Session& session) = 0;
  /// Drops the gradients of all shards of these buckets that are chosen.
  virtual void drop_gradients(const std::set<uint32_t>& buckets,
                              const std::function<bool(const Shard&)>& chosen) = 0;
  /// The bytes of a gradient that nobody reads any more; whose gradient it is stays.
  virtual void drop_gradient_bytes(Entry& gradient) = 0;
};

}  // namespace memd
