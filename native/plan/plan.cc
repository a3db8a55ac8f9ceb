#include "plan/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace memd {

Plan::Plan(std::vector<PlanUse> uses) : uses_(std::move(uses)), next_(uses_.size(), kNone) {
  places_.resize(uses_.size());
  std::iota(places_.begin(), places_.end(), 0);
  std::sort(places_.begin(), places_.end(), [this](uint32_t a, uint32_t b) {
    return std::pair(uses_[a].item, a) < std::pair(uses_[b].item, b);
  });
  for (uint32_t i = 0; i < places_.size(); ++i) {
    const uint32_t item = uses_[places_[i]].item;
    if (items_.empty() || items_.back() != item) {
      items_.push_back(item);
      begins_.push_back(i);
    } else {
      next_[places_[i - 1]] = places_[i];
    }
  }
  begins_.push_back(static_cast<uint32_t>(places_.size()));

  const auto count = static_cast<uint32_t>(uses_.size());
  session_from_.resize(count + 1, count);
  session_until_.resize(count + 1, 0);
  for (uint32_t i = count; i-- > 0;)
    session_from_[i] = uses_[i].by_daemon ? session_from_[i + 1] : i;
  for (uint32_t i = 1; i <= count; ++i)
    session_until_[i] = uses_[i - 1].by_daemon ? session_until_[i - 1] : i;
}

std::span<const uint32_t> Plan::positions(uint32_t item) const {
  const auto found = std::lower_bound(items_.begin(), items_.end(), item);
  if (found == items_.end() || *found != item) return {};
  const auto index = static_cast<size_t>(found - items_.begin());
  return std::span(places_).subspan(begins_[index], begins_[index + 1] - begins_[index]);
}

std::optional<uint32_t> Plan::first_from(uint32_t item, size_t position) const {
  const std::span<const uint32_t> all = positions(item);
  const auto found = std::lower_bound(all.begin(), all.end(), position);
  return found == all.end() ? std::nullopt : std::optional(*found);
}

}  // namespace memd
