// A job's extents: which one replaces which, what a failed step returns to, and what the next
// commit frees.
#include <utility>

#include "base/failpoint.h"
#include "store/job.h"

namespace memd {

void Job::replace(Replica& place, const ExtentRecord& extent, ExtentStore& extents) {
  MEMD_FAILPOINT("extent.before_supersede");
  release(place, extents);
  place = Replica(extent, false);
}

void Job::take_quota(const Entry& entry, uint64_t bytes) {
  nvme_bytes_used += bytes;
  if (entry.kind == EntryKind::gradient && nvme_bytes_promised != 0) nvme_bytes_promised += bytes;
}

void Job::give_back_quota(const Entry& entry, uint64_t bytes) {
  nvme_bytes_used -= bytes;
  if (entry.kind == EntryKind::gradient && nvme_bytes_promised != 0) nvme_bytes_promised -= bytes;
}

void Job::replace_gradient(Entry& entry,
                           size_t index,
                           const ExtentRecord& extent,
                           ExtentStore& extents) {
  Replica& place = entry.replicas[index];
  if (place.exists()) {
    give_back_quota(entry, place.length_bytes);
    extents.release(place.extent());
  }
  place = Replica(extent, false);
}

std::vector<ExtentRecord> Job::take_extents() {
  std::vector<ExtentRecord> extents;
  const auto take = [&extents](ReplicaList& replicas) {
    for (Replica& replica : replicas) {
      if (replica.exists()) extents.push_back(replica.extent());
      replica = {};
    }
  };
  for (Entry* const entry : entries) {
    if (entry != nullptr) take(entry->replicas);
  }
  for (Bucket& bucket : buckets) take(bucket.rest);
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) extents.push_back(old.extent);
  }
  superseded_.clear();
  return extents;
}

void Job::release(Replica& place, ExtentStore& extents) {
  if (!place.exists()) {
    // Rolling back means that there is no extent again.
    if (is_updating_) superseded_.push_back({.place = &place, .extent = {}});
    return;
  }
  if (place.referenced && !MEMD_PLANTED("extent.released_before_the_commit")) {
    superseded_.push_back({.place = &place, .extent = place.extent()});
  } else {
    nvme_bytes_used -= place.length_bytes;
    extents.release(place.extent());
  }
  place = {};
}

void Job::begin_update() {
  MEMD_FAILPOINT("update.begun");
  is_updating_ = true;
  for_each_replica([](Replica& replica) { replica.referenced = true; });
  update_begin_ = superseded_.size();
}

void Job::add_superseded(const std::vector<ExtentRecord>& extents) {
  for (const ExtentRecord& extent : extents) {
    superseded_.push_back({.place = nullptr, .extent = extent});
    nvme_bytes_used += extent.length_bytes;
  }
}

void Job::roll_back(ExtentStore& extents) {
  is_updating_ = false;
  std::vector<Superseded> undone(superseded_.begin() + static_cast<ptrdiff_t>(update_begin_),
                                 superseded_.end());
  superseded_.resize(update_begin_);
  committing_count_ = 0;
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
      nvme_bytes_used -= it->place->length_bytes;
      extents.release(it->place->extent());
    }
    *it->place = Replica(it->extent, it->extent.exists());
  }
}

std::vector<ExtentRecord> Job::mark_committing() {
  for_each_replica([](Replica& replica) { replica.referenced = true; });
  std::vector<ExtentRecord> releasable;
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) releasable.push_back(old.extent);
  }
  committing_count_ = superseded_.size();
  changed = false;
  return releasable;
}

void Job::committed(uint64_t catalogue_tag) {
  is_updating_ = false;
  durable = std::move(committing_);
  durable_step = durable.undurable_since() == 0 ? durable.step() : 0;
  disk_error = Status::ok();
  if (durable.undurable_since() != 0) {
    // Nothing on disk is gone back to: each extent is free as soon as another takes its place.
    for_each_replica([](Replica& replica) { replica.referenced = false; });
  }
  if (ledger != nullptr) ledger->rebase(catalogue_tag);
  superseded_.erase(superseded_.begin(),
                    superseded_.begin() + static_cast<ptrdiff_t>(committing_count_));
  committing_count_ = 0;
}

}  // namespace memd
