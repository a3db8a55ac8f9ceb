#include "store/cache/eviction.h"

#include <algorithm>
#include <utility>

namespace memd {

// ---- LeastRecentlyUsed --------------------------------------------------------------------------

void LeastRecentlyUsed::used(uint32_t entry_id, EvictionPrice price) {
  forget(entry_id);
  const uint64_t use = use_count_++;
  residents_.emplace(use, Resident{.entry_id = entry_id, .price = price, .is_aside = false});
  last_uses_[entry_id] = use;
  order(price).emplace(use, entry_id);
}

void LeastRecentlyUsed::forget(uint32_t entry_id) {
  const auto found = last_uses_.find(entry_id);
  if (found == last_uses_.end()) return;
  const auto resident = residents_.find(found->second);
  order(resident->second.price).erase(resident->first);
  residents_.erase(resident);
  last_uses_.erase(found);
}

void LeastRecentlyUsed::set_aside(uint32_t entry_id, bool is_aside) {
  const auto found = last_uses_.find(entry_id);
  if (found == last_uses_.end()) return;
  Resident& resident = residents_.at(found->second);
  if (std::exchange(resident.is_aside, is_aside) == is_aside) return;
  if (is_aside) {
    order(resident.price).erase(found->second);
  } else {
    order(resident.price).emplace(found->second, entry_id);
  }
}

void LeastRecentlyUsed::in_order(EvictionPrice price, const Visit& visit) const {
  for (const auto& [use, entry_id] : price == EvictionPrice::clean ? clean_ : dirty_) {
    if (!visit(entry_id)) return;
  }
}

// ---- SessionPlan --------------------------------------------------------------------------------

void SessionPlan::put(uint32_t entry_id, EvictionPrice price) {
  if (!cursor.has_plan()) return;
  if (const auto next = cursor.next_use(entry_id)) {
    order.put(entry_id, *next, price);
  } else {
    order.put_without_use(entry_id, price);
  }
}

uint64_t SessionPlan::distance(uint32_t entry_id) const {
  const auto next = cursor.next_use(entry_id);
  return next ? *next - cursor.now() : kNeverUsed;
}

std::vector<uint32_t> SessionPlan::followed(std::span<const uint32_t> used_ids,
                                            const LeastRecentlyUsed& residents) {
  std::vector<uint32_t> passed;
  if (epoch_ != cursor.epoch()) {
    epoch_ = cursor.epoch();
    looked_until = 0;
    order.clear();
    for (const auto& [use, resident] : residents.residents()) {
      put(resident.entry_id, resident.price);
      if (resident.is_aside) order.set_aside(resident.entry_id);
      passed.push_back(resident.entry_id);
    }
    return passed;
  }
  for (const uint32_t entry_id : used_ids) {
    if (const auto price = order.price(entry_id)) put(entry_id, *price);
  }
  passed = order.overdue(cursor.now());
  for (const uint32_t each : passed) put(each, *order.price(each));
  return passed;
}

// ---- FarthestNextUse ----------------------------------------------------------------------------

void FarthestNextUse::used(uint32_t entry_id, EvictionPrice price) {
  recent_.used(entry_id, price);
  for (SessionPlan* const session : sessions_) {
    session->order.put_back(entry_id);
    session->put(entry_id, price);
  }
}

void FarthestNextUse::set_aside(uint32_t entry_id) {
  recent_.set_aside(entry_id);
  for (SessionPlan* const session : sessions_) session->order.set_aside(entry_id);
}

void FarthestNextUse::put_back(uint32_t entry_id) {
  recent_.put_back(entry_id);
  for (SessionPlan* const session : sessions_) session->order.put_back(entry_id);
}

void FarthestNextUse::forget(uint32_t entry_id) {
  recent_.forget(entry_id);
  for (SessionPlan* const session : sessions_) session->order.remove(entry_id);
}

void FarthestNextUse::look_again_at(uint32_t entry_id) {
  for (SessionPlan* const session : sessions_) {
    const auto next = session->cursor.next_use(entry_id);
    if (next) session->looked_until = std::min(session->looked_until, *next);
  }
}

void FarthestNextUse::look_again() {
  for (SessionPlan* const session : sessions_) session->looked_until = 0;
}

void FarthestNextUse::in_order(EvictionPrice price, const Visit& visit) const {
  std::vector<const SessionPlan*> planned;
  for (const SessionPlan* const session : sessions_) {
    if (session->cursor.has_plan()) planned.push_back(session);
  }
  if (planned.empty()) {
    return recent_.in_order(price, [&](uint32_t entry_id) { return visit(entry_id, kNeverUsed); });
  }
  if (planned.size() > 1) return in_order_of_all(planned, price, visit);
  const uint64_t now = planned.front()->cursor.now();
  planned.front()->order.in_order(price, [&](uint32_t entry_id, uint64_t time) {
    if (time >= NextUseOrder::kNoUse) return visit(entry_id, kNeverUsed);
    return visit(entry_id, time > now ? time - now : 0);
  });
}

// The first session to need it counts. Several sessions with plans on one job are rare.
void FarthestNextUse::in_order_of_all(const std::vector<const SessionPlan*>& planned,
                                      EvictionPrice price,
                                      const Visit& visit) const {
  std::vector<std::pair<uint64_t, uint32_t>> all;
  recent_.in_order(price, [&](uint32_t entry_id) {
    uint64_t nearest = kNeverUsed;
    for (const SessionPlan* const session : planned)
      nearest = std::min(nearest, session->distance(entry_id));
    all.emplace_back(nearest, entry_id);
    return true;
  });
  std::stable_sort(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [distance, entry_id] : all) {
    if (!visit(entry_id, distance)) return;
  }
}

}  // namespace memd
