// The memory of dropped jobs, replaced as the server does it.
#pragma once

#include <cstddef>

#include "store/shard_store.h"

namespace memd::testing {

/// Returns how many segments were replaced.
inline size_t replace_released(HostMemory& memory) {
  size_t count = 0;
  for (; const auto replacement = memory.begin_replacement(); ++count) {
    replacement->make();
    memory.end_replacement(*replacement);
  }
  return count;
}

}  // namespace memd::testing
