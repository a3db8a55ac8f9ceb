// Updates of a step that is still to be closed: work done ahead of it while backward runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "store/journal/step_request.h"
#include "store/state/speculative_bucket.h"
#include "store/state/state_parts.h"
#include "store/state/tile_tasks.h"

namespace memd {

/// One job's updates ahead of their step. Owned by its PrivateState; on the server thread. A bucket
/// is updated early once its
/// session has said with which settings, and that each of its gradients is final. The values are
/// speculative: nothing that is made here changes step N, so that all of it may be discarded at any
/// moment. A step takes what matches it exactly and does the rest as ever. No method blocks.
class EarlyUpdates {
 public:
  EarlyUpdates(const StateParts& parts, TileTasks& tasks) : parts_(parts), tasks_(tasks) {}

  /// The settings with which the session's next steps will update these shards.
  Status expect(uint64_t session_id, const std::vector<StepGroup>& groups);
  /// Nobody writes the shard's gradient before the step. Ignored where that cannot be.
  void gradient_is_final(uint64_t session_id, uint32_t shard_id);
  /// Begins what can begin. Not to be called while an operation of the job runs. True where a tile
  /// began.
  bool advance();
  /// A bucket of which all gradients are final waits to be begun, or to go on.
  bool has_waiting() const { return !ready_.empty(); }

  using SettingsOf = std::function<const AdamSettings*(uint32_t shard_id)>;
  /// The part that a step of the session takes over, which updates each shard of the bucket with
  /// these settings; nullptr if there is nothing, or nothing that fits. No tile of it is under way.
  std::shared_ptr<SpeculativeBucket> take(uint32_t bucket,
                                          uint64_t session_id,
                                          const SettingsOf& settings_of);
  /// Tiles that were made take the places of N's, as those of the step that runs; counts them.
  void adopt(Bucket& bucket, SpeculativeBucket& made);
  /// Drops a bucket that take() returned and nobody adopts.
  void give_back(SpeculativeBucket& made, EarlyDiscard why);

  void discard(uint32_t bucket, EarlyDiscard why);
  /// Also when it was final: its gradient is written again, or gone.
  void forget_gradient(uint32_t shard_id);
  void forget_session(uint64_t session_id) { expected_.erase(session_id); }
  /// At the job's end. No tile is under way.
  void forget_all();

  /// Frees the memory of one tile that is on disk as well; false: there is none.
  bool drop_memory();
  /// Discards one bucket whose tiles take disk that somebody else needs; false: there is none.
  bool free_extents();
  /// Somebody waits for the value as it is: no further tile of its bucket begins until those that
  /// are on their way have ended.
  void pause(const Entry& value);
  /// The slot of the speculative value, if there is one.
  const Slot* slot_of(const Entry& value) const;
  /// The same if nobody works there, so that it may go: the step's session has the value fetched
  /// then.
  const Slot* slot_to_spare(const Entry& value) const;
  /// That one.
  void free_slot(const Entry& value);

  /// nullptr where there is nothing.
  const SpeculativeBucket* find(uint32_t bucket) const {
    const auto found = by_bucket_.find(bucket);
    return found == by_bucket_.end() ? nullptr : found->second.get();
  }
  size_t bucket_count() const { return by_bucket_.size(); }
  size_t final_shard_count() const { return final_shards_.size(); }
  /// Tiles.
  uint32_t running_count() const { return running_count_; }

 private:
  enum class Begin : uint8_t { now, later, never };
  Begin check(const Bucket& bucket) const;
  uint64_t session_of(const Bucket& bucket) const;
  /// False: no further tile may begin for now.
  bool advance_bucket(std::deque<uint32_t>::iterator& at);
  bool is_left_to_the_step(const Bucket& bucket, size_t tile) const;
  bool has_quota(const Bucket& bucket, size_t tile) const;
  std::shared_ptr<SpeculativeBucket> begin(Bucket& bucket);
  void begin_tiles(Bucket& bucket, const std::shared_ptr<SpeculativeBucket>& made);
  void begin_tile(Bucket& bucket, const std::shared_ptr<SpeculativeBucket>& made, size_t tile);
  void find_slot(SpeculativeBucket& made);
  void free_slot(SpeculativeBucket& made);
  void end_tile(uint32_t bucket, SpeculativeBucket& made, const Status& status);
  void release_tile(const SpeculativeTile& tile);
  void release(SpeculativeBucket& made);

  const StateParts parts_;
  TileTasks& tasks_;
  std::unordered_map<uint64_t, std::unordered_map<uint32_t, AdamSettings>> expected_;  // by session
  std::map<uint32_t, std::shared_ptr<SpeculativeBucket>> by_bucket_;
  /// Buckets of which all gradients are final, and not all tiles are begun.
  std::deque<uint32_t> ready_;
  /// Shards whose gradient their session writes no more before its step.
  std::unordered_set<uint32_t> final_shards_;
  std::unordered_map<uint32_t, uint32_t> final_counts_;  // of them, by bucket
  uint32_t running_count_ = 0;                           // tiles
};

}  // namespace memd
