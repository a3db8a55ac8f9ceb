#include "plan/next_use_order.h"

#include <iterator>
#include <limits>

namespace memd {
namespace {

uint64_t distance(uint64_t time, uint64_t now) { return time > now ? time - now : 0; }

}  // namespace

void NextUseOrder::put(uint32_t item, uint64_t time, EvictionPrice price) {
  const auto [found, is_new] = places_.try_emplace(item, Place{.time = time, .price = price});
  if (!is_new) {
    Place& place = found->second;
    if (place.time == time && place.price == price) return;
    places(place).erase({place.time, item});
    place.time = time;
    place.price = price;
  }
  places(found->second).emplace(time, item);
}

void NextUseOrder::put_without_use(uint32_t item, EvictionPrice price) {
  put(item, std::numeric_limits<uint64_t>::max() - put_count_++, price);
}

void NextUseOrder::remove(uint32_t item) {
  const auto found = places_.find(item);
  if (found == places_.end()) return;
  places(found->second).erase({found->second.time, item});
  places_.erase(found);
}

void NextUseOrder::set_aside(uint32_t item) { set_aside(item, true); }

void NextUseOrder::put_back(uint32_t item) { set_aside(item, false); }

void NextUseOrder::set_aside(uint32_t item, bool is_aside) {
  const auto found = places_.find(item);
  if (found == places_.end() || found->second.is_aside == is_aside) return;
  Place& place = found->second;
  places(place).erase({place.time, item});
  place.is_aside = is_aside;
  places(place).emplace(place.time, item);
}

std::optional<EvictionPrice> NextUseOrder::price(uint32_t item) const {
  const auto found = places_.find(item);
  return found == places_.end() ? std::nullopt : std::optional(found->second.price);
}

void NextUseOrder::clear() {
  places_.clear();
  clean_.clear();
  dirty_.clear();
  aside_.clear();
}

std::vector<uint32_t> NextUseOrder::overdue(uint64_t now) const {
  std::vector<uint32_t> items;
  for (const Places* const all : {&clean_, &dirty_, &aside_}) {
    for (auto it = all->begin(); it != all->end() && it->first < now; ++it)
      items.push_back(it->second);
  }
  return items;
}

std::optional<NextUseOrder::Position> NextUseOrder::next(
    EvictionPrice price, const std::optional<Position>& behind) const {
  const Places& all = price == EvictionPrice::clean ? clean_ : dirty_;
  const auto end = behind ? all.lower_bound(*behind) : all.end();
  return end == all.begin() ? std::nullopt : std::optional(*std::prev(end));
}

void NextUseOrder::in_order(
    uint64_t now,
    const std::function<bool(uint32_t item, uint64_t time, EvictionPrice price)>& visit) const {
  auto clean = clean_.rbegin();
  auto dirty = dirty_.rbegin();
  while (clean != clean_.rend() || dirty != dirty_.rend()) {
    bool takes_clean = dirty == dirty_.rend();
    if (!takes_clean && clean != clean_.rend()) {
      takes_clean = distance(clean->first, now) >= distance(dirty->first, now) / kDirtyNearness;
    }
    auto& next = takes_clean ? clean : dirty;
    const auto price = takes_clean ? EvictionPrice::clean : EvictionPrice::dirty;
    if (!visit(next->second, next->first, price)) return;
    ++next;
  }
}

}  // namespace memd
