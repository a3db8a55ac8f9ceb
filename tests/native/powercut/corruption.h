// Bits that flip and blocks that are not where they belong, anywhere in an image.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "powercut/recording.h"

namespace memd::powercut {

struct CorruptOptions {
  uint64_t count = 0;
  uint64_t seed = 0;
  /// One in so many images is also opened by a whole ShardStore and read through leases; 0: none.
  uint64_t read_all_every = 0;
  /// Called with the images so far.
  std::function<void(uint64_t)> progress;
};

struct CorruptResult {
  uint64_t count = 0;
  // What became of them, one each:
  uint64_t whole_count = 0;     // all bytes right
  uint64_t lost_count = 0;      // some shards are errors, the others right
  uint64_t refused_count = 0;   // not opened
  uint64_t previous_count = 0;  // an older commit: both newest superblocks were damaged
  uint64_t read_all_count = 0;
  uint64_t violation_count = 0;
  std::vector<std::string> violations;  // the first of them
};

/// Damages the image that the recording left in one way at a time: flips bits, swaps extents of
/// equal length, zeroes or fills a block, writes one to another's place; among superblocks, root,
/// catalogues, state and free space. What is read has to be right, or an error that names what is
/// lost; and what no used byte was damaged for has to be whole.
CorruptResult corrupt(const Recording& recording, const CorruptOptions& options);

}  // namespace memd::powercut
