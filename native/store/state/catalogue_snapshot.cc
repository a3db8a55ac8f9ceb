#include "store/state/catalogue_snapshot.h"

#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"

namespace memd {
namespace {

#ifdef MEMD_COUNT_BYTES
// With larger jobs the tests would take too long.
constexpr size_t kComparedShardsMax = 4096;
#endif

// A turn looks at so many shards at most for each KiB that it may write.
constexpr size_t kLookBytes = 8;

}  // namespace

void CatalogueSnapshot::begin(bool for_disk) {
  MEMD_CHECK(state_ == State::none);
  state_ = State::writing;
  is_for_disk_ = for_disk;
  job_ = recorder_.fields();
  bucket_count_ = shards_.buckets().size();
  ids_end_ = static_cast<uint32_t>(shards_.size());
  shard_count_ = static_cast<uint32_t>(shards_.count());
  const uint64_t bytes_expected = recorder_.catalogue_bytes();
  encoder_ = {};
  encoder_.begin(job_, static_cast<uint32_t>(bucket_count_), bytes_expected);
  const DeclaredSpace& declared = shards_.declared();
  if (is_for_disk_) {
    durable_ = DurableJob(job_,
                          {.ids_end = ids_end_,
                           .buckets = bucket_count_,
                           .extents = declared.extent_count(),
                           .blobs = declared.blob_count()});
  }
  bucket_ = tile_ = 0;
  shard_id_ = 0;
  is_in_shard_ = false;
  if (bucket_count_ == 0) encoder_.begin_shards(shard_count_);
#ifdef MEMD_COUNT_BYTES
  const WorkerBytes not_the_turns;
  expected_.clear();
  if (shard_count_ <= kComparedShardsMax) expected_ = encode(recorder_.record());
#endif
}

void CatalogueSnapshot::write(size_t bytes_max) {
  for (size_t bytes = 0; bytes < bytes_max && is_writing();) bytes += write_next();
}

size_t CatalogueSnapshot::write_next() {
  const size_t before = encoder_.size();
  size_t looked_bytes = 0;
  if (bucket_ < bucket_count_) {
    looked_bytes = write_tile();
  } else if (shard_id_ < ids_end_) {
    looked_bytes = write_shard();
  } else {
    end_writing();
  }
  return encoder_.size() - before + looked_bytes;
}

size_t CatalogueSnapshot::write_tile() {
  const Bucket& bucket = shards_.bucket(bucket_);
  size_t looked_bytes = 0;
  if (tile_ == 0) {
    // A first writeback that is half done leaves no value on disk yet.
    is_bucket_on_disk_ = bucket.value->has_replica();
    looked_bytes = bucket.tile_count() * kLookBytes;
    encoder_.begin_bucket(bucket.record(), static_cast<uint32_t>(bucket.tile_count()));
  }
  if (tile_ < bucket.tile_count()) {
    const TileRecord tile{
        .parameter = is_bucket_on_disk_ ? bucket.value->replicas()[tile_].extent() : ExtentRecord{},
        .rest = bucket.rest[tile_].extent()};
    encoder_.put(tile);
    if (is_for_disk_) durable_.add_tile(tile);
    ++tile_;
  }
  if (tile_ == bucket.tile_count()) {
    if (is_for_disk_) durable_.end_bucket();
    tile_ = 0;
    if (++bucket_ == bucket_count_) encoder_.begin_shards(shard_count_);
  }
  return looked_bytes;
}

size_t CatalogueSnapshot::write_shard() {
  const Kept* const kept = find_kept(shard_id_);
  size_t looked_bytes = 0;
  if (!is_in_shard_) {
    const bool exists = kept == nullptr ? !shards_[shard_id_].deleted : kept->record.has_value();
    if (!exists) {
      ++shard_id_;
      return kLookBytes;
    }
    if (kept == nullptr) looked_bytes = shards_[shard_id_].value->replicas().size() * kLookBytes;
    begin_shard(kept);
  }
  if (extent_ < extent_count_) {
    const ExtentRecord extent = kept == nullptr
                                    ? shards_[shard_id_].value->replicas()[extent_].extent()
                                    : kept->record->extents[extent_];
    encoder_.put(extent);
    if (is_for_disk_) durable_.add_extent(extent);
    ++extent_;
  }
  if (extent_ == extent_count_) end_shard(kept);
  return looked_bytes;
}

void CatalogueSnapshot::begin_shard(const Kept* kept) {
  is_in_shard_ = true;
  extent_ = 0;
  ShardRecord label;
  if (kept == nullptr) {
    label = shards_[shard_id_].record_without_extents();
    extent_count_ = shards_[shard_id_].has_extents()
                        ? static_cast<uint32_t>(shards_[shard_id_].value->replicas().size())
                        : 0;
  }
  const ShardRecord& shard = kept == nullptr ? label : *kept->record;
  if (kept != nullptr) extent_count_ = static_cast<uint32_t>(shard.extents.size());
  marks_ = {.written = shard.written,
            .keeps_maximum = shard.keeps_maximum,
            .generation = shard.generation};
  encoder_.begin_shard(shard, extent_count_);
}

void CatalogueSnapshot::end_shard(const Kept* kept) {
  is_in_shard_ = false;
  ++shard_id_;
  if (!is_for_disk_) return;
  if (kept != nullptr && kept->is_removed) {
    durable_.add_gone(*kept->record);
  } else {
    durable_.add_shard(shard_id_ - 1, marks_);
  }
}

void CatalogueSnapshot::end_writing() {
  encoder_.end(job_);
  kept_.clear();
  state_ = State::whole;
#ifdef MEMD_COUNT_BYTES
  if (expected_.empty()) return;
  const WorkerBytes not_the_turns;
  JobEncoder copy = encoder_;
  std::vector<std::byte> whole = copy.take();
  JobEncoder::seal(whole);
  MEMD_CHECK(whole == expected_);  // else something changed and did not say so before
#endif
}

DurableJob CatalogueSnapshot::end() {
  MEMD_CHECK(state_ == State::whole);
  state_ = State::none;
  return std::exchange(durable_, {});
}

void CatalogueSnapshot::abandon() {
  state_ = State::none;
  encoder_ = {};
  durable_ = {};
  kept_.clear();
}

// ---- What happens meanwhile ---------------------------------------------------------------------

bool CatalogueSnapshot::is_unwritten(uint32_t shard_id) const {
  return is_writing() && shard_id >= shard_id_ && shard_id < ids_end_;
}

const CatalogueSnapshot::Kept* CatalogueSnapshot::find_kept(uint32_t shard_id) const {
  const auto found = kept_.find(shard_id);
  return found == kept_.end() ? nullptr : &found->second;
}

void CatalogueSnapshot::before_change(uint32_t shard_id) {
  if (!is_unwritten(shard_id) || kept_.contains(shard_id)) return;
  kept_[shard_id] = {.record = shards_[shard_id].record(), .is_removed = false};
}

void CatalogueSnapshot::before_removal(uint32_t shard_id) {
  if (state_ == State::none) return;
  if (!is_unwritten(shard_id)) return durable_.keep(shard_id, shards_[shard_id].label_record());
  before_change(shard_id);
  kept_.at(shard_id).is_removed = true;
}

void CatalogueSnapshot::added(uint32_t shard_id) {
  if (is_unwritten(shard_id)) kept_.try_emplace(shard_id);
}

}  // namespace memd
