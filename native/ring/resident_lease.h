// How a resident shard is leased without a request: the steps of both sides, in their order.
//
// The client pins, then looks whether the shard is still where it thought. The daemon takes the
// shard out of the table, then looks whether anybody has pinned it. At least one of them sees
// the other, because every step is sequentially consistent.
//
// tests/native/resident_lease_model_test.cc runs these functions in every order of their steps:
// `Atomic` is std::atomic, or a word whose every access is a step of the model.
#pragma once

#include <cstdint>
#include <optional>

namespace memd {

/// A pin counter holds readers in its low half and writers in its high half.
inline constexpr uint32_t kReaderPin = 1;
inline constexpr uint32_t kWriterPin = 1u << 16;
/// One more would count as a writer.
inline constexpr uint32_t kPinReadersMax = kWriterPin - kReaderPin;
constexpr uint32_t pin_readers(uint32_t pins) { return pins & kPinReadersMax; }
constexpr uint32_t pin_writers(uint32_t pins) { return pins >> 16; }

/// The sessions that may lease a shard's value without a request. `group`: the members of the job's
/// training group, who see what a step of theirs made before it is committed.
enum class Visibility : uint8_t { nobody = 0, everybody = 1, group = 2 };

/// {visibility: 8, generation: 24 (low bits), pin counter: 32}
constexpr uint64_t row_word(Visibility visibility, uint64_t generation, uint32_t pin) {
  return (uint64_t{static_cast<uint8_t>(visibility)} << 56) | ((generation & 0xff'ffff) << 32) |
         pin;
}
constexpr Visibility row_visibility(uint64_t word) { return static_cast<Visibility>(word >> 56); }
constexpr uint32_t row_pin(uint64_t word) { return static_cast<uint32_t>(word); }

/// The place of a shard's value.
struct ShardPlace {
  uint32_t pin = 0;           // its counter, in every session's memory
  uint64_t offset_bytes = 0;  // from the arena's start
  uint64_t length_bytes = 0;
  uint64_t generation = 0;
};

/// One shard's row in the job's table. The daemon writes it and never reads it back. The other
/// fields change only while the word says that there is nothing to lease.
template <template <typename> typename Atomic>
struct BasicShardRow {
  Atomic<uint64_t> word;
  Atomic<uint64_t> offset_bytes;
  Atomic<uint64_t> length_bytes;
  Atomic<uint64_t> generation;
};

// ---- The daemon's side --------------------------------------------------------------------------

/// From here on nobody begins to lease it: whoever does not see this has a pin that a look at the
/// pins after it sees.
template <template <typename> typename Atomic>
void withdraw(BasicShardRow<Atomic>& row) {
  row.word.store(row_word(Visibility::nobody, 0, 0));
}

/// The row is withdrawn. A session that leases it then holds a pin of the slot that `place` is in;
/// that slot is freed, changed or reused only after a withdrawal and a look at the pins.
template <template <typename> typename Atomic>
void publish(BasicShardRow<Atomic>& row,
             const ShardPlace& place,
             Visibility visibility = Visibility::everybody) {
  row.offset_bytes.store(place.offset_bytes);
  row.length_bytes.store(place.length_bytes);
  row.generation.store(place.generation);
  row.word.store(row_word(visibility, place.generation, place.pin));
}

/// Takes a slot away from those who might lease what is in it, or finds that somebody did: then all
/// is as before. In this order, or a client could pin between the look and the withdrawal.
template <typename Withdraw, typename IsPinned, typename Publish>
bool take_slot_away(const Withdraw& withdraw_rows,
                    const IsPinned& is_pinned,
                    const Publish& publish_rows) {
  withdraw_rows();
  if (!is_pinned()) return true;
  publish_rows();
  return false;
}

// ---- The client's side --------------------------------------------------------------------------

/// Gives a pin back. Ordered before the look whether somebody waits for that: either the daemon,
/// which says so and then scans the pins, sees it gone, or we see that it waits, and ring.
template <template <typename> typename Atomic, typename Ring>
void unpin(Atomic<uint32_t>& counter,
           uint32_t pin,
           const Atomic<uint32_t>& release_wanted,
           const Ring& ring) {
  counter.fetch_sub(pin);
  if (release_wanted.load() != 0) ring();
}

/// The client's own words, of one session.
template <template <typename> typename Atomic>
struct PinWords {
  Atomic<uint32_t>* counters;
  uint32_t counter_count;
  const Atomic<uint32_t>& release_wanted;
  const Atomic<uint32_t>& requests_only;
  /// The newest step call of the session that the table accounts for: before the daemon says so it
  /// withdraws what the step updates, and before it publishes any of that again for a step that
  /// failed it takes it back.
  const Atomic<uint64_t>& resident_call;
  /// Not 0: the session is a member of the job's training group. It becomes one only while no row
  /// says `group`.
  const Atomic<uint32_t>& in_group;
  uint64_t after_call;  // the step call that the lease follows; 0: none that is on its way

  bool may_lease(uint64_t word) const {
    const Visibility visibility = row_visibility(word);
    return visibility == Visibility::everybody ||
           (visibility == Visibility::group && in_group.load() != 0);
  }
};

/// The shard's place, with a pin that the caller gives back; nothing if a request has to be made.
/// `before_pin(pin)` may refuse, and `undo_pin(pin)` is called if it came to nothing.
///
/// Why no slot is mistaken for another: from the second load of the word on a pin is held on the
/// slot that the word named at that moment. That slot can be retired, but neither freed nor given
/// to another shard, and what was retired never comes back. So where the third load names the same
/// counter, no other slot was published between the two, and offset and length are those of this
/// one. The first load only guesses the counter: whatever happened to the shard and its slot before
/// the pin was there does not matter.
///
/// Why no other group's value is leased: between the second and the third load of a word that says
/// `group` the slot holds one uncommitted value all the time, and meanwhile nobody joins the group.
/// A session that is a member at a moment between them is one of those who may see that value.
template <template <typename> typename Atomic, typename BeforePin, typename UndoPin, typename Ring>
std::optional<ShardPlace> pin_resident(const BasicShardRow<Atomic>& row,
                                       const PinWords<Atomic>& words,
                                       const BeforePin& before_pin,
                                       const UndoPin& undo_pin,
                                       const Ring& ring) {
  const uint64_t guess = row.word.load();
  const uint32_t pin = row_pin(guess);
  // Before the second look at the word: what the step updates is withdrawn by then. Without a step
  // to follow nothing of it matters.
  const uint64_t call = words.after_call == 0 ? 0 : words.resident_call.load();
  if (!words.may_lease(guess) || pin >= words.counter_count || call < words.after_call ||
      !before_pin(pin)) {
    return std::nullopt;
  }
  words.counters[pin].fetch_add(kReaderPin);
  const uint64_t word = row.word.load();
  // Looks at the membership after the second load and before the third.
  if (row_pin(word) == pin && words.may_lease(word)) {
    const ShardPlace place{.pin = pin,
                           .offset_bytes = row.offset_bytes.load(),
                           .length_bytes = row.length_bytes.load(),
                           .generation = row.generation.load()};
    // The daemon says that it gives the session up before it stops looking at its pins, and that a
    // step failed before it publishes again what was there before that.
    if (row.word.load() == word && words.requests_only.load() == 0 &&
        (words.after_call == 0 || words.resident_call.load() == call)) {
      return place;
    }
  }
  unpin(words.counters[pin], kReaderPin, words.release_wanted, ring);
  undo_pin(pin);
  return std::nullopt;
}

}  // namespace memd
