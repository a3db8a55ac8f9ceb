// The gradients that ranks have accumulated and not averaged yet.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "store/cache/entry.h"

namespace memd {

/// Owns which shards' gradients a rank has accumulated by itself, and the entry for each bucket of
/// them, which is fetched and spilled as any gradient. A rank's sum of a shard is there from its
/// first lease for writing until it is in the sum of all ranks, or is dropped; the entry's bytes go
/// with the last of its shards, and the entry stays for the next ones. The next daemon knows none:
/// ranks do not outlive theirs. Owned by the Shards; the server thread calls everything; nothing
/// blocks.
class RankSums {
 public:
  /// `add_entry`: makes an entry for gradients of a bucket.
  explicit RankSums(std::function<Entry*(uint32_t bucket)> add_entry)
      : add_entry_(std::move(add_entry)) {}

  /// nullptr: the rank has never had one there.
  Entry* find(uint32_t rank, uint32_t bucket) const {
    const auto found = sums_.find({rank, bucket});
    return found == sums_.end() ? nullptr : found->second.entry;
  }
  /// Before the rank leases one there.
  void make(uint32_t rank, uint32_t bucket) {
    Sum& sum = sums_[{rank, bucket}];
    if (sum.entry == nullptr) sum.entry = add_entry_(bucket);
  }

  bool has(uint32_t rank, uint32_t bucket, uint32_t shard_id) const {
    const auto found = sums_.find({rank, bucket});
    return found != sums_.end() && found->second.shard_ids.contains(shard_id);
  }
  bool is_empty(uint32_t rank, uint32_t bucket) const {
    const auto found = sums_.find({rank, bucket});
    return found == sums_.end() || found->second.shard_ids.empty();
  }
  /// There is an entry.
  void begin(uint32_t rank, uint32_t bucket, uint32_t shard_id) {
    sums_.at({rank, bucket}).shard_ids.insert(shard_id);
  }
  void end(uint32_t rank, uint32_t bucket, uint32_t shard_id) {
    sums_.at({rank, bucket}).shard_ids.erase(shard_id);
  }
  /// A copy, so that they may end one by one.
  std::vector<uint32_t> shards_of(uint32_t rank) const {
    std::vector<uint32_t> all;
    for (auto at = sums_.lower_bound({rank, 0}); at != sums_.end() && at->first.first == rank; ++at)
      all.insert(all.end(), at->second.shard_ids.begin(), at->second.shard_ids.end());
    return all;
  }

 private:
  struct Sum {
    Entry* entry = nullptr;
    std::set<uint32_t> shard_ids;
  };

  const std::function<Entry*(uint32_t bucket)> add_entry_;
  std::map<std::pair<uint32_t, uint32_t>, Sum> sums_;  // by rank and bucket
};

}  // namespace memd
