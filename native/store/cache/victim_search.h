// The search for entries that make room together, a bounded number of looks at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

#include "arena/room_search.h"
#include "store/cache/cache_parts.h"

namespace memd {

/// Room that somebody wants, and what may be evicted for it.
struct EvictionWish {
  uint64_t bytes = 0;  // in one piece
  /// Only what is used so many uses from now, or later, as far as plans know.
  uint64_t distance_min = 0;
  uint64_t evicted_bytes_max = std::numeric_limits<uint64_t>::max();
  size_t victim_count_max = std::numeric_limits<size_t>::max();
};

/// Goes through entries in the policy's order until those that may go, and the gaps between them,
/// make room in one piece; then looks which of them it takes at least. Each call goes on where the
/// one before stopped, whatever came and went meanwhile: what stays evictable throughout a pass is
/// found by it, and victims are looked at again when they go. Owned by Room; the server thread
/// calls everything; nothing blocks.
class VictimSearch {
 public:
  enum class State : uint8_t { looking, choosing, evicting, failed };
  /// Adds the entry's slots that may go by offer().
  using Look = std::function<void(Entry& entry)>;
  /// A slot, and whose it was when it was offered.
  struct Victim {
    uint64_t offset_bytes = 0;
    uint32_t entry_id = 0;
  };

  VictimSearch(const CacheParts& parts, uint64_t bytes, uint64_t event_count);

  bool is_for(uint64_t bytes) const { return bytes_ == bytes; }
  State state() const { return state_; }
  /// Events that wake who waits for room, until the pass began.
  uint64_t event_count() const { return event_count_; }

  /// Looks at no more than `count_max` entries.
  void look(uint64_t distance_min, size_t count_max, const Look& look);
  /// During a look. True: it is enough.
  bool offer(const Entry& entry, const Slot& slot);
  /// Meets no more than `count_max` slots.
  void choose(size_t count_max);
  /// While evicting: the bytes of entries that go, at least `bytes_max` where it is more.
  uint64_t victim_bytes(uint64_t bytes_max) const;
  size_t victim_count() const { return chosen_.size(); }
  bool has_taken() const { return taken_count_ > 0; }
  /// While evicting; nothing after the last.
  std::optional<Victim> take_victim();

 private:
  const CacheParts& parts_;
  const uint64_t bytes_;
  const uint64_t event_count_;
  /// The arena has room for so few of the largest entries that one small view, held for long in a
  /// bad place, keeps them out. There whatever goes first goes: what is taken from the front keeps
  /// small slots together.
  const bool only_first_;
  State state_ = State::looking;
  RoomSearch room_;
  EvictionCursor cursor_;
  std::unordered_map<uint64_t, uint32_t> offered_;  // entries by the offset of their slot
  std::vector<uint64_t> chosen_;
  size_t taken_count_ = 0;
};

}  // namespace memd
