// Sizes of one job's shards, summed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/units.h"

namespace memd {

/// Owns sums over the entries of one job, in whole blocks. Owned by its Shards, which alone changes
/// it as entries come and go; the server thread reads it. Nothing blocks.
class ShardSums {
 public:
  /// Elements of all parameters.
  uint64_t element_count() const { return element_count_; }
  /// Bytes of all entries.
  uint64_t entry_bytes() const { return entry_bytes_; }
  /// Bytes of the largest entry there ever was, not rounded.
  uint64_t largest_entry_bytes() const { return largest_entry_bytes_; }
  /// Bytes of all parameters' gradients, and of the largest one.
  uint64_t gradient_bytes() const { return gradient_bytes_; }
  uint64_t largest_gradient_bytes() const { return largest_gradient_bytes_; }

  void add_elements(uint64_t count) { element_count_ += count; }
  void add_entry(uint64_t bytes) {
    entry_bytes_ += align_up(bytes, kBlockBytes);
    largest_entry_bytes_ = std::max(largest_entry_bytes_, bytes);
  }
  void remove_entry(uint64_t bytes) { entry_bytes_ -= align_up(bytes, kBlockBytes); }
  /// The caller adds the gradient's entry with add_entry() as well.
  void add_gradient(uint64_t bytes) {
    gradient_bytes_ += align_up(bytes, kBlockBytes);
    largest_gradient_bytes_ = std::max(largest_gradient_bytes_, align_up(bytes, kBlockBytes));
  }

 private:
  uint64_t element_count_ = 0;
  uint64_t entry_bytes_ = 0;
  uint64_t largest_entry_bytes_ = 0;
  uint64_t gradient_bytes_ = 0;
  uint64_t largest_gradient_bytes_ = 0;
};

}  // namespace memd
