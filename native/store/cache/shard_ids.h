// The shards of a bucket.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/bulk_bytes.h"

namespace memd {

/// Ids that stay what they are once a bucket has them. A bucket of its own has one, which needs no
/// memory beside this word; a vector takes 24 bytes, and 32 on the heap.
class ShardIds {
 public:
  ShardIds() = default;  // none
  /// As many, for set(): a copy of all of a large bucket's would be more than a turn may move.
  explicit ShardIds(size_t count);
  explicit ShardIds(const std::vector<uint32_t>& ids);
  ShardIds(ShardIds&& other) noexcept { std::swap(word_, other.word_); }
  ShardIds& operator=(ShardIds&& other) noexcept {
    std::swap(word_, other.word_);
    return *this;
  }
  ShardIds(const ShardIds&) = delete;
  ShardIds& operator=(const ShardIds&) = delete;
  ~ShardIds() { delete[] array(); }

  size_t size() const;
  bool empty() const { return size() == 0; }
  const uint32_t* begin() const;
  const uint32_t* end() const { return begin() + size(); }
  uint32_t front() const { return *begin(); }
  uint32_t operator[](size_t index) const { return begin()[index]; }

  void set(size_t index, uint32_t id) { first()[index] = id; }
  template <typename Less>
  void sort(const Less& is_before) {
    std::sort(first(), first() + size(), is_before);
  }

 private:
  struct Word {
    uint32_t low = 0;
    uint32_t high = 0;
  };
  static_assert(sizeof(Word) == sizeof(uint32_t*));
  // In `high`, with the id in `low`. No pointer has it: where it does, an address has at most 57
  // bits.
  static constexpr uint32_t kOne = ~uint32_t{0};

  uint32_t* first() { return const_cast<uint32_t*>(begin()); }
  bool is_one() const { return word_.high == kOne; }
  /// The count, and the ids; nullptr where there is none or one.
  uint32_t* array() const { return is_one() ? nullptr : std::bit_cast<uint32_t*>(word_); }

  Word word_;
};

inline ShardIds::ShardIds(size_t count) {
  if (count == 1) {
    word_ = {.low = 0, .high = kOne};
  } else if (count != 0) {
    auto* const counted = new uint32_t[1 + count];
    counted[0] = static_cast<uint32_t>(count);
    word_ = std::bit_cast<Word>(counted);
  }
}

inline ShardIds::ShardIds(const std::vector<uint32_t>& ids) : ShardIds(ids.size()) {
  copy_bytes(first(), ids.data(), ids.size() * sizeof(uint32_t));
}

inline size_t ShardIds::size() const {
  if (is_one()) return 1;
  return array() == nullptr ? 0 : array()[0];
}

inline const uint32_t* ShardIds::begin() const {
  if (is_one()) return &word_.low;
  return array() == nullptr ? nullptr : array() + 1;
}

}  // namespace memd
