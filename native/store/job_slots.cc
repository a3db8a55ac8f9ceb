// A job's slots in the arena: who has them pinned, how they come and go, and what its ledger is
// told of each.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "store/job.h"

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
  if (entry.is_ahead && entry.is_resident()) record.residency = Residency::filling;
  record.kind = entry.kind;
  record.owner = entry.kept_owner;
  record.has_service_writer = std::any_of(slot.service_pins.begin(),
                                          slot.service_pins.end(),
                                          [](uint32_t pins) { return pin_writers(pins) != 0; });
  if (role == SlotRole::pending) record.pending_session = slot.pending_session;
  return record;
}

}  // namespace

void Job::note(const Entry& entry) {
  if (ledger == nullptr) return;
  if (entry.slot != nullptr) ledger->note_slot(slot_record(entry, *entry.slot, SlotRole::current));
  if (entry.pending != nullptr)
    ledger->note_slot(slot_record(entry, *entry.pending, SlotRole::pending));
}

void Job::note_slots() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) note(*entry);
  }
}

PinCount Job::pins(const Slot& slot, uint32_t index) const {
  PinCount sum;
  sum.add(slot.service_pins[index]);
  for (const auto& session : sessions) sum.add(session->ring.pins(slot.pin_first + index));
  return sum;
}

bool Job::is_pinned(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).all() != 0) return true;
  }
  return false;
}

bool Job::has_writer(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).writers != 0) return true;
  }
  return false;
}

bool Job::pinned_by_others(uint64_t session_id) const {
  const auto held = [&](const Slot& slot) {
    for (uint32_t i = 0; i < slot.pin_count(); ++i) {
      if (slot.service_pins[i] != 0) return true;
      for (const auto& session : sessions) {
        if (session->session_id != session_id && session->ring.pins(slot.pin_first + i) != 0)
          return true;
      }
    }
    return false;
  };
  for (Entry* const entry : entries) {
    if (entry == nullptr) continue;
    if (entry->slot != nullptr && held(*entry->slot)) return true;
    if (entry->pending != nullptr && held(*entry->pending)) return true;
  }
  return std::any_of(retired.begin(), retired.end(), [&](const auto& slot) { return held(*slot); });
}

uint32_t Job::lease_count() const {
  uint64_t count = 0;
  const auto add = [&](const Slot* slot) {
    if (slot == nullptr) return;
    for (uint32_t i = 0; i < slot->pin_count(); ++i) count += pins(*slot, i).all();
  };
  for (Entry* const entry : entries) {
    if (entry == nullptr) continue;
    add(entry->slot.get());
    add(entry->pending.get());
  }
  for (const auto& slot : retired) add(slot.get());
  return static_cast<uint32_t>(count);
}

std::unique_ptr<Slot> Job::make_slot(uint64_t bytes, uint32_t pin_count) {
  const auto offset_bytes = memory->arena().allocate(std::max<uint64_t>(bytes, 1));
  if (!offset_bytes) return nullptr;
  const auto pin_first = pin_indexes.take(pin_count);
  if (!pin_first) {
    memory->arena().free(*offset_bytes);
    return nullptr;
  }
  auto slot = std::make_unique<Slot>();
  slot->offset_bytes = *offset_bytes;
  slot->bytes = bytes;
  slot->pin_first = *pin_first;
  slot->service_pins.assign(pin_count, 0);
  if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::made));
  return slot;
}

void Job::free_slot(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::none));
  memory->arena().free(slot->offset_bytes);
  pin_indexes.give_back(slot->pin_first, slot->pin_count());
}

std::unique_ptr<Slot> Job::take_slot(Entry& entry) {
  if (!take_away(entry)) return nullptr;
  move(entry, Residency::clean, Residency::absent);
  // The ledger comes first: from here on these are no bytes of the entry.
  if (ledger != nullptr) ledger->note_slot(slot_record(*entry.slot, SlotRole::made));
  return std::move(entry.slot);
}

void Job::retire_slot(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  if (is_pinned(*slot)) {
    if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::retired));
    retired.push_back(std::move(slot));
  } else {
    free_slot(std::move(slot));
  }
}

void Job::free_retired() {
  for (auto it = retired.begin(); it != retired.end();) {
    if (is_pinned(**it)) {
      ++it;
      continue;
    }
    free_slot(std::move(*it));
    it = retired.erase(it);
  }
}

void Job::set_pending(Entry& entry, std::unique_ptr<Slot> slot) {
  MEMD_CHECK(entry.pending == nullptr);
  entry.pending = std::move(slot);
  pending_ids_.insert(entry.id);
}

void Job::settle_all_pending() {
  std::erase_if(pending_ids_, [this](uint32_t id) {
    Entry* const entry = entries[id];
    if (entry != nullptr) settle_pending(*entry);
    return entry == nullptr || entry->pending == nullptr;
  });
}

void Job::settle_pending(Entry& entry) {
  // Nobody reads there: a reader's pin is one that looks for another slot, and goes again.
  if (entry.pending == nullptr || has_writer(*entry.pending)) return;
  // A spill of the old bytes is in flight: they are still being copied.
  if (entry.residency() == Residency::draining || entry.residency() == Residency::filling) return;
  MEMD_FAILPOINT("blob.before_swap");
  withdraw(entry);
  std::unique_ptr<Slot> old = std::move(entry.slot);
  entry.slot = std::move(entry.pending);
  entry.slot->pending_session = 0;
  if (ledger != nullptr) {
    // In one store the new bytes are the entry's; only then does the old slot go.
    SlotRecord record = slot_record(entry, *entry.slot, SlotRole::current);
    record.residency = Residency::dirty;
    ledger->note_slot(record);
    MEMD_FAILPOINT("ledger.pending_settled");
  }
  if (old != nullptr) retire_slot(std::move(old));
  if (entry.residency() == Residency::absent) {
    move_untold(entry, Residency::absent, Residency::filling);
    move_untold(entry, Residency::filling, Residency::clean);
  }
  if (entry.residency() == Residency::clean) move(entry, Residency::clean, Residency::dirty);
  shards[entry.owner].written = true;
  note_shard(entry.owner);
  changed = true;
  publish(entry);
  MEMD_FAILPOINT("blob.swapped");
}

}  // namespace memd
