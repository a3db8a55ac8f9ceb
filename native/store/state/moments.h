// Adam's moments of one parameter, read and replaced a tile at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "store/state/early_updates.h"
#include "store/state/state_parts.h"
#include "store/state/tile_tasks.h"
#include "store/state/writeback.h"

namespace memd {

struct MomentsRequest {
  uint64_t session_id = 0;
  uint32_t shard_id = 0;
  uint64_t element_first = 0;
  uint64_t element_count = 0;
};

/// Reads and replaces one job's moments. Owned by its PrivateState; the server thread calls
/// everything; nothing blocks. The caller lets no other operation of the job run before `done`.
class Moments {
 public:
  using Read =
      std::function<void(const Status&, std::vector<float> exp_avg, std::vector<float> exp_avg_sq)>;

  Moments(const StateParts& parts, TileTasks& tasks, EarlyUpdates& early, Writeback& writeback)
      : parts_(parts), tasks_(tasks), early_(early), writeback_(writeback) {}

  /// fp32, of elements within one tile.
  void read(const MomentsRequest& request, Read done);
  /// Replaces them, and the generation; durable after the next sync or step.
  void write(const MomentsRequest& request,
             uint64_t generation,
             std::vector<float> exp_avg,
             std::vector<float> exp_avg_sq,
             Done done);

 private:
  struct Place {
    Bucket* bucket = nullptr;
    size_t tile = 0;
    uint64_t element_in_tile = 0;
  };

  Result<Place> find(const MomentsRequest& request) const;
  static TileTask task_at(const Place& place);
  /// Once nothing else moves the bucket's values.
  void submit_when_still(TileTask task);

  const StateParts parts_;
  TileTasks& tasks_;
  EarlyUpdates& early_;
  Writeback& writeback_;
};

}  // namespace memd
