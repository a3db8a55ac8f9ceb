#include "store/state/host_tiles.h"

namespace memd {

const HostTiles::Place* HostTiles::find(uint64_t key) const {
  const auto found = places_.find(key);
  return found == places_.end() ? nullptr : &found->second;
}

bool HostTiles::contains_all(const Bucket& bucket) const {
  const auto found = counts_.find(bucket.value->owner());
  return found != counts_.end() && found->second == bucket.tile_count();
}

bool HostTiles::has_rest(const Bucket& bucket, size_t tile) const {
  if (bucket.is_updated || bucket.rest[tile].exists()) return true;
  const Place* const held = find(tile_key(bucket.value->owner(), tile));
  return held != nullptr && held->bytes > bucket.value->replica_bytes(tile);
}

void HostTiles::put(uint64_t key, const Place& place) {
  const auto [at, is_new] = places_.try_emplace(key, place);
  if (is_new) {
    ++counts_[bucket_of(key)];
  } else {
    bytes_ -= at->second.bytes;
    at->second = place;
  }
  bytes_ += place.bytes;
}

void HostTiles::drop_all(Arena& side) {
  for (const auto& [key, place] : places_) side.free(place.offset_bytes);
  places_.clear();
  counts_.clear();
  bytes_ = 0;
}

}  // namespace memd
