// Finds races: two uses of the same bytes, one of them a write, that nothing orders.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "vector_clock.h"

namespace sim {

struct Span {
  const char* begin;
  const char* end;
  bool is_written;
};

/// One use of bytes: the actor's event number `tick`.
struct Access {
  Span span;
  Actor actor;
  int64_t tick;
  std::string name;
};

/// Uses of bytes since they were allocated, by region: a device's segment, or a registered range. A
/// use is dropped once a later one that knows of it would be in every race that it could be in. The
/// caller serialises.
class AccessLog {
 public:
  void check_races(bool is_on) { checks_races_ = is_on; }

  /// Raises if the access is not ordered after all that conflict with it, of which `seen` says what
  /// its actor knows.
  void note(const char* region, Access access, const VectorClock& seen);

  bool all_over(const char* region, const std::function<bool(const Access&)>& is_over) const;
  /// The bytes of [begin, end) are somebody else's from now on: those uses of them are over.
  void forget(const char* begin,
              const char* end,
              const std::function<bool(const Access&)>& is_over);
  void clear() { regions_.clear(); }

 private:
  bool checks_races_ = true;
  std::map<const char*, std::vector<Access>> regions_;
};

}  // namespace sim
