// The table of a daemon's jobs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "store/job/job.h"
#include "store/verify/extent_walk.h"

namespace memd {

/// Jobs by their ids, and what a verification sees of them. Owned by the ShardStore; the server
/// thread calls everything; nothing blocks.
class Jobs final : public VerifiedJobs {
 public:
  using Map = std::map<uint64_t, std::unique_ptr<Job>>;

  Map::const_iterator begin() const { return all_.begin(); }
  Map::const_iterator end() const { return all_.end(); }
  /// nullptr where there is none.
  Job* find(uint64_t job_id) const;
  Job* find(const std::string& name) const;
  /// The next in the circle of all: it begins anew behind the last. nullptr where there is none.
  Job* find_behind(uint64_t job_id) const;
  size_t count() const { return all_.size(); }
  /// Takes the place of the one with its id.
  Job& put(std::unique_ptr<Job> job);
  std::unique_ptr<Job> take(uint64_t job_id);

  std::vector<uint64_t> ids() const override;
  std::optional<VerifiedJob> verified(uint64_t job_id) const override;
  void lose(uint64_t job_id, const Entry& entry, size_t replica, const Status& why) const override;

 private:
  Map all_;
};

}  // namespace memd
