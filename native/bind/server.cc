#include "server/server.h"

#include <nanobind/make_iterator.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "server/notify_keeper.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

/// Python objects of them are made one by one, as they are looked at: nanobind's table of objects
/// keeps 63 bytes for each that there ever were at a time, of a job with a million shards as well.
struct ShardInfos {
  std::vector<ShardInfo> all;
};

IoEngine engine_named(const std::string& name) {
  if (name == "auto") return IoEngine::automatic;
  if (name == "io_uring") return IoEngine::io_uring;
  if (name == "threads") return IoEngine::threads;
  throw nb::value_error(concat("io_engine is auto, io_uring or threads: ", name).c_str());
}

std::vector<StepGroup> step_groups(
    const std::vector<std::pair<AdamSettings, std::vector<uint32_t>>>& groups) {
  std::vector<StepGroup> out;
  for (const auto& [settings, shard_ids] : groups)
    out.push_back({.settings = settings, .shard_ids = shard_ids});
  return out;
}

std::map<std::string, double> by_phase(const TurnPhaseSeconds& seconds) {
  std::map<std::string, double> named;
  for (size_t i = 0; i < seconds.size(); ++i) named.emplace(kTurnPhaseNames[i], seconds[i]);
  return named;
}

/// Progress of formatting: bytes done, bytes in all.
using Progress = nb::typed<nb::callable, void(uint64_t, uint64_t)>;

std::shared_ptr<Server> start(const std::vector<std::string>& directories,
                              uint64_t nvme_bytes,
                              uint64_t host_bytes,
                              bool lock_required,
                              bool huge_pages,
                              const std::string& io_engine,
                              const std::vector<std::pair<uint32_t, uint64_t>>& io_limits,
                              uint32_t update_thread_count,
                              uint32_t jobs_expected,
                              const std::optional<Progress>& progress,
                              std::optional<int> keeper_fd,
                              const std::vector<std::pair<std::string, int>>& kept) {
  KeptDescriptors descriptors;
  for (const auto& [name, fd] : kept) descriptors.push_back({.name = name, .fd = OwnedFd(fd)});
  ServerOptions options;
  if (keeper_fd) options.keeper = std::make_shared<NotifyKeeper>(OwnedFd(*keeper_fd));
  options.directories = directories;
  options.nvme_bytes = nvme_bytes;
  options.host_bytes = host_bytes;
  options.lock_required = lock_required;
  options.huge_pages = huge_pages;
  options.io_engine = engine_named(io_engine);
  for (const auto& [depth, chunk_bytes] : io_limits) {
    options.path_limits.push_back({.depth = depth, .chunk_bytes = chunk_bytes});
  }
  options.update_thread_count = update_thread_count;
  if (jobs_expected == 0) throw nb::value_error("jobs_expected counts from 1: 0");
  options.jobs_expected = jobs_expected;
  if (progress) {
    // By reference: copies of the callable, made where the GIL is released, would count references.
    options.progress = [&progress](uint64_t done_bytes, uint64_t all_bytes) {
      const nb::gil_scoped_acquire locked;
      (*progress)(done_bytes, all_bytes);
    };
  }
  return unlocked([&] { return Server::start(options, std::move(descriptors)); });
}

std::vector<int> release_fds(std::vector<OwnedFd> fds) {
  std::vector<int> numbers;
  for (OwnedFd& fd : fds) numbers.push_back(fd.release());
  return numbers;
}

nb::bytes float_bytes(const std::vector<float>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(float));
}

std::vector<float> floats_of(const nb::bytes& bytes) {
  if (bytes.size() % sizeof(float) != 0)
    throw nb::value_error("moments are fp32: 4 bytes an element");
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.c_str(), bytes.size());
  return values;
}

nb::tuple read_moments(Server& server,
                       uint64_t session_id,
                       uint32_t shard_id,
                       uint64_t element_first,
                       uint64_t element_count,
                       bool with_master,
                       double timeout_s) {
  const MomentsRequest request{.session_id = session_id,
                               .shard_id = shard_id,
                               .element_first = element_first,
                               .element_count = element_count,
                               .reads_masters = with_master};
  const MomentValues values = unlocked([&] { return server.moments().read(request, timeout_s); });
  return nb::make_tuple(float_bytes(values.exp_avg),
                        float_bytes(values.exp_avg_sq),
                        float_bytes(values.max_exp_avg_sq),
                        float_bytes(values.masters));
}

/// A write of moments that was begun.
struct MomentsWrite {
  std::shared_ptr<Server> server;
  MomentCalls::Write write;
};

MomentsWrite begin_write_moments(Server& server,
                                 uint64_t session_id,
                                 uint32_t shard_id,
                                 uint64_t generation,
                                 uint64_t element_first,
                                 const nb::bytes& exp_avg,
                                 const nb::bytes& exp_avg_sq,
                                 const nb::bytes& max_exp_avg_sq,
                                 const nb::bytes& master) {
  MomentValues values{.exp_avg = floats_of(exp_avg),
                      .exp_avg_sq = floats_of(exp_avg_sq),
                      .max_exp_avg_sq = floats_of(max_exp_avg_sq),
                      .masters = floats_of(master)};
  const MomentsRequest request{.session_id = session_id,
                               .shard_id = shard_id,
                               .element_first = element_first,
                               .element_count = values.exp_avg.size()};
  return {
      .server = server.shared_from_this(),
      .write = server.moments().begin_write(request, generation, NewMoments(std::move(values)))};
}

