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

/// fp32, of the elements that a request asks for.
struct MomentValues {
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<float> max_exp_avg_sq;  // empty: the parameter keeps none
};

/// Reads and replaces one job's moments. Owned by its PrivateState; the server thread calls
/// everything; nothing blocks. The caller lets no other operation of the job run before `done`.
class Moments {
 public:
  using Read = std::function<void(const Status&, MomentValues values)>;

  Moments(const StateParts& parts, TileTasks& tasks, EarlyUpdates& early, Writeback& writeback)
      : parts_(parts), tasks_(tasks), early_(early), writeback_(writeback) {}

  /// The elements lie within one tile.
  void read(const MomentsRequest& request, Read done);
  /// Replaces them, and the generation; durable after the next sync or step. Without a maximum the
  /// parameter keeps none from here on.
  void write(const MomentsRequest& request, uint64_t generation, MomentValues values, Done done);

 private:
  struct Place {
    Bucket* bucket = nullptr;
    size_t tile = 0;
    uint64_t element_in_tile = 0;
  };

  Result<Place> find(const MomentsRequest& request) const;
  static TileTask task_at(const Place& place);
  void note_written(uint32_t shard_id, uint64_t generation, bool keeps_maximum);
  /// Once nothing else moves the bucket's values. `keeps_maxima`: the bucket has a place for them
  /// then.
  void submit_when_still(TileTask task, bool keeps_maxima);

  const StateParts parts_;
  TileTasks& tasks_;
  EarlyUpdates& early_;
  Writeback& writeback_;
};

}  // namespace memd
