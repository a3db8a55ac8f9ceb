// A tensor that a job keeps here, and how it is declared.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/cache/entry.h"
#include "store/cache/shard_label.h"
#include "store/format/catalogue.h"
#include "store/journal/contributors.h"

namespace memd {

struct ShardSpec {
  std::string name;
  ShardKind kind = ShardKind::unspecified;
  DType dtype = DType::unspecified;
  Tier tier = Tier::nvme;
  std::vector<uint64_t> shape;
  /// A parameter needs no room for an optimizer's state and for a step's second copy, until it is
  /// declared without this or a step updates it.
  bool value_only = false;
  /// A parameter's optimizer state has max_exp_avg_sq. Said without `value_only`, it holds for what
  /// has had no update; later only new moments change it.
  bool keeps_maximum = false;
};

struct ShardInfo {
  uint32_t shard_id = 0;
  ShardSpec spec;
  uint64_t generation = 0;
  bool written = false;
  uint64_t bytes = 0;
  bool lost = false;
  bool unreadable = false;  // the device failed its last read; the next use tries again
};

struct Shard {
  ShardLabel label;
  uint64_t bytes = 0;
  uint64_t generation = 0;
  // Contributors of the gradient that waits for a step; empty: there is none.
  Contributors contributors;
  Entry* value = nullptr;
  // A parameter's place in its bucket.
  uint64_t element_offset = 0;
  uint32_t bucket = 0;
  uint32_t index_in_bucket = 0;

  ShardKind kind = ShardKind::unspecified;
  DType dtype = DType::unspecified;
  Tier tier = Tier::nvme;
  bool written = false;
  bool deleted = false;
  // Its update can be leased, and the next commit counts it.
  bool is_uncommitted = false;
  // The bucket's extents hold bytes that were written to it.
  bool is_on_disk = false;
  // Its gradient was leased ahead, and nobody has said since that it is there.
  bool is_gradient_unsure : 1 = false;
  // Its row of the shard table says so: the value is leased without a request.
  bool is_published : 1 = false;
  // Its optimizer state has max_exp_avg_sq.
  bool keeps_maximum : 1 = false;

  std::string_view name() const { return label.name(); }
  ShardSpec spec() const {
    return {.name = std::string(name()),
            .kind = kind,
            .dtype = dtype,
            .tier = tier,
            .shape = label.shape(),
            .keeps_maximum = keeps_maximum};
  }
  /// The fields that never change.
  ShardRecord label_record() const;
  /// As a catalogue describes it now.
  ShardRecord record() const;
  /// The same without its extents, and whether it has any.
  ShardRecord record_without_extents() const;
  bool has_extents() const;
  /// Or an update of it is on its way.
  bool was_updated() const { return generation != 0 || contributors.is_sealed(); }
  uint64_t element_count() const { return bytes / dtype_bytes(dtype); }
  uint64_t offset_bytes() const { return element_offset * dtype_bytes(dtype); }
  /// Generation of the bytes that a lease shows.
  uint64_t leased_generation() const { return generation + (is_uncommitted ? 1 : 0); }
};

// A job has up to a million, and bench_growth.py counts the bytes of each: large members first, so
// that none are lost between them.
static_assert(sizeof(Shard) <= 64);

/// Bytes of a tensor; nothing where the product overflows or passes 2^48.
std::optional<uint64_t> tensor_bytes(const std::vector<uint64_t>& shape, DType dtype);
std::string shape_text(const std::vector<uint64_t>& shape);

}  // namespace memd