MomentsWrite begin_write_staged_moments(Server& server,
                                        uint64_t session_id,
                                        uint32_t shard_id,
                                        uint64_t generation,
                                        uint64_t element_first,
                                        uint32_t staged_shard_id,
                                        bool has_maximum,
                                        bool has_master,
                                        double timeout_s) {
  const MomentsRequest request{.session_id = session_id,
                               .shard_id = shard_id,
                               .element_first = element_first,
                               .element_count = 0};
  const StagedMoments staged{
      .shard_id = staged_shard_id, .has_maximum = has_maximum, .has_masters = has_master};
  return {.server = server.shared_from_this(),
          .write = server.moments().begin_write(request, generation, staged, timeout_s)};
}

double seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

void bind_records(nb::module_& module) {
  nb::class_<PoolReport>(module, "PoolReport")
      .def_ro("bytes", &PoolReport::bytes)
      .def_ro("segment_bytes", &PoolReport::segment_bytes)
      .def_ro("page_bytes", &PoolReport::page_bytes)
      .def_ro("locked", &PoolReport::locked)
      .def_ro("note", &PoolReport::note)
      .def_ro("prefault_seconds", &PoolReport::prefault_seconds)
      .def_ro("kept_bytes", &PoolReport::kept_bytes)
      .def_ro("gathered_bytes",
              &PoolReport::gathered_bytes,
              "With small pages that lie together in runs of 2 MiB, as the pool was made.");
  nb::class_<StartReport>(module, "StartReport")
      .def_ro("pool", &StartReport::pool)
      .def_ro("io_engine", &StartReport::io_engine)
      .def_ro("io_engine_reason", &StartReport::io_engine_reason)
      .def_ro("volume_paths", &StartReport::volume_paths)
      .def_ro("volume_bytes", &StartReport::volume_bytes)
      .def_ro("formatted", &StartReport::formatted)
      .def_ro("format_seconds", &StartReport::format_seconds)
      .def_ro("job_count", &StartReport::job_count)
      .def_ro("kept_note", &StartReport::kept_note)
      .def_ro("load_notes", &StartReport::load_notes);
  nb::class_<ShardSpec>(module, "ShardSpec")
      .def(
          "__init__",
          [](ShardSpec* self,
             std::string name,
             uint8_t kind,
             uint8_t dtype,
             std::vector<uint64_t> shape,
             uint8_t tier,
             bool value_only,
             bool keeps_maximum) {
            new (self) ShardSpec{.name = std::move(name),
                                 .kind = static_cast<ShardKind>(kind),
                                 .dtype = static_cast<DType>(dtype),
                                 .tier = static_cast<Tier>(tier),
                                 .shape = std::move(shape),
                                 .value_only = value_only,
                                 .keeps_maximum = keeps_maximum};
          },
          "name"_a,
          "kind"_a,
          "dtype"_a,
          "shape"_a,
          "tier"_a,
          "value_only"_a = false,
          "keeps_maximum"_a = false)
      .def_ro("name", &ShardSpec::name)
      .def_prop_ro("kind", [](const ShardSpec& self) { return static_cast<int>(self.kind); })
      .def_prop_ro("dtype", [](const ShardSpec& self) { return static_cast<int>(self.dtype); })
      .def_ro("keeps_maximum", &ShardSpec::keeps_maximum)
      .def_ro("shape", &ShardSpec::shape)
      .def_prop_ro("tier", [](const ShardSpec& self) { return static_cast<int>(self.tier); });
  nb::class_<ShardInfo>(module, "ShardInfo")
      .def_ro("shard_id", &ShardInfo::shard_id)
      .def_ro("spec", &ShardInfo::spec)
      .def_ro("generation", &ShardInfo::generation)
      .def_ro("written", &ShardInfo::written)
      .def_ro("bytes", &ShardInfo::bytes)
      .def_ro("lost", &ShardInfo::lost)
      .def_ro("unreadable", &ShardInfo::unreadable);
  nb::class_<SnapshotInfo>(module, "SnapshotInfo", "A committed step that its job keeps.")
      .def_ro("job_id", &SnapshotInfo::job_id)
      .def_ro("name", &SnapshotInfo::name)
      .def_ro("step", &SnapshotInfo::step)
      .def_ro("created_s", &SnapshotInfo::created_s, "Since 1970.")
      .def_ro("bytes",
              &SnapshotInfo::bytes,
              "On disk, some of which the job or other snapshots may name too.")
      .def_ro("extent_count", &SnapshotInfo::extent_count)
      .def_ro("is_lost", &SnapshotInfo::is_lost, "Its catalogue on disk is damaged.")
      .def_ro("lost_shards", &SnapshotInfo::lost_shards)
      .def_ro("is_exported", &SnapshotInfo::is_exported)
      .def_ro("exported_part", &SnapshotInfo::exported_part, "0 to 1, where it is exported.");
  nb::class_<ShardInfos>(module, "ShardInfos", "In the order that was asked for.")
      .def("__len__", [](const ShardInfos& self) { return self.all.size(); })
      .def("__getitem__",
           [](const ShardInfos& self, size_t index) {
             if (index >= self.all.size()) throw nb::index_error();
             return self.all[index];
           })
      .def(
          "__iter__",
          [](const ShardInfos& self) {
            return nb::make_iterator<nb::rv_policy::copy>(
                nb::type<ShardInfos>(), "ShardInfoIterator", self.all.begin(), self.all.end());
          },
          nb::keep_alive<0, 1>());
  nb::class_<JobInfo>(module, "JobInfo")
      .def_ro("job_id", &JobInfo::job_id)
      .def_ro("name", &JobInfo::name)
      .def_ro("uid", &JobInfo::uid)
      .def_ro("created", &JobInfo::created)
      .def_ro("committed_step", &JobInfo::committed_step)
      .def_ro("durable_step", &JobInfo::durable_step)
      .def_ro("durability", &JobInfo::durability)
      .def_ro("weight", &JobInfo::weight)
      .def_ro("session_count", &JobInfo::session_count)
      .def_ro("host_bytes", &JobInfo::host_bytes)
      .def_ro("host_bytes_used", &JobInfo::host_bytes_used)
      .def_ro("nvme_bytes", &JobInfo::nvme_bytes)
      .def_ro("nvme_bytes_used", &JobInfo::nvme_bytes_used, "By state.")
      .def_ro("metadata_bytes", &JobInfo::metadata_bytes, "By the catalogue, old and new.")
      .def_ro(
          "snapshot_bytes", &JobInfo::snapshot_bytes, "By snapshots, as if each shared nothing.")
      .def_ro("snapshot_count", &JobInfo::snapshot_count)
      .def_ro("host_tier_bytes",
              &JobInfo::host_tier_bytes,
              "Parameters of tier host and their optimizer state: on disk only in snapshots.")
      .def_ro("shard_count", &JobInfo::shard_count)
      .def_ro("element_count", &JobInfo::element_count)
      .def_ro("lease_count", &JobInfo::lease_count)
      .def_ro("lost_shards", &JobInfo::lost_shards)
      .def_ro("unreadable_shards", &JobInfo::unreadable_shards);
  nb::class_<SessionGrant>(
      module,
      "SessionGrant",
      "Its descriptors are closed when it is deleted: keep it until they were sent.")
      .def_ro("session_id", &SessionGrant::session_id)
      .def_ro("committed_step",
              &SessionGrant::committed_step,
              "The step at which the job stood when it was granted.")
      .def_ro("durable_step", &SessionGrant::durable_step)
      .def_prop_ro("session_fd", [](const SessionGrant& self) { return self.session.get(); })
      .def_prop_ro("table_fd", [](const SessionGrant& self) { return self.table.get(); })
      .def_prop_ro("doorbell_fd", [](const SessionGrant& self) { return self.doorbell.get(); })
      .def_ro("segment_bytes", &SessionGrant::segment_bytes)
      .def_ro("arena_reserved_bytes", &SessionGrant::arena_reserved_bytes);
  nb::class_<KeptSession>(module, "KeptSession")
      .def_ro("session_id", &KeptSession::session_id)
      .def_ro("job_id", &KeptSession::job_id)
      .def_prop_ro("pid", [](const KeptSession& self) { return self.owner.pid; })
      .def_prop_ro("start_time", [](const KeptSession& self) { return self.owner.start_time; })
      .def_prop_ro("uid", [](const KeptSession& self) { return self.owner.uid; });
  nb::class_<StepReport>(module, "StepReport")
      .def_ro("committed_step", &StepReport::committed_step)
      .def_ro("durable_step", &StepReport::durable_step)
      .def_ro("read_seconds", &StepReport::read_seconds)
      .def_ro("update_seconds", &StepReport::update_seconds)
      .def_ro("write_seconds", &StepReport::write_seconds)
      .def_ro("commit_seconds", &StepReport::commit_seconds)
      .def_ro("read_bytes", &StepReport::read_bytes)
      .def_ro("written_bytes", &StepReport::written_bytes)
      .def_ro("disk_error", &StepReport::disk_error);
}

