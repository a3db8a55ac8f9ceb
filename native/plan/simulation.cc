#include "plan/simulation.h"

#include <unordered_map>

#include "plan/next_use_order.h"

namespace memd {

BytesMoved simulate(const Plan& plan,
                    const std::vector<uint64_t>& item_bytes,
                    const SimulationSettings& settings) {
  BytesMoved moved;
  if (plan.size() == 0 || settings.measured_count == 0) return moved;
  NextUseOrder order;
  std::unordered_map<uint32_t, EvictionPrice> resident;
  uint64_t used_bytes = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  const auto let_go = [&](uint32_t item) {
    order.remove(item);
    resident.erase(item);
    used_bytes -= item_bytes.at(item);
  };
  for (uint64_t period = 0; period < settings.warm_count + settings.measured_count; ++period) {
    if (period == settings.warm_count) read_bytes = written_bytes = 0;
    for (size_t position = 0; position < plan.size(); ++position) {
      const PlanUse& use = plan[position];
      const uint64_t bytes = item_bytes.at(use.item);
      const uint64_t now = period * plan.size() + position;
      const auto [found, is_absent] = resident.try_emplace(use.item, EvictionPrice::clean);
      EvictionPrice price = found->second;
      if (is_absent) {
        used_bytes += bytes;
        if (use.kind != UseKind::overwrite) read_bytes += bytes;
      }
      order.remove(use.item);  // it is in use, and goes for nobody
      while (used_bytes > settings.cache_bytes && order.size() > 0) {
        uint32_t victim = 0;
        order.in_order(now, [&](uint32_t item, uint64_t, EvictionPrice evicted) {
          if (evicted == EvictionPrice::dirty) written_bytes += item_bytes.at(item);
          victim = item;
          return false;
        });
        let_go(victim);
      }
      if (use.kind == UseKind::last) {
        let_go(use.item);
        continue;
      }
      if (use.kind == UseKind::overwrite || use.kind == UseKind::add) price = EvictionPrice::dirty;
      if (use.kind == UseKind::change) {
        price = settings.writes_changes ? EvictionPrice::clean : EvictionPrice::dirty;
        if (settings.writes_changes) written_bytes += bytes;
      }
      resident[use.item] = price;
      const auto later = plan.next_of_same(position);
      const uint64_t next =
          later ? *later - position : plan.size() - position + plan.positions(use.item).front();
      order.put(use.item, now + next, price);
    }
  }
  const double count = settings.measured_count;
  moved.read_bytes = static_cast<double>(read_bytes) / count;
  moved.written_bytes = static_cast<double>(written_bytes) / count;
  return moved;
}

}  // namespace memd
