// How much of one job moves at this moment.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "store/cache/wait_lists.h"

namespace memd {

/// Fetches, spills and tile tasks in flight: while there is one, the job is not dropped, and room
/// may come of it. Owned by the Job; whoever starts something begins an activity and ends it, on
/// the server thread. Nothing blocks.
class Activities {
 public:
  explicit Activities(WaitLists& waits) : waits_(waits) {}

  void begin() { ++count_; }
  void end() {
    MEMD_CHECK(count_ > 0);
    if (--count_ == 0) waits_.wake(WaitList::room);
  }
  bool any() const { return count_ != 0; }

 private:
  WaitLists& waits_;
  uint32_t count_ = 0;
};

}  // namespace memd