void bind_background_statistics(nb::module_& module) {
  nb::class_<ScrubStatistics>(module, "ScrubStatistics", "The verification in the background.")
      .def_ro("bytes_per_second", &ScrubStatistics::bytes_per_second, "At most; 0: it is off.")
      .def_ro("bytes", &ScrubStatistics::bytes, "Read since the start.")
      .def_ro("errors", &ScrubStatistics::errors, "Extents found damaged, in each pass anew.")
      .def_ro("pass_count", &ScrubStatistics::pass_count)
      .def_prop_ro("last_pass_age_seconds",
                   [](const ScrubStatistics& self) { return seconds(self.last_pass_age_ns); })
      .def_ro("in_pass", &ScrubStatistics::in_pass)
      .def_ro("pass_bytes", &ScrubStatistics::pass_bytes)
      .def_ro("pass_bytes_all", &ScrubStatistics::pass_bytes_all)
      .def_ro("last_error", &ScrubStatistics::last_error);
  nb::class_<SnapshotReadingStatistics>(
      module, "SnapshotReadingStatistics", "Reads of snapshots for exports.")
      .def_ro("count", &SnapshotReadingStatistics::count, "At this moment.")
      .def_ro("bytes", &SnapshotReadingStatistics::bytes, "Read and verified since the start.")
      .def_ro("errors",
              &SnapshotReadingStatistics::errors,
              "Extents that were damaged or could not be read.");
}

