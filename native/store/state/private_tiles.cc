#include "store/state/private_tiles.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace memd {

std::optional<uint64_t> PrivateTiles::offset_of(uint64_t key) const {
  const auto found = cached_.find(key);
  if (found == cached_.end()) return std::nullopt;
  return found->second;
}

bool PrivateTiles::has_dirty(uint32_t bucket, size_t tile_count) const {
  const auto first = next_dirty(tile_key(bucket, 0));
  return first && first->key < tile_key(bucket, tile_count);
}

std::optional<PrivateTiles::Dirty> PrivateTiles::next_dirty(uint64_t key) const {
  const auto found = dirty_.lower_bound(key);
  if (found == dirty_.end()) return std::nullopt;
  return Dirty{.key = found->first, .dirtied_before = found->second};
}

uint64_t PrivateTiles::next_to_flush() const {
  MEMD_CHECK(!dirty_.empty());
  const auto whole = std::find_if(dirty_.begin(), dirty_.end(), [this](const auto& each) {
    return !half_made_piece(each.first).has_value();
  });
  return whole == dirty_.end() ? dirty_.begin()->first : whole->first;
}

std::optional<uint64_t> PrivateTiles::take(uint64_t key) {
  const auto found = cached_.find(key);
  if (found == cached_.end()) return std::nullopt;
  const uint64_t offset_bytes = found->second;
  cached_.erase(found);
  return offset_bytes;
}

void PrivateTiles::put(uint64_t key, uint64_t offset_bytes) {
  const bool is_new = cached_.emplace(key, offset_bytes).second;
  MEMD_CHECK(is_new);
}

void PrivateTiles::drop(uint64_t key, Arena& side) {
  MEMD_CHECK(!dirty_.contains(key));
  if (const auto offset_bytes = take(key)) side.free(*offset_bytes);
}

bool PrivateTiles::drop_any_clean(Arena& side) {
  const auto clean = std::find_if(cached_.begin(), cached_.end(), [this](const auto& tile) {
    return !dirty_.contains(tile.first);
  });
  if (clean == cached_.end()) return false;
  side.free(clean->second);
  cached_.erase(clean);
  return true;
}

void PrivateTiles::drop_clean(Arena& side) {
  std::erase_if(cached_, [&](const auto& tile) {
    if (dirty_.contains(tile.first)) return false;
    side.free(tile.second);
    return true;
  });
}

void PrivateTiles::drop_all(Arena& side) {
  for (const auto& [key, offset_bytes] : cached_) side.free(offset_bytes);
  cached_.clear();
  dirty_.clear();
}

const MadeTile* PrivateTiles::made(uint64_t key) const {
  const auto found = made_.find(key);
  return found == made_.end() ? nullptr : &found->second;
}

std::optional<uint32_t> PrivateTiles::take_made_scratch(uint64_t key) {
  const auto found = made_.find(key);
  if (found == made_.end()) return std::nullopt;
  return std::exchange(found->second.scratch, std::nullopt);
}

std::optional<uint64_t> PrivateTiles::half_made_piece(uint64_t key) const {
  const MadeTile* const tile = made(key);
  if (tile == nullptr || tile->is_whole) return std::nullopt;
  return tile->piece;
}

}  // namespace memd
