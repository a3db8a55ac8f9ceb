#include "store/cache/victim_search.h"

namespace memd {
namespace {

bool is_tight(const CacheParts& parts) {
  constexpr uint64_t kLargestEntries = 4;
  return parts.memory->arena_bytes_max() <
         kLargestEntries * parts.shards.sums().largest_entry_bytes();
}

}  // namespace

VictimSearch::VictimSearch(const CacheParts& parts, uint64_t bytes, uint64_t event_count)
    : parts_(parts),
      bytes_(bytes),
      event_count_(event_count),
      only_first_(is_tight(parts)),
      room_(parts.memory->arena(), bytes) {}

bool VictimSearch::offer(const Entry& entry, const Slot& slot) {
  offered_[slot.offset_bytes] = entry.id();
  if (only_first_) {
    chosen_ = {slot.offset_bytes};
    state_ = State::evicting;
    return true;
  }
  if (!room_.offer(slot.offset_bytes)) return false;
  state_ = State::choosing;
  return true;
}

void VictimSearch::look(uint64_t distance_min, size_t count_max, const Look& look) {
  // The order's end is met unless something else ends the walk.
  State ended = State::failed;
  parts_.policy.in_order(EvictionPrice::clean, cursor_, [&](uint32_t entry_id, uint64_t distance) {
    if (distance < distance_min) return false;
    look(*parts_.shards.entry(entry_id));
    if (state_ != State::looking) {
      ended = state_;
      return false;
    }
    if (--count_max > 0) return true;
    ended = State::looking;
    return false;
  });
  state_ = ended;
}

void VictimSearch::choose(size_t count_max) {
  if (!room_.choose(count_max)) return;
  chosen_ = room_.chosen();
  // Others took memory meanwhile.
  state_ = chosen_.empty() ? State::failed : State::evicting;
}

uint64_t VictimSearch::victim_bytes(uint64_t bytes_max) const {
  uint64_t bytes = 0;
  for (const uint64_t offset_bytes : chosen_) {
    const Entry* const entry = parts_.shards.entry(offered_.at(offset_bytes));
    if (entry != nullptr) bytes += entry->bytes();
    if (bytes > bytes_max) break;
  }
  return bytes;
}

std::optional<VictimSearch::Victim> VictimSearch::take_victim() {
  if (taken_count_ == chosen_.size()) return std::nullopt;
  const uint64_t offset_bytes = chosen_[taken_count_++];
  return Victim{.offset_bytes = offset_bytes, .entry_id = offered_.at(offset_bytes)};
}

}  // namespace memd
