#include "arena/gap_order.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

/// Offsets that follow each other get priorities in no order (splitmix64).
uint64_t priority_of(uint64_t offset_bytes) {
  uint64_t mixed = offset_bytes + 0x9e37'79b9'7f4a'7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58'476d'1ce4'e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d0'49bb'1331'11eb;
  return mixed ^ (mixed >> 31);
}

}  // namespace

void GapOrder::note_longest(Gap& gap) {
  gap.longest_bytes = std::max({gap.bytes, longest_of(gap.lower), longest_of(gap.higher)});
}

void GapOrder::insert(uint64_t offset_bytes, uint64_t bytes) {
  auto gap = std::make_unique<Gap>();
  gap->offset_bytes = offset_bytes;
  gap->bytes = gap->longest_bytes = bytes;
  gap->priority = priority_of(offset_bytes);
  insert_in(root_, std::move(gap));
}

void GapOrder::insert_in(Tree& tree, Tree gap) {
  if (tree == nullptr) {
    tree = std::move(gap);
    return;
  }
  if (gap->priority > tree->priority) {
    split(std::move(tree), gap->offset_bytes, gap->lower, gap->higher);
    tree = std::move(gap);
  } else {
    Tree& side = gap->offset_bytes < tree->offset_bytes ? tree->lower : tree->higher;
    insert_in(side, std::move(gap));
  }
  note_longest(*tree);
}

void GapOrder::erase(uint64_t offset_bytes) { erase_in(root_, offset_bytes); }

void GapOrder::erase_in(Tree& tree, uint64_t offset_bytes) {
  MEMD_CHECK(tree != nullptr);
  if (tree->offset_bytes == offset_bytes) {
    tree = join(std::move(tree->lower), std::move(tree->higher));
    return;
  }
  erase_in(offset_bytes < tree->offset_bytes ? tree->lower : tree->higher, offset_bytes);
  note_longest(*tree);
}

void GapOrder::split(Tree tree, uint64_t offset_bytes, Tree& lower, Tree& higher) {
  if (tree == nullptr) return;
  if (tree->offset_bytes < offset_bytes) {
    Tree rest = std::move(tree->higher);
    split(std::move(rest), offset_bytes, tree->higher, higher);
    note_longest(*tree);
    lower = std::move(tree);
  } else {
    Tree rest = std::move(tree->lower);
    split(std::move(rest), offset_bytes, lower, tree->lower);
    note_longest(*tree);
    higher = std::move(tree);
  }
}

GapOrder::Tree GapOrder::join(Tree lower, Tree higher) {
  if (lower == nullptr) return higher;
  if (higher == nullptr) return lower;
  if (lower->priority > higher->priority) {
    lower->higher = join(std::move(lower->higher), std::move(higher));
    note_longest(*lower);
    return lower;
  }
  higher->lower = join(std::move(lower), std::move(higher->lower));
  note_longest(*higher);
  return higher;
}

std::optional<uint64_t> GapOrder::first_of(uint64_t bytes) const {
  if (root_ == nullptr || root_->longest_bytes < bytes) return std::nullopt;
  for (const Gap* gap = root_.get();;) {
    ++looked_at_count_;
    if (longest_of(gap->lower) >= bytes) {
      gap = gap->lower.get();
    } else if (gap->bytes >= bytes) {
      return gap->offset_bytes;
    } else {
      gap = gap->higher.get();
    }
  }
}

}  // namespace memd
