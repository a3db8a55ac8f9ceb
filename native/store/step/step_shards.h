// The shards that one step updates, and what leases see of them meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "store/cache/lease_request.h"
#include "store/cache/lease_waiters.h"
#include "store/journal/step_request.h"
#include "store/step/staged_buffers.h"
#include "store/step/step_parts.h"

namespace memd {

/// Owns which shards and buckets the step updates, with which settings, the entries that it holds,
/// and whether leases still wait for it. A sync has none. Owned by its Step, which alone calls it,
/// on the server thread; nothing blocks.
///
/// sealed → held → released: the new values are everybody's, or the old ones are again.
class StepShards {
 public:
  StepShards(const StepParts& parts, const StepRequest& request, bool is_redo)
      : parts_(parts), request_(request), is_redo_(is_redo) {}
  StepShards(const StepShards&) = delete;
  StepShards& operator=(const StepShards&) = delete;

  /// Gradients are the step's, and values that it will replace are withdrawn.
  void seal();
  const std::set<uint32_t>& buckets() const { return buckets_; }
  /// The step updates it.
  bool contains(uint32_t shard_id) const { return group_of_.contains(shard_id); }
  /// Those of them that it updates with amsgrad, and that have no place for maxima, in order.
  std::vector<uint32_t> buckets_without_maxima() const;
  /// nullptr: the step does not update this shard.
  const AdamSettings* settings_of(uint32_t shard_id) const;
  /// The reason for a lease of a parameter's value to wait: its update, or the commit of it.
  std::optional<WaitsFor> before(const LeaseRequest& request,
                                 const Entry& entry,
                                 bool is_undoing) const;

  /// Nothing that the step names is being read, filled or written back.
  bool are_settled() const;
  /// The entries that the step reads and replaces: nobody fetches, writes or evicts them before the
  /// step ended. Once its update is published, a parameter may be fetched and evicted.
  void hold(const StagedBuffers& staged);
  /// It is committed, or undone: no lease waits for it any more.
  void release();

  // The update.
  /// Finds room in the arena for new values, where there is none.
  void make_slot(Entry& value) const;
  /// The training group goes on with the new values at once. Everybody else sees what is committed.
  void publish_bucket(const Bucket& bucket) const;
  /// The bucket is updated and cannot go back: its gradient's bytes go, where the step updates all
  /// of its shards.
  void drop_gradient(const Bucket& bucket);

  // The commit.
  /// No shard has a value that is not committed.
  void end_ahead() const;
  /// The next daemon finds the new values in their slots.
  void note_slots() const;
  /// They are everybody's again, as they are now.
  void publish_values() const;

  // Undoing.
  /// Nobody begins to read what is not committed.
  void withdraw_uncommitted() const;
  /// Published values may be on their way from the disk.
  bool are_uncommitted_still() const;
  void drop_new_values() const;
  /// Gradients are their contributors' again; if one of them has ended, that one's alone, and the
  /// others are told.
  void unseal() const;
  /// Nobody makes the step a second time with it: its session has ended, or its bytes have gone.
  bool is_gradient_over(const Shard& shard) const;

 private:
  void unseal(uint32_t shard_id) const;

  const StepParts& parts_;
  const StepRequest& request_;
  const bool is_redo_;
  std::unordered_map<uint32_t, size_t> group_of_;  // by shard id
  /// By shard id. The others are the step's session's alone.
  std::unordered_map<uint32_t, const SummedGradients*> summed_;
  std::set<uint32_t> buckets_;
  std::vector<Entry*> held_;
  std::set<uint32_t> without_gradient_;  // buckets whose gradient went with their update
  bool is_past_ = false;
};

/// StepRequest::summed of a step that is closed now.
std::vector<SummedGradients> summed_gradients(const StepParts& parts, const StepRequest& request);

}  // namespace memd
