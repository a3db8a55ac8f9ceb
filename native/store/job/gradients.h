// Gradients of all jobs: hints of sessions about them, and their end.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "base/status.h"
#include "store/job/scratch.h"
#include "store/job/store_parts.h"
#include "store/journal/step_request.h"

namespace memd {

/// Ends contributions to gradients, and drops a bucket's slot with the last of them. Owned by the
/// ShardStore; the server, its rings and steps call it on the server thread. Nothing blocks.
class Gradients {
 public:
  using Chosen = std::function<bool(const Shard&)>;

  explicit Gradients(const StoreParts& parts) : parts_(parts), scratch_(parts) {}
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  /// How the session's next steps will update these shards, so that a bucket whose gradients it
  /// says to be final is updated before the step is closed. Undone where the step differs.
  Status expect_step(uint64_t session_id, const std::vector<StepGroup>& groups);
  void is_final(uint64_t session_id, uint32_t shard_id);
  /// A slot that was leased ahead of it is not used: nothing was written there.
  void unused(uint64_t session_id, uint32_t shard_id);
  /// The gradients that the session has added to, and those that it has accumulated by itself;
  /// other contributors are told. Of all shards if none is named.
  Status drop(uint64_t session_id, const std::vector<uint32_t>& shard_ids);
  /// A rank has made its gradients of the next step: others wait for its parts no longer, and what
  /// it has accumulated by itself is in them.
  Status end_of_rank(uint64_t session_id);
  /// Shards whose gradient other ranks have added to, and this one has not.
  Result<std::vector<uint32_t>> made_by_other_ranks(uint64_t session_id);
  /// All ranks drop gradients of these shards, and make new ones. As drop().
  Status drop_of_ranks(uint64_t session_id, const std::vector<uint32_t>& shard_ids);
  /// The rank's own sum of this shard is in that of all ranks.
  void end_rank_sum(uint64_t session_id, uint32_t shard_id);
  /// The session ends: the gradients that it has added to, and scratch of sessions that are gone.
  void drop(Job& job, uint64_t session_id);
  /// All of these buckets that are chosen.
  void drop(Job& job, const std::set<uint32_t>& buckets, const Chosen& chosen);
  Scratch& scratch() { return scratch_; }
  /// Buckets that were looked at so far.
  uint64_t looked_at_count() const { return looked_at_count_; }

 private:
  /// The job of a rank whose start is whole.
  Result<Job*> job_of_rank(uint64_t session_id) const;
  void drop_of_session(Job& job, uint32_t bucket, uint64_t session_id, const Chosen& chosen);
  void drop_in_bucket(Job& job, uint32_t bucket, const Chosen& chosen);
  void drop_rank_sums(Job& job, uint32_t rank, const std::function<bool(uint32_t)>& chosen);
  /// Once nothing moves there, if they are unused still.
  void drop_bytes(Job& job, Entry& gradient, std::function<bool()> is_unused);

  const StoreParts& parts_;
  Scratch scratch_;
  uint64_t looked_at_count_ = 0;
};

}  // namespace memd
