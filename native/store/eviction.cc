#include "store/eviction.h"

namespace memd {

void LeastRecentlyUsed::used(uint32_t entry_id) {
  forget(entry_id);
  places_[entry_id] = order_.insert(order_.end(), entry_id);
}

void LeastRecentlyUsed::forget(uint32_t entry_id) {
  const auto found = places_.find(entry_id);
  if (found == places_.end()) return;
  order_.erase(found->second);
  places_.erase(found);
}

void LeastRecentlyUsed::in_order(const std::function<bool(uint32_t entry_id)>& visit) const {
  for (const uint32_t entry_id : order_) {
    if (!visit(entry_id)) return;
  }
}

}  // namespace memd
