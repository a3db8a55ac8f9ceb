// Space that a job's shards need of its quotas once all of them are written and updated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "store/format/catalogue.h"
#include "store/format/durability.h"

namespace memd {

/// Bytes of the disk quota, a field for each term.
struct SpaceNeeded {
  uint64_t updated_once_bytes = 0;  // value and optimizer state of parameters that steps update
  uint64_t copies = 0;              // of those, that the durability needs side by side
  uint64_t replaced_bytes = 0;      // tiles whose new extents come before the old ones go
  uint64_t gradient_bytes = 0;      // those that the arena does not hold
  uint64_t kept_value_bytes = 0;    // of parameters that no step updates
  uint64_t blob_bytes = 0;          // and buffers, in tier nvme
  uint64_t host_tier_bytes = 0;     // of tier host, as the last snapshot wrote it
  uint64_t catalogue_bytes = 0;     // the old one and the new one
  uint64_t snapshot_bytes = 0;      // that snapshots keep, as if each shared nothing

  uint64_t total() const {
    return copies * updated_once_bytes + replaced_bytes + gradient_bytes + kept_value_bytes +
           blob_bytes + host_tier_bytes + catalogue_bytes + snapshot_bytes;
  }
  /// The terms that are not 0, for an error.
  std::string text() const;
};

/// Sums over the shards of one job. Owned by the Job, on its thread; nothing here can fail.
class DeclaredSpace {
 public:
  struct Label {
    size_t name_bytes = 0;
    size_t dimension_count = 0;
    bool is_parameter = false;
    uint64_t extent_count = 0;  // of a blob or buffer that is written
  };

  void add_label(const Label& label);
  void remove_label(const Label& label);
  void add_bucket(DType dtype, uint64_t element_count, bool is_updated, Tier tier = Tier::nvme);
  /// A bucket that was added without `is_updated` has it now.
  void begin_updates(DType dtype, uint64_t element_count, Tier tier = Tier::nvme);
  /// A bucket that is updated has maxima (max_exp_avg_sq) from here on.
  void begin_maxima(DType dtype, uint64_t element_count, Tier tier = Tier::nvme);
  void add_blob(uint64_t bytes) { blob_bytes_ += on_disk_bytes(bytes); }
  void remove_blob(uint64_t bytes) { blob_bytes_ -= on_disk_bytes(bytes); }

  /// Without the catalogue, of which the Job knows more. `tile_count_replaced`: as many tiles at
  /// most have new extents beside their old ones.
  SpaceNeeded needed(const Durability& durability,
                     uint64_t arena_bytes_max,
                     uint64_t tile_count_replaced) const;
  /// The new extents of at most so many tiles, while their old ones stay.
  uint64_t replaced_bytes(uint64_t tile_count_replaced) const;
  /// Bytes of the encoded JobRecord, when everything is written, without the job's name.
  uint64_t catalogue_bytes() const { return catalogue_bytes_; }
  /// Counts in a catalogue when everything is written: extents, and blobs and buffers.
  uint64_t extent_count() const { return extent_count_; }
  uint64_t blob_count() const { return blob_count_; }
  /// The largest state of a tile of a bucket that is updated.
  uint64_t tile_bytes_max() const { return tile_bytes_max_; }
  /// Some parameter is of tier host: what is newer than the last snapshot is in memory alone.
  bool has_host_tier() const { return host_tier_bytes_ != 0; }
  /// Parameters of tier host and their optimizer state, which stay in memory.
  uint64_t host_tier_bytes() const { return host_tier_bytes_; }
  /// The values of the largest bucket.
  uint64_t value_bytes_max() const { return value_bytes_max_; }
  /// The largest state of one of their tiles.
  uint64_t host_tile_bytes_max() const { return host_tile_bytes_max_; }
  /// Bytes that the daemon keeps for the shards beside the pool: records, labels and their copies
  /// in the ledger. bench_growth.py measures them; this is above.
  uint64_t memory_bytes() const { return memory_bytes_; }

 private:
  static uint64_t on_disk_bytes(uint64_t bytes);

  uint64_t updated_bytes_ = 0;
  uint64_t kept_value_bytes_ = 0;
  uint64_t blob_bytes_ = 0;
  uint64_t gradient_bytes_ = 0;  // of buckets that are updated
  uint64_t gradient_bytes_max_ = 0;
  uint64_t tile_count_ = 0;      // of buckets that are updated
  uint64_t tile_bytes_max_ = 0;  // with its optimizer state
  uint64_t value_bytes_max_ = 0;
  uint64_t host_tier_bytes_ = 0;
  uint64_t host_tile_bytes_max_ = 0;
  uint64_t catalogue_bytes_ = 0;
  uint64_t extent_count_ = 0;
  uint64_t blob_count_ = 0;
  uint64_t memory_bytes_ = 0;
};

}  // namespace memd
