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

const LeastRecentlyUsed::Resident* LeastRecentlyUsed::find(uint32_t entry_id) const {
  const auto found = last_uses_.find(entry_id);
  return found == last_uses_.end() ? nullptr : &residents_.at(found->second);
}

std::optional<std::pair<uint64_t, uint32_t>> LeastRecentlyUsed::next(
    EvictionPrice price, const std::optional<uint64_t>& behind) const {
  const Order& all = price == EvictionPrice::clean ? clean_ : dirty_;
  const auto found = behind ? all.upper_bound(*behind) : all.begin();
  return found == all.end() ? std::nullopt : std::optional(std::pair(*found));
}

// ---- SessionPlan --------------------------------------------------------------------------------

void SessionPlan::put(uint32_t entry_id, EvictionPrice price) {
  if (!cursor_.has_plan()) return;
  if (const auto next = cursor_.next_use(entry_id)) {
    order_.put(entry_id, *next, price);
  } else {
    order_.put_without_use(entry_id, price);
  }
}

void SessionPlan::end_period(const std::function<bool(const PlanUse&)>& is_of_step) {
  const PlanCut ended = std::move(cuts_.front());
  cuts_.pop_front();
  cursor_.end_step(is_of_step, ended.updates);
  if (ended.is_made) cursor_.end_updates();
}

bool SessionPlan::end_updates(uint64_t step) {
  const auto cut = std::find_if(
      cuts_.begin(), cuts_.end(), [step](const PlanCut& each) { return each.step == step; });
  if (cut != cuts_.end()) {
    cut->is_made = true;
    return false;
  }
  cursor_.end_updates();
  return true;
}

void SessionPlan::look_ahead(const std::function<bool(const PlanUse& use, uint64_t time)>& visit) {
  cursor_.for_coming(looked_until_, [&](const PlanUse& use, uint64_t time) {
    looked_until_ = time;
    if (!visit(use, time)) return false;
    looked_until_ = time + 1;
    return true;
  });
}

void SessionPlan::look_again_at(uint32_t entry_id) {
  const auto next = cursor_.next_use(entry_id);
  if (next) looked_until_ = std::min(looked_until_, *next);
}

uint64_t SessionPlan::distance(uint32_t entry_id) const {
  const auto next = cursor_.next_use(entry_id);
  return next ? *next - cursor_.now() : kNeverUsed;
}

std::vector<uint32_t> SessionPlan::followed(std::span<const uint32_t> used_ids,
                                            const LeastRecentlyUsed& residents) {
  std::vector<uint32_t> passed;
  if (epoch_ != cursor_.epoch()) {
    epoch_ = cursor_.epoch();
    looked_until_ = 0;
    order_.clear();
    for (const auto& [use, resident] : residents.residents()) {
      put(resident.entry_id, resident.price);
      if (resident.is_aside) order_.set_aside(resident.entry_id);
      passed.push_back(resident.entry_id);
    }
    return passed;
  }
  for (const uint32_t entry_id : used_ids) {
    if (const auto price = order_.price(entry_id)) put(entry_id, *price);
  }
  passed = order_.overdue(cursor_.now());
  for (const uint32_t each : passed) put(each, *order_.price(each));
  return passed;
}

// ---- FarthestNextUse ----------------------------------------------------------------------------

void FarthestNextUse::used(uint32_t entry_id, EvictionPrice price) {
  recent_.used(entry_id, price);
  for (SessionPlan* const session : sessions_) {
    session->put_back(entry_id);
    session->put(entry_id, price);
  }
  file(entry_id);
}

std::vector<uint32_t> FarthestNextUse::followed(SessionPlan& session,
                                                std::span<const uint32_t> used_ids) {
  std::vector<uint32_t> passed = session.followed(used_ids, recent_);
  if (!filed_for_.empty()) {
    for (const uint32_t each : used_ids) file(each);
    for (const uint32_t each : passed) file(each);
  }
  return passed;
}

void FarthestNextUse::set_aside(uint32_t entry_id) {
  recent_.set_aside(entry_id);
  for (SessionPlan* const session : sessions_) session->set_aside(entry_id);
  for (auto& [session, first_uses] : first_uses_) first_uses.set_aside(entry_id);
}

