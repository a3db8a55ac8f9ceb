#include "store/space/declared_space.h"

#include <algorithm>

#include "base/status.h"
#include "base/units.h"
#include "store/format/encoding.h"
#include "store/format/tile_rest.h"

namespace memd {
namespace {

// As encode(JobRecord) writes them; catalogue_test.cc compares.
constexpr uint64_t kExtentBytes = kExtentEncodedBytes;
constexpr uint64_t kTileBytes = 2 * kExtentBytes;
constexpr uint64_t kBucketBytes = 13;
constexpr uint64_t kShardBytes = 14;          // without its name and shape
constexpr uint64_t kShardInBucketBytes = 13;  // bucket, offset, whether it is written
constexpr uint64_t kShardExtentsBytes = 4;    // how many there are
constexpr uint64_t kDimensionBytes = 8;

// Shard, two entries, its places in the tables of names and ids, what the last commit says of it;
// and its label three times: here, and in the ledger, whose two places take turns.
constexpr uint64_t kShardMemoryBytes = 512;
constexpr uint64_t kLabelCount = 3;

uint64_t label_bytes(const DeclaredSpace::Label& label) {
  return label.name_bytes + label.dimension_count * kDimensionBytes;
}

uint64_t catalogue_bytes_of(const DeclaredSpace::Label& label) {
  const uint64_t rest_bytes = label.is_parameter
                                  ? kShardInBucketBytes
                                  : kShardExtentsBytes + label.extent_count * kExtentBytes;
  return kShardBytes + label_bytes(label) + rest_bytes;
}

uint64_t memory_bytes_of(const DeclaredSpace::Label& label) {
  return kShardMemoryBytes + kLabelCount * label_bytes(label);
}

struct BucketBytes {
  uint64_t values = 0;
  uint64_t states = 0;  // values and the rest
  uint64_t tile_count = 0;
  uint64_t tile_bytes_max = 0;
};

BucketBytes bytes_of(DType dtype, uint64_t element_count, bool keeps_maxima = false) {
  BucketBytes sum;
  sum.tile_count = divide_up(element_count, kTileElements);
  const auto add = [&](uint64_t elements, uint64_t count) {
    const uint64_t value_bytes = align_up(elements * dtype_bytes(dtype), kBlockBytes);
    const uint64_t state_bytes = value_bytes + rest_bytes_of(dtype, elements, keeps_maxima);
    sum.values += count * value_bytes;
    sum.states += count * state_bytes;
    sum.tile_bytes_max = std::max(sum.tile_bytes_max, state_bytes);
  };
  if (element_count >= kTileElements) add(kTileElements, element_count / kTileElements);
  if (element_count % kTileElements != 0) add(element_count % kTileElements, 1);
  return sum;
}

}  // namespace

uint64_t DeclaredSpace::on_disk_bytes(uint64_t bytes) { return align_up(bytes, kBlockBytes); }

void DeclaredSpace::add_label(const Label& label) {
  catalogue_bytes_ += catalogue_bytes_of(label);
  extent_count_ += label.extent_count;
  blob_count_ += label.is_parameter ? 0 : 1;
  memory_bytes_ += memory_bytes_of(label);
}

void DeclaredSpace::remove_label(const Label& label) {
  catalogue_bytes_ -= catalogue_bytes_of(label);
  extent_count_ -= label.extent_count;
  blob_count_ -= label.is_parameter ? 0 : 1;
  memory_bytes_ -= memory_bytes_of(label);
}

void DeclaredSpace::add_bucket(DType dtype, uint64_t element_count, bool is_updated, Tier tier) {
  const BucketBytes bucket = bytes_of(dtype, element_count);
  catalogue_bytes_ += kBucketBytes + bucket.tile_count * kTileBytes;
  extent_count_ += 2 * bucket.tile_count;
  value_bytes_max_ = std::max(value_bytes_max_, bucket.values);
  (tier == Tier::host ? host_tier_bytes_ : kept_value_bytes_) += bucket.values;
  if (tier == Tier::host)
    host_tile_bytes_max_ = std::max(host_tile_bytes_max_, bucket.tile_bytes_max);
  if (is_updated) begin_updates(dtype, element_count, tier);
}

void DeclaredSpace::begin_updates(DType dtype, uint64_t element_count, Tier tier) {
  const BucketBytes bucket = bytes_of(dtype, element_count);
  if (tier == Tier::host) {
    host_tier_bytes_ += bucket.states - bucket.values;
  } else {
    kept_value_bytes_ -= bucket.values;
    updated_bytes_ += bucket.states;
    tile_count_ += bucket.tile_count;
    tile_bytes_max_ = std::max(tile_bytes_max_, bucket.tile_bytes_max);
  }
  // A gradient has its parameter's dtype.
  gradient_bytes_ += bucket.values;
  gradient_bytes_max_ = std::max(gradient_bytes_max_, bucket.values);
}

void DeclaredSpace::begin_maxima(DType dtype, uint64_t element_count, Tier tier) {
  const BucketBytes with = bytes_of(dtype, element_count, true);
  const uint64_t more_bytes = with.states - bytes_of(dtype, element_count).states;
  const bool is_host = tier == Tier::host;
  (is_host ? host_tier_bytes_ : updated_bytes_) += more_bytes;
  uint64_t& tile_bytes_max = is_host ? host_tile_bytes_max_ : tile_bytes_max_;
  tile_bytes_max = std::max(tile_bytes_max, with.tile_bytes_max);
}

SpaceNeeded DeclaredSpace::needed(const Durability& durability,
                                  uint64_t arena_bytes_max,
                                  uint64_t tile_count_replaced) const {
  SpaceNeeded needed;
  needed.updated_once_bytes = updated_bytes_;
  // "none" overwrites what the last sync left; the others keep it until the next commit on disk.
  needed.copies = durability.is_none() ? 1 : 2;
  // A step in memory cannot be undone, so that a tile's old extents go as soon as it has new ones.
  if (durability.is_in_memory()) needed.replaced_bytes = replaced_bytes(tile_count_replaced);
  // Beside the largest, which is being written. As Job::gradients_fit().
  const uint64_t wanted_bytes = gradient_bytes_ + gradient_bytes_max_;
  if (wanted_bytes > arena_bytes_max) {
    needed.gradient_bytes = std::min(wanted_bytes - arena_bytes_max, gradient_bytes_);
  }
  needed.kept_value_bytes = kept_value_bytes_;
  needed.blob_bytes = blob_bytes_;
  return needed;
}

uint64_t DeclaredSpace::replaced_bytes(uint64_t tile_count_replaced) const {
  return std::min(tile_count_, tile_count_replaced) * tile_bytes_max_;
}

std::string SpaceNeeded::text() const {
  std::string text;
  const auto add = [&text](uint64_t count, uint64_t bytes, const char* what) {
    if (count * bytes == 0) return;
    if (!text.empty()) text += " + ";
    if (count != 1) text += concat(count, " x ");
    text += concat(bytes, " (", what, ")");
  };
  add(copies, updated_once_bytes, "parameters and their optimizer state");
  add(1, replaced_bytes, "tiles that are being replaced");
  add(1, gradient_bytes, "gradients that host_bytes does not hold");
  add(1, kept_value_bytes, "parameters that no optimizer updates");
  add(1, blob_bytes, "blobs and buffers");
  add(1, host_tier_bytes, "tier host, as the last snapshot wrote it");
  add(1, catalogue_bytes, "the catalogue, old and new");
  add(1, snapshot_bytes, "snapshots");
  return text;
}

}  // namespace memd
