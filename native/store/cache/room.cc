#include "store/cache/room.h"

#include <algorithm>

#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

std::unique_ptr<Slot> Room::make(Asker asker, uint64_t bytes, uint32_t pin_count, bool may_spill) {
  const uint64_t evicted_count_before = evicted_count_;
  for (;;) {
    if (auto slot = parts_.slots.make(bytes, pin_count)) return slot;
    parts_.slots.free_retired();
    if (auto slot = parts_.slots.make(bytes, pin_count)) return slot;
    if (parts_.memory->grow_arena()) continue;
    const Eviction evicted = evict_for(asker, {.bytes = bytes});
    if (evicted == Eviction::done) {
      if (evicted_count_ - evicted_count_before < kMovedMax) continue;
      has_looked_at_all_ = false;
      parts_.waits.wake_first_for_room();
      return nullptr;
    }
    // Clean entries go before those that have to be written.
    if (evicted == Eviction::unfinished) return nullptr;
    if (parts_.memory->grow_arena_further()) continue;
    if (!parts_.activities.any() && shrink_private(may_spill)) continue;
    if (may_spill) spill(bytes);
    return nullptr;
  }
}

bool Room::shrink_private(bool may_flush) {
  if (!parts_.memory->can_shrink_private()) return false;
  // Tiles lie anywhere: those that are dirty may lie in the last segment, whatever else is free.
  parts_.gates.drop_clean_tiles();
  if (parts_.memory->shrink_private()) return true;
  if (may_flush) parts_.gates.flush_tiles(std::nullopt);
  return false;
}

bool Room::may_go(const Entry& entry) const {
  if (entry.residency() != Residency::clean || entry.task_count() != 0) return false;
  if (entry.pending() != nullptr) return false;
  if (parts_.slots.is_pinned(*entry.slot()) && !MEMD_PLANTED("evict.leased_slot")) return false;
  // A shard without bytes on disk has nowhere to go but away: empty tensors, and those of tier
  // "host" once they were read.
  return entry.is_backed();
}

Room::Eviction Room::evict_for(Asker asker, const EvictionWish& wish) {
  std::optional<VictimSearch>& search = searches_[static_cast<size_t>(asker)];
  const uint64_t event_count = parts_.waits.room_event_count();
  const bool goes_on = search && search->is_for(wish.bytes);
  const uint64_t event_count_before = goes_on ? search->event_count() : event_count;
  Eviction evicted = go_on(search, wish);
  const bool has_ended = evicted == Eviction::nothing;
  // The search has passed entries that became evictable behind it.
  const bool begins_anew = has_ended && event_count_before != event_count;
  if (asker == Asker::prefetch) return begins_anew ? Eviction::unfinished : evicted;
  has_looked_at_all_ = evicted != Eviction::unfinished && !begins_anew;
  if (!has_looked_at_all_) parts_.waits.wake_first_for_room();
  return evicted;
}

bool Room::evict_at_once_for(const EvictionWish& wish) {
  std::optional<VictimSearch> search;
  EvictionWish at_once = wish;
  at_once.victim_count_max = kMovedMax;
  return go_on(search, at_once) == Eviction::done;
}

Room::Eviction Room::go_on(std::optional<VictimSearch>& search, const EvictionWish& wish) {
  if (!search || !search->is_for(wish.bytes)) {
    look_at_leased(kLookedAtMax);
    search.emplace(parts_, wish.bytes, parts_.waits.room_event_count());
  }
  if (search->state() == VictimSearch::State::looking) look(*search, wish.distance_min);
  if (search->state() == VictimSearch::State::choosing) search->choose(16 * kLookedAtMax);
  if (search->state() == VictimSearch::State::evicting) return evict_found(search, wish);
  if (search->state() != VictimSearch::State::failed) return Eviction::unfinished;
  search.reset();
  return Eviction::nothing;
}

