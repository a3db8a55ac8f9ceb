// A job's shards, the buckets that its parameters lie in, and an entry for each piece of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "store/cache/bucket.h"
#include "store/cache/entry.h"
#include "store/cache/entry_table.h"
#include "store/cache/free_ids.h"
#include "store/cache/labelled_specs.h"
#include "store/cache/lease_request.h"
#include "store/cache/rank_sums.h"
#include "store/cache/shard.h"
#include "store/cache/shard_ids.h"
#include "store/cache/shard_label.h"
#include "store/cache/shard_names.h"
#include "store/cache/shard_sums.h"
#include "store/format/catalogue.h"
#include "store/space/declared_space.h"
#include "store/space/job_space.h"

namespace memd {

/// A job as it would be with a declaration. Nothing of the job has changed.
struct Declaration {
  /// Parameters that will lie in one bucket, and where in it.
  struct PlannedBucket {
    DType dtype = DType::float32;
    Tier tier = Tier::nvme;
    uint64_t element_count = 0;
    bool is_updated = false;
    bool needs_maxima = false;
    std::vector<const ShardSpec*> specs;
    std::vector<uint64_t> element_offsets;
  };

  /// Shards that are new; the specs belong to the caller.
  std::vector<const ShardSpec*> parameters;
  std::vector<const ShardSpec*> bytes;
  std::vector<PlannedBucket> plan;
  /// Buckets that steps will update from now on.
  std::set<uint32_t> updates_begun;
  /// Buckets that need maxima from now on.
  std::set<uint32_t> maxima_begun;
  /// Shards that the job has, by their ids: whether they keep a maximum from now on.
  std::map<uint32_t, bool> maxima_changed;
  /// Needs of all shards, those that are new included.
  DeclaredSpace wanted;
  /// It needs more than what an earlier daemon accepted.
  bool asks_for_more = false;
};

/// Owned by the Job; the server thread calls everything; nothing blocks. Ids count from 0, and that
/// of a shard that was removed is given again.
class Shards {
 public:
  explicit Shards(std::string job_name) : job_name_(std::move(job_name)) {}
  Shards(const Shards&) = delete;
  Shards& operator=(const Shards&) = delete;

  Shard& operator[](size_t shard_id) { return shards_[shard_id]; }
  const Shard& operator[](size_t shard_id) const { return shards_[shard_id]; }
  /// Every id is below it; a shard with such an id may be `deleted`.
  size_t size() const { return shards_.size(); }
  /// Shards there are.
  size_t count() const { return names_.size(); }
  auto begin() { return shards_.begin(); }
  auto end() { return shards_.end(); }
  auto begin() const { return shards_.begin(); }
  auto end() const { return shards_.end(); }
  std::optional<uint32_t> find(std::string_view name) const { return names_.find(name); }
  uint32_t id_of(const Shard& shard) const {
    return static_cast<uint32_t>(&shard - shards_.data());
  }
  /// `name` is a shard's.
  uint32_t id_of(std::string_view name) const { return names_.at(name); }
  std::vector<uint32_t> ids_in_order() const;

  Bucket& bucket(size_t index) { return buckets_[index]; }
  const Bucket& bucket(size_t index) const { return buckets_[index]; }
  std::deque<Bucket>& buckets() { return buckets_; }
  const std::deque<Bucket>& buckets() const { return buckets_; }
  /// nullptr where there is none with that id.
  Entry* entry(size_t entry_id) const { return entries_[entry_id]; }
  const EntryTable& entries() const { return entries_; }
  /// nullptr where there is no such shard, it has no gradient, or the rank has never had a sum of
  /// it.
  Entry* find_entry(uint32_t shard_id, Part part, uint32_t rank = 0) const;
  RankSums& rank_sums() { return rank_sums_; }
  /// Shards that lie in the entry.
  uint32_t shard_count(const Entry& entry) const;
  /// `visit(shard_id, index in the entry's slot)`, for an entry of values.
  template <typename Visit>
  void for_each_shard(const Entry& entry, const Visit& visit) const {
    if (entry.kind() == EntryKind::gradient) return;
    if (entry.kind() == EntryKind::bytes) return visit(entry.owner(), 0u);
    const ShardIds& ids = buckets_[entry.owner()].shards;
    for (uint32_t index = 0; index < ids.size(); ++index) visit(ids[index], index);
  }
  /// Shards with bytes in the entry's replica `replica`, or in the rest of that tile.
  std::vector<uint32_t> shards_in(const Entry& entry, size_t replica) const;
  /// "job/name" or, for gradients, "job/name gradient"; for a bucket, its first shard.
  std::string describe(const Entry& entry) const;
  /// The same of one replica: "job/name", and how many other shards have bytes in it.
  std::string describe(const Entry& entry, size_t replica) const;
  /// Every extent that the shards' state lies in.
  void for_each_replica(const JobSpace::Visit& visit);
  JobSpace::Walk each_replica() {
    return [this](const JobSpace::Visit& visit) { for_each_replica(visit); };
  }

