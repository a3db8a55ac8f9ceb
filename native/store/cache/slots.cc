#include "store/cache/slots.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

SlotRecord slot_record(const Slot& slot, SlotRole role) {
  SlotRecord record;
  record.role = role;
  record.offset_bytes = slot.offset_bytes;
  record.bytes = slot.bytes;
  record.pin_first = slot.pin_first;
  record.pin_count = slot.pin_count();
  return record;
}

SlotRecord slot_record(const Entry& entry, const Slot& slot, SlotRole role) {
  SlotRecord record = slot_record(slot, role);
  record.residency = entry.residency();
  // The next daemon makes the update again, and must not take these bytes for those of the step
  // before.
  if (entry.is_uncommitted() && entry.is_resident()) record.residency = Residency::filling;
  record.kind = entry.kind();
  record.owner = entry.kept_owner();
  record.has_service_writer = slot.service_writer_count != 0;
  if (role == SlotRole::pending) record.pending_session = slot.pending_session;
  return record;
}

}  // namespace

std::unique_ptr<Slot> Slots::make(uint64_t bytes, uint32_t pin_count) {
  const auto offset_bytes = memory_->arena().allocate(std::max<uint64_t>(bytes, 1));
  if (!offset_bytes) return nullptr;
  const auto pin_first = pin_indexes_.take(pin_count);
  if (!pin_first) {
    memory_->arena().free(*offset_bytes);
    return nullptr;
  }
  auto slot = std::make_unique<Slot>();
  slot->offset_bytes = *offset_bytes;
  slot->bytes = bytes;
  slot->pin_first = *pin_first;
  slot->service_pins.assign(pin_count, 0);
  note_made(*slot);
  return slot;
}

void Slots::free(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  ledger_.note_slot(slot_record(*slot, SlotRole::none));
  memory_->arena().free(slot->offset_bytes);
  pin_indexes_.give_back(slot->pin_first, slot->pin_count());
  waits_.wake(WaitList::room);
}

void Slots::retire(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  if (is_pinned(*slot)) {
    ledger_.note_slot(slot_record(*slot, SlotRole::retired));
    retired_.push_back(std::move(slot));
  } else {
    free(std::move(slot));
  }
}

void Slots::free_retired() {
  for (size_t count = std::min(kRetiredLookedAtMax, retired_.size()); count > 0; --count) {
    ++retired_looked_at_count_;
    if (is_pinned(*retired_.front())) {
      retired_.splice(retired_.end(), retired_, retired_.begin());
      continue;
    }
    free(std::move(retired_.front()));
    retired_.pop_front();
  }
}

bool Slots::any_retired_free(size_t count_max) {
  for (size_t count = std::min(count_max, retired_.size()); count > 0; --count) {
    ++retired_looked_at_count_;
    if (!is_pinned(*retired_.front())) return true;
    retired_.splice(retired_.end(), retired_, retired_.begin());
  }
  return false;
}

void Slots::free_all() {
  for (Entry* const entry : entries_) {
    if (entry == nullptr) continue;
    if (entry->slot() != nullptr) free(entry->take_slot());
    if (entry->pending() != nullptr) free(entry->take_pending());
  }
  for (auto& slot : std::exchange(retired_, {})) free(std::move(slot));
}

std::unique_ptr<Slot> Slots::adopt(const SlotRecord& record) {
  if (!memory_->arena().reserve(record.offset_bytes, record.bytes)) return nullptr;
  auto slot = std::make_unique<Slot>();
  slot->offset_bytes = record.offset_bytes;
  slot->bytes = record.bytes;
  slot->pin_first = record.pin_first;
  slot->service_pins.assign(record.pin_count, 0);
  return slot;
}

PinCount Slots::pins(const Slot& slot, uint32_t index) const {
  PinCount sum;
  sum.add(slot.service_pins[index]);
  for (const auto& session : sessions_) sum.add(session->ring.pins(slot.pin_first + index));
  return sum;
}

bool Slots::is_pinned(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).all() != 0) return true;
  }
  return false;
}

bool Slots::has_writer(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).has_writers()) return true;
  }
  return false;
}

void Slots::end_adoption(uint32_t pin_end) {
  pin_indexes_.start_at(pin_end);
  for (const Entry* const entry : entries_) {
    if (entry != nullptr && entry->slot() != nullptr) note_writer(*entry);
  }
}

const Entry* Slots::written_parameter() {
  const auto is_written = [this](const Entry* entry) {
    return entry != nullptr && entry->slot() != nullptr && entry->kind() == EntryKind::parameter &&
           has_writer(*entry->slot());
  };
  std::erase_if(written_ids_, [&](uint32_t id) { return !is_written(entries_[id]); });
  return written_ids_.empty() ? nullptr : entries_[*written_ids_.begin()];
}

