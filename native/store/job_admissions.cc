#include "store/job_admissions.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/units.h"

namespace memd {
namespace {

// Outside of every quota: the root, and catalogues of jobs that were admitted before catalogues
// counted. Old and new ones lie side by side during a commit.
constexpr uint64_t kCatalogueReserveBytesMin = 4_MiB;

uint64_t catalogue_reserve_bytes(uint64_t capacity_bytes) {
  return std::max(kCatalogueReserveBytesMin, capacity_bytes / 100);
}

}  // namespace

Result<JobInfo> JobAdmissions::open(const OpenJobRequest& request) {
  if (request.name.empty() || request.name.size() > 256) {
    return error(StatusCode::invalid_argument,
                 "a job's name has 1 to 256 bytes; this one has ",
                 request.name.size());
  }
  const auto held = parts_.reports.find_job(request.name);
  if (!held.is_ok()) {
    const auto job = admit(request);
    if (!job.is_ok()) return job.status();
    JobInfo info = parts_.reports.info(*job.value());
    info.created = true;
    return info;
  }
  Job& job = *store_.jobs.find(held.value().job_id);
  if (job.ending() != nullptr) {
    return error(StatusCode::unavailable, "job ", job.name(), " ", job.ending(), "; try again");
  }
  // The store's attach() says more of a job that is half loaded.
  const bool is_stopped = !job.progress().stopped().is_ok() && !job.progress().is_loading();
  if (is_stopped) return job.progress().stopped();
  if (Status status = set_durability(job, request); !status.is_ok()) return status;
  if (job.memory() == nullptr) {
    // It was admitted to another pool, maybe: what is asked for now counts.
    const uint64_t host_bytes_before = job.admission().host_bytes();
    if (request.host_bytes != 0) job.admission().set_host_bytes(request.host_bytes);
    if (Status status = parts_.memory.give(job); !status.is_ok()) {
      job.admission().set_host_bytes(host_bytes_before);
      return status;
    }
  }
  return parts_.reports.info(job);
}

Result<Job*> JobAdmissions::admit(const OpenJobRequest& request) {
  const uint64_t segment_bytes = store_.pool.segment_bytes();
  const uint64_t nvme_free_bytes = nvme_bytes_free();
  if (request.nvme_bytes > nvme_free_bytes) {
    return error(StatusCode::capacity,
                 "job ",
                 request.name,
                 ": not enough disk space is free; ask for less (nvme_bytes), drop a job (memd job "
                 "list), or start the daemon with "
                 "a larger --nvme: wanted ",
                 request.nvme_bytes,
                 " bytes, free ",
                 nvme_free_bytes)
        .about({"nvme", nvme_free_bytes});
  }
  auto created = Job::create(
      {.job_id = store_.commits.take_job_id(), .name = request.name, .uid = request.uid});
  if (!created.is_ok()) return created.status();
  std::unique_ptr<Job> job = std::move(created).value();
  const uint64_t share_bytes =
      store_.pool.segment_count_free() / parts_.jobs_expected * segment_bytes;
  job->admission().set_host_bytes(
      request.host_bytes != 0
          ? request.host_bytes
          : std::max(share_bytes, JobMemory::segment_count_min(segment_bytes) * segment_bytes));
  job->admission().set_durability(request.durability.value_or(Durability()));
  job->space().set_quota_bytes(request.nvme_bytes != 0 ? request.nvme_bytes
                                                       : nvme_free_bytes / parts_.jobs_expected);
  if (Status status = parts_.memory.give(*job); !status.is_ok()) return status;
  job->durable().note_change();
  MEMD_FAILPOINT("job.admitted");
  parts_.operations.connect(*job);
  return &store_.jobs.put(std::move(job));
}

Status JobAdmissions::set_durability(Job& job, const OpenJobRequest& request) {
  if (!request.durability || *request.durability == job.admission().durability_asked())
    return Status::ok();
  const bool busy = !job.cache().sessions().empty() || job.operations().is_running();
  if (busy) {
    return error(StatusCode::invalid_argument,
                 "job ",
                 job.name(),
                 " has durability \"",
                 job.admission().durability_asked().text(),
                 "\", and it is in use; ask for the same, or close its other sessions first: \"",
                 request.durability->text(),
                 "\"");
  }
  const Durability before = job.admission().durability_asked();
  job.admission().set_durability(*request.durability);
  if (Status opened = job.kept().open_tile_words(); !opened.is_ok()) {
    job.admission().set_durability(before);
    return opened;
  }
  job.kept().keep_tile_words(store_.keepsakes);
  job.durable().note_change();
  job.journal().note_terms();
  return Status::ok();
}

Status JobAdmissions::set_weight(uint64_t job_id, JobWeight weight) {
  Job* const job = store_.jobs.find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  job->admission().set_weight(weight);
  apply_weight(job_id, weight);
  return Status::ok();
}

void JobAdmissions::apply_weight(uint64_t job_id, JobWeight weight) {
  store_.io.set_weight(JobId{job_id}, weight);
  store_.workers.set_weight(JobId{job_id}, weight);
}

uint64_t JobAdmissions::nvme_bytes_free() const {
  const uint64_t capacity_bytes = store_.extents.capacity_bytes();
  uint64_t taken_bytes = catalogue_reserve_bytes(capacity_bytes);
  for (const auto& [job_id, job] : store_.jobs) taken_bytes += job->space().quota_bytes();
  return capacity_bytes > taken_bytes ? capacity_bytes - taken_bytes : 0;
}

}  // namespace memd
