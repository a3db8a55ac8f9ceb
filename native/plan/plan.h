// The order in which things are used, as it was once and will be again.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace memd {

/// The effect of a use on the bytes of its item.
enum class UseKind : uint8_t {
  read,
  overwrite,  // nothing of what was there is needed
  change,
  add,   // to what needs not be durable: a gradient
  last,  // reads; nobody needs the bytes afterwards, whatever became of them
};

/// `item`: whatever is fetched and evicted as one.
struct PlanUse {
  uint32_t item = 0;
  UseKind kind = UseKind::read;
  /// Made by the daemon (the update phase), not by a session.
  bool by_daemon = false;

  bool operator==(const PlanUse&) const = default;
};

/// One period of a trace. Never changes; 1e5 uses take a few milliseconds to index.
class Plan {
 public:
  explicit Plan(std::vector<PlanUse> uses);

  size_t size() const { return uses_.size(); }
  const PlanUse& operator[](size_t position) const { return uses_[position]; }
  std::span<const PlanUse> uses() const { return uses_; }
  /// The next use of the item that is used at `position`; nothing where this was the last one.
  std::optional<uint32_t> next_of_same(size_t position) const {
    const uint32_t next = next_[position];
    return next == kNone ? std::nullopt : std::optional(next);
  }
  /// The first use of `item` at `position` or later, in O(log n).
  std::optional<uint32_t> first_from(uint32_t item, size_t position) const;
  /// Times at which `item` is used, ascending.
  std::span<const uint32_t> positions(uint32_t item) const;
  /// The first use by a session at `position` or later, or size(). In O(1), as the next: an update
  /// phase is as long as the job has parameters, and is passed for each place that is compared.
  uint32_t session_from(size_t position) const { return session_from_[position]; }
  /// Behind the last use by a session before `position`; 0 where there is none.
  uint32_t session_until(size_t position) const { return session_until_[position]; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  std::vector<PlanUse> uses_;
  std::vector<uint32_t> next_;
  std::vector<uint32_t> session_from_;   // of each position, the end's too
  std::vector<uint32_t> session_until_;  // as well
  // The places of item items_[i] are places_[begins_[i]] to places_[begins_[i + 1]].
  std::vector<uint32_t> items_;
  std::vector<uint32_t> begins_;
  std::vector<uint32_t> places_;
};

}  // namespace memd
