#include "store/cache/prefetcher.h"

#include <algorithm>
#include <utility>

#include "base/units.h"

namespace memd {
namespace {

// In flight for plans: as much as a fast device needs to be busy, and what a lease that no plan
// foresaw has to wait behind at most.
constexpr uint64_t kPrefetchingBytesMax = 64_MiB;
// An early fetch displaces something that is needed later, and so costs bytes: a window
// of a sixteenth of what a period fetches costs at most that much more.
constexpr uint64_t kAheadPart = 16;
constexpr uint64_t kAheadArenaPart = 64;
constexpr uint64_t kAheadBytesMax = 64_MiB;
// Uses that are looked at in one go.
constexpr uint32_t kLookedAtMax = 4096;
// Entries that searches for room meet in one turn.
constexpr uint64_t kMetMax = 4 * Room::kLookedAtMax;

}  // namespace

bool Prefetcher::look_ahead() {
  if (!parts_.policy.take_look_ahead()) return false;
  bool progress = false;
  is_searching_ = false;
  const size_t session_count = parts_.sessions.size();
  for (size_t i = 0; i < session_count && !is_searching_; ++i) {
    const size_t at = (first_session_ + i) % session_count;
    Session& session = *parts_.sessions[at];
    if (session.plan != nullptr) progress |= look_ahead(session);
    if (is_searching_) first_session_ = at;
  }
  if (is_searching_) parts_.policy.want_look_ahead();
  return progress || is_searching_;
}

bool Prefetcher::look_ahead(Session& session) {
  SessionPlan& plan = *session.plan;
  const bool may_look =
      plan.cursor().has_plan() && parts_.memory != nullptr && parts_.progress.stopped().is_ok();
  // Somebody who waits for room goes first.
  if (!may_look || parts_.waiters.any_for_room()) return false;
  // Blobs and buffers have to stand still for a step or sync to begin.
  const bool is_operating = parts_.gates.is_operating();
  bool progress = false;
  bool has_room = true;
  uint32_t looked_at_count = 0;
  const uint64_t met_before_count = room_.looked_at_count();
  const uint64_t now = plan.cursor().now();
  plan.look_ahead([&](const PlanUse& use, uint64_t time) {
    // An entry that the step changes is not fetched before it did.
    if (use.by_daemon || ++looked_at_count > kLookedAtMax) return false;
    // The id comes from a plan: its entry may be gone, or another's by now.
    Entry* const entry = parts_.shards.entry(use.item);
    const bool is_left = entry == nullptr || use.kind == UseKind::overwrite ||
                         (entry->kind() == EntryKind::bytes && is_operating && !is_scratch(*entry));
    if (is_left || !may_prefetch(*entry)) return true;
    const uint64_t reading_bytes = parts_.window.reading_bytes();
    if (reading_bytes > 0 && reading_bytes + entry->bytes() > kPrefetchingBytesMax) return false;
    if (room_.looked_at_count() - met_before_count > kMetMax) {
      is_searching_ = true;
      return false;
    }
    auto slot = make_room(*entry, time - now);
    if (slot == nullptr) {
      has_room = is_searching_;
      return false;
    }
    prefetch(*entry, std::move(slot));
    progress = true;
    return true;
  });
  if (!has_room) session.ring.want_use_after(uses_until_room(plan));
  return progress;
}

std::unique_ptr<Slot> Prefetcher::make_room(const Entry& entry, uint64_t distance) {
  const auto free_slot = [&] {
    return parts_.slots.make(entry.bytes(), parts_.shards.shard_count(entry));
  };
  if (auto slot = free_slot()) return slot;
  parts_.slots.free_retired();
  if (auto slot = free_slot()) return slot;
  while (parts_.memory->grow_arena()) {
    if (auto slot = free_slot()) return slot;
  }
  const uint64_t window_bytes =
      std::min(std::max(plans_.period_fetched_bytes() / kAheadPart,
                        parts_.memory->arena().capacity_bytes() / kAheadArenaPart),
               kAheadBytesMax);
  const uint64_t ahead_bytes = parts_.window.bytes();
  if (ahead_bytes > 0 && ahead_bytes + entry.bytes() > window_bytes) return nullptr;
  // It is not worth more than twice what is fetched.
  const uint64_t& evicted_bytes = parts_.counters.evicted_bytes;
  const uint64_t evicted_bytes_max = evicted_bytes + 2 * entry.bytes();
  const uint64_t evicted_count_before = room_.evicted_count();
  while (evicted_bytes < evicted_bytes_max) {
    const Room::Eviction evicted =
        room_.evict_for(Room::Asker::prefetch,
                        {.bytes = entry.bytes(),
                         .distance_min = distance + 1,
                         .evicted_bytes_max = evicted_bytes_max - evicted_bytes});
    is_searching_ = evicted == Room::Eviction::unfinished;
    if (evicted != Room::Eviction::done) break;
    if (auto slot = free_slot()) return slot;
    if (room_.evicted_count() - evicted_count_before < Room::kMovedMax) continue;
    is_searching_ = true;
    break;
  }
  return nullptr;
}

// There is room again when something that was brought up is used, or is not needed soon any more.
uint64_t Prefetcher::uses_until_room(const SessionPlan& plan) const {
  uint64_t count = 0;
  plan.cursor().for_coming(plan.cursor().now(), [&](const PlanUse& use, uint64_t) {
    if (use.by_daemon || ++count == PlanProgress::kUsesUnheardMax) return false;
    const Entry* const entry = parts_.shards.entry(use.item);
    return entry == nullptr || entry->prefetch().state() == EntryPrefetch::State::no;
  });
  return std::max<uint64_t>(count, 1);
}

bool Prefetcher::may_prefetch(const Entry& entry) const {
  if (entry.residency() != Residency::absent || entry.task_count() != 0) return false;
  if (entry.bytes() == 0 || entry.prefetch().has_failed() || !entry.is_backed()) return false;
  if (entry.pending() != nullptr || entry.is_exchanged() || parts_.is_lost(entry)) return false;
  if (entry.kind() == EntryKind::bytes || entry.is_uncommitted()) return true;
  // An entry that a step begins with stands still for it. One that it has updated does not. The
  // shards last: a bucket has thousands, and most entries that a plan names are there.
  const ShardIds& held = parts_.shards.bucket(entry.owner()).shards;
  return std::none_of(held.begin(), held.end(), [this](uint32_t id) {
    return parts_.shards[id].contributors.is_sealed();
  });
}

void Prefetcher::prefetch(Entry& entry, std::unique_ptr<Slot> slot) {
  entry.place(std::move(slot));
  parts_.window.begin(entry);
  parts_.residencies.move(entry, Residency::absent, Residency::filling);
  fetches_.fetch(entry, IoPriority::prefetch, [this, &entry](const Status& status) {
    parts_.window.end_reading(entry, status.is_ok());
    parts_.policy.want_look_ahead();
  });
}

}  // namespace memd
