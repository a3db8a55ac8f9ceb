// How fast the update runs in memory, beside the limit of that memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace memd {

struct AdamRateOptions {
  DType dtype = DType::float32;  // of the parameter; bfloat16 has fp32 moments and a remainder
  uint64_t element_count = 0;    // in all
  uint32_t tensor_count = 1;     // of the same size each
  uint32_t thread_count = 1;
  uint32_t round_count = 5;
};

struct AdamRate {
  /// Read and written together: 28 for fp32, 26 for bf16.
  uint32_t bytes_per_element = 0;
  uint64_t element_count = 0;
  /// Seconds of one pass over all elements, in turn on the same memory: an update, then the traffic
  /// alone.
  std::vector<double> update_seconds;
  std::vector<double> traffic_seconds;
};

/// Any thread; blocks, and holds 16 (fp32) or 14 (bf16) bytes an element. Threads take tiles of a
/// tensor in turn, as the daemon's workers do. Refused: no elements, more tensors than elements, no
/// threads, no rounds; memory that is not there is a capacity error.
Result<AdamRate> measure_adam(const AdamRateOptions& options);

}  // namespace memd