void bind_statistics(nb::module_& module) {
  const auto list_of = [](const SecondsBounds& bounds) {
    return nb::cast(std::vector<double>(bounds.begin(), bounds.end()));
  };
  module.attr("IO_SECONDS_BOUNDS") = list_of(kIoSecondsBounds);
  module.attr("STEP_SECONDS_BOUNDS") = list_of(kStepSecondsBounds);
  module.attr("TURN_SECONDS_BOUNDS") = list_of(kTurnSecondsBounds);
  nb::class_<SecondsHistogram>(module, "SecondsHistogram")
      .def_prop_ro(
          "counts",
          [](const SecondsHistogram& self) {
            return std::vector<uint64_t>(self.counts().begin(), self.counts().end());
          },
          "One for each bucket alone; the last is for all above the highest bound.")
      .def_prop_ro("sum_seconds", &SecondsHistogram::sum_seconds);
  nb::class_<IoKindStatistics>(module, "IoKindStatistics")
      .def_ro("bytes", &IoKindStatistics::bytes)
      .def_ro("seconds", &IoKindStatistics::seconds)
      .def_ro("error_count_by_errno", &IoKindStatistics::error_count_by_errno)
      .def_prop_ro("error_count", &IoKindStatistics::error_count);
  nb::class_<DeviceStatistics>(module, "DeviceStatistics")
      .def_ro("path", &DeviceStatistics::path)
      .def_ro("bytes", &DeviceStatistics::bytes)
      .def_ro("bytes_free", &DeviceStatistics::bytes_free)
      .def_ro("checksum_failures", &DeviceStatistics::checksum_failures)
      .def_ro("fenced", &DeviceStatistics::fenced)
      .def_prop_ro("io_depth", [](const DeviceStatistics& self) { return self.limits.depth; })
      .def_prop_ro("io_chunk_bytes",
                   [](const DeviceStatistics& self) { return self.limits.chunk_bytes; })
      .def_prop_ro(
          "read",
          [](const DeviceStatistics& self) -> const auto& { return self.io.read; },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "write",
          [](const DeviceStatistics& self) -> const auto& { return self.io.write; },
          nb::rv_policy::reference_internal)
      .def_prop_ro(
          "sync",
          [](const DeviceStatistics& self) -> const auto& { return self.io.sync; },
          nb::rv_policy::reference_internal);
  nb::class_<JobStatistics>(module, "JobStatistics")
      .def_ro("job", &JobStatistics::job)
      .def_ro("arena_bytes", &JobStatistics::arena_bytes)
      .def_ro("arena_bytes_used", &JobStatistics::arena_bytes_used)
      .def_ro("private_bytes", &JobStatistics::private_bytes)
      .def_ro("private_bytes_used", &JobStatistics::private_bytes_used)
      .def_prop_ro("lease_hits", [](const JobStatistics& self) { return self.counters.lease_hits; })
      .def_prop_ro("lease_misses",
                   [](const JobStatistics& self) { return self.counters.lease_misses; })
      .def_prop_ro("lease_wait_seconds",
                   [](const JobStatistics& self) { return seconds(self.counters.lease_wait_ns); })
      .def_prop_ro("lease_wait_reason_seconds",
                   [](const JobStatistics& self) {
                     return seconds_by_reason(self.counters.lease_wait_reason_ns);
                   })
      .def_prop_ro("step_wall_seconds",
                   [](const JobStatistics& self) { return seconds(self.stalls.step_wall_ns()); })
      .def_prop_ro("stall_phase_seconds",
                   [](const JobStatistics& self) { return seconds_by_phase(self.stalls); })
      .def_prop_ro("stall_group_seconds",
                   [](const JobStatistics& self) { return seconds_by_group(self.stalls); })
      .def_prop_ro("fetched_bytes",
                   [](const JobStatistics& self) { return self.counters.fetched_bytes; })
      .def_prop_ro("prefetched_bytes",
                   [](const JobStatistics& self) { return self.counters.prefetched_bytes; })
      .def_prop_ro("prefetch_unused_bytes",
                   [](const JobStatistics& self) { return self.counters.prefetch_unused_bytes; })
      .def_prop_ro("prefetch_hits",
                   [](const JobStatistics& self) { return self.counters.prefetch_hits; })
      .def_prop_ro("prefetch_late",
                   [](const JobStatistics& self) { return self.counters.prefetch_late; })
      .def_prop_ro("uses_foreseen",
                   [](const JobStatistics& self) { return self.counters.uses_foreseen; })
      .def_prop_ro("uses_unforeseen",
                   [](const JobStatistics& self) { return self.counters.uses_unforeseen; })
      .def_prop_ro("plan_moved_bytes",
                   [](const JobStatistics& self) { return self.counters.plan_moved_bytes; })
      .def_prop_ro("plan_necessary_bytes",
                   [](const JobStatistics& self) { return self.counters.plan_necessary_bytes; })
      .def_prop_ro("early_tiles_adopted",
                   [](const JobStatistics& self) { return self.counters.early_tiles_adopted; })
      .def_prop_ro("early_tiles_discarded",
                   [](const JobStatistics& self) {
                     std::map<std::string, uint64_t> by_reason;
                     for (size_t i = 0; i < kEarlyDiscardCount; ++i)
                       by_reason[kEarlyDiscardNames[i]] = self.counters.early_tiles_discarded[i];
                     return by_reason;
                   })
      .def_prop_ro("evicted_bytes",
                   [](const JobStatistics& self) { return self.counters.evicted_bytes; })
      .def_prop_ro("spilled_bytes",
                   [](const JobStatistics& self) { return self.counters.spilled_bytes; });
  nb::class_<Activity>(module, "Activity", "Something that was begun and is not done.")
      .def_ro("kind", &Activity::kind)
      .def_ro("job", &Activity::job)
      .def_ro("uid", &Activity::uid)
      .def_ro("what", &Activity::what)
      .def_ro("waits_on", &Activity::waits_on)
      .def_ro("priority", &Activity::priority)
      .def_prop_ro("age_seconds", [](const Activity& self) { return seconds(self.age_ns); });
  nb::class_<StepPhases>(module, "StepPhases")
      .def_ro("read", &StepPhases::read)
      .def_ro("update", &StepPhases::update)
      .def_ro("write", &StepPhases::write)
      .def_ro("commit", &StepPhases::commit);
  nb::class_<TurnStatistics>(
      module, "TurnStatistics", "The server thread's turns that had something to do.")
      .def_ro("cpu_seconds", &TurnStatistics::cpu_seconds)
      .def_ro("wall_seconds", &TurnStatistics::wall_seconds)
      .def_ro("cpu_seconds_max", &TurnStatistics::cpu_seconds_max, "Since the start.")
      .def_ro("wall_seconds_max", &TurnStatistics::wall_seconds_max, "Since the start.")
      .def_prop_ro(
          "phases_of_cpu_max",
          [](const TurnStatistics& self) { return by_phase(self.phases_of_cpu_max); },
          "Seconds by the wall of each phase of the turn that took cpu_seconds_max.")
      .def_prop_ro(
          "phases_of_wall_max",
          [](const TurnStatistics& self) { return by_phase(self.phases_of_wall_max); },
          "Seconds by the wall of each phase of the turn that took wall_seconds_max.");
  nb::class_<ServerStatistics>(module, "ServerStatistics")
      .def_ro("pool", &ServerStatistics::pool)
      .def_ro("pool_bytes_free", &ServerStatistics::pool_bytes_free)
      .def_ro("nvme_bytes", &ServerStatistics::nvme_bytes)
      .def_ro("nvme_bytes_free", &ServerStatistics::nvme_bytes_free)
      .def_ro("nvme_bytes_of_snapshots", &ServerStatistics::nvme_bytes_of_snapshots)
      .def_ro("fence_reason", &ServerStatistics::fence_reason)
      .def_ro("devices", &ServerStatistics::devices)
      .def_ro("jobs", &ServerStatistics::jobs)
      .def_ro("session_count", &ServerStatistics::session_count)
      .def_ro("ring_protocol_errors", &ServerStatistics::ring_protocol_errors)
      .def_prop_ro("room_wait_seconds",
                   [](const ServerStatistics& self) { return seconds(self.room_wait_ns); })
      .def_ro("step_seconds", &ServerStatistics::step_seconds)
      .def_ro("commit_seconds", &ServerStatistics::commit_seconds)
      .def_ro("step_phases", &ServerStatistics::step_phases)
      .def_ro("turns", &ServerStatistics::turns)
      .def_ro("scrub", &ServerStatistics::scrub)
      .def_ro("exports", &ServerStatistics::exports);
}

