// One job's part of the disk: its quota, and which of its extents are free when.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "store/format/extent_record.h"
#include "store/space/extent_store.h"
#include "store/space/replica.h"

namespace memd {

/// The content of an extent. A catalogue names state; it names no gradient, which is dropped after
/// its step.
enum class SpaceUse : uint8_t { state, gradient };

/// The step that a snapshot keeps; its job has one of that name.
struct KeptStep {
  std::string name;
  uint64_t step = 0;

  bool operator==(const KeptStep&) const = default;
};

/// The part of a job's quotas that its snapshots take: each counts as if it shared nothing.
struct SnapshotSpace {
  uint32_t count = 0;
  uint64_t bytes = 0;       // on disk
  uint64_t load_bytes = 0;  // a part of these: of the one of a load
  /// A part of those: the job uses the same extents, and they count once. So the load has the room
  /// that a step's second copy would take.
  uint64_t load_shared_bytes = 0;
  uint64_t memory_bytes = 0;      // for their records, beside the pool
  std::vector<KeptStep> steps{};  // of those that are whole, as the root lists them

  /// On disk, beside what the job uses.
  uint64_t kept_bytes() const { return bytes - load_shared_bytes; }
};

inline SnapshotSpace& operator+=(SnapshotSpace& sum, const SnapshotSpace& more) {
  sum.count += more.count;
  sum.bytes += more.bytes;
  sum.load_bytes += more.load_bytes;
  sum.load_shared_bytes += more.load_shared_bytes;
  sum.memory_bytes += more.memory_bytes;
  sum.steps.insert(sum.steps.end(), more.steps.begin(), more.steps.end());
  return sum;
}

inline SnapshotSpace& operator-=(SnapshotSpace& sum, const SnapshotSpace& less) {
  sum.count -= less.count;
  sum.bytes -= less.bytes;
  sum.load_bytes -= less.load_bytes;
  if (sum.load_bytes == 0) sum.load_shared_bytes = 0;
  sum.memory_bytes -= less.memory_bytes;
  for (const KeptStep& each : less.steps) std::erase(sum.steps, each);
  return sum;
}

/// The unit is an extent. Owned by its Job; the server thread calls everything; nothing blocks.
///
/// An extent that the last catalogue on disk names is superseded when another takes its place, and
/// free after the next commit. Between begin_update() and the commit roll_back() can return every
/// replica to the extent that it had before. Both hold for what came before an instant: that ends
/// an epoch, a replica knows the epoch in which it came, and nobody walks over them.
class JobSpace {
 public:
  using Visit = std::function<void(ReplicaPlace)>;
  /// Calls a Visit with every replica of the job's state.
  using Walk = std::function<void(const Visit&)>;

  // The quota. Between two commits it counts superseded extents, too.
  uint64_t quota_bytes() const { return quota_bytes_; }
  void set_quota_bytes(uint64_t bytes) { quota_bytes_ = bytes; }
  /// The part that the job's catalogue takes, on disk and as the next commit writes it.
  uint64_t metadata_bytes() const { return metadata_bytes_; }
  void set_metadata_bytes(uint64_t bytes) { metadata_bytes_ = bytes; }
  /// The sum over all snapshots that the job has, or is making. Extents that they pin are free for
  /// the quota as soon as the job names them no more: these bytes count them.
  const SnapshotSpace& snapshots() const { return snapshots_; }
  void add_snapshots(const SnapshotSpace& more) { snapshots_ += more; }
  void remove_snapshots(const SnapshotSpace& less) { snapshots_ -= less; }
  uint64_t used_bytes() const { return used_bytes_; }
  /// Bytes that a new extent finds taken: a gradient leaves the running step what was promised to
  /// it.
  uint64_t taken_bytes(SpaceUse use) const {
    return use == SpaceUse::gradient ? std::max(used_bytes_, promised_bytes_) : used_bytes_;
  }
  bool has_room(SpaceUse use, uint64_t bytes) const {
    return taken_bytes(use) + bytes + set_aside_bytes() <= quota_bytes_;
  }
  /// Each term of what has_room() adds up, for an error.
  std::string taken_text(SpaceUse use) const;
  /// Whether `bytes` more of gradients leave a running step what was promised to it.
  bool keeps_promise(uint64_t bytes) const {
    return promised_bytes_ == 0 || promised_bytes_ + bytes + set_aside_bytes() <= quota_bytes_;
  }
  void take(SpaceUse use, uint64_t bytes);
  void give_back(SpaceUse use, uint64_t bytes);
  /// A step in memory will use up to `bytes` more; gradients that spill meanwhile come on top.
  void promise(uint64_t bytes) { promised_bytes_ = used_bytes_ + bytes; }
  uint64_t promised_bytes() const { return promised_bytes_; }
  void end_promise() { promised_bytes_ = 0; }
  /// Some extent has a tile of tier host.
  bool has_host_extents() const { return host_extent_count_ != 0; }

