// Work of one job that starts as soon as a condition holds.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace memd {

/// Owned by its Job; the server thread calls everything; nothing blocks. The store asks once a
/// turn.
class Conditions {
 public:
  using Holds = std::function<bool()>;
  using Then = std::function<void()>;

  void add(Holds holds, Then then) {
    waiting_.push_back({.holds = std::move(holds), .then = std::move(then)});
  }
  /// Work that goes on behind what waits already, as soon as a turn has time for it.
  void go_on(Then then) {
    add([] { return true; }, std::move(then));
  }
  bool empty() const { return waiting_.empty(); }
  /// Removes and returns the first at or after `position` that holds now, and moves `position`
  /// behind it. The caller runs it, which may add others, or end the job and this object.
  std::optional<Then> take_next(size_t& position) {
    for (; position < waiting_.size(); ++position) {
      if (!waiting_[position].holds()) continue;
      Then then = std::move(waiting_[position].then);
      waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(position));
      return then;
    }
    return std::nullopt;
  }

 private:
  struct Waiting {
    Holds holds;
    Then then;
  };
  std::vector<Waiting> waiting_;
};

}  // namespace memd
