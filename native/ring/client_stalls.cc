#include "ring/client_stalls.h"

#include <algorithm>
#include <cstring>

namespace memd {

uint32_t ClientStalls::group(std::string_view name) {
  // Another thread may have held the mutex when the child was forked, which is refused soon anyhow.
  if (forks_.is_in_child()) return 0;
  name = name.substr(0, kStallGroupNameBytes - 1);
  const std::lock_guard lock(mutex_);
  const uint32_t count = group_count_.load(std::memory_order_relaxed);
  for (uint32_t group = 1; group < count; ++group) {
    if (name == group_names_[group]) return group;
  }
  if (count == kStallGroupCount || name.empty()) return 0;
  std::memcpy(group_names_[count], name.data(), name.size());
  std::memcpy(board_.group_names[count], group_names_[count], kStallGroupNameBytes);
  group_count_.store(count + 1, std::memory_order_release);
  // Pairs with the acquire load in ServerRing::stalls(): the name is there.
  board_.group_count.store(count + 1, std::memory_order_release);
  return count;
}

void ClientStalls::note(StallPlace place, size_t reason, uint64_t ns) noexcept {
  reason = std::min(reason, kStallRing);
  count_stall(counters_, place, reason, ns);
  if (!forks_.is_in_child()) count_stall(board_.counters, place, reason, ns);
}

void ClientStalls::note_step(uint64_t wall_ns) noexcept {
  counters_.step_wall_ns.fetch_add(wall_ns, std::memory_order_relaxed);
  if (!forks_.is_in_child()) {
    board_.counters.step_wall_ns.fetch_add(wall_ns, std::memory_order_relaxed);
  }
}

Stalls ClientStalls::sums() const {
  return read_stalls(counters_, group_names_, group_count_.load(std::memory_order_acquire));
}

}  // namespace memd
