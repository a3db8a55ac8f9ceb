// The calls that ranks make together, as any thread makes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/server_thread.h"
#include "store/cache/ranks.h"

namespace memd {

/// The ranks of one start, whole.
struct RanksReport {
  uint64_t start = 0;
  std::vector<std::string> names;  // by rank, for people
  std::vector<uint64_t> sessions;  // by rank; 0: it has not attached
};

/// TrainingGroup's ranks, on the server thread, which is waited for: see Server.
class RankCalls {
 public:
  explicit RankCalls(ServerThread& thread) : thread_(thread) {}

  /// The session has this rank from now on.
  Status join(uint64_t session_id, const RankPlace& place) const;
  /// Fenced where one of them has left.
  Result<RanksReport> report(uint64_t session_id) const;
  // As Gradients'.
  Status end_gradients(uint64_t session_id) const;
  Result<std::vector<uint32_t>> made_by_others(uint64_t session_id) const;
  Status drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids) const;

 private:
  ServerThread& thread_;
};

}  // namespace memd
