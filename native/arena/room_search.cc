#include "arena/room_search.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "base/units.h"

namespace memd {

RoomSearch::RoomSearch(const Arena& arena, uint64_t bytes)
    : arena_(arena), wanted_bytes_(align_up(std::max<uint64_t>(bytes, 1), kBlockBytes)) {}

bool RoomSearch::offer(uint64_t offset_bytes) {
  const auto slot = arena_.slots().find(offset_bytes);
  MEMD_CHECK(slot != arena_.slots().end());
  offered_[slot->first] = slot->second;
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
  begin_bytes_ = next_bytes_ = window_.room_begin_bytes = begin;
  end_bytes_ = end;
  return true;
}

bool RoomSearch::choose(size_t count_max) {
  const auto& slots = arena_.slots();
  auto slot = slots.lower_bound(next_bytes_);
  if (slot != slots.begin()) {
    // One that was made since the stretch was found may begin before it.
    const auto& [offset_bytes, slot_bytes] = *std::prev(slot);
    if (window_.slots.empty() && offset_bytes + slot_bytes > window_.room_begin_bytes)
      window_.room_begin_bytes = offset_bytes + slot_bytes;
  }
  for (; slot != slots.end() && slot->first < end_bytes_; ++slot) {
    if (count_max-- == 0) return false;
    next_bytes_ = slot->first + 1;
    const auto offered = offered_.find(slot->first);
    if (offered == offered_.end() || offered->second != slot->second) {
      window_ = {.slots = {}, .room_begin_bytes = slot->first + slot->second, .held_bytes = 0};
      continue;
    }
    window_.slots.push_back(*slot);
    window_.held_bytes += slot->second;
    const auto next = std::next(slot);
    const uint64_t room_end_bytes =
        next == slots.end() || next->first >= end_bytes_ ? end_bytes_ : next->first;
    // Room is what lies between those that stay on either side.
    while (room_end_bytes - window_.room_begin_bytes >= wanted_bytes_) {
      if (window_.held_bytes < chosen_bytes_) {
        chosen_bytes_ = window_.held_bytes;
        chosen_first_last_ = {window_.slots.front().first, slot->first};
      }
      if (window_.slots.size() == 1) break;
      const auto [offset_bytes, slot_bytes] = window_.slots.front();
      window_.slots.pop_front();
      window_.room_begin_bytes = offset_bytes + slot_bytes;
      window_.held_bytes -= slot_bytes;
    }
  }
  return true;
}

std::vector<uint64_t> RoomSearch::chosen() const {
  std::vector<uint64_t> offsets;
  if (chosen_bytes_ == std::numeric_limits<uint64_t>::max()) return offsets;
  const auto& [first, last] = chosen_first_last_;
  for (auto it = offered_.find(first); it != offered_.end() && it->first <= last; ++it)
    offsets.push_back(it->first);
  return offsets;
}

}  // namespace memd