Room::Eviction Room::evict_found(std::optional<VictimSearch>& search, const EvictionWish& wish) {
  if (!search->has_taken() &&
      (search->victim_count() > wish.victim_count_max ||
       search->victim_bytes(wish.evicted_bytes_max) > wish.evicted_bytes_max)) {
    search.reset();
    return Eviction::nothing;
  }
  for (size_t count = 0; count < kMovedMax; ++count) {
    const auto victim = search->take_victim();
    if (!victim) {
      search.reset();
      return Eviction::done;
    }
    if (!may_go(*victim)) {
      // Those that are left make no room without it.
      search.reset();
      return Eviction::unfinished;
    }
    evict(*victim);
  }
  return Eviction::unfinished;
}

bool Room::may_go(const VictimSearch::Victim& victim) const {
  const Entry* const entry = parts_.shards.entry(victim.entry_id);
  if (entry == nullptr) return false;
  const auto lies_there = [&](const Slot* slot) {
    return slot != nullptr && slot->offset_bytes == victim.offset_bytes;
  };
  return lies_there(entry->slot()) ? may_go(*entry)
                                   : lies_there(parts_.gates.early_slot_to_spare(*entry));
}

void Room::look(VictimSearch& search, uint64_t distance_min) {
  std::vector<Entry*> left;
  search.look(distance_min, kLookedAtMax, [&](Entry& entry) {
    ++looked_at_count_;
    const bool goes = may_go(entry);
    if (goes && search.offer(entry, *entry.slot())) return;
    const Slot* const early_slot = parts_.gates.early_slot_to_spare(entry);
    if (early_slot != nullptr) {
      search.offer(entry, *early_slot);
    } else if (!goes) {
      left.push_back(&entry);
    }
  });
  set_aside(left);
}

// Residencies put back what has changed, and look_for_releases() what is leased no more.
void Room::set_aside(const std::vector<Entry*>& entries) {
  for (const Entry* const entry : entries) {
    parts_.policy.set_aside(entry->id());
    if (entry->slot() != nullptr && parts_.slots.is_pinned(*entry->slot()))
      leased_ids_.insert(entry->id());
  }
}

void Room::look_for_releases() {
  parts_.residencies.settle_pending(kLookedAtMax);
  if (look_at_leased(kLookedAtMax) || parts_.slots.any_retired_free(kLookedAtMax))
    parts_.waits.wake(WaitList::room);
}

void Room::look_for_all_releases() {
  parts_.residencies.settle_all_pending();
  if (look_at_leased(leased_ids_.size()) ||
      parts_.slots.any_retired_free(parts_.slots.retired_count()))
    parts_.waits.wake(WaitList::room);
}

bool Room::look_at_leased(size_t count_max) {
  bool any_free = false;
  for (size_t count = std::min(count_max, leased_ids_.size()); count > 0; --count) {
    auto at = leased_ids_.lower_bound(next_leased_id_);
    if (at == leased_ids_.end()) at = leased_ids_.begin();
    next_leased_id_ = *at + 1;
    ++looked_at_count_;
    const Entry* const entry = parts_.shards.entry(*at);
    if (entry != nullptr && entry->slot() != nullptr && parts_.slots.is_pinned(*entry->slot()))
      continue;
    parts_.policy.put_back(*at);
    leased_ids_.erase(at);
    any_free = true;
  }
  return any_free;
}

void Room::evict(const VictimSearch::Victim& victim) {
  ++evicted_count_;
  Entry& entry = *parts_.shards.entry(victim.entry_id);
  if (entry.slot() == nullptr || entry.slot()->offset_bytes != victim.offset_bytes) {
    parts_.counters.evicted_bytes += entry.bytes();
    return parts_.gates.free_early_slot(entry);
  }
  // A client that leased it without a request since we looked is seen now: a second try finds it
  // pinned.
  if (!parts_.table.take_away(entry) && !MEMD_PLANTED("evict.leased_slot")) return;
  MEMD_FAILPOINT("evict.chosen");
  parts_.counters.evicted_bytes += entry.bytes();
  parts_.policy.look_again_at(entry.id());
  parts_.residencies.move(entry, Residency::clean, Residency::absent);
  parts_.slots.free(entry.take_slot());
}

