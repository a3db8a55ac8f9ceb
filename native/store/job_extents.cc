// A job's extents at a commit and at its end.
#include <utility>

#include "store/job.h"

namespace memd {

std::vector<ExtentRecord> Job::take_extents() {
  std::vector<ExtentRecord> extents = space.take_superseded();
  const auto take = [&extents](ReplicaList& replicas) {
    for (Replica& replica : replicas) {
      if (replica.exists()) extents.push_back(replica.extent());
      replica = {};
    }
  };
  for (Entry* const entry : shards_.entries()) {
    if (entry != nullptr) take(entry->replicas);
  }
  for (Bucket& bucket : shards_.buckets()) take(bucket.rest);
  return extents;
}

std::vector<ExtentRecord> Job::mark_committing() {
  changed = false;
  return space.begin_commit(shards_.each_replica());
}

void Job::committed(uint64_t catalogue_tag) {
  space.end_commit();
  durable = std::move(committing_);
  durable_catalogue_bytes_ = committing_catalogue_bytes_;
  progress.committed_on_disk(durable.undurable_since() == 0 ? durable.step() : 0);
  if (durable.undurable_since() != 0) {
    // Nothing on disk is gone back to: each extent is free as soon as another takes its place.
    shards_.for_each_replica([](Replica& replica) { replica.referenced = false; });
  }
  reserve_metadata();
  if (ledger != nullptr) ledger->rebase(catalogue_tag);
}

}  // namespace memd