  /// Refused where a shard is bad, or held with another shape or dtype. `bytes_max`: a shard has
  /// at most so many.
  Result<Declaration> plan(const std::vector<ShardSpec>& specs, uint64_t bytes_max) const;
  /// Makes the planned shards known, in the order of their ids, and takes their labels from
  /// `declared`, whose specs were planned. Shards that the job has stay as they are.
  void add(const Declaration& declaration, LabelledSpecs& declared);
  /// Adds what a catalogue names; reserves no extent. `given_ids`: of the record's shards, in any
  /// order, or empty: counted from 0. There is no shard before.
  void restore(const JobRecord& record, const std::vector<uint32_t>& given_ids);
  /// Forgets a blob that has no slot and no extent any more. `known_to`: see FreeIds.
  void remove(uint32_t shard_id, std::set<uint64_t> known_to);
  FreeIds& free_ids() { return free_ids_; }
  /// At an adoption: those below `end` were given, if no shard has them now.
  void note_given_ids(uint32_t end);
  /// Steps update the bucket from now on, whatever was declared, or one of its shards keeps a
  /// maximum as well; false where all of that was so before.
  bool begin_updates(Bucket& bucket, bool with_maxima = false);
  /// Fills in `shards` and `buckets`.
  void write(JobRecord& into) const;

  const DeclaredSpace& declared() const { return declared_; }
  const ShardSums& sums() const { return sums_; }

 private:
  Status check(const ShardSpec& spec, uint64_t bytes_max) const;
  void add_parameters(const Declaration& declaration, LabelledSpecs& declared);
  void add_bytes(const ShardSpec& spec, ShardLabel label);
  uint32_t add_shard(const ShardSpec& spec, ShardLabel label);
  void close_bucket(Bucket bucket, ShardIds ids);
  Entry* add_entry(const Entry::Shape& shape);
  void restore_shard(const ShardRecord& in, std::vector<std::vector<uint32_t>>& shards_of);
  void restore_bucket(const BucketRecord& in, std::vector<uint32_t> ids);

  const std::string job_name_;
  std::vector<Shard> shards_;
  FreeIds free_ids_;
  ShardNames names_{[this](uint32_t shard_id) { return shards_[shard_id].name(); }};
  // A deque: tasks in flight point to buckets while others are added.
  std::deque<Bucket> buckets_;
  /// Buckets that an earlier daemon made.
  size_t restored_bucket_count_ = 0;
  EntryTable entries_;
  RankSums rank_sums_{[this](uint32_t bucket) {
    const Entry& gradient = *buckets_[bucket].gradient;
    return add_entry({.id = 0,
                      .kind = EntryKind::gradient,
                      .bytes = gradient.bytes(),
                      .stride_bytes = gradient.stride_bytes(),
                      .owner = bucket,
                      .tier = Tier::nvme,
                      .life = EntryLife::rank});
  }};
  DeclaredSpace declared_;
  ShardSums sums_;
};

/// As Shards::find_entry(), of what is leased.
inline Entry* find_entry(const Shards& shards, const LeaseRequest& request) {
  return shards.find_entry(request.shard_id, request.part, request.rank);
}

}  // namespace memd
