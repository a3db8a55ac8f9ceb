// Which buckets of a job have gradients.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace memd {

/// Buckets in which some shard has contributors to its gradient: whoever gives the first to a shard
/// adds its bucket, and Gradients removes it with the last one. Without it the end of a session
/// would look at every bucket of the job. Owned by the JobCache; the server thread calls
/// everything; nothing blocks.
class GradientBuckets {
 public:
  void add(uint32_t bucket) { buckets_.insert(bucket); }
  void remove(uint32_t bucket) { buckets_.erase(bucket); }
  /// Ascending; a copy, so that they may be removed one by one.
  std::vector<uint32_t> list() const { return {buckets_.begin(), buckets_.end()}; }

 private:
  std::set<uint32_t> buckets_;
};

}  // namespace memd
