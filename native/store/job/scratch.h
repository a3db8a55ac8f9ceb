// Scratch blobs of all jobs, and their end.
#pragma once

#include <cstdint>
#include <string>

#include "store/job/store_parts.h"

namespace memd {

/// Drops the bytes of scratch blobs that nobody reads any more, and removes those whose session has
/// ended. Owned by the Gradients, which end with them; the server thread calls everything; nothing
/// blocks.
class Scratch {
 public:
  explicit Scratch(const StoreParts& parts) : parts_(parts) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// The session reads the bytes of this blob no more: they go once nothing moves there, unless it
  /// has written others by then. A lease that lives keeps what it shows.
  void end(uint64_t session_id, uint32_t shard_id);
  /// A session of the job has ended: blobs of sessions that are there no more go, once they stand
  /// still.
  void remove_ended(Job& job, uint64_t session_id);

 private:
  void drop(Job& job, const std::string& name) const;
  void remove(Job& job, const std::string& name, uint64_t session_id) const;

  const StoreParts& parts_;
};

}  // namespace memd
