// The terms on which one job was admitted, and what they allow it to declare.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "base/job_weight.h"
#include "base/status.h"
#include "store/cache/bucket.h"
#include "store/cache/job_memory.h"
#include "store/cache/shards.h"
#include "store/format/catalogue.h"
#include "store/format/durability.h"
#include "store/journal/progress.h"
#include "store/space/declared_space.h"
#include "store/space/job_space.h"
#include "store/state/durable_state.h"
#include "store/state/job_journal.h"

namespace memd {

/// Bytes of the host quota that a job with parameters of tier host needs, a field for each term.
struct HostNeeded {
  uint64_t state_bytes = 0;   // those parameters and their optimizer state
  uint64_t place_bytes = 0;   // of tiles that change their places
  uint64_t window_bytes = 0;  // the largest parameter and its gradient
  uint64_t floor_bytes = 0;   // tiles in work
  uint64_t segment_bytes = 0;

  uint64_t host_side_bytes() const;
  uint64_t total_bytes() const { return host_side_bytes() + window_bytes + floor_bytes; }
  /// Whether `memory` could give it, with nothing in the host side and the private side.
  bool fits(const JobMemory& memory) const;
  std::string text() const;
};

/// Owns the job's host memory in bytes, its durability and its weight, and knows which part of the
/// disk quota, which JobSpace has, its catalogues take. All of them are on disk with the next
/// commit. Owned by the Job; the ShardStore changes the terms when a job is opened, and the Job
/// asks before it declares, on the server thread. Nothing blocks.
class Admission {
 public:
  struct Parts {
    const std::string& job_name;
    Shards& shards;
    JobSpace& space;
    DurableState& durable;
    JobProgress& progress;
    JobJournal& journal;
    /// Nothing before the first session attaches.
    const std::unique_ptr<JobMemory>& memory;
  };

  explicit Admission(const Parts& parts) : parts_(parts) {}
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  /// At start: as a catalogue says. The shards follow.
  void restore(const JobRecord& record);
  /// Fills in what a catalogue says of the terms.
  void write(JobRecord& record) const;

  /// Those of another job.
  void take_terms(const Admission& other);

  uint64_t host_bytes() const { return host_bytes_; }
  void set_host_bytes(uint64_t bytes) { host_bytes_ = bytes; }
  /// With parameters of tier host a job is as one of "none", whatever it asked for: its commits are
  /// in memory.
  const Durability& durability() const { return durability_; }
  const Durability& durability_asked() const { return durability_asked_; }
  void set_durability(Durability durability) {
    durability_asked_ = durability;
    settle_host_tier();
  }
  /// Parameters were declared or restored, or snapshots came or went.
  void settle_host_tier();
  /// Its share of what other jobs want too: devices and workers.
  JobWeight weight() const { return weight_; }
  void set_weight(JobWeight weight);

  /// Bytes of the largest shard that fits.
  uint64_t arena_bytes_max() const;
  /// Whether the quotas hold the job with `wanted` in the place of what it has now.
  Status check(const DeclaredSpace& wanted) const;
  /// The same with optimizer state in `bucket`, and with maxima if asked. Tier host then has the
  /// memory for it.
  Status make_room_for_state(const Bucket& bucket, bool with_maxima) const;
  /// How many more bytes of the disk quota the job would need with optimizer state and maxima in
  /// all of these buckets; some may have them. make_room_for_state() asks for as many, bucket by
  /// bucket, so blobs of this size keep the room.
  uint64_t bytes_of_maxima(const std::set<uint32_t>& buckets) const;
  /// Whether the quotas hold the job with `wanted`. Tier host then has the memory for it.
  Status make_room(const DeclaredSpace& wanted) const;
  /// Gives tier host its memory, if the host quota holds it beside what training works in.
  Status reserve_host(const DeclaredSpace& wanted) const;
  /// Whether the quotas hold `more` snapshots beside those that the job has.
  Status check_snapshots(const SnapshotSpace& more) const;
  /// The same for one snapshot of all that the job may have by now, before any of it is written.
  Status check_next_snapshot() const;
  /// The part of a host quota of such segments that `declared` needs; nothing without tier host.
  static HostNeeded host_needed(const DeclaredSpace& declared, uint64_t segment_bytes);
  /// From now on it has these as well.
  void add_snapshots(const SnapshotSpace& more);
  void remove_snapshots(const SnapshotSpace& less);
  /// The part of nvme_bytes that all of its shards need, written and updated.
  SpaceNeeded space_needed() const;
  /// Bytes of the catalogue, on disk and as the next commit writes it, side by side.
  uint64_t metadata_bytes() const;
  /// Bytes of the next one, in whole blocks.
  uint64_t catalogue_bytes() const { return catalogue_bytes(parts_.shards.declared()); }
  /// Tells the quota what metadata_bytes() is. A job that was admitted when catalogues were in no
  /// quota, and that has declared more than its quota holds with them, keeps all for its state: it
  /// trains on.
  void reserve_metadata();
  /// A step updates it, or somebody writes its moments, whatever was declared.
  void begin_updates(Bucket& bucket, bool with_maxima = false);
  /// Whether all gradients fit beside the largest bucket's parameters.
  bool gradients_fit() const;
  /// The bytes of all gradients, in whole blocks; 0 where they fit.
  uint64_t gradient_bytes_to_spill() const {
    return gradients_fit() ? 0 : parts_.shards.sums().gradient_bytes();
  }

 private:
  uint64_t catalogue_bytes(const DeclaredSpace& declared) const;
  /// Adds to `wanted` what the bucket has not begun: optimizer state, and maxima as well.
  static void add_state(DeclaredSpace& wanted, const Bucket& bucket, bool with_maxima);
  /// Bytes that the arena has at most beside the tier host of `declared`.
  uint64_t arena_bytes_beside(const DeclaredSpace& declared) const;
  SpaceNeeded space_needed(const DeclaredSpace& declared, const SnapshotSpace& snapshots) const;
  Status check(const DeclaredSpace& wanted,
               const SnapshotSpace& snapshots,
               const SpaceNeeded& needed) const;

  const Parts parts_;
  uint64_t host_bytes_ = 0;
  Durability durability_asked_;
  Durability durability_;
  JobWeight weight_;
};

}  // namespace memd
