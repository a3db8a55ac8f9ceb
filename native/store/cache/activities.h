// How much of one job moves at this moment.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace memd {

/// Fetches, spills and tile tasks in flight: while there is one, the job is not dropped, and room
/// may come of it. Owned by the Job; whoever starts something begins an activity and ends it, on
/// the server thread. Nothing blocks.
class Activities {
 public:
  void begin() { ++count_; }
  void end() {
    MEMD_CHECK(count_ > 0);
    --count_;
  }
  bool any() const { return count_ != 0; }

 private:
  uint32_t count_ = 0;
};

}  // namespace memd