/// The start, and jobs with what they hold.
void bind_jobs(nb::class_<Server>& server) {
  server
      .def(
          nb::new_(&start),
          nb::kw_only(),
          "directories"_a,
          "nvme_bytes"_a,
          "host_bytes"_a,
          "lock_required"_a = true,
          "huge_pages"_a = true,
          "io_engine"_a = "auto",
          "io_limits"_a = std::vector<std::pair<uint32_t, uint64_t>>{},
          "update_thread_count"_a = 0,
          "jobs_expected"_a = 2,
          "progress"_a = nb::none(),
          "keeper_fd"_a = nb::none(),
          "kept"_a = std::vector<std::pair<std::string, int>>{},
          "`io_limits` are depth and chunk size of each directory's path, or none for the default. "
          "Takes ownership of `keeper_fd`, a connected socket on which descriptors are kept in "
          "systemd's words, and of `kept`: names and descriptors that the daemon before left.")
      .def("report", &Server::report, nb::rv_policy::copy)
      .def(
          "open_job",
          [](Server& self,
             std::string name,
             uint32_t uid,
             uint64_t host_bytes,
             uint64_t nvme_bytes,
             bool fresh,
             const std::string& durability) {
            OpenJobRequest request{.name = std::move(name),
                                   .uid = uid,
                                   .host_bytes = host_bytes,
                                   .nvme_bytes = nvme_bytes,
                                   .fresh = fresh,
                                   .durability = std::nullopt};
            if (!durability.empty()) {
              request.durability = unlocked([&] { return Durability::parse(durability); });
            }
            return unlocked([&] { return self.open_job(request); });
          },
          "name"_a,
          nb::kw_only(),
          "uid"_a,
          "host_bytes"_a = 0,
          "nvme_bytes"_a = 0,
          "fresh"_a = false,
          "durability"_a = "",
          "Finds the job, whoever owns it, or creates it for `uid`.")
      .def(
          "find_job",
          [](Server& self, const std::string& name) {
            return unlocked([&] { return self.find_job(name); });
          },
          "name"_a)
      .def("jobs", [](Server& self) { return unlocked([&] { return self.jobs(); }); })
      .def(
          "shards",
          [](Server& self, uint64_t job_id, uint32_t first, std::optional<size_t> count_max) {
            const size_t count = count_max.value_or(std::numeric_limits<size_t>::max());
            return ShardInfos{unlocked([&] { return self.shards(job_id, first, count); })};
          },
          "job_id"_a,
          nb::kw_only(),
          "first"_a = 0,
          "count_max"_a = nb::none(),
          "In the order of their ids, from `first` on.")
      .def(
          "find_shard",
          [](Server& self, uint64_t job_id, const std::string& name) {
            return unlocked([&] { return self.find_shard(job_id, name); });
          },
          "job_id"_a,
          "name"_a)
      .def(
          "drop_job",
          [](Server& self, uint64_t job_id, bool force) {
            unlocked([&] { return self.drop_job(job_id, force); });
          },
          "job_id"_a,
          nb::kw_only(),
          "force"_a = false)
      .def(
          "set_job_weight",
          [](Server& self, uint64_t job_id, double weight) {
            unlocked([&] {
              const auto wanted = JobWeight::of(weight);
              return wanted.is_ok() ? self.set_job_weight(job_id, wanted.value()) : wanted.status();
            });
          },
          "job_id"_a,
          "weight"_a,
          "The job's share of devices and workers that others want as well.");
}

