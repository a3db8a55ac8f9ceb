// An image opened by a whole ShardStore and read as a client does.
#pragma once

#include <span>

#include "base/status.h"
#include "powercut/state.h"

namespace memd::powercut {

/// Ok where leases and moments give exactly the bytes of `expected`. A shard that it has lost has
/// to be an error; others may be one then, as a job that lost something may be stopped. The
/// remainders of bfloat16 are not compared. `goes_back`: a job may go back to a snapshot, and so
/// the start may write.
Status read_all_is(std::span<const std::byte> image,
                   const Geometry& geometry,
                   const SetState& expected,
                   bool goes_back = false);

}  // namespace memd::powercut
