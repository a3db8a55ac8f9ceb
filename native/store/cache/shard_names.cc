#include "store/cache/shard_names.h"

#include <utility>

#include "base/check.h"

namespace memd {

size_t ShardNames::home(std::string_view name) const {
  return std::hash<std::string_view>{}(name) % places_.size();
}

std::optional<uint32_t> ShardNames::find(std::string_view name) const {
  if (count_ == 0) return std::nullopt;
  for (size_t place = home(name); places_[place] != kEmpty; place = after(place)) {
    if (name_of_(places_[place]) == name) return places_[place];
  }
  return std::nullopt;
}

uint32_t ShardNames::at(std::string_view name) const {
  const auto found = find(name);
  MEMD_CHECK(found.has_value());
  return *found;
}

void ShardNames::put(uint32_t shard_id) {
  size_t place = home(name_of_(shard_id));
  while (places_[place] != kEmpty) place = after(place);
  places_[place] = shard_id;
}

void ShardNames::grow() {
  std::vector<uint32_t> old = std::exchange(
      places_, std::vector<uint32_t>(places_.empty() ? 8 : places_.size() * 2, kEmpty));
  for (const uint32_t shard_id : old) {
    if (shard_id != kEmpty) put(shard_id);
  }
}

void ShardNames::insert(uint32_t shard_id) {
  MEMD_CHECK_NE(shard_id, kEmpty);
  if ((count_ + 1) * 4 > places_.size() * 3) grow();
  put(shard_id);
  ++count_;
}

void ShardNames::erase(uint32_t shard_id) {
  MEMD_CHECK_GT(count_, 0u);
  size_t hole = home(name_of_(shard_id));
  while (places_[hole] != shard_id) {
    MEMD_CHECK_NE(places_[hole], kEmpty);
    hole = after(hole);
  }
  // A name behind the hole that is looked for at or before it moves there, so that no search ends
  // too early.
  for (size_t place = after(hole); places_[place] != kEmpty; place = after(place)) {
    const size_t wanted = home(name_of_(places_[place]));
    const size_t from_wanted = (place + places_.size() - wanted) % places_.size();
    const size_t from_hole = (place + places_.size() - hole) % places_.size();
    if (from_wanted < from_hole) continue;
    places_[hole] = std::exchange(places_[place], kEmpty);
    hole = place;
  }
  places_[hole] = kEmpty;
  --count_;
}

}  // namespace memd
