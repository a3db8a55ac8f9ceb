// Items in the order of their next use, the farthest first, and the cost of letting go of each.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memd {

/// The cost of an eviction beyond reading the bytes again.
enum class EvictionPrice : uint8_t {
  clean,  // nothing: the disk has them, or gets them anyway
  dirty,  // they have to be written, which keeping them would save
};

/// Items in memory by their next use, in the order in which they should go: farthest first, with
/// dirty ones as if they were used kDirtyNearness times sooner. Times are those of whoever asks;
/// an item without a next use goes before all others, the one that was given first, first. Every
/// change is O(log n).
class NextUseOrder {
 public:
  // A dirty item costs twice the bytes, and after a write it would be as far away as a clean one
  // that is read again. Against the lower bound, over the traces of tests/numerics/
  // test_plan_bytes.py with caches of 1/8 to 7/8, what is moved is with a factor of 1 at most 1.106
  // (1.032 on average), with 2 1.074 (1.016), with 8 and 16 1.041 (1.009).
  static constexpr uint64_t kDirtyNearness = 16;

  /// Replaces what was said of the item before.
  void put(uint32_t item, uint64_t time, EvictionPrice price);
  void put_without_use(uint32_t item, EvictionPrice price);
  void remove(uint32_t item);
  void clear();
  /// No walk meets it until it is put back; it keeps its place.
  void set_aside(uint32_t item);
  void put_back(uint32_t item);
  /// Nothing where the item is not there.
  std::optional<EvictionPrice> price(uint32_t item) const;
  size_t size() const { return places_.size(); }
  /// Ones whose time has passed; whoever knows their next use puts them anew.
  std::vector<uint32_t> overdue(uint64_t now) const;
  /// Until `visit` returns false, which must not change the order. `time`: of the next use;
  /// kNoUse or more where there is none.
  void in_order(
      uint64_t now,
      const std::function<bool(uint32_t item, uint64_t time, EvictionPrice price)>& visit) const;
  /// A time, and the item that is used then.
  using Position = std::pair<uint64_t, uint32_t>;
  /// The same among items of one price, one a call: the first that comes after `behind`, which
  /// need not be there any more.
  std::optional<Position> next(EvictionPrice price, const std::optional<Position>& behind) const;
  /// Times from here on mean: no next use.
  static constexpr uint64_t kNoUse = uint64_t{1} << 63;

 private:
  using Places = std::set<Position>;

  struct Place {
    uint64_t time = 0;
    EvictionPrice price = EvictionPrice::clean;
    bool is_aside = false;
  };
  Places& places(const Place& place) {
    if (place.is_aside) return aside_;
    return place.price == EvictionPrice::clean ? clean_ : dirty_;
  }
  void set_aside(uint32_t item, bool is_aside);

  std::unordered_map<uint32_t, Place> places_;
  Places clean_;
  Places dirty_;
  Places aside_;
  uint64_t put_count_ = 0;
};

}  // namespace memd
