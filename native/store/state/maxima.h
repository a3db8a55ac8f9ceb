// The place of max_exp_avg_sq in a job's tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "store/state/state_parts.h"

namespace memd {

/// Tiles of these buckets have a place for maxima from here on, with zeros in it; buckets that have
/// it stay as they are. Nobody works on a tile of the others, and none of them is dirty or
/// speculative. On the server thread; does not block.
void keep_maxima(const StateParts& parts, const std::vector<uint32_t>& buckets);

}  // namespace memd
