#include "store/cache/slot_fills.h"

#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"

namespace memd {

std::byte* SlotFills::at(const Slot& slot) const {
  return parts_.memory->arena().at(slot.offset_bytes);
}

void SlotFills::submit(Entry& entry,
                       uint64_t bytes,
                       Piece piece,
                       std::function<void(Ready&)> done) {
  parts_.activities.begin();
  parts_.residencies.begin_task(entry);
  MEMD_FAILPOINT("slot.fill_started");
  parts_.workers.submit_pieces(
      JobId{parts_.job_id}, bytes, std::move(piece), [this, &entry, done = std::move(done)] {
        parts_.activities.end();
        MEMD_FAILPOINT("slot.filled");
        done(ready_[entry.id()]);
        parts_.residencies.end_task(entry);
      });
}

void SlotFills::replace(Entry& entry, std::unique_ptr<Slot> copy) {
  std::byte* const into = at(*copy);
  const std::byte* const from = at(*entry.slot());
  // std::function copies what it holds.
  const auto owner = std::make_shared<std::unique_ptr<Slot>>(std::move(copy));
  submit(
      entry,
      entry.bytes(),
      [into, from](uint64_t offset, uint64_t bytes) {
        copy_bytes(into + offset, from + offset, bytes);
      },
      [this, &entry, owner](Ready& ready) {
        ready.is_replaced = true;
        take_place(entry, std::move(*owner));
      });
}

// A client that leased the entry without a request while it was copied keeps the old slot. Both
// have the same bytes: nobody wrote meanwhile.
void SlotFills::take_place(Entry& entry, std::unique_ptr<Slot> copy) {
  parts_.table.withdraw(entry);
  std::unique_ptr<Slot> old = entry.replace_slot(std::move(copy));
  parts_.slots.note(entry);
  parts_.slots.retire(std::move(old));
}

bool SlotFills::is_for_writer(const Entry& entry) const {
  const auto found = ready_.find(entry.id());
  return found != ready_.end() && found->second.is_replaced;
}

void SlotFills::prepare_pending(Entry& entry, std::unique_ptr<Slot> slot, bool copies) {
  std::byte* const into = at(*slot);
  const std::byte* const from = copies ? at(*entry.slot()) : nullptr;
  const auto owner = std::make_shared<std::unique_ptr<Slot>>(std::move(slot));
  submit(
      entry,
      entry.bytes(),
      [into, from](uint64_t offset, uint64_t bytes) {
        from == nullptr ? zero_bytes(into + offset, bytes)
                        : copy_bytes(into + offset, from + offset, bytes);
      },
      [owner](Ready& ready) { ready.pending = std::move(*owner); });
}

std::unique_ptr<Slot> SlotFills::take_pending(const Entry& entry) {
  const auto found = ready_.find(entry.id());
  return found == ready_.end() ? nullptr : std::move(found->second.pending);
}

void SlotFills::zero(Entry& entry, uint32_t shard_id) {
  const Shard& shard = parts_.shards[shard_id];
  std::byte* const into = at(*entry.slot()) + shard.offset_bytes();
  submit(
      entry,
      shard.bytes,
      [into](uint64_t offset, uint64_t bytes) { zero_bytes(into + offset, bytes); },
      [shard_id](Ready& ready) { ready.zeroed_shard = shard_id; });
}

bool SlotFills::take_zeroed(const Entry& entry, uint32_t shard_id) {
  const auto found = ready_.find(entry.id());
  if (found == ready_.end() || found->second.zeroed_shard != shard_id) return false;
  found->second.zeroed_shard.reset();
  return true;
}

void SlotFills::give_up_rest() {
  for (auto& [entry_id, ready] : std::exchange(ready_, {})) {
    if (ready.pending != nullptr) {
      parts_.slots.free(std::move(ready.pending));
      parts_.waits.wake(WaitList::room);
    }
    const Entry* const entry = parts_.shards.entry(entry_id);
    if (!ready.is_replaced || entry == nullptr) continue;
    parts_.table.publish(*entry);
    parts_.waits.wake(*entry);
  }
}

}  // namespace memd