bool Slots::is_pinned_by_others(const Slot& slot, uint64_t session_id) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (slot.service_pins[i] != 0) return true;
    for (const auto& session : sessions_) {
      if (session->session_id != session_id && session->ring.pins(slot.pin_first + i) != 0)
        return true;
    }
  }
  return false;
}

std::optional<bool> Slots::pinned_by_others(uint64_t session_id) {
  constexpr size_t kLookedAtMax = 2048;
  const auto is_held = [&](const Slot* slot) {
    return slot != nullptr && is_pinned_by_others(*slot, session_id);
  };
  if (pin_search_.session_id != session_id) {
    pin_search_.session_id = session_id;
    pin_search_.seen_count = 0;
    pin_search_.retired_seen_count = 0;
  }
  size_t count = 0;
  for (; pin_search_.retired_seen_count < retired_.size(); ++count) {
    if (count == kLookedAtMax) return std::nullopt;
    if (is_held(retired_.front().get())) {
      pin_search_.retired_seen_count = 0;
      return true;
    }
    retired_.splice(retired_.end(), retired_, retired_.begin());
    ++pin_search_.retired_seen_count;
  }
  for (; pin_search_.seen_count < entries_.size(); ++count) {
    if (count == kLookedAtMax) return std::nullopt;
    if (pin_search_.next_id >= entries_.size()) pin_search_.next_id = 0;
    const Entry* const entry = entries_[pin_search_.next_id];
    if (entry != nullptr && (is_held(entry->slot()) || is_held(entry->pending()))) {
      // It is looked at first the next time, and all others after it.
      pin_search_.seen_count = 0;
      pin_search_.retired_seen_count = 0;
      return true;
    }
    ++pin_search_.next_id;
    ++pin_search_.seen_count;
  }
  pin_search_.seen_count = 0;
  pin_search_.retired_seen_count = 0;
  return false;
}

uint64_t Slots::lease_count(const Slot& slot) const {
  uint64_t count = 0;
  for (uint32_t i = 0; i < slot.pin_count(); ++i) count += pins(slot, i).all();
  return count;
}

uint32_t Slots::lease_count() const {
  constexpr size_t kEntries = 1024;
  constexpr size_t kCountedAtOnce = 4;
  lease_counts_.resize(divide_up(entries_.size(), kEntries));
  for (size_t i = 0; i < std::min(kCountedAtOnce, lease_counts_.size()); ++i) {
    const size_t at = next_lease_count_++ % lease_counts_.size();
    uint64_t& count = lease_counts_[at] = 0;
    for (size_t id = at * kEntries; id < (at + 1) * kEntries; ++id) {
      const Entry* const entry = entries_[id];
      if (entry == nullptr) continue;
      if (entry->slot() != nullptr) count += lease_count(*entry->slot());
      if (entry->pending() != nullptr) count += lease_count(*entry->pending());
    }
  }
  uint64_t sum = 0;
  for (const uint64_t count : lease_counts_) sum += count;
  for (const auto& slot : retired_) sum += lease_count(*slot);
  return static_cast<uint32_t>(sum);
}

uint32_t Slots::lease_count(const Session& session) const {
  // Counters of free slots are 0. They lie side by side.
  PinCount pins;
  for (uint32_t i = 0; i < pin_indexes_.end(); ++i) pins.add(session.ring.pins(i));
  return static_cast<uint32_t>(pins.all());
}

void Slots::pin_for_service(Slot& slot, uint32_t index, uint32_t pin) {
  slot.service_pins[index] += pin;
  slot.service_writer_count += pin_writers(pin);
  ++service_lease_count_;
}

void Slots::release_service(Slot& slot, uint32_t index, uint32_t pin) {
  --service_lease_count_;
  slot.service_pins[index] -= pin;
  slot.service_writer_count -= pin_writers(pin);
}

void Slots::note(const Entry& entry) {
  if (is_rank_sum(entry)) {
    // Nobody's to the next daemon, which must not give the place away while its rank writes there.
    if (entry.slot() != nullptr) ledger_.note_slot(slot_record(*entry.slot(), SlotRole::retired));
    return;
  }
  if (entry.slot() != nullptr)
    ledger_.note_slot(slot_record(entry, *entry.slot(), SlotRole::current));
  if (entry.pending() != nullptr)
    ledger_.note_slot(slot_record(entry, *entry.pending(), SlotRole::pending));
}

void Slots::note_all() {
  for (const Entry* const entry : entries_) {
    if (entry != nullptr) note(*entry);
  }
}

void Slots::note_as(const Entry& entry, Residency residency) {
  SlotRecord record = slot_record(entry, *entry.slot(), SlotRole::current);
  record.residency = residency;
  ledger_.note_slot(record);
}

void Slots::note_made(const Slot& slot) { ledger_.note_slot(slot_record(slot, SlotRole::made)); }

}  // namespace memd
