// Adam's moments of one parameter, read and replaced a tile at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
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
  bool reads_masters = false;  // besides, of a bf16 parameter
};

/// fp32, of the elements of a request.
struct MomentValues {
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<float> max_exp_avg_sq;  // empty: the parameter keeps none
  /// The numbers of which a bf16 parameter's values are published. Empty: nobody asked for them, or
  /// the remainders stay as they are.
  std::vector<float> masters;
};

/// The same for a write, in memory of `owner`, who is let go when it was taken.
struct NewMoments {
  NewMoments() = default;
  explicit NewMoments(MomentValues values);

  std::span<const float> exp_avg;
  std::span<const float> exp_avg_sq;
  std::span<const float> max_exp_avg_sq;
  std::span<const float> masters;
  std::shared_ptr<const void> owner;
};

/// Reads and replaces one job's moments. Owned by its PrivateState; the server thread calls
/// everything; nothing blocks. The caller lets no other operation of the job run before `done`, but
/// kWritesAtOnce writes together, if no shard is of tier host.
class Moments {
 public:
  /// Enough that one is copied while others are on their way to the disk.
  static constexpr size_t kWritesAtOnce = 4;

  using Read = std::function<void(const Status&, MomentValues values)>;

  Moments(const StateParts& parts, TileTasks& tasks, EarlyUpdates& early, Writeback& writeback)
      : parts_(parts), tasks_(tasks), early_(early), writeback_(writeback) {}

  /// The elements lie within one tile. Masters are those of what a client wrote last; refused while
  /// one writes.
  void read(const MomentsRequest& request, Read done);
  /// Replaces them, and the generation; durable after the next sync or step. Without a maximum the
  /// parameter keeps none from here on. Refused, with nothing changed, if a step would publish
  /// another value of a master than the parameter has.
  /// Writes to one tile take effect in the order of the calls.
  void write(const MomentsRequest& request, uint64_t generation, NewMoments values, Done done);

 private:
  struct Place {
    Bucket* bucket = nullptr;
    size_t tile = 0;
    uint64_t element_in_tile = 0;
  };

  Result<Place> find(const MomentsRequest& request) const;
  Status check(const MomentsRequest& request, const NewMoments& values, const Bucket& bucket) const;
  static TileTask task_at(const Place& place);
  void note_written(uint32_t shard_id, uint64_t generation, bool keeps_maximum);
  /// `element`: of the parameter.
  Status misfit(uint32_t shard_id, uint64_t element) const;
  /// Tile tasks find what a client wrote to the bucket's values.
  void write_back(Bucket& bucket, Done done);
  /// Nothing but tasks of writes moves the entry's bytes.
  bool is_still(const Entry& entry) const;
  /// Tiles of the bucket that tasks of writes work on.
  size_t writing_count(uint32_t bucket) const;
  bool may_write(const TileTask& task, bool keeps_maxima) const;
  /// Once nothing else works on the tile. `keeps_maxima`: the bucket has a place for them then.
  void submit_when_still(TileTask task, bool keeps_maxima);
  void begin_writing(TileTask& task);

  const StateParts parts_;
  TileTasks& tasks_;
  EarlyUpdates& early_;
  Writeback& writeback_;
  std::map<uint32_t, std::set<size_t>> writing_;  // tiles, by bucket
};

}  // namespace memd
