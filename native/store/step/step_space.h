// The disk space of one step: what was made ahead of it, what it may need, and what it replaces.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "base/status.h"
#include "store/state/speculative_bucket.h"
#include "store/step/step_parts.h"
#include "store/step/step_shards.h"

namespace memd {

/// Owns the speculative buckets that the step takes over, which have their extents already, and the
/// step's part in JobSpace: the promise of a step in memory, or what undoing it returns to. Owned
/// by its Step, which alone calls it, on the server thread; nothing blocks.
class StepSpace {
 public:
  StepSpace(const StepParts& parts, const StepShards& shards) : parts_(parts), shards_(shards) {}
  StepSpace(const StepSpace&) = delete;
  StepSpace& operator=(const StepSpace&) = delete;

  /// Takes what the session's early updates have made of the step's buckets.
  void take_speculative(uint64_t session_id);
  /// A step in memory cannot be undone: what it may need of the disk must be there before, also
  /// where everything that is cached or stays is displaced by somebody else's need of memory. If
  /// there is too little, the speculative buckets are given back: the step alone may need less at a
  /// time. Looks at some of the tiles in each turn; the operation keeps them as they are.
  void promise(Done done);
  /// The bucket's part; nullptr if there is none. Once.
  std::shared_ptr<SpeculativeBucket> take(uint32_t bucket);

  /// From here on roll_back() can return every replica to its extent of before.
  void begin_update() const;
  void roll_back() const;
  /// The step is over.
  void end() const;

 private:
  struct Need;

  Status try_promise(uint64_t needed_bytes) const;
  void count_need(const std::shared_ptr<Need>& need, std::function<void(uint64_t)> then) const;
  /// From `key` on, of the tiles that are dirty or that the step updates.
  std::optional<uint64_t> next_tile(uint64_t key) const;
  void add_tile(uint64_t key, Need& needed) const;

  const StepParts& parts_;
  const StepShards& shards_;
  std::map<uint32_t, std::shared_ptr<SpeculativeBucket>> speculative_;  // by bucket
};

}  // namespace memd
