// Adam's moments of a job's parameters, as any thread reads and writes them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "server/server_thread.h"
#include "store/state/moments.h"

namespace memd {

/// On the server thread, which is waited for: see Server.
class MomentCalls {
 public:
  explicit MomentCalls(ServerThread& thread) : thread_(thread) {}

  // As JobOperations'.
  Result<MomentValues> read(const MomentsRequest& request, double timeout_s) const;
  Status write(const MomentsRequest& request,
               uint64_t generation,
               MomentValues values,
               double timeout_s) const;
  /// As StoreReports'.
  Result<uint64_t> bytes_of_maxima(uint64_t session_id,
                                   const std::vector<uint32_t>& shard_ids) const;

 private:
  ServerThread& thread_;
};

}  // namespace memd