/// Snapshots, and loads that go back to one.
void bind_snapshots(nb::class_<Server>& server) {
  server
      .def(
          "create_snapshot",
          [](Server& self,
             uint64_t job_id,
             const std::string& name,
             uint64_t created_s,
             uint64_t number,
             uint64_t load_session_id,
             double timeout_s) {
            const SnapshotRequest request{.job_id = job_id,
                                          .name = name,
                                          .created_s = created_s,
                                          .number = number,
                                          .session_id = load_session_id};
            return unlocked([&] { return self.snapshots().create(request, timeout_s); });
          },
          "job_id"_a,
          "name"_a,
          nb::kw_only(),
          "created_s"_a,
          "number"_a,
          "load_session_id"_a = 0,
          "timeout_s"_a,
          "Keeps the job's last committed step, which is on disk then. The same `number` again, "
          "not 0, is the same request. With `load_session_id` the job goes back to it unless that "
          "session calls end_load().")
      .def(
          "restore_snapshot",
          [](Server& self, uint64_t job_id, const std::string& name, double timeout_s) {
            return unlocked([&] { return self.snapshots().restore(job_id, name, timeout_s); });
          },
          "job_id"_a,
          "name"_a,
          nb::kw_only(),
          "timeout_s"_a,
          "The job's committed step becomes the snapshot's. Refused while the job is in use.")
      .def(
          "drop_snapshot",
          [](Server& self, uint64_t job_id, const std::string& name, double timeout_s) {
            unlocked([&] { return self.snapshots().drop(job_id, name, timeout_s); });
          },
          "job_id"_a,
          "name"_a,
          nb::kw_only(),
          "timeout_s"_a)
      .def(
          "end_load",
          [](Server& self, uint64_t session_id, const std::string& name, double timeout_s) {
            unlocked([&] { return self.snapshots().end_load(session_id, name, timeout_s); });
          },
          "session_id"_a,
          "name"_a,
          nb::kw_only(),
          "timeout_s"_a,
          "The session's load counts, and is on disk; its snapshot is dropped.")
      .def(
          "take_load_notes",
          [](Server& self) { return unlocked([&] { return self.snapshots().take_notes(); }); },
          "A sentence for each load that broke off since the last call: its job has gone back, or "
          "could not.")
      .def(
          "snapshots",
          [](Server& self, uint64_t job_id) {
            return unlocked([&] { return self.snapshots().list(job_id); });
          },
          "job_id"_a,
          "Oldest first.");
}

/// Sessions, from attaching to detaching.
void bind_sessions(nb::class_<Server>& server) {
  server
      .def(
          "attach",
          [](Server& self,
             uint64_t job_id,
             uint32_t pid,
             uint64_t start_time,
             uint32_t uid,
             double timeout_s) {
            const SessionOwner owner{.pid = pid, .start_time = start_time, .uid = uid};
            return std::make_unique<SessionGrant>(
                unlocked([&] { return self.attach(job_id, owner, timeout_s); }));
          },
          "job_id"_a,
          nb::kw_only(),
          "pid"_a = 0,
          "start_time"_a = 0,
          "uid"_a = 0,
          "timeout_s"_a = 60.0,
          "`pid`, `start_time` and `uid` are those of the process that the session belongs to; "
          "only "
          "it may resume the session. Where it is not done in time there is no session.")
      .def(
          "kept_sessions",
          [](Server& self) { return unlocked([&] { return self.kept_sessions(); }); },
          "Sessions of the daemon before whose processes have not come back yet.")
      .def(
          "redo_steps",
          &Server::redo_steps,
          nb::call_guard<nb::gil_scoped_release>(),
          "Once, when those of kept_sessions() whose process is dead are detached: steps that were "
          "closed in the daemon before are made from here on.")
      .def(
          "resume_session",
          [](Server& self, uint64_t session_id, uint32_t pid, uint64_t start_time, uint32_t uid) {
            const SessionOwner owner{.pid = pid, .start_time = start_time, .uid = uid};
            return std::make_unique<SessionGrant>(
                unlocked([&] { return self.resume_session(session_id, owner); }));
          },
          "session_id"_a,
          nb::kw_only(),
          "pid"_a,
          "start_time"_a,
          "uid"_a,
          "Without descriptors: the process has them.")
      .def(
          "closing_step",
          [](Server& self, uint64_t job_id) {
            return unlocked([&] { return self.closing_step(job_id); });
          },
          "job_id"_a,
          "A step that was closed and that the daemon is finishing; 0: none.")
      .def(
          "segment_fds",
          [](Server& self, uint64_t session_id, uint64_t first) {
            return release_fds(unlocked([&] { return self.segment_fds(session_id, first); }));
          },
          "session_id"_a,
          "first"_a,
          "Duplicates of the arena's segments from `first` on, at most 64; owned by the caller.")
      .def(
          "detach",
          [](Server& self, uint64_t session_id) {
            return unlocked([&] { return self.detach(session_id); });
          },
          "session_id"_a,
          "Leases that were still held.");
}

