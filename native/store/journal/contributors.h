// The sessions whose gradients are summed in a shard's gradient.
#pragma once

#include <cstdint>

namespace memd {

/// A set of sessions in one word, which the ledger keeps as it is: empty, one session by its id,
/// several by their seats in the job's training group, or sealed, when a step has taken the sum.
/// TrainingGroup knows whose the seats are.
class Contributors {
 public:
  constexpr Contributors() = default;
  static constexpr Contributors one(uint64_t session_id) { return Contributors(session_id); }
  /// Bit i: the member with seat i. At least two.
  static constexpr Contributors several(uint64_t seats) { return Contributors(kSeveral | seats); }
  /// No session's end drops the gradient.
  static constexpr Contributors sealed() { return Contributors(kSealed); }
  static constexpr Contributors from_word(uint64_t word) { return Contributors(word); }

  constexpr uint64_t word() const { return word_; }
  constexpr bool empty() const { return word_ == 0; }
  constexpr bool is_sealed() const { return word_ == kSealed; }
  /// The one session; 0 where there is none, or more.
  constexpr uint64_t only() const { return (word_ & kSeveral) == 0 ? word_ : 0; }
  /// 0 where they are not several.
  constexpr uint64_t seats() const {
    return (word_ & kSeveral) == 0 || is_sealed() ? 0 : word_ & ~kSeveral;
  }

  constexpr bool operator==(const Contributors&) const = default;

 private:
  // Session ids are below it: a random number of 32 bits, times 2^16.
  static constexpr uint64_t kSeveral = uint64_t{1} << 63;
  static constexpr uint64_t kSealed = ~uint64_t{0};

  explicit constexpr Contributors(uint64_t word) : word_(word) {}

  uint64_t word_ = 0;
};

}  // namespace memd
