#include "store/cache/eviction.h"

#include <algorithm>

namespace memd {

// ---- LeastRecentlyUsed --------------------------------------------------------------------------

void LeastRecentlyUsed::used(uint32_t entry_id, EvictionPrice price) {
  forget(entry_id);
  places_[entry_id] = order_.insert(order_.end(), {.entry_id = entry_id, .price = price});
}

void LeastRecentlyUsed::forget(uint32_t entry_id) {
  const auto found = places_.find(entry_id);
  if (found == places_.end()) return;
  order_.erase(found->second);
  places_.erase(found);
}

void LeastRecentlyUsed::in_order(const Visit& visit) const {
  for (const Resident& resident : order_) {
    if (!visit(resident.entry_id, kNeverUsed)) return;
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
    for (const auto& resident : residents.order()) {
      put(resident.entry_id, resident.price);
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
  for (SessionPlan* const session : sessions_) session->put(entry_id, price);
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

void FarthestNextUse::in_order(const Visit& visit) const {
  std::vector<const SessionPlan*> planned;
  for (const SessionPlan* const session : sessions_) {
    if (session->cursor.has_plan()) planned.push_back(session);
  }
  if (planned.empty()) return recent_.in_order(visit);
  if (planned.size() == 1) {
    const uint64_t now = planned.front()->cursor.now();
    planned.front()->order.in_order(now, [&](uint32_t entry_id, uint64_t time, EvictionPrice) {
      if (time >= NextUseOrder::kNoUse) return visit(entry_id, kNeverUsed);
      return visit(entry_id, time > now ? time - now : 0);
    });
    return;
  }
  // The first session to need it counts. Several sessions with plans on one job are rare.
  std::vector<std::pair<uint64_t, uint32_t>> all;
  for (const auto& resident : recent_.order()) {
    uint64_t nearest = kNeverUsed;
    for (const SessionPlan* const session : planned)
      nearest = std::min(nearest, session->distance(resident.entry_id));
    all.emplace_back(nearest, resident.entry_id);
  }
  std::stable_sort(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (const auto& [distance, entry_id] : all) {
    if (!visit(entry_id, distance)) return;
  }
}

}  // namespace memd
