// Room in the arena of one job: what goes for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "store/cache/cache_parts.h"
#include "store/cache/victim_search.h"

namespace memd {

/// Finds a place for an entry's bytes: a hole, a segment that no side has yet, what is clean, what
/// the private side can spare; and spills what is dirty, so that there is room later. Owned by the
/// Job; the server thread calls everything; nothing blocks.
class Room {
 public:
  explicit Room(const CacheParts& parts) : parts_(parts) {}
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  /// Each has a search of its own, which goes on in its next call.
  enum class Asker : uint8_t { lease, copy, prefetch };
  /// nullptr where there is no room at this moment. `may_spill`: there may be some later, of which
  /// nobody is told.
  std::unique_ptr<Slot> make(Asker asker, uint64_t bytes, uint32_t pin_count, bool may_spill);
  /// False: the last make() ended early, and whoever is first for room has been woken to go on.
  bool has_looked_at_all() const { return has_looked_at_all_; }
  enum class Eviction : uint8_t {
    nothing,     // nothing that makes room may go
    done,        // there may still be no room, where a client leased meanwhile what was to go
    unfinished,  // the next call goes on
  };
  /// Evicts in the policy's order, if that makes room in one piece: nothing goes for a hole that is
  /// too small. Looks at kLookedAtMax entries at most, and kMovedMax go.
  Eviction evict_for(Asker asker, const EvictionWish& wish);
  /// The same for who does not come again: nothing goes unless all of it goes in this call.
  bool evict_at_once_for(const EvictionWish& wish);

  /// An overwrite of `bytes` was granted, and the next one will need as much room: writes dirty
  /// bytes back while the client fills this one. Does nothing if that much is free, clean or being
  /// written.
  void write_ahead(uint64_t bytes);

  /// Clients give pins back without a request. Looks at entries that were leased when they were to
  /// go, at most kLookedAtMax in a turn and all before the server thread sleeps, and wakes whoever
  /// waits for room where one of them is leased no more.
  void look_for_releases();
  void look_for_all_releases();
  /// Entries that walks and looks for releases met so far.
  uint64_t looked_at_count() const { return looked_at_count_; }
  /// Entries that were evicted so far.
  uint64_t evicted_count() const { return evicted_count_; }

  /// Entries that one call of a search, or one look for releases, meets at most: some 20 µs. What
  /// cannot go is set aside, so that no later search meets it again.
  static constexpr size_t kLookedAtMax = 256;
  /// And that a search evicts, or a call begins to spill: 10 to 20 µs each. A call whose search
  /// made too little room evicts less than twice as many.
  static constexpr size_t kMovedMax = 16;

 private:
  bool may_go(const Entry& entry) const;
  bool may_spill(const Entry& entry) const;
  Eviction go_on(std::optional<VictimSearch>& search, const EvictionWish& wish);
  Eviction evict_found(std::optional<VictimSearch>& search, const EvictionWish& wish);
  void look(VictimSearch& search, uint64_t distance_min);
  /// False: something that was to go stays.
  bool may_go(const VictimSearch::Victim& victim) const;
  void set_aside(const std::vector<Entry*>& entries);
  /// True where one is leased no more.
  bool look_at_leased(size_t count_max);
  void evict(const VictimSearch::Victim& victim);
  /// The private side's last segment becomes the arena's, at once or, with `may_flush`, once what
  /// lies there alone is on disk.
  bool shrink_private(bool may_flush);
  /// Whether `bytes` are free, may be evicted, or are being written back.
  bool has_ready(uint64_t bytes);
  void spill(uint64_t bytes);
  /// Looks at kLookedAtMax entries at most; the next call goes on behind them.
  std::vector<Entry*> choose_to_spill(uint64_t bytes);

  struct SpillSearch {
    EvictionCursor cursor;
    uint64_t event_count = 0;  // of those that wake who waits for room, when it began
  };

  const CacheParts parts_;
  /// Ids of entries that were set aside because they were leased.
  std::set<uint32_t> leased_ids_;
  uint32_t next_leased_id_ = 0;                          // to be looked at
  std::array<std::optional<VictimSearch>, 3> searches_;  // by Asker
  std::optional<SpillSearch> spill_search_;
  bool has_looked_at_all_ = true;
  uint64_t looked_at_count_ = 0;
  uint64_t evicted_count_ = 0;
};

}  // namespace memd
