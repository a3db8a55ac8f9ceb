#include "store/journal/loose_extents.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/memory_orders.h"
#include "store/journal/ledger_layout.h"

namespace memd {
namespace {

// Old places are emptied at least as fast as new ones are taken.
constexpr size_t kEmptiedANote = 2;

uint64_t loose_checksum(const LooseWords& words) {
  const uint64_t fields[6] = {words.base,
                              words.kind_and_index,
                              words.owner,
                              words.offset_bytes,
                              words.extent_checksum,
                              words.device_and_length};
  return hash_record(std::as_bytes(std::span(fields)));
}

/// Gradients build on no catalogue.
uint64_t base_of(const LooseKey& key, uint64_t base) {
  return key.kind == LooseKey::Kind::gradient ? 0 : base;
}

}  // namespace

std::optional<uint32_t> LooseExtents::take_place() {
  if (!free_places_.empty()) {
    const uint32_t place = free_places_.back();
    free_places_.pop_back();
    return place;
  }
  const uint64_t end = layout_.loose_end.load(std::memory_order_relaxed);
  if (end >= kLooseMax) return std::nullopt;
  layout_.loose_end.store(end + 1, kRelease);
  return static_cast<uint32_t>(end);
}

void LooseExtents::empty(uint32_t place) {
  layout_.loose[place].sequence.store(0, kRelease);
  free_places_.push_back(place);
}

bool LooseExtents::note(const LooseKey& key, const ExtentRecord& extent, uint64_t base) {
  empty_old(kEmptiedANote);
  Places& places = places_of(key);
  const auto known = places.find(key);
  std::optional<uint32_t> old;
  if (known != places.end()) old = known->second;
  if (extent.exists()) {
    const auto place = take_place();
    if (!place) return false;
    LooseWords& words = layout_.loose[*place];
    words.base = base_of(key, base);
    words.kind_and_index = uint64_t{static_cast<uint8_t>(key.kind)} << 32 | key.index;
    words.owner = key.owner;
    words.offset_bytes = extent.address.offset_bytes;
    words.extent_checksum = extent.checksum;
    words.device_and_length = uint64_t{extent.address.device} << 32 | extent.length_bytes;
    words.checksum = loose_checksum(words);
    words.sequence.store(sequence_next_++, kRelease);
    places[key] = *place;
  } else if (old) {
    places.erase(key);
  }
  if (old) empty(*old);
  return true;
}

void LooseExtents::rebase(uint64_t base, uint64_t tag) {
  // One base is old at a time, and never the newest.
  empty_old(std::numeric_limits<size_t>::max());
  old_ = std::exchange(others_, {});
  if (tag == base) empty_old(std::numeric_limits<size_t>::max());
}

bool LooseExtents::empty_old(size_t count_max) {
  for (; count_max > 0 && !old_.empty(); --count_max) {
    empty(old_.begin()->second);
    old_.erase(old_.begin());
  }
  return old_.empty();
}

Result<std::map<LooseKey, ExtentRecord>> LooseExtents::read(uint64_t base) {
  const uint64_t end = layout_.loose_end.load(kAcquire);
  if (end > kLooseMax) return damaged("loose extents: ", end);
  std::map<LooseKey, ExtentRecord> extents;
  std::map<LooseKey, uint64_t> sequences;
  for (uint32_t at = 0; at < end; ++at) {
    LooseWords& words = layout_.loose[at];
    const uint64_t sequence = words.sequence.load(kAcquire);
    const LooseKey key{.kind = static_cast<LooseKey::Kind>(words.kind_and_index >> 32),
                       .owner = static_cast<uint32_t>(words.owner),
                       .index = static_cast<uint32_t>(words.kind_and_index)};
    if (sequence != 0 && loose_checksum(words) != words.checksum) return damaged("a loose extent");
    // On an older catalogue: the one on disk names the right place. Older, of the same place:
    // replaced, and the daemon died before it could note that.
    if (sequence == 0 || words.base != base_of(key, base) || sequence < sequences[key]) {
      empty(at);
      continue;
    }
    Places& places = places_of(key);
    if (const auto older = places.find(key); older != places.end()) empty(older->second);
    places[key] = at;
    sequences[key] = sequence;
    sequence_next_ = std::max(sequence_next_, sequence + 1);
    extents[key] = {.address = {.device = static_cast<uint16_t>(words.device_and_length >> 32),
                                .offset_bytes = words.offset_bytes},
                    .length_bytes = static_cast<uint32_t>(words.device_and_length),
                    .checksum = words.extent_checksum};
  }
  return extents;
}

}  // namespace memd
