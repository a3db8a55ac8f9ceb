// Which slots have to go so that one of so many bytes finds room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "arena/arena.h"

namespace memd {

/// Slots are offered in the order in which they should go, until some of them and the gaps between
/// them lie in one stretch that is long enough. Slots that were offered and lie elsewhere may stay.
/// An offer is O(log n). Where the arena changes meanwhile, a stretch may be longer than it was
/// when it was found, and what is chosen is what makes room now.
class RoomSearch {
 public:
  RoomSearch(const Arena& arena, uint64_t bytes);

  /// A slot that may go. True once there is room; then nothing more is offered.
  bool offer(uint64_t offset_bytes);
  /// Looks which slots of that stretch hold the fewest bytes and make room. Meets no more than
  /// `count_max`; false: the next call goes on.
  bool choose(size_t count_max);
  /// The slots that were chosen. Empty before there is room, or once there is none any more.
  std::vector<uint64_t> chosen() const;

 private:
  const Arena& arena_;
  uint64_t wanted_bytes_;
  std::map<uint64_t, uint64_t> offered_;  // slots: offset → length
  /// Stretches of offered slots with the gaps that touch them: begin → end.
  std::map<uint64_t, uint64_t> stretches_;
  uint64_t begin_bytes_ = 0;  // of the one that is long enough
  uint64_t end_bytes_ = 0;

  /// Slots next to each other that were offered.
  struct Window {
    std::deque<std::pair<uint64_t, uint64_t>> slots;
    uint64_t room_begin_bytes = 0;  // behind the slot before the first
    uint64_t held_bytes = 0;
  };
  Window window_;
  uint64_t next_bytes_ = 0;  // where choose() goes on
  std::pair<uint64_t, uint64_t> chosen_first_last_;
  uint64_t chosen_bytes_ = std::numeric_limits<uint64_t>::max();
};

}  // namespace memd
