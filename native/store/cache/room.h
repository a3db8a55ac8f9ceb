// Room in the arena of one job: what goes for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "store/cache/cache_parts.h"

namespace memd {

/// Finds a place for an entry's bytes: a hole, a segment that no side has yet, what is clean, what
/// the private side can spare; and spills what is dirty, so that there is room later. Owned by the
/// Job; the server thread calls everything; nothing blocks.
class Room {
 public:
  explicit Room(const CacheParts& parts) : parts_(parts) {}
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  /// nullptr where there is no room at this moment. `may_spill`: there may be some later, of which
  /// nobody is told.
  std::unique_ptr<Slot> make(uint64_t bytes, uint32_t pin_count, bool may_spill);
  /// False: the last walk ended early, and whoever is first for room has been woken to go on.
  bool has_looked_at_all() const { return has_looked_at_all_; }
  /// Evicts in the policy's order, if that makes room for `bytes` in one piece: nothing goes for a
  /// hole that is too small. `distance_min`: only what is used so many uses from now, or later, as
  /// far as plans know. False where nothing went; after true there may still be no room, where a
  /// client leased meanwhile what was to go.
  bool evict_for(uint64_t bytes,
                 uint64_t distance_min = 0,
                 uint64_t evicted_bytes_max = std::numeric_limits<uint64_t>::max());

  /// Clients give pins back without a request. Looks at entries that were leased when they were to
  /// go, at most kLookedAtMax in a turn and all before the server thread sleeps, and wakes whoever
  /// waits for room where one of them is leased no more.
  void look_for_releases();
  void look_for_all_releases();
  /// Entries that walks and looks for releases met so far.
  uint64_t looked_at_count() const { return looked_at_count_; }

  /// Entries that one walk, or one look for releases, meets at most: some 20 µs. What a walk cannot
  /// take it sets aside, so that the next one goes on behind it.
  static constexpr size_t kLookedAtMax = 256;

 private:
  /// The offset of a slot, and whose it is.
  using Victim = std::pair<uint64_t, Entry*>;

  /// The arena has room for so few of the largest entries that one small view, held for long in a
  /// bad place, keeps them out.
  bool is_tight() const;
  bool may_go(const Entry& entry) const;
  bool may_spill(const Entry& entry) const;
  std::vector<Victim> choose(uint64_t bytes, uint64_t distance_min);
  void set_aside(const std::vector<Entry*>& entries);
  /// True where one is leased no more.
  bool look_at_leased(size_t count_max);
  void evict(const Victim& victim);
  /// The private side's last segment becomes the arena's, at once or, with `may_flush`, once what
  /// lies there alone is on disk.
  bool shrink_private(bool may_flush);
  void spill(uint64_t bytes);
  std::vector<Entry*> choose_to_spill(uint64_t bytes);

  const CacheParts parts_;
  /// Ids of entries that were set aside because they were leased.
  std::set<uint32_t> leased_ids_;
  uint32_t next_leased_id_ = 0;  // to be looked at
  bool has_looked_at_all_ = true;
  uint64_t looked_at_count_ = 0;
};

}  // namespace memd
