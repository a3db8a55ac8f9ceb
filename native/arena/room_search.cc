#include "arena/room_search.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/check.h"
#include "base/units.h"

namespace memd {

RoomSearch::RoomSearch(const Arena& arena, uint64_t bytes)
    : arena_(arena), wanted_bytes_(align_up(std::max<uint64_t>(bytes, 1), kBlockBytes)) {}

bool RoomSearch::offer(uint64_t offset_bytes) {
  const auto slot = arena_.slots().find(offset_bytes);
  MEMD_CHECK(slot != arena_.slots().end());
  offered_.insert(*slot);
  uint64_t begin = slot->first;
  uint64_t end = slot->first + slot->second;
  // A stretch has the gaps beside it already: on each side there is one of the two.
  const auto& gaps = arena_.gaps();
  auto after = stretches_.lower_bound(begin);
  if (after != stretches_.begin()) {
    const auto before = std::prev(after);
    if (before->second == begin) {
      begin = before->first;
      stretches_.erase(before);
    }
  }
  if (after != stretches_.end() && after->first == end) {
    end = after->second;
    stretches_.erase(after);
  }
  const auto gap = gaps.lower_bound(begin);
  if (gap != gaps.begin()) {
    const auto& [gap_offset, gap_bytes] = *std::prev(gap);
    if (gap_offset + gap_bytes == begin) begin = gap_offset;
  }
  if (const auto behind = gaps.find(end); behind != gaps.end()) end += behind->second;
  stretches_[begin] = end;
  if (end - begin < wanted_bytes_) return false;
  begin_bytes_ = begin;
  end_bytes_ = end;
  return true;
}

std::vector<uint64_t> RoomSearch::chosen() const {
  const auto from = offered_.lower_bound(begin_bytes_);
  const auto to = offered_.lower_bound(end_bytes_);
  // A window over the stretch's slots: room is what lies between those that stay on either side.
  auto best_first = to;
  auto best_last = to;
  uint64_t best_bytes = std::numeric_limits<uint64_t>::max();
  uint64_t room_begin = begin_bytes_;
  uint64_t held_bytes = 0;
  auto first = from;
  for (auto last = from; last != to; ++last) {
    held_bytes += last->second;
    const auto next = std::next(last);
    const uint64_t room_end = next == to ? end_bytes_ : next->first;
    while (room_end - room_begin >= wanted_bytes_) {
      if (held_bytes < best_bytes) {
        best_bytes = held_bytes;
        best_first = first;
        best_last = next;
      }
      if (first == last) break;
      room_begin = first->first + first->second;
      held_bytes -= first->second;
      ++first;
    }
  }
  std::vector<uint64_t> offsets;
  for (auto it = best_first; it != best_last; ++it) offsets.push_back(it->first);
  return offsets;
}

}  // namespace memd
