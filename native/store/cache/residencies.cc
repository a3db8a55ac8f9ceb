#include "store/cache/residencies.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"

namespace memd {
namespace {

// More than one for each that begins, so that those that are over do not add up.
constexpr size_t kSettledBesideMax = 2;

}  // namespace

void Residencies::move(Entry& entry, Residency from, Residency to) {
  const bool stays = to == Residency::clean || to == Residency::dirty;
  if (!stays) parts_.table.withdraw(entry);
  move_unnoted(entry, from, to);
  parts_.slots.note(entry);
  // The ledger comes first: it says of no slot that is leased that it is nobody's.
  if (stays) parts_.table.publish(entry);
}

void Residencies::move_unnoted(Entry& entry, Residency from, Residency to) {
  entry.move(from, to);
  note_state(entry);
  parts_.waits.wake(entry);
  if (from == Residency::draining) draining_bytes_ -= entry.bytes();
  if (to == Residency::draining) draining_bytes_ += entry.bytes();
  if (entry.is_resident() && entry.pending() == nullptr)
    parts_.policy.used(entry.id(), price_of(entry));
  if (!entry.is_resident() && parts_.gates.early_slot(entry) == nullptr)
    parts_.policy.forget(entry.id());
  if (to == Residency::absent) parts_.window.end(entry);
  if (entry.is_resident() || to == Residency::absent) parts_.waits.wake(WaitList::room);
}

void Residencies::note_state(const Entry& entry) {
  const auto keep = [&entry](std::set<uint32_t>& ids, bool belongs) {
    if (belongs) {
      ids.insert(entry.id());
    } else {
      ids.erase(entry.id());
    }
  };
  keep(busy_ids_,
       entry.task_count() != 0 || entry.residency() == Residency::filling ||
           entry.residency() == Residency::draining);
  const bool is_dirty = entry.residency() == Residency::dirty;
  if (!is_dirty) awaited_ids_.erase(entry.id());
  keep(dirty_ids_, is_dirty && !is_awaited(entry));
}

void Residencies::begin_task(Entry& entry) {
  entry.add_task();
  note_state(entry);
  if (entry.task_count() == 1) parts_.waits.wake(entry);
}

void Residencies::end_task(Entry& entry) {
  entry.remove_task();
  note_state(entry);
  if (entry.task_count() == 0) note_changed(entry);
}

void Residencies::note_changed(const Entry& entry) {
  const bool is_known = parts_.policy.residents().contains(entry.id());
  // While it had a pending slot it may have become resident in silence.
  if (!is_known && entry.is_resident() && entry.pending() == nullptr)
    parts_.policy.used(entry.id(), price_of(entry));
  parts_.policy.put_back(entry.id());
  parts_.waits.wake(entry);
  parts_.waits.wake(WaitList::room);
}

std::unique_ptr<Slot> Residencies::take_slot(Entry& entry) {
  if (!parts_.table.take_away(entry)) return nullptr;
  move(entry, Residency::clean, Residency::absent);
  // The ledger comes first: from here on these are no bytes of the entry.
  parts_.slots.note_made(*entry.slot());
  return entry.take_slot();
}

void Residencies::set_pending(Entry& entry, std::unique_ptr<Slot> slot) {
  // A commit looks at each that is left.
  settle_pending(kSettledBesideMax);
  entry.begin_pending(std::move(slot));
  pending_ids_.insert(entry.id());
}

void Residencies::await_dirty() {
  MEMD_CHECK(awaited_ids_.empty() && awaited_pending_ids_.empty());
  awaited_ids_ = std::exchange(dirty_ids_, {});
  for (const uint32_t id : pending_ids_) {
    const Entry* const entry = parts_.entries[id];
    if (entry != nullptr && is_finished(*entry)) awaited_pending_ids_.insert(id);
  }
}

Entry* Residencies::take_awaited() {
  // In the order of their ids, as they are taken: none is taken before its overwrite is in place.
  for (bool is_settled = false; !is_settled && !awaited_pending_ids_.empty();) {
    const uint32_t id = *awaited_pending_ids_.begin();
    if (Entry* const entry = parts_.entries[id]) settle_pending(*entry);
    is_settled = awaited_pending_ids_.erase(id) == 0;
  }
  while (!awaited_ids_.empty()) {
    const uint32_t id = *awaited_ids_.begin();
    awaited_ids_.erase(awaited_ids_.begin());
    Entry* const entry = parts_.entries[id];
    if (entry == nullptr) continue;
    dirty_ids_.insert(id);
    parts_.waits.wake(*entry);
    return entry;
  }
  return nullptr;
}

void Residencies::settle_all_pending() { settle_pending(pending_ids_.size()); }

void Residencies::settle_pending(size_t count_max) {
  for (size_t count = std::min(count_max, pending_ids_.size()); count > 0; --count) {
    auto at = pending_ids_.lower_bound(next_pending_id_);
    if (at == pending_ids_.end()) at = pending_ids_.begin();
    const uint32_t id = *at;
    next_pending_id_ = id + 1;
    Entry* const entry = parts_.entries[id];
    if (entry != nullptr) settle_pending(*entry);
    if (entry == nullptr || entry->pending() == nullptr) pending_ids_.erase(id);
  }
}

bool Residencies::is_finished(const Entry& entry) const {
  // Nobody reads there: a reader's pin is one that looks for another slot, and goes again.
  if (entry.pending() == nullptr || parts_.slots.has_writer(*entry.pending())) return false;
  // The old bytes are still being copied.
  return entry.residency() != Residency::draining && entry.residency() != Residency::filling;
}

bool Residencies::may_settle(const Entry& entry) const {
  // The old bytes will be copied, unless these were there as well when they were set apart.
  const bool is_later = is_awaited(entry) && !awaited_pending_ids_.contains(entry.id());
  return is_finished(entry) && !is_later;
}

void Residencies::settle_pending(Entry& entry) {
  if (!may_settle(entry)) return;
  MEMD_FAILPOINT("blob.before_swap");
  parts_.table.withdraw(entry);
  std::unique_ptr<Slot> old = entry.settle_pending();
  pending_ids_.erase(entry.id());
  // In one store the new bytes are the entry's; only then does the old slot go.
  parts_.slots.note_as(entry, Residency::dirty);
  MEMD_FAILPOINT("ledger.pending_settled");
  if (old != nullptr) parts_.slots.retire(std::move(old));
  if (entry.residency() == Residency::absent) {
    move_unnoted(entry, Residency::absent, Residency::filling);
    move_unnoted(entry, Residency::filling, Residency::clean);
  }
  if (entry.residency() == Residency::clean) move(entry, Residency::clean, Residency::dirty);
  if (awaited_pending_ids_.erase(entry.id()) != 0) awaited_ids_.insert(entry.id());
  parts_.gates.note_written(entry.owner());
  parts_.table.publish(entry);
  note_changed(entry);
  MEMD_FAILPOINT("blob.swapped");
}

}  // namespace memd
