#include "store/space/pinned_extents.h"

#include "base/check.h"

namespace memd {

void PinnedExtents::pin_place(const ExtentRecord& extent, bool is_held) {
  Pin& pin = pins_[extent.address];
  if (pin.snapshot_count == 0) {
    pin = {.length_bytes = extent.length_bytes,
           .snapshot_count = 0,
           .checksum = extent.checksum,
           .is_held = is_held,
           .whole_pass = 0};
    if (!is_held) pinned_alone_bytes_ += extent.length_bytes;
  }
  MEMD_CHECK(is_same(pin, extent));
  ++pin.snapshot_count;
}

PinnedExtents::Space PinnedExtents::pin(const ExtentRecord& extent) {
  const auto found = pins_.find(extent.address);
  if (found == pins_.end()) return Space::take;
  if (!is_same(found->second, extent)) return Space::conflict;
  ++found->second.snapshot_count;
  return Space::unchanged;
}

PinnedExtents::Space PinnedExtents::unpin(const ExtentRecord& extent) {
  const auto found = pins_.find(extent.address);
  MEMD_CHECK(found != pins_.end());
  Pin& pin = found->second;
  if (--pin.snapshot_count > 0) return Space::unchanged;
  const bool is_held = pin.is_held;
  if (!is_held) pinned_alone_bytes_ -= pin.length_bytes;
  pins_.erase(found);
  return is_held ? Space::unchanged : Space::free;
}

PinnedExtents::Space PinnedExtents::hold(const ExtentRecord& extent) {
  const auto found = pins_.find(extent.address);
  if (found == pins_.end()) return Space::take;
  Pin& pin = found->second;
  if (!is_same(pin, extent) || pin.is_held) return Space::conflict;
  pin.is_held = true;
  pinned_alone_bytes_ -= pin.length_bytes;
  return Space::unchanged;
}

PinnedExtents::Space PinnedExtents::release(const ExtentRecord& extent) {
  const auto found = pins_.find(extent.address);
  if (found == pins_.end()) return Space::free;
  Pin& pin = found->second;
  MEMD_CHECK(pin.is_held);
  pin.is_held = false;
  pinned_alone_bytes_ += pin.length_bytes;
  return Space::unchanged;
}

void PinnedExtents::note_whole(const ExtentRecord& extent, uint32_t pass) {
  const auto found = pins_.find(extent.address);
  if (found != pins_.end() && is_same(found->second, extent)) found->second.whole_pass = pass;
}

bool PinnedExtents::is_whole(const ExtentRecord& extent, uint32_t pass) const {
  const auto found = pins_.find(extent.address);
  return found != pins_.end() && found->second.whole_pass == pass && is_same(found->second, extent);
}

}  // namespace memd
