// The bytes of one bucket, gradient or blob in the host tier, and where they lie on disk.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
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

/// An entry as plans see it: whether one has brought it up, and whether the last try failed.
/// Changed by the PrefetchWindow alone.
class EntryPrefetch {
 public:
  /// Brought up by a plan. `late`: somebody asked before it was there.
  enum class State : uint8_t { no, unused, late };

  State state() const { return state_; }
  void begin() { state_ = State::unused; }
  /// Somebody asks for it. True where that is the first one, and comes before any use.
  bool note_asked() {
    if (state_ != State::unused) return false;
    state_ = State::late;
    return true;
  }
  /// It is used, or gone. Returns the state that ends.
  State end() {
    const State was = state_;
    state_ = State::no;
    return was;
  }

  /// A plan does not try again before somebody has used the entry.
  bool has_failed() const { return has_failed_; }
  void note_read(bool is_ok) { has_failed_ = !is_ok; }
  void note_used() { has_failed_ = false; }

 private:
  State state_ : 2 = State::no;
  bool has_failed_ : 1 = false;
};

/// How long an entry is there. `rank`: a gradient of one rank, which RankSums knows, and nobody
/// once the daemon has ended. `session`: scratch, a blob that no commit knows (scratch_names.h).
enum class EntryLife : uint8_t { job, rank, session };

