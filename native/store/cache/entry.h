// The bytes of one bucket, gradient or blob in the host tier, and where they lie on disk.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/units.h"
#include "plan/next_use_order.h"
#include "ring/layout.h"
#include "store/format/catalogue.h"
#include "store/journal/residency.h"
#include "store/space/job_space.h"
#include "store/space/replica.h"

namespace memd {

/// Brought up by a plan. `late`: somebody asked before it was there.
enum class Prefetched : uint8_t { no, unused, late };

/// A place in the arena with one pin counter for each of the entry's shards.
struct Slot {
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  /// While it is an entry's `pending`: whose overwrite lease writes there.
  uint64_t pending_session = 0;
  uint32_t pin_first = 0;
  /// Pins of the daemon itself (gRPC streams), beside those of the sessions; same encoding.
  std::vector<uint32_t> service_pins;
  /// The shard table may name it: whoever is to free, change or replace it withdraws it first.
  bool is_published = false;

  uint32_t pin_count() const { return static_cast<uint32_t>(service_pins.size()); }
};

/// The unit of residency, eviction and fetching. Owned by its Job; changed only on the server
/// thread; workers may read and write the bytes of its slot while task_count() is not 0.
/// Evictable: clean, no pins, no tasks. No method blocks.
class Entry {
 public:
  struct Shape {
    uint32_t id = 0;
    EntryKind kind = EntryKind::bytes;
    uint64_t bytes = 0;         // without padding
    uint64_t stride_bytes = 0;  // of the entry that one replica covers; a power of two
    uint32_t owner = 0;         // index of its bucket, or id of its shard
    Tier tier = Tier::nvme;
  };

  explicit Entry(const Shape& shape)
      : bytes(shape.bytes),
        replicas(divide_up(shape.bytes, shape.stride_bytes)),
        id(shape.id),
        owner(shape.owner),
        kept_owner(shape.owner),
        kind(shape.kind),
        tier(shape.tier),
        stride_log2_(std::countr_zero(shape.stride_bytes) & 63) {
    MEMD_CHECK(std::has_single_bit(shape.stride_bytes));
  }

  Residency residency() const { return residency_; }
  /// The one place where a residency changes; CHECKs that it is `from` and that the edge exists.
  void move(Residency from, Residency to);

  bool is_resident() const {
    return residency_ == Residency::clean || residency_ == Residency::dirty;
  }
  /// Work that uses its bytes or its place: it is neither written nor evicted meanwhile.
  uint32_t task_count() const { return task_count_; }
  /// Within one call. Work that lasts begins with Residencies::begin_task(), which wakes whoever
  /// waits for its end.
  void add_task() { ++task_count_; }
  void remove_task() {
    MEMD_CHECK(task_count_ != 0);
    --task_count_;
  }
  EvictionPrice price() const {
    return residency_ == Residency::dirty ? EvictionPrice::dirty : EvictionPrice::clean;
  }
  /// All of its bytes are on disk (as of their last writeback, which may have failed half way).
  bool has_replica() const {
    return !replicas.empty() &&
           std::all_of(replicas.begin(), replicas.end(), [](const Replica& replica) {
             return replica.exists();
           });
  }
  /// Bytes of replica `index`, in whole blocks.
  uint32_t replica_bytes(size_t index) const {
    const uint64_t begin = index * stride_bytes();
    return static_cast<uint32_t>(align_up(std::min(bytes - begin, stride_bytes()), kBlockBytes));
  }
  uint64_t stride_bytes() const { return uint64_t{1} << stride_log2_; }
  SpaceUse use() const {
    return kind == EntryKind::gradient ? SpaceUse::gradient : SpaceUse::state;
  }

  const uint64_t bytes;

  std::unique_ptr<Slot> slot;
  /// Written by an overwrite lease; takes the slot's place once the writer gave it back.
  std::unique_ptr<Slot> pending;
  ReplicaList replicas;

  const uint32_t id;
  uint32_t owner;
  /// The owner of the bytes as of the last commit, for the ledger: a staged buffer takes the
  /// other's place only then.
  uint32_t kept_owner;

 private:
  uint32_t task_count_ = 0;

 public:
  // Steps that were accepted and will replace it: until then its session leases it by request.
  uint32_t steps_before = 0;

  const EntryKind kind : 2;
  const Tier tier : 2;
  bool is_in_step : 1 = false;  // a step that runs reads or replaces it
  // A read of it shows what a step made, before that is committed.
  bool is_uncommitted : 1 = false;
  bool prefetch_failed : 1 = false;  // not tried again before it was used
  Prefetched prefetched : 2 = Prefetched::no;

 private:
  Residency residency_ : 3 = Residency::absent;
  const uint8_t stride_log2_ : 6;
};

// A parameter that has a bucket of its own has two, and bench_growth.py counts the bytes of each:
// large members first, so that no bytes are lost between them.
static_assert(sizeof(Entry) <= 72);

}  // namespace memd
