// Every state that a power cut may leave of a recording, opened again.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "powercut/recording.h"

namespace memd::powercut {

struct ExploreOptions {
  /// Of distinct states: contents and what is accepted of them. What is exhaustive comes first and
  /// is complete in any case.
  uint64_t state_count = 0;
  /// The first operations, whose states are all visited.
  uint64_t exhaustive_operations = 0;
  /// One in so many states is also opened by a whole ShardStore and read through leases; 0: none.
  uint64_t read_all_every = 0;
  uint64_t seed = 0;
  /// Called with the distinct states so far.
  std::function<void(uint64_t)> progress;
};

struct ExploreResult {
  uint64_t state_count = 0;       // distinct
  uint64_t exhaustive_count = 0;  // of these
  uint64_t torn_count = 0;        // of these
  uint64_t read_all_count = 0;
  /// How often what was found was the operation before or the one that was under way. One of them
  /// alone would mean that nothing was tested.
  uint64_t before_count = 0;
  uint64_t after_count = 0;
  uint64_t violation_count = 0;
  std::vector<std::string> violations;  // the first of them
};

/// At each event of the recording: the writes that a completed sync covered are on the medium, of
/// the others any subset, one of them torn between sectors of 512 bytes; where two that were in
/// flight at once overlap, in any order. What a daemon finds there has to be exactly what the last
/// acknowledged commit left, or that and one that was under way.
ExploreResult explore(const Recording& recording, const ExploreOptions& options);

}  // namespace memd::powercut
