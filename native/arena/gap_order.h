// Gaps by their offsets, so that the first one that is long enough is found without a look at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace memd {

/// A treap: a search tree by offset whose nodes know the longest gap below them, and whose shape
/// does not depend on the order in which gaps come. Everything is O(log n) of the gaps. Owned by
/// its Arena, on its thread.
class GapOrder {
 public:
  void insert(uint64_t offset_bytes, uint64_t bytes);
  /// There is a gap at `offset_bytes`.
  void erase(uint64_t offset_bytes);
  /// The lowest offset of a gap of at least `bytes`.
  std::optional<uint64_t> first_of(uint64_t bytes) const;
  /// 0: there is none.
  uint64_t longest_bytes() const { return longest_of(root_); }
  /// Gaps that first_of() has met so far.
  uint64_t looked_at_count() const { return looked_at_count_; }

 private:
  struct Gap;
  using Tree = std::unique_ptr<Gap>;
  struct Gap {
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
    uint64_t longest_bytes = 0;  // of it and all below it
    uint64_t priority = 0;       // at least that of each below it
    Tree lower;
    Tree higher;
  };

  static uint64_t longest_of(const Tree& tree) { return tree == nullptr ? 0 : tree->longest_bytes; }
  static void note_longest(Gap& gap);
  static void insert_in(Tree& tree, Tree gap);
  static void erase_in(Tree& tree, uint64_t offset_bytes);
  /// Parts a tree into what lies below `offset_bytes` and what lies above it.
  static void split(Tree tree, uint64_t offset_bytes, Tree& lower, Tree& higher);
  /// All of `lower` lies below all of `higher`.
  static Tree join(Tree lower, Tree higher);

  Tree root_;
  mutable uint64_t looked_at_count_ = 0;
};

}  // namespace memd