bool Room::may_spill(const Entry& entry) const {
  return entry.residency() == Residency::dirty && entry.task_count() == 0 &&
         entry.tier() == Tier::nvme && entry.pending() == nullptr && !entry.replicas().empty() &&
         !parts_.slots.is_pinned(*entry.slot());
}

std::vector<Entry*> Room::choose_to_spill(uint64_t bytes) {
  uint64_t draining_bytes = parts_.residencies.draining_bytes();
  if (draining_bytes >= bytes) return {};
  if (!spill_search_) {
    spill_search_.emplace(
        SpillSearch{.cursor = {}, .event_count = parts_.waits.room_event_count()});
  }
  uint64_t quota_bytes = 0;
  // While a step or sync runs, what its catalogue will name stays where it is; gradients and
  // scratch are in no catalogue.
  const bool gradients_only = parts_.gates.is_operating();
  std::vector<Entry*> victims;
  std::vector<Entry*> left;
  const auto look = [&](Entry& entry) {
    ++looked_at_count_;
    if (!may_spill(entry)) return left.push_back(&entry);
    // Space that is promised to the running step is free again after it.
    const uint64_t spilled_bytes = align_up(entry.bytes(), kBlockBytes);
    const bool stays = (gradients_only && space_use_of(entry) == SpaceUse::state) ||
                       !parts_.space.keeps_promise(quota_bytes + spilled_bytes);
    if (stays) return;
    quota_bytes += spilled_bytes;
    victims.push_back(&entry);
    draining_bytes += entry.bytes();
  };
  bool is_cut = false;
  size_t count = 0;
  parts_.policy.in_order(
      EvictionPrice::dirty, spill_search_->cursor, [&](uint32_t entry_id, uint64_t) {
        look(*parts_.shards.entry(entry_id));
        if (draining_bytes >= bytes) return false;
        is_cut = ++count == kLookedAtMax || victims.size() == kMovedMax;
        return !is_cut;
      });
  set_aside(left);
  if (!is_cut) {
    // The search has passed entries that may be spilled by now.
    const bool begins_anew =
        draining_bytes < bytes && spill_search_->event_count != parts_.waits.room_event_count();
    spill_search_.reset();
    if (!begins_anew) return victims;
  }
  has_looked_at_all_ = false;
  parts_.waits.wake_first_for_room();
  return victims;
}

bool Room::has_ready(uint64_t bytes) {
  const Arena& arena = parts_.memory->arena();
  if (arena.capacity_bytes() < parts_.memory->arena_bytes_max()) return true;
  if (arena.largest_free_bytes() >= bytes) return true;
  uint64_t ready_bytes = parts_.residencies.draining_bytes();
  size_t count = 0;
  parts_.policy.in_order(EvictionPrice::clean, [&](uint32_t entry_id, uint64_t) {
    const Entry& entry = *parts_.shards.entry(entry_id);
    if (may_go(entry)) ready_bytes += entry.bytes();
    ++looked_at_count_;
    return ready_bytes < bytes && ++count < kLookedAtMax;
  });
  return ready_bytes >= bytes;
}

void Room::write_ahead(uint64_t bytes) {
  if (!parts_.gates.is_operating() && !has_ready(bytes)) spill(bytes);
}

void Room::spill(uint64_t bytes) {
  // A finished overwrite takes the place of what was there before either is written back.
  parts_.residencies.settle_pending(kLookedAtMax);
  for (Entry* const entry : choose_to_spill(bytes)) {
    MEMD_FAILPOINT("spill.started");
    parts_.counters.spilled_bytes += entry->bytes();
    parts_.gates.write_back(*entry, [this, entry](const Status& status) {
      MEMD_FAILPOINT("spill.finished");
      if (status.is_ok()) return;
      parts_.waiters.fail(*entry, status);
      // Trying again at once would end the same way.
      parts_.waiters.fail_for_room(status);
    });
  }
}

}  // namespace memd