void bind_moments(nb::class_<Server>& server) {
  server
      .def("read_moments",
           &read_moments,
           "session_id"_a,
           "shard_id"_a,
           "element_first"_a,
           "element_count"_a,
           nb::kw_only(),
           "with_master"_a,
           "timeout_s"_a,
           nb::sig("def read_moments(self, session_id: int, shard_id: int, element_first: int, "
                   "element_count: int, *, with_master: bool, timeout_s: float) "
                   "-> tuple[bytes, bytes, bytes, bytes]"),
           "exp_avg, exp_avg_sq, max_exp_avg_sq and master, fp32, of elements within one tile of "
           "262144. max_exp_avg_sq is empty where the shard keeps no maximum, and master, the "
           "numbers of which the bfloat16 values are published, without with_master or where the "
           "shard is float32.")
      .def("begin_write_moments",
           &begin_write_moments,
           "session_id"_a,
           "shard_id"_a,
           "generation"_a,
           "element_first"_a,
           "exp_avg"_a,
           "exp_avg_sq"_a,
           "max_exp_avg_sq"_a,
           "master"_a,
           "Replaces moments within one tile, and the shard's generation; durable after the next "
           "sync or step. max_exp_avg_sq is empty where the shard keeps no maximum from here on. "
           "master is empty, or the fp32 numbers of which the bfloat16 values are published. "
           "Returns at once; writes to one tile take effect in their order.")
      .def("begin_write_staged_moments",
           &begin_write_staged_moments,
           "session_id"_a,
           "shard_id"_a,
           "generation"_a,
           "element_first"_a,
           "staged_shard_id"_a,
           "has_maximum"_a,
           "has_master"_a,
           nb::kw_only(),
           "timeout_s"_a,
           "The same of moments that lie in a blob, one behind the other. The blob is leased once "
           "it can be, within timeout_s, and until they were taken.")
      .def(
          "bytes_of_maxima",
          [](Server& self, uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
            return unlocked([&] { return self.moments().bytes_of_maxima(session_id, shard_ids); });
          },
          "session_id"_a,
          "shard_ids"_a,
          "Returns how many more bytes of the disk quota the job would need if all these "
          "parameters kept a maximum. Changes nothing.");
}

/// A session's calls on its job's shards.
void bind_state(nb::class_<Server>& server) {
  server
      .def(
          "declare",
          [](Server& self, uint64_t session_id, const nb::typed<nb::iterable, ShardSpec>& shards) {
            std::vector<ShardSpec> specs;
            for (const nb::handle each : shards) {
              if (!nb::isinstance<ShardSpec>(each)) {
                throw nb::type_error("declare() takes ShardSpecs");
              }
              specs.push_back(nb::cast<ShardSpec>(each));
            }
            auto [infos, gradients_fit] = unlocked([&] { return self.declare(session_id, specs); });
            return std::pair(ShardInfos{std::move(infos)}, gradients_fit);
          },
          "session_id"_a,
          "shards"_a,
          "Takes each spec as it comes: who makes them one by one keeps none.")
      .def(
          "step",
          [](Server& self,
             uint64_t session_id,
             const std::vector<std::pair<AdamSettings, std::vector<uint32_t>>>& groups,
             const std::vector<std::pair<uint32_t, uint32_t>>& staged_buffers,
             uint64_t step,
             uint64_t call,
             const std::vector<std::pair<uint64_t, uint64_t>>& other_ranks,
             double timeout_s) {
            std::vector<StepCall> others;
            for (const auto& [other_id, other_call] : other_ranks)
              others.push_back({.session_id = other_id, .call = other_call});
            StepRequest request{.session_id = session_id,
                                .groups = step_groups(groups),
                                .staged_buffers = staged_buffers,
                                .step = step,
                                .call = call};
            return unlocked([&] { return self.step(request, others, timeout_s); });
          },
          "session_id"_a,
          "groups"_a,
          nb::kw_only(),
          "staged_buffers"_a = std::vector<std::pair<uint32_t, uint32_t>>{},
          "step"_a = 0,
          "call"_a = 0,
          "other_ranks"_a = std::vector<std::pair<uint64_t, uint64_t>>{},
          "timeout_s"_a,
          "`other_ranks`: session id and call of each that closes the same step.")
      .def(
          "expect_step",
          [](Server& self,
             uint64_t session_id,
             const std::vector<std::pair<AdamSettings, std::vector<uint32_t>>>& groups) {
            unlocked([&] { return self.expect_step(session_id, step_groups(groups)); });
          },
          "session_id"_a,
          "groups"_a)
      .def(
          "sync",
          [](Server& self, uint64_t session_id, double timeout_s) {
            return unlocked([&] { return self.sync(session_id, timeout_s); });
          },
          "session_id"_a,
          nb::kw_only(),
          "timeout_s"_a)
      .def(
          "drop_gradients",
          [](Server& self, uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
            unlocked([&] { return self.drop_gradients(session_id, shard_ids); });
          },
          "session_id"_a,
          "shard_ids"_a)
      .def(
          "delete_shard",
          [](Server& self, uint64_t session_id, const std::string& name) {
            return unlocked([&] { return self.delete_shard(session_id, name); });
          },
          "session_id"_a,
          "name"_a)
      .def(
          "lease",
          [](Server& self,
             uint64_t session_id,
             uint32_t shard_id,
             uint8_t part,
             uint8_t mode,
             double timeout_s) {
            return unlocked([&] {
              return self.lease(session_id,
                                shard_id,
                                static_cast<Part>(part),
                                static_cast<LeaseMode>(mode),
                                timeout_s);
            });
          },
          "session_id"_a,
          "shard_id"_a,
          nb::kw_only(),
          "part"_a = 0,
          "mode"_a = 0,
          "timeout_s"_a);
}

