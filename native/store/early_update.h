// Updates of a step that is still to be closed: work done ahead of it while backward runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "store/job.h"
#include "store/journal/step_request.h"
#include "store/space/extent_store.h"
#include "store/tile_tasks.h"

namespace memd {

/// Owned by the ShardStore, on the server thread; the state is in Job::early. A bucket is updated
/// early once its session has said with which settings, and that each of its gradients is final.
/// Nothing that is made here changes N, so that all of it may be discarded at any moment: a step
/// takes what matches it exactly and does the rest as ever. No method blocks.
class EarlyUpdates {
 public:
  EarlyUpdates(ExtentStore& extents, TileTasks& tiles) : extents_(extents), tiles_(tiles) {}

  /// The settings with which the session's next steps will update these shards.
  static Status expect(Job& job, Session& session, const std::vector<StepGroup>& groups);
  /// Nobody writes the shard's gradient before the step. Ignored where that cannot be.
  static void gradient_is_final(Job& job, const Session& session, uint32_t shard_id);
  /// Begins what can begin. Not to be called while an operation of the job runs.
  void advance(Job& job);

  using SettingsOf = std::function<const AdamSettings*(uint32_t shard_id)>;
  /// What a step of the session takes over, which updates each shard of the bucket with these
  /// settings; nullptr where there is nothing, or nothing that fits. No tile of it is under way.
  std::shared_ptr<EarlyBucket> take(Job& job,
                                    uint32_t bucket,
                                    uint64_t session_id,
                                    const SettingsOf& settings_of);
  /// Tiles that were made take the places of N's, as those of the step that runs; counts them.
  void adopt(Job& job, Bucket& bucket, EarlyBucket& early);
  /// Of a bucket that take() returned and nobody adopts.
  void give_back(Job& job, EarlyBucket& early, EarlyDiscard why);

  void discard(Job& job, uint32_t bucket, EarlyDiscard why);
  /// Also when it was final: its gradient is written again, or gone.
  void forget_gradient(Job& job, uint32_t shard_id);
  /// At the job's end. No tile is under way.
  void forget(Job& job);
  /// Discards one bucket whose tiles take disk that somebody else needs; false where there is none.
  bool free_extents(Job& job);
  /// Somebody waits for the value as it is: no further tile of its bucket begins until those that
  /// are on their way have ended.
  static void pause(Job& job, const Entry& value);
  /// Where a parameter's value as of the step to come is, which nobody leases, if it may go: the
  /// step's session has it fetched then.
  static const Slot* slot_to_spare(const Job& job, const Entry& value);
  /// That one.
  static void free_slot(Job& job, const Entry& value);

 private:
  enum class Begin : uint8_t { now, later, never };
  Begin check(const Job& job, const Bucket& bucket) const;
  static const Session* session_of(const Job& job, const Bucket& bucket);
  bool is_left_to_the_step(Job& job, const Bucket& bucket, size_t tile) const;
  static bool has_quota(const Job& job, const Bucket& bucket, size_t tile);
  std::shared_ptr<EarlyBucket> begin(Job& job, Bucket& bucket, const Session& session);
  void begin_tile(Job& job, Bucket& bucket, const std::shared_ptr<EarlyBucket>& early, size_t tile);
  static void find_slot(Job& job, EarlyBucket& early);
  static void free_slot(Job& job, EarlyBucket& early);
  void end_tile(Job& job, uint32_t bucket, EarlyBucket& early, const Status& status);
  void release_tile(Job& job, const EarlyTile& tile);
  void release(Job& job, EarlyBucket& early);

  ExtentStore& extents_;
  TileTasks& tiles_;
};

}  // namespace memd
