// Adam's moments of a job's parameters, as any thread reads and writes them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "server/server_thread.h"
#include "store/state/moments.h"

namespace memd {

/// A blob with new moments of elements of one tile: all of exp_avg, then exp_avg_sq, then what it
/// has besides.
struct StagedMoments {
  uint32_t shard_id = 0;
  bool has_maximum = false;
  bool has_masters = false;
};

/// On the server thread, which is waited for: see Server.
class MomentCalls {
 public:
  using Write = Asked<bool>;

  explicit MomentCalls(ServerThread& thread) : thread_(thread) {}

  // As JobOperations'.
  Result<MomentValues> read(const MomentsRequest& request, double timeout_s) const;
  /// Several may be under way; those of one tile take effect in their order.
  Write begin_write(const MomentsRequest& request, uint64_t generation, NewMoments values) const;
  /// The blob is leased for `timeout_s` at most, and until the bytes were taken; `element_count` of
  /// the request is the blob's.
  Write begin_write(const MomentsRequest& request,
                    uint64_t generation,
                    const StagedMoments& staged,
                    double timeout_s) const;
  Status wait(Write& write, double timeout_s) const;
  /// As StoreReports'.
  Result<uint64_t> bytes_of_maxima(uint64_t session_id,
                                   const std::vector<uint32_t>& shard_ids) const;

 private:
  ServerThread& thread_;
};

}  // namespace memd