void FarthestNextUse::put_back(uint32_t entry_id) {
  recent_.put_back(entry_id);
  for (SessionPlan* const session : sessions_) session->put_back(entry_id);
  for (auto& [session, first_uses] : first_uses_) first_uses.put_back(entry_id);
}

void FarthestNextUse::forget(uint32_t entry_id) {
  recent_.forget(entry_id);
  for (SessionPlan* const session : sessions_) session->forget(entry_id);
  for (auto& [session, first_uses] : first_uses_) first_uses.remove(entry_id);
}

void FarthestNextUse::file(uint32_t entry_id) {
  if (filed_for_.empty()) return;
  for (auto& [session, first_uses] : first_uses_) first_uses.remove(entry_id);
  const SessionPlan* first = nullptr;
  for (const SessionPlan* const session : sessions_) {
    if (!session->cursor().has_plan()) continue;
    if (first == nullptr || session->distance(entry_id) < first->distance(entry_id))
      first = session;
  }
  const LeastRecentlyUsed::Resident* const resident = recent_.find(entry_id);
  if (first == nullptr || resident == nullptr) return;
  NextUseOrder& first_uses = first_uses_[first];
  if (const auto time = first->cursor().next_use(entry_id)) {
    first_uses.put(entry_id, *time, resident->price);
  } else {
    first_uses.put_without_use(entry_id, resident->price);
  }
  if (resident->is_aside) first_uses.set_aside(entry_id);
}

void FarthestNextUse::file_all(const Epochs& epochs) {
  first_uses_.clear();
  filed_for_ = epochs;
  for (const auto& [use, resident] : recent_.residents()) file(resident.entry_id);
}

void FarthestNextUse::look_again_at(uint32_t entry_id) {
  for (SessionPlan* const session : sessions_) session->look_again_at(entry_id);
}

void FarthestNextUse::look_again() {
  for (SessionPlan* const session : sessions_) session->look_again();
}

void FarthestNextUse::in_order(EvictionPrice price, EvictionCursor& cursor, const Visit& visit) {
  std::vector<SessionPlan*> planned;
  Epochs epochs;
  for (SessionPlan* const session : sessions_) {
    if (!session->cursor().has_plan()) continue;
    planned.push_back(session);
    epochs.emplace_back(session, session->cursor().epoch());
  }
  if (cursor.made_by_ != epochs) {
    cursor = {};
    cursor.made_by_ = epochs;
    cursor.behind_.resize(epochs.size());
  }
  if (planned.size() < 2) {
    stop_filing();
  } else if (filed_for_ != epochs) {
    file_all(epochs);
  }
  while (const auto met = next(planned, price, cursor)) {
    if (!visit(met->first, met->second)) return;
  }
}

std::optional<std::pair<uint32_t, uint64_t>> FarthestNextUse::next(
    const std::vector<SessionPlan*>& planned, EvictionPrice price, EvictionCursor& cursor) {
  if (planned.empty()) {
    const auto found = recent_.next(price, cursor.behind_use_);
    if (!found) return std::nullopt;
    cursor.behind_use_ = found->first;
    return std::pair(found->second, kNeverUsed);
  }
  for (;;) {
    std::optional<NextUseOrder::Position> farthest;
    size_t whose = 0;
    uint64_t distance = 0;
    for (size_t i = 0; i < planned.size(); ++i) {
      const SessionPlan& session = *planned[i];
      const NextUseOrder& order = planned.size() == 1 ? session.order() : first_uses_[&session];
      const auto found = order.next(price, cursor.behind_[i]);
      if (!found) continue;
      const uint64_t now = session.cursor().now();
      const uint64_t time = found->first;
      const uint64_t uses = time >= NextUseOrder::kNoUse ? kNeverUsed : time - std::min(time, now);
      if (farthest && uses <= distance) continue;
      farthest = found;
      whose = i;
      distance = uses;
    }
    if (!farthest) return std::nullopt;
    cursor.behind_[whose] = farthest;
    const uint32_t entry_id = farthest->second;
    const bool is_first_use =
        planned.size() == 1 ||
        std::all_of(planned.begin(), planned.end(), [&](const SessionPlan* session) {
          return session->distance(entry_id) >= distance;
        });
    if (is_first_use) return std::pair(entry_id, distance);
    file(entry_id);
  }
}

}  // namespace memd
