#include "store/space/job_space.h"

#include "base/check.h"
#include "base/failpoint.h"
#include "base/status.h"

namespace memd {
namespace {

/// While something is loaded no other snapshot begins to name what the job uses.
void release_extent(const ExtentRecord& extent, ExtentStore& extents, SnapshotSpace& snapshots) {
  const bool is_kept = extents.release(extent);
  if (!is_kept) return;
  uint64_t& shared_bytes = snapshots.load_shared_bytes;
  shared_bytes -= std::min<uint64_t>(shared_bytes, extent.length_bytes);
}

}  // namespace

void JobSpace::take(SpaceUse use, uint64_t bytes) {
  used_bytes_ += bytes;
  if (use == SpaceUse::gradient && promised_bytes_ != 0) promised_bytes_ += bytes;
}

void JobSpace::give_back(SpaceUse use, uint64_t bytes) {
  used_bytes_ -= bytes;
  if (use == SpaceUse::gradient && promised_bytes_ != 0) promised_bytes_ -= bytes;
}

std::string JobSpace::taken_text(SpaceUse use) const {
  uint64_t superseded_bytes = 0;
  for (const Superseded& old : superseded_) superseded_bytes += old.extent.length_bytes;
  std::string text = concat(taken_bytes(use) - superseded_bytes, " (in use)");
  const auto add = [&text](uint64_t bytes, const char* what) {
    if (bytes != 0) text += concat(" + ", bytes, " (", what, ")");
  };
  add(superseded_bytes, "old ones, until the next commit");
  add(metadata_bytes_, "the catalogue, old and new");
  add(snapshots_.kept_bytes(), "snapshots");
  return text;
}

void JobSpace::replace(ReplicaPlace place, const ExtentRecord& extent, ExtentStore& extents) {
  MEMD_FAILPOINT("extent.before_supersede");
  release(place, extents);
  *place.replica_ = Replica(extent, epoch_);
  if (place.is_host_ && extent.exists()) ++host_extent_count_;
}

void JobSpace::release(ReplicaPlace place, ExtentStore& extents) {
  if (place.is_host_ && place->exists()) {
    // Its steps are in memory: roll_back(), which counts nothing, has none of it.
    MEMD_CHECK(!is_updating_ && host_extent_count_ > 0);
    --host_extent_count_;
  }
  if (!place->exists()) {
    // Rolling back leaves the place without an extent again.
    if (is_updating_) superseded_.push_back({.replica = place.replica_, .extent = {}});
    return;
  }
  if (is_referenced(*place) && !MEMD_PLANTED("extent.released_before_the_commit")) {
    superseded_.push_back({.replica = place.replica_, .extent = place->extent()});
  } else {
    give_back(SpaceUse::state, place->length_bytes());
    release_extent(place->extent(), extents, snapshots_);
  }
  *place.replica_ = {};
}

void JobSpace::forget(const ReplicaList& places) {
  const Replica* const first = places.data();
  for (size_t i = is_updating_ ? update_begin_ : superseded_.size(); i < superseded_.size(); ++i) {
    Superseded& old = superseded_[i];
    if (old.replica >= first && old.replica < first + places.size()) old.replica = nullptr;
  }
}

void JobSpace::replace_gradient(ReplicaPlace place,
                                const ExtentRecord& extent,
                                ExtentStore& extents) {
  if (place->exists()) {
    give_back(SpaceUse::gradient, place->length_bytes());
    extents.release(place->extent());
  }
  *place.replica_ = Replica(extent, epoch_);
}

void JobSpace::add_superseded(const std::vector<ExtentRecord>& extents) {
  for (const ExtentRecord& extent : extents) {
    superseded_.push_back({.replica = nullptr, .extent = extent});
    used_bytes_ += extent.length_bytes;
  }
}

std::vector<ExtentRecord> JobSpace::superseded() const {
  std::vector<ExtentRecord> extents;
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) extents.push_back(old.extent);
  }
  return extents;
}

void JobSpace::adopt(ReplicaPlace place, const ExtentRecord& extent, uint64_t epoch) {
  *place.replica_ = Replica(extent, epoch);
}

void JobSpace::count(const Walk& each_replica) {
  used_bytes_ = 0;
  host_extent_count_ = 0;
  each_replica([this](ReplicaPlace place) { count(place); });
}

void JobSpace::count(ReplicaPlace place) {
  used_bytes_ += place->length_bytes();
  if (place.is_host_ && place->exists()) ++host_extent_count_;
}

void JobSpace::end_epoch() {
  ++epoch_;
  referenced_end_ = epoch_;
}

void JobSpace::begin_update() {
  MEMD_FAILPOINT("update.begun");
  is_updating_ = true;
  end_epoch();
  update_begin_ = superseded_.size();
}

void JobSpace::roll_back(ExtentStore& extents) {
  is_updating_ = false;
  std::vector<Superseded> undone(superseded_.begin() + static_cast<ptrdiff_t>(update_begin_),
                                 superseded_.end());
  superseded_.resize(update_begin_);
  committing_count_ = 0;
  MEMD_FAILPOINT("rollback.begun");
  if (MEMD_PLANTED("rollback.forgets_a_replica") && !undone.empty()) undone.pop_back();
  // Backwards, so that a place that was replaced twice ends with what it held first.
  for (auto it = undone.rbegin(); it != undone.rend(); ++it) {
    if (it->replica == nullptr) {
      // A shard that was deleted meanwhile stays deleted; the last catalogue still names its bytes.
      if (it->extent.exists()) superseded_.push_back(*it);
      continue;
    }
    if (it->replica->exists() && !is_referenced(*it->replica)) {
      give_back(SpaceUse::state, it->replica->length_bytes());
      extents.release(it->replica->extent());
    }
    *it->replica = it->extent.exists() ? Replica(it->extent, kOnDisk) : Replica();
  }
}

void JobSpace::begin_commit() {
  MEMD_CHECK_EQ(committing_count_, size_t{0});
  referenced_end_before_ = referenced_end_;
  end_epoch();
  committing_count_ = superseded_.size();
}

void JobSpace::abandon_commit() {
  referenced_end_ = referenced_end_before_;
  committing_count_ = 0;
}

void JobSpace::end_commit(bool is_step) {
  is_updating_ = false;
  // Nothing on disk is gone back to: each extent is free as soon as another takes its place.
  if (!is_step) referenced_end_ = kOnDisk;
}

bool JobSpace::release_superseded(ExtentStore& extents, size_t count) {
  for (; count > 0 && committing_count_ > 0; --count, --committing_count_) {
    const ExtentRecord extent = superseded_.front().extent;
    superseded_.pop_front();
    if (!extent.exists()) continue;
    used_bytes_ -= extent.length_bytes;
    release_extent(extent, extents, snapshots_);
  }
  return committing_count_ == 0;
}

}  // namespace memd
