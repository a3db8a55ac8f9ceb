// Which slots have to go so that one of so many bytes finds room.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "arena/arena.h"

namespace memd {

/// Slots are offered in the order in which they should go, until some of them and the gaps between
/// them lie in one stretch that is long enough. What was offered and lies elsewhere may stay. The
/// arena must not change meanwhile. An offer is O(log n).
class RoomSearch {
 public:
  RoomSearch(const Arena& arena, uint64_t bytes);

  /// A slot that may go. True once there is room; then nothing more is offered.
  bool offer(uint64_t offset_bytes);
  /// Of that stretch, the slots that hold the fewest bytes and make room. Empty before there is
  /// any.
  std::vector<uint64_t> chosen() const;

 private:
  const Arena& arena_;
  uint64_t wanted_bytes_;
  std::map<uint64_t, uint64_t> offered_;  // slots: offset → length
  /// Stretches of offered slots with the gaps that touch them: begin → end.
  std::map<uint64_t, uint64_t> stretches_;
  uint64_t begin_bytes_ = 0;  // of the one that is long enough
  uint64_t end_bytes_ = 0;
};

}  // namespace memd