  /// The epoch of a replica that comes now.
  uint64_t epoch() const { return epoch_; }
  /// A catalogue that was written, or is being written, names it, or roll_back() may return to it:
  /// it is free only after the next commit.
  bool is_referenced(const Replica& replica) const { return replica.epoch() < referenced_end_; }
  /// The epoch of a replica that the catalogue on disk names, at a start.
  static constexpr uint64_t kOnDisk = 0;

  // State.
  /// `extent` takes the place of what `place` holds, which is free at once, or after the next
  /// commit if a catalogue names it.
  void replace(ReplicaPlace place, const ExtentRecord& extent, ExtentStore& extents);
  void release(ReplicaPlace place, ExtentStore& extents);
  /// `place` ends. roll_back() returns nothing to it.
  void forget(const ReplicaList& places);
  /// The same for a gradient's extent, which is free at once.
  void replace_gradient(ReplicaPlace place, const ExtentRecord& extent, ExtentStore& extents);
  /// The catalogue on disk names these, and memory needs them no more.
  void add_superseded(const std::vector<ExtentRecord>& extents);
  std::vector<ExtentRecord> superseded() const;

  // A start.
  /// `place` has this extent since `epoch`: kOnDisk, or epoch() for what no catalogue names. It is
  /// not counted.
  static void adopt(ReplicaPlace place, const ExtentRecord& extent, uint64_t epoch);
  /// Counts anew: every replica that the walk visits.
  void count(const Walk& each_replica);
  void count(ReplicaPlace place);

  // A step.
  void begin_update();
  bool is_updating() const { return is_updating_; }
  /// No commit came of begin_update(), and nothing was replaced.
  void end_update() { is_updating_ = false; }
  /// Undoes every replace() since begin_update(). If a commit failed half way, nobody gets an
  /// extent that its catalogue may name.
  void roll_back(ExtentStore& extents);

  // A commit.
  /// The catalogue that is begun names what lies where now.
  void begin_commit();
  /// Nothing of it was written: all is as if it had not been begun.
  void abandon_commit();
  /// Some of it may have been: what it names stays.
  void fail_commit() { committing_count_ = 0; }
  /// It is durable: what was superseded before it began is free. `is_step`: the job can return to
  /// what it names.
  void end_commit(bool is_step);
  /// Releases up to `count` of those; true once there are none left.
  bool release_superseded(ExtentStore& extents, size_t count);

 private:
  void end_epoch();
  uint64_t set_aside_bytes() const { return metadata_bytes_ + snapshots_.kept_bytes(); }

  struct Superseded {
    Replica* replica;  // nullptr: its entry is gone, and nothing returns there
    ExtentRecord extent;
  };

  uint64_t quota_bytes_ = 0;
  uint64_t metadata_bytes_ = 0;
  SnapshotSpace snapshots_;
  uint64_t used_bytes_ = 0;
  uint64_t promised_bytes_ = 0;  // 0: no step in memory runs
  uint64_t host_extent_count_ = 0;
  uint64_t epoch_ = kOnDisk + 1;
  uint64_t referenced_end_ = kOnDisk + 1;  // what came in an epoch before it
  uint64_t referenced_end_before_ = 0;     // without the commit in flight
  std::deque<Superseded> superseded_;
  bool is_updating_ = false;
  size_t update_begin_ = 0;      // into superseded_
  size_t committing_count_ = 0;  // of superseded_: what the commit in flight frees
};

}  // namespace memd
