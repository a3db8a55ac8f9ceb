// Everything that a volume set holds, as its users would see it: what a crash must not change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/io_queue.h"
#include "store/format/catalogue.h"
#include "store/format/volume.h"

namespace memd::powercut {

struct ShardState {
  std::string name;
  ShardKind kind = ShardKind::unspecified;
  DType dtype = DType::unspecified;
  std::vector<uint64_t> shape;
  uint64_t generation = 0;
  bool written = false;
  std::vector<std::byte> value;
  // Of parameters; the remainder is bfloat16's alone.
  std::vector<std::byte> exp_avg, exp_avg_sq, remainder;
  /// After a recovery: why its bytes can't be had.
  Status lost;
};

struct JobState {
  std::string name;
  uint64_t step = 0;
  std::vector<ShardState> shards;  // by name
};

using SetState = std::vector<JobState>;  // by name

/// A snapshot is in a SetState as a job of this name, which no job can have.
inline std::string snapshot_state_name(const std::string& job, const std::string& snapshot) {
  return job + "@" + snapshot;
}
inline bool is_snapshot(const JobState& state) { return state.name.find('@') != std::string::npos; }

void sort_by_name(SetState& state);
/// Of everything but `lost`.
uint64_t digest(const SetState& state);
uint64_t digest(const ShardState& shard);
/// What the first difference is; empty where there is none.
std::string difference(const SetState& expected, const SetState& found);

/// A set whose volumes lie one after the other in an image, each of `device_bytes`, of which the
/// first `data_bytes` after the superblocks are used: few, so that extents are soon used again.
struct Geometry {
  uint16_t device_count = 1;
  uint64_t device_bytes = 0;
  uint64_t data_bytes = 0;

  uint64_t image_bytes() const { return device_count * device_bytes; }
};

struct Recovered {
  /// Why the set can't be opened.
  Status status;
  uint64_t sequence = 0;  // of the superblock that was chosen
  SetState state;
  std::vector<std::string> lost_snapshots{};  // of which the catalogue is damaged
};

/// What a daemon that starts on `set` has: root, catalogues, every extent taken out of the free
/// space, read and verified. Writes nothing.
Recovered recover(IoQueue& io, VolumeSet set);
/// The same of an image, with the newest superblock of each volume.
Recovered recover(std::span<const std::byte> image, const Geometry& geometry);

}  // namespace memd::powercut
