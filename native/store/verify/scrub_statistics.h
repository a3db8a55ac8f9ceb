// How far the verification in the background is, and what it found.
#pragma once

#include <cstdint>
#include <string>

namespace memd {

/// A record of Scrub, for metrics.
struct ScrubStatistics {
  uint64_t bytes_per_second = 0;  // at most; 0: it is off
  uint64_t bytes = 0;             // read since the start
  uint64_t errors = 0;            // extents found damaged, in each pass anew
  uint64_t pass_count = 0;        // that were finished
  uint64_t last_pass_age_ns = 0;  // since the last of them ended
  bool in_pass = false;
  uint64_t pass_bytes = 0;  // of the pass that runs, or was the last
  uint64_t pass_bytes_all = 0;
  std::string last_error;
};

}  // namespace memd