/// The operator's view, and the end.
void bind_operation(nb::class_<Server>& server) {
  server.def("statistics", [](Server& self) { return unlocked([&] { return self.statistics(); }); })
      .def_prop_ro("outlives_process",
                   &Server::outlives_process,
                   "Whether what jobs have in memory outlives this process; False also where the "
                   "keeper failed.")
      .def(
          "in_flight",
          [](Server& self) { return unlocked([&] { return self.in_flight(); }); },
          "Operations that have begun and are not done, the oldest first.")
      .def("set_scrub_rate",
           &Server::set_scrub_rate,
           "bytes_per_second"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "The verification in the background reads so fast; 0: off, as at the start.")
      .def(
          "begin_check",
          [](Server& self, const std::vector<uint64_t>& job_ids, bool whole) {
            const LiveCheckRequest request{.job_ids = {job_ids.begin(), job_ids.end()},
                                           .whole = whole};
            return unlocked([&] { return self.begin_check(request); });
          },
          "job_ids"_a,
          nb::kw_only(),
          "whole"_a,
          "Checks these jobs, or everything, and returns its number. Refused while another one "
          "runs.")
      .def(
          "check_progress",
          [](Server& self, uint64_t check_id) {
            return unlocked([&] { return self.check_progress(check_id); });
          },
          "check_id"_a,
          "Findings since the last call, and the report at the end.")
      .def("end_check", &Server::end_check, "check_id"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("heartbeat",
           &Server::heartbeat,
           "Grows while the server thread turns; the watchdog looks at it.")
      .def(
          "stop",
          [](Server& self, double timeout_s) { unlocked([&] { return self.stop(timeout_s); }); },
          nb::kw_only(),
          "timeout_s"_a,
          "Finishes the steps that were begun, makes written blobs durable, ends the threads. "
          "Sessions end, unless they outlive the process. Idempotent.");
}

}  // namespace

void bind_server(nb::module_& module) {
  bind_records(module);
  bind_background_statistics(module);
  bind_statistics(module);

  nb::class_<MomentsWrite>(module, "MomentsWrite", "A write of moments that was begun.")
      .def(
          "wait",
          [](MomentsWrite& self, double timeout_s) {
            unlocked([&] { return self.server->moments().wait(self.write, timeout_s); });
          },
          nb::kw_only(),
          "timeout_s"_a,
          "Until it has taken effect. Once. After an error it may go on.");

  nb::class_<ServiceLease>(module,
                           "ServiceLease",
                           "Bytes of one shard, pinned until release(), discard() or deletion, "
                           "whatever becomes of the session.")
      .def(
          "memory",
          [](ServiceLease& self) {
            PyObject* view = PyMemoryView_FromMemory(reinterpret_cast<char*>(self.data()),
                                                     static_cast<Py_ssize_t>(self.bytes()),
                                                     PyBUF_WRITE);
            if (view == nullptr) throw nb::python_error();
            return nb::steal(view);
          },
          nb::keep_alive<0, 1>(),
          nb::sig("def memory(self) -> memoryview"),
          "The bytes, writable. Not to be touched after release() or discard().")
      .def(
          "release",
          [](ServiceLease& self) { self.release(false); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Readers see the new bytes from now on.")
      .def(
          "discard",
          [](ServiceLease& self) { self.release(true); },
          nb::call_guard<nb::gil_scoped_release>(),
          "An overwrite of a blob leaves no trace.");

  nb::class_<Server> server(
      module,
      "Server",
      "Pool, volumes, jobs and the threads that serve them. Every method may be "
      "called from any thread and releases the GIL; each raises "
      "StatusError. Blocking ones take a deadline and say on what they waited.");
  bind_jobs(server);
  bind_snapshots(server);
  bind_sessions(server);
  bind_state(server);
  bind_moments(server);
  bind_operation(server);
  bind_snapshot_readings(module, server);
  bind_ranks(module, server);
}

}  // namespace memd
