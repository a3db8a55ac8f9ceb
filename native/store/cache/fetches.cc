#include "store/cache/fetches.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/join.h"
#include "base/units.h"

namespace memd {

void Fetches::fetch(Entry& entry, IoPriority priority, Done done) {
  parts_.activities.begin();
  parts_.residencies.begin_task(entry);
  MEMD_FAILPOINT("fetch.started");
  auto join = Join::start([this, &entry, done = std::move(done)](const Status& status) {
    finish(entry, status, done);
  });
  std::byte* const data = parts_.memory->arena().at(entry.slot()->offset_bytes);
  for (size_t i = 0; i < entry.replicas().size(); ++i) {
    const std::span<std::byte> into(data + i * entry.stride_bytes(), entry.replica_bytes(i));
    if (parts_.gates.is_tile_in_memory(entry, i)) {
      parts_.gates.read_tile(entry, i, into.data(), join->branch());
      continue;
    }
    parts_.counters.fetched_bytes +=
        std::min(entry.stride_bytes(), entry.bytes() - i * entry.stride_bytes());
    parts_.extents.read(entry.replicas()[i].extent(),
                        into,
                        {.job = JobId{parts_.job_id}, .priority = priority},
                        concat("shard ",
                               parts_.shards.describe(entry, i),
                               ", step ",
                               parts_.progress.committed_step()),
                        [this, &entry, i, done = join->branch()](const Status& status) {
                          MEMD_FAILPOINT("fetch.extent_verified");
                          if (status.code() == StatusCode::integrity) parts_.lose(entry, i, status);
                          done(status);
                        });
  }
  join->finish(Status::ok());
}

void Fetches::zero(Entry& entry) {
  parts_.activities.begin();
  parts_.residencies.begin_task(entry);
  std::byte* const data = parts_.memory->arena().at(entry.slot()->offset_bytes);
  parts_.workers.submit_pieces(
      JobId{parts_.job_id},
      entry.bytes(),
      [data](uint64_t offset, uint64_t bytes) { zero_bytes(data + offset, bytes); },
      [this, &entry] { finish(entry, Status::ok(), [](const Status&) {}); });
}

void Fetches::finish(Entry& entry, const Status& status, const Done& done) {
  parts_.activities.end();
  parts_.residencies.end_task(entry);
  MEMD_FAILPOINT("fetch.finished");
  if (status.is_ok()) {
    parts_.residencies.move(entry, Residency::filling, Residency::clean);
    return done(status);
  }
  parts_.residencies.move(entry, Residency::filling, Residency::absent);
  parts_.slots.free(entry.take_slot());
  done(status);
  parts_.waiters.fail(entry, status);
}

void Fetches::raise(const Entry& entry) {
  parts_.extents.io().raise(JobId{parts_.job_id},
                            {parts_.memory->arena().at(entry.slot()->offset_bytes),
                             align_up(entry.bytes(), kBlockBytes)});
}

}  // namespace memd
