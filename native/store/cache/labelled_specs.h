// Shards as one call declares them.
#pragma once

#include <initializer_list>
#include <vector>

#include "store/cache/shard.h"
#include "store/cache/shard_label.h"

namespace memd {

/// Specs, and a label for each. Who declares makes both on a thread of its own: the names of a
/// large model are more bytes than the server thread may move in a turn, which takes the labels as
/// they are.
class LabelledSpecs {
 public:
  LabelledSpecs(std::vector<ShardSpec> specs);            // NOLINT: specs are what is declared
  LabelledSpecs(std::initializer_list<ShardSpec> specs);  // NOLINT

  const std::vector<ShardSpec>& specs() const { return specs_; }
  /// `spec` is one of specs(), and is not taken a second time. Of one whose name or shape is longer
  /// than a shard's may be it is empty: Shards::plan() refuses it.
  ShardLabel take_label(const ShardSpec& spec);

 private:
  std::vector<ShardSpec> specs_;
  std::vector<ShardLabel> labels_;
};

}  // namespace memd
