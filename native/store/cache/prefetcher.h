// Brings up what plans of one job use next, before anybody asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "store/cache/cache_parts.h"
#include "store/cache/fetches.h"
#include "store/cache/plan_progress.h"
#include "store/cache/room.h"

namespace memd {

/// Owned by the Job; the server thread calls everything; nothing blocks.
class Prefetcher {
 public:
  Prefetcher(const CacheParts& parts, const PlanProgress& plans, Room& room, Fetches& fetches)
      : parts_(parts), plans_(plans), room_(room), fetches_(fetches) {}
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// As far as there is room, where something has changed since the last call: nothing goes for it
  /// that is used before it is. True where a fetch began.
  bool look_ahead();

 private:
  bool look_ahead(Session& session);
  bool may_prefetch(const Entry& entry) const;
  uint64_t uses_until_room(const SessionPlan& plan) const;
  /// nullptr where there is no room, or the search for it goes on in the next turn.
  std::unique_ptr<Slot> make_room(const Entry& entry, uint64_t distance);
  void prefetch(Entry& entry, std::unique_ptr<Slot> slot);

  const CacheParts parts_;
  const PlanProgress& plans_;
  Room& room_;
  Fetches& fetches_;
  /// A search for room has not ended: the next turn begins with the session that it is for.
  bool is_searching_ = false;
  size_t first_session_ = 0;
};

}  // namespace memd
