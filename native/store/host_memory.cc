#include "store/host_memory.h"

#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

Status HostMemory::give(Job& job) {
  const uint64_t segment_bytes = parts_.pool.segment_bytes();
  const uint64_t count = divide_up(job.admission().host_bytes(), segment_bytes);
  const uint64_t count_min = JobMemory::segment_count_min(segment_bytes);
  if (count < count_min) {
    return error(StatusCode::invalid_argument,
                 "job ",
                 job.name(),
                 ": host_bytes is below what two tiles and a slot need; ask for at least ",
                 count_min * segment_bytes,
                 ": ",
                 job.admission().host_bytes(),
                 " bytes");
  }
  if (count > parts_.pool.segment_count_free()) {
    return error(StatusCode::capacity,
                 "job ",
                 job.name(),
                 ": not enough host memory is free; ask for less (host_bytes), drop a job (memd "
                 "job list), or start the daemon "
                 "with a larger --host: wanted ",
                 count * segment_bytes,
                 " bytes, free ",
                 parts_.pool.segment_count_free() * segment_bytes)
        .about({"host", parts_.pool.segment_count_free() * segment_bytes});
  }
  const HostNeeded needed = Admission::host_needed(job.shards().declared(), segment_bytes);
  if (needed.total_bytes() > count * segment_bytes && needed.state_bytes != 0) {
    return error(StatusCode::capacity,
                 "job ",
                 job.name(),
                 " keeps parameters in tier host, which need more; ask for a larger host_bytes: ",
                 needed.text(),
                 "; host_bytes ",
                 count * segment_bytes)
        .about({"host_bytes", count * segment_bytes});
  }
  const uint64_t tag = parts_.commits.catalogue_tag(job.job_id());
  if (Status opened = job.kept().open_ledger(parts_.keepsakes, segment_bytes, tag); !opened.is_ok())
    return opened;
  std::vector<Segment> segments;
  MEMD_FAILPOINT("job.before_segments_taken");
  for (uint64_t i = 0; i < count; ++i) segments.push_back(*parts_.pool.take());
  if (Status given = job.kept().give(segments, segment_bytes, parts_.io); !given.is_ok()) {
    // The caller replaces them: touching fresh ones takes tens of milliseconds each.
    dropped_.add(std::move(segments));
    return given;
  }
  job.kept().keep(parts_.keepsakes);
  MEMD_FAILPOINT("job.memory_given");
  job.kept().expect_shards();
  // All of the memory is still unassigned.
  MEMD_CHECK(job.memory()->reserve_host(needed.state_bytes == 0 ? 0 : needed.host_side_bytes()));
  return Status::ok();
}

void HostMemory::add(Segment old_segment) {
  Pool::Replacement replacement = parts_.pool.begin_replacement(std::move(old_segment));
  replacement.make();
  end_replacement(replacement);
}

std::shared_ptr<Pool::Replacement> HostMemory::begin_replacement() {
  auto segment = dropped_.take_segment();
  if (!segment) return nullptr;
  return std::make_shared<Pool::Replacement>(parts_.pool.begin_replacement(std::move(*segment)));
}

void HostMemory::end_replacement(Pool::Replacement& replacement) {
  // If the kernel has no memory for a fresh segment, the pool is smaller from now on, which its
  // report shows.
  [[maybe_unused]] const Status status = parts_.pool.end_replacement(std::move(replacement));
  for (const uint64_t job_id : dropped_.destroyed(replacement.segment_id()))
    parts_.keepsakes.forget_ledger(job_id);
}

void HostMemory::destroy_claimed(const JobLedger& ledger) {
  const auto claims = ledger.claims();
  MEMD_CHECK(claims.is_ok());  // checked when it was adopted
  for (const SegmentClaim& claim : claims.value()) {
    if (auto segment = parts_.pool.take_kept(claim.id)) add(std::move(*segment));
  }
}

void HostMemory::destroy_unclaimed() {
  for (const uint64_t id : parts_.pool.kept_ids()) add(std::move(*parts_.pool.take_kept(id)));
}

}  // namespace memd
