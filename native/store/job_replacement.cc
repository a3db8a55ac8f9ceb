#include "store/job_replacement.h"

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "base/check.h"

namespace memd {
void JobReplacement::replace(Job& job, std::unique_ptr<Job> fresh) const {
  job.state().early().forget_all();
  const std::vector<ExtentRecord> old = job.take_extents();
  std::set<ExtentAddress> held;
  for (const ExtentRecord& extent : old) held.insert(extent.address);
  std::set<ExtentAddress> named;
  fresh->shards().for_each_replica([&](const Replica& replica) {
    named.insert(replica.extent().address);
    if (held.contains(replica.extent().address)) return;
    MEMD_CHECK(parts_.extents.reserve(replica.extent()).is_ok());
  });
  for (const ExtentRecord& extent : old) {
    if (!named.contains(extent.address)) parts_.extents.release(extent);
  }
  // Set since the record was written.
  if (fresh->admission().weight() != job.admission().weight())
    fresh->admission().set_weight(job.admission().weight());
  job.kept().free_all();
  fresh->cache().counters() = job.cache().counters();
  fresh->cache().sessions().count_on(job.cache().sessions());
  const uint64_t tag = parts_.commits.catalogue_tag(job.job_id());
  const Status kept =
      fresh->kept().take_over(job.kept(), parts_.keepsakes, parts_.pool.segment_bytes(), tag);
  if (!kept.is_ok()) fresh->progress().stop(kept);  // it goes on being refused too
  fresh->admission().add_snapshots(job.space().snapshots());
  operations_.connect(*fresh);
  parts_.jobs.put(std::move(fresh));
}

}  // namespace memd