/// A place in the arena with one pin counter for each of the entry's shards.
struct Slot {
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  /// While it is an entry's `pending`: whose overwrite lease writes there.
  uint64_t pending_session = 0;
  uint32_t pin_first = 0;
  /// Pins of the daemon itself (gRPC streams), beside those of the sessions; same encoding.
  std::vector<uint32_t> service_pins;
  /// The writers among them: a lease of a bucket of thousands must not count them one by one.
  uint32_t service_writer_count = 0;
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
    EntryLife life = EntryLife::job;
  };

  explicit Entry(const Shape& shape)
      : bytes_(shape.bytes),
        replicas_(divide_up(shape.bytes, shape.stride_bytes)),
        id_(shape.id),
        owner_(shape.owner),
        kept_owner_(shape.owner),
        kind_(shape.kind),
        tier_(shape.tier),
        life_(shape.life),
        stride_log2_(std::countr_zero(shape.stride_bytes) & 63) {
    MEMD_CHECK(std::has_single_bit(shape.stride_bytes));
  }

  uint32_t id() const { return id_; }
  EntryKind kind() const { return kind_; }
  Tier tier() const { return tier_; }
  EntryLife life() const { return life_; }
  /// Without padding.
  uint64_t bytes() const { return bytes_; }

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

  // ---- Where its bytes are ----

  /// nullptr: nowhere in the arena.
  Slot* slot() const { return slot_.get(); }
  void place(std::unique_ptr<Slot> slot) {
    MEMD_CHECK(slot_ == nullptr);
    slot_ = std::move(slot);
  }
  std::unique_ptr<Slot> take_slot() { return std::move(slot_); }
  /// Returns the slot that the entry had; nullptr: none.
  std::unique_ptr<Slot> replace_slot(std::unique_ptr<Slot> by) {
    return std::exchange(slot_, std::move(by));
  }

  /// Written by an overwrite lease; takes the slot's place once the writer gave it back.
  Slot* pending() const { return pending_.get(); }
  void begin_pending(std::unique_ptr<Slot> slot) {
    MEMD_CHECK(pending_ == nullptr);
    pending_ = std::move(slot);
  }
  std::unique_ptr<Slot> take_pending() { return std::move(pending_); }
  /// The writer gave it back. Returns the slot whose place it takes; nullptr: there was none.
  std::unique_ptr<Slot> settle_pending() {
    pending_->pending_session = 0;
    return replace_slot(take_pending());
  }

  /// On disk.
  const ReplicaList& replicas() const { return replicas_; }
  /// For JobSpace, which fills and empties it. A tile of a parameter: see value_place().
  ReplicaPlace replica_place(size_t index, bool is_host = false) {
    return replicas_.place(index, is_host);
  }
  /// All of its bytes are on disk (as of their last writeback, which may have failed half way).
  bool has_replica() const {
    return !replicas_.empty() &&
           std::all_of(replicas_.begin(), replicas_.end(), [](const Replica& replica) {
             return replica.exists();
           });
  }
  /// HostTiles has every tile of it.
  void set_in_host_tiles() { is_in_host_tiles_ = true; }
  /// All of its bytes are outside of the arena as well: what has a slot may lose it.
  bool is_backed() const { return is_in_host_tiles_ || has_replica(); }
  /// Bytes of replica `index`, in whole blocks.
  uint32_t replica_bytes(size_t index) const {
    const uint64_t begin = index * stride_bytes();
    return static_cast<uint32_t>(align_up(std::min(bytes_ - begin, stride_bytes()), kBlockBytes));
  }
  uint64_t stride_bytes() const { return uint64_t{1} << stride_log2_; }

  // ---- Whose bytes they are ----

  /// Index of its bucket, or id of its shard.
  uint32_t owner() const { return owner_; }
  /// As of the last commit, for the ledger: a staged buffer takes the other's place only then.
  uint32_t kept_owner() const { return kept_owner_; }
  /// It has changed places with a staged buffer, which no commit knows yet.
  bool is_exchanged() const { return owner_ != kept_owner_; }
  void exchange_owner(Entry& other) { std::swap(owner_, other.owner_); }
  void keep_owner() { kept_owner_ = owner_; }

  // ---- Steps ----

  /// Some were accepted and will replace it: until then its session leases it by request.
  bool is_awaiting_steps() const { return steps_before_ != 0; }
  void accept_step() { ++steps_before_; }
  void end_accepted_step() { --steps_before_; }
  /// A step that runs reads or replaces it.
  bool is_in_step() const { return is_in_step_; }
  void begin_step() { is_in_step_ = true; }
  void end_step() {
    is_in_step_ = false;
    is_uncommitted_ = false;
  }
  /// A read of it shows what a step made, before that is committed.
  bool is_uncommitted() const { return is_uncommitted_; }
  void show_uncommitted() { is_uncommitted_ = true; }

  const EntryPrefetch& prefetch() const { return prefetch_; }

 private:
  friend class PrefetchWindow;  // changes prefetch_, whose bytes it counts

  const uint64_t bytes_;
  std::unique_ptr<Slot> slot_;
  std::unique_ptr<Slot> pending_;
  ReplicaList replicas_;
  const uint32_t id_;
  uint32_t owner_;
  uint32_t kept_owner_;
  uint32_t task_count_ = 0;
  uint32_t steps_before_ = 0;
  const EntryKind kind_ : 2;
  const Tier tier_ : 2;
  const EntryLife life_ : 2;
  bool is_in_step_ : 1 = false;
  bool is_uncommitted_ : 1 = false;
  bool is_in_host_tiles_ : 1 = false;
  Residency residency_ : 3 = Residency::absent;
  const uint8_t stride_log2_ : 6;
  EntryPrefetch prefetch_;
};

inline bool is_rank_sum(const Entry& entry) { return entry.life() == EntryLife::rank; }
inline bool is_scratch(const Entry& entry) { return entry.life() == EntryLife::session; }

inline SpaceUse space_use_of(const Entry& entry) {
  const bool is_in_no_catalogue = entry.kind() == EntryKind::gradient || is_scratch(entry);
  return is_in_no_catalogue ? SpaceUse::gradient : SpaceUse::state;
}

inline EvictionPrice price_of(const Entry& entry) {
  return entry.residency() == Residency::dirty ? EvictionPrice::dirty : EvictionPrice::clean;
}

// A parameter that has a bucket of its own has two, and bench_growth.py counts the bytes of each:
// large members first, so that no bytes are lost between them.
static_assert(sizeof(Entry) <= 72);

}  // namespace memd
