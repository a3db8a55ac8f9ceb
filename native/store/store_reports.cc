#include "store/store_reports.h"

#include <algorithm>
#include <set>
#include <utility>

namespace memd {
namespace {

uint64_t room_wait_ns(const Job& job) {
  return job.cache().waiters().counters_until_now().lease_wait_reason_ns[static_cast<size_t>(
      LeaseWait::room)];
}

}  // namespace

JobInfo StoreReports::info(const Job& job) const {
  JobInfo info = job.job_info();
  for (const uint32_t shard_id : job.unreadable_shards(store_.extents))
    info.unreadable_shards.emplace_back(job.shards()[shard_id].name());
  return info;
}

Result<JobInfo> StoreReports::find_job(const std::string& name) const {
  if (const Job* const job = store_.jobs.find(name)) return info(*job);
  return error(StatusCode::not_found, "there is no job ", name, "; see `memd job list`");
}

std::vector<JobInfo> StoreReports::jobs() const {
  std::vector<JobInfo> infos;
  for (const auto& [job_id, job] : store_.jobs) infos.push_back(info(*job));
  std::sort(infos.begin(), infos.end(), [](const JobInfo& a, const JobInfo& b) {
    return a.job_id < b.job_id;
  });
  return infos;
}

Result<std::vector<ShardInfo>> StoreReports::shards(uint64_t job_id,
                                                    uint32_t first,
                                                    size_t count_max) const {
  Job* const job = store_.jobs.find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  const std::set<uint32_t> unreadable = job->unreadable_shards(store_.extents);
  std::vector<ShardInfo> infos;
  for (uint32_t shard_id = first; shard_id < job->shards().size(); ++shard_id) {
    if (infos.size() == count_max) break;
    if (job->shards()[shard_id].deleted) continue;
    job->cache().residencies().settle_pending(*job->shards()[shard_id].value);
    infos.push_back(job->info(shard_id));
    infos.back().unreadable = unreadable.contains(shard_id);
  }
  return infos;
}

Result<uint64_t> StoreReports::bytes_of_maxima(uint64_t session_id,
                                               const std::vector<uint32_t>& shard_ids) const {
  const auto owner = store_.job_of(session_id);
  if (!owner.is_ok()) return owner.status();
  Job& job = *owner.value();
  std::set<uint32_t> buckets;
  for (const uint32_t shard_id : shard_ids) {
    if (job.shards().find_entry(shard_id, Part::gradient) == nullptr) {
      return error(
          StatusCode::not_found, "job ", job.name(), " has no parameter with shard id ", shard_id);
    }
    buckets.insert(job.shards()[shard_id].bucket);
  }
  return job.admission().bytes_of_maxima(buckets);
}

Result<ShardInfo> StoreReports::find_shard(uint64_t job_id, const std::string& name) const {
  Job* const job = store_.jobs.find(job_id);
  if (job == nullptr) return error(StatusCode::not_found, "there is no job with id ", job_id);
  const auto found = job->shards().find(name);
  if (!found) {
    return error(StatusCode::not_found, "job ", job->name(), " holds nothing named ", name);
  }
  job->cache().residencies().settle_pending(*job->shards()[*found].value);
  ShardInfo info = job->info(*found);
  info.unreadable = job->unreadable_shards(store_.extents).contains(*found);
  return info;
}

void StoreReports::add_transfers(std::vector<Activity>& all) const {
  for (const IoInFlight& each : store_.io.in_flight()) {
    Activity activity{.kind = io_kind_name(each.kind),
                      .what = store_.extents.path(each.device),
                      .waits_on = each.started ? "" : "its turn",
                      .priority = io_priority_name(each.priority),
                      .age_ns = each.age_ns};
    if (each.kind != IoKind::sync) {
      activity.what += concat(" at ", each.offset_bytes, ", ", each.length_bytes, " bytes");
    }
    all.push_back(std::move(activity));
  }
  for (const ExtentStore::WaitingRead& each : store_.extents.waiting_reads()) {
    const ExtentRecord& extent = each.extent;
    all.push_back({.kind = "read",
                   .what = concat(store_.extents.path(extent.address.device),
                                  " at ",
                                  extent.address.offset_bytes,
                                  ", ",
                                  extent.length_bytes,
                                  " bytes"),
                   .waits_on = "its next try, since the device failed it",
                   .age_ns = store_.clock.now_ns() - each.since_ns});
  }
}

std::vector<Activity> StoreReports::in_flight() const {
  const uint64_t now_ns = store_.clock.now_ns();
  std::vector<Activity> all;
  add_transfers(all);
  const auto add = [&](const Job* job, uint64_t job_id, Activity activity, uint64_t since_ns) {
    activity.job_id = job_id;
    activity.job = job != nullptr ? job->name() : concat("id ", job_id);
    activity.uid = job != nullptr ? job->uid() : 0;
    activity.age_ns = now_ns - since_ns;
    all.push_back(std::move(activity));
  };
  for (const auto& [job_id, owned] : store_.jobs) {
    const Job* const job = owned.get();
    job->cache().waiters().for_each([&](const LeaseWaiter& waiter) {
      const LeaseRequest& request = waiter.request();
      std::string what = concat("shard ", job->shards()[request.shard_id].name());
      if (request.part != Part::value) what += " gradient";
      what += request.mode == LeaseMode::read ? ", to read" : ", to write";
      add(job,
          job->job_id(),
          {.kind = "lease",
           .what = std::move(what),
           .waits_on = job->cache().waiters().describe(waiter)},
          waiter.started_ns());
    });
    const std::vector<Operations::Open> operations = job->operations().open();
    for (const Operations::Open& each : operations) {
      std::string before = each.runs ? "" : concat("the ", operations.front().kind, " before it");
      add(job,
          job->job_id(),
          {.kind = each.kind, .what = each.phase, .waits_on = std::move(before)},
          each.since_ns);
    }
  }
  for (const Commits::Open& each : store_.commits.open()) {
    add(store_.jobs.find(each.job_id),
        each.job_id,
        {.kind = "commit", .waits_on = each.running ? "" : "the commit before it"},
        each.since_ns);
  }
  if (auto activity = parts_.live_check.activity()) all.push_back(std::move(*activity));
  for (Activity& each : parts_.snapshot_readings.activities()) all.push_back(std::move(each));
  std::stable_sort(all.begin(), all.end(), [](const Activity& a, const Activity& b) {
    return a.age_ns > b.age_ns;
  });
  return all;
}

JobStatistics StoreReports::statistics(const Job& job) const {
  JobStatistics statistics{.job = info(job),
                           .counters = job.cache().waiters().counters_until_now(),
                           .stalls = job.cache().sessions().stalls()};
  if (job.memory() != nullptr) {
    statistics.arena_bytes = job.memory()->arena().capacity_bytes();
    statistics.arena_bytes_used = job.memory()->arena().used_bytes();
    statistics.private_bytes = job.memory()->private_side().capacity_bytes();
    statistics.private_bytes_used = job.memory()->private_side().used_bytes();
  }
  return statistics;
}

ServerStatistics StoreReports::statistics() const {
  ServerStatistics out;
  out.pool = store_.pool.report();
  out.pool_bytes_free = store_.pool.segment_count_free() * store_.pool.segment_bytes();
  out.nvme_bytes = store_.extents.capacity_bytes();
  out.nvme_bytes_free = store_.extents.free_bytes();
  out.nvme_bytes_of_snapshots = store_.extents.pinned_alone_bytes();
  out.fence_reason = store_.extents.check_writable().message();
  for (uint16_t device = 0; device < store_.extents.device_count(); ++device) {
    out.devices.push_back({.path = store_.extents.path(device),
                           .bytes = store_.extents.device_bytes(device),
                           .bytes_free = store_.extents.free_bytes(device),
                           .checksum_failures = store_.extents.checksum_failure_count(device),
                           .fenced = !store_.extents.broken().is_ok(),
                           .limits = store_.io.limits(device),
                           .io = store_.io.device_statistics(device)});
  }
  for (const auto& [job_id, job] : store_.jobs) {
    out.room_wait_ns += room_wait_ns(*job);
    out.jobs.push_back(statistics(*job));
  }
  out.session_count = static_cast<uint32_t>(store_.sessions.all().size());
  out.ring_protocol_errors = ring_protocol_errors_;
  out.room_wait_ns += room_wait_ns_of_dropped_;
  out.step_seconds = parts_.step_times.seconds;
  out.commit_seconds = store_.commits.seconds();
  out.step_phases = parts_.step_times.phases;
  out.scrub = parts_.scrub.statistics();
  out.exports = parts_.snapshot_readings.statistics();
  return out;
}

void StoreReports::count_dropped(const Job& job) { room_wait_ns_of_dropped_ += room_wait_ns(job); }

}  // namespace memd
