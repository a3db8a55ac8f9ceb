// How fast checksums of extents are computed, beside the limit of memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace memd {

struct HashRateOptions {
  uint64_t bytes = 0;  // of random data; more than the caches hold, where memory is to be measured
  uint32_t round_count = 5;
};

struct HashRate {
  uint64_t bytes = 0;
  /// Seconds of one pass over all bytes, in turn on the same memory, one thread: checksums as the
  /// daemon computes them, without wide instructions, and reading alone.
  std::vector<double> hash_seconds;
  std::vector<double> plain_seconds;
  std::vector<double> read_seconds;
};

/// Any thread; blocks, and holds `bytes`. Refused: less than an extent of 1 MiB or no whole ones,
/// no rounds; memory that is not there is a capacity error.
Result<HashRate> measure_hash(const HashRateOptions& options);

}  // namespace memd
