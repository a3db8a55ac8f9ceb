// Shards of a job whose bytes on disk are gone.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace memd {

/// A job that has lost a shard stays at its last commit: a further step would be made from
/// other values than those that the user trained. Leases go on, so that what is whole can be saved.
/// In memory only: what is gone is found again by whoever reads it after a restart, and what could
/// not be read for a while is not lost for ever. Owned by its Job; the server thread.
class LostShards {
 public:
  void add(uint32_t shard_id, const std::string& name, const Status& why);
  /// It was deleted: nothing is missing any more, and the next shard of this id is another one.
  void remove(uint32_t shard_id);

  /// ok, or an integrity error that names the shards, a reason, and what to do.
  Status check(const std::string& job_name) const;
  bool contains(uint32_t shard_id) const { return all_.contains(shard_id); }
  size_t count() const { return all_.size(); }
  std::vector<std::string> names() const;

 private:
  struct Lost {
    std::string name;
    Status why;
  };
  std::map<uint32_t, Lost> all_;
};

}  // namespace memd
