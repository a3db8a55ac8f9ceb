// A lease's request, and its grant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/status.h"
#include "ring/layout.h"
#include "store/cache/entry.h"

namespace memd {

struct LeaseGrant {
  Slot* slot = nullptr;
  uint32_t index = 0;     // of the shard's counter in the slot
  uint32_t entry_id = 0;  // whose slot it was
  uint32_t pin = 0;       // kReaderPin or kWriterPin, already counted
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t generation = 0;
  std::byte* data = nullptr;  // the daemon's view
  uint64_t wait_ns = 0;
  LeaseWait wait_reason = LeaseWait::disk;  // what most of it was for
};

using LeaseReply = std::function<void(const Status&, const LeaseGrant&)>;

struct LeaseRequest {
  uint64_t session_id = 0;
  uint32_t shard_id = 0;
  Part part = Part::value;
  LeaseMode mode = LeaseMode::read;
  uint64_t timeout_ns = 0;
  /// The pin is the daemon's own: it stays when the session ends, until release_service_lease().
  bool for_service = false;
  /// Only brings the shard up; dropped where there is no room at once.
  bool prefetch = false;
  uint64_t after_call = 0;  // the StepRequest::call that it follows; 0: none
  /// For a gradient that is expected; gradient_unused() says that it does not come.
  bool is_expected = false;
  /// It has the sum, of a Part::rank_sum.
  uint32_t rank = 0;
};

}  // namespace memd
