#include "store/space/job_space.h"

#include "base/failpoint.h"

namespace memd {

void JobSpace::take(SpaceUse use, uint64_t bytes) {
  used_bytes_ += bytes;
  if (use == SpaceUse::gradient && promised_bytes_ != 0) promised_bytes_ += bytes;
}

void JobSpace::give_back(SpaceUse use, uint64_t bytes) {
  used_bytes_ -= bytes;
  if (use == SpaceUse::gradient && promised_bytes_ != 0) promised_bytes_ -= bytes;
}

void JobSpace::replace(Replica& place, const ExtentRecord& extent, ExtentStore& extents) {
  MEMD_FAILPOINT("extent.before_supersede");
  release(place, extents);
  place = Replica(extent, false);
}

void JobSpace::release(Replica& place, ExtentStore& extents) {
  if (!place.exists()) {
    // Rolling back leaves the place without an extent again.
    if (is_updating_) superseded_.push_back({.place = &place, .extent = {}});
    return;
  }
  if (place.referenced && !MEMD_PLANTED("extent.released_before_the_commit")) {
    superseded_.push_back({.place = &place, .extent = place.extent()});
  } else {
    give_back(SpaceUse::state, place.length_bytes);
    extents.release(place.extent());
  }
  place = {};
}

void JobSpace::forget(const ReplicaList& places) {
  const Replica* const first = places.data();
  for (size_t i = is_updating_ ? update_begin_ : superseded_.size(); i < superseded_.size(); ++i) {
    Superseded& old = superseded_[i];
    if (old.place >= first && old.place < first + places.size()) old.place = nullptr;
  }
}

void JobSpace::replace_gradient(Replica& place, const ExtentRecord& extent, ExtentStore& extents) {
  if (place.exists()) {
    give_back(SpaceUse::gradient, place.length_bytes);
    extents.release(place.extent());
  }
  place = Replica(extent, false);
}

void JobSpace::add_superseded(const std::vector<ExtentRecord>& extents) {
  for (const ExtentRecord& extent : extents) {
    superseded_.push_back({.place = nullptr, .extent = extent});
    used_bytes_ += extent.length_bytes;
  }
}

std::vector<ExtentRecord> JobSpace::take_superseded() {
  std::vector<ExtentRecord> extents;
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) extents.push_back(old.extent);
  }
  superseded_.clear();
  return extents;
}

void JobSpace::count(const Walk& each_replica) {
  used_bytes_ = 0;
  each_replica([this](const Replica& replica) { count(replica); });
}

void JobSpace::begin_update(const Walk& each_replica) {
  MEMD_FAILPOINT("update.begun");
  is_updating_ = true;
  each_replica([](Replica& replica) { replica.referenced = true; });
  update_begin_ = superseded_.size();
}

void JobSpace::roll_back(ExtentStore& extents) {
  is_updating_ = false;
  std::vector<Superseded> undone(superseded_.begin() + static_cast<ptrdiff_t>(update_begin_),
                                 superseded_.end());
  superseded_.resize(update_begin_);
  committing_count_ = 0;
  committing_bytes_ = 0;
  MEMD_FAILPOINT("rollback.begun");
  if (MEMD_PLANTED("rollback.forgets_a_replica") && !undone.empty()) undone.pop_back();
  // Backwards, so that a place that was replaced twice ends with what it held first.
  for (auto it = undone.rbegin(); it != undone.rend(); ++it) {
    if (it->place == nullptr) {
      // A shard that was deleted meanwhile stays deleted; the last catalogue still names its bytes.
      if (it->extent.exists()) superseded_.push_back(*it);
      continue;
    }
    if (it->place->exists() && !it->place->referenced) {
      give_back(SpaceUse::state, it->place->length_bytes);
      extents.release(it->place->extent());
    }
    *it->place = Replica(it->extent, it->extent.exists());
  }
}

std::vector<ExtentRecord> JobSpace::begin_commit(const Walk& each_replica) {
  each_replica([](Replica& replica) { replica.referenced = true; });
  std::vector<ExtentRecord> releasable;
  committing_bytes_ = 0;
  for (const Superseded& old : superseded_) {
    if (!old.extent.exists()) continue;
    releasable.push_back(old.extent);
    committing_bytes_ += old.extent.length_bytes;
  }
  committing_count_ = superseded_.size();
  return releasable;
}

void JobSpace::end_commit() {
  is_updating_ = false;
  used_bytes_ -= committing_bytes_;
  superseded_.erase(superseded_.begin(),
                    superseded_.begin() + static_cast<ptrdiff_t>(committing_count_));
  committing_count_ = 0;
  committing_bytes_ = 0;
}

}  // namespace memd
