#include "store/verify/check.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/threads.h"
#include "base/units.h"

namespace memd {
namespace {

constexpr auto kProgressInterval = std::chrono::milliseconds(100);

struct Set {
  std::vector<InspectedVolume> volumes;  // by index
  Superblock superblock;                 // of the lead volume
};

/// One extent to compare, and where it belongs.
struct Task {
  ExtentUse use;
  size_t job = 0;  // index into CheckReport::jobs
  std::string snapshot{};
};

class Buffer {
 public:
  std::span<std::byte> of(uint64_t bytes) {
    if (bytes > bytes_) {
      data_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes)));
      MEMD_CHECK(data_ != nullptr);
      bytes_ = bytes;
    }
    return {data_.get(), bytes};
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  uint64_t bytes_ = 0;
};

Result<Set> open_set(const std::vector<std::string>& directories,
                     uint32_t lock_wait_ms,
                     const std::function<int(int file)>& flush_file = {}) {
  if (directories.empty() || directories.size() > UINT16_MAX) {
    return error(StatusCode::invalid_argument,
                 "name 1 to 65535 data directories; named are ",
                 directories.size());
  }
  Set set;
  for (const std::string& directory : directories) {
    auto volume = inspect_volume(directory, lock_wait_ms, flush_file);
    if (!volume.is_ok()) return volume.status();
    set.volumes.push_back(std::move(volume).value());
  }
  std::sort(set.volumes.begin(), set.volumes.end(), [](const auto& a, const auto& b) {
    return a.superblock.volume_index < b.superblock.volume_index;
  });
  for (size_t i = 0; i < set.volumes.size(); ++i) {
    const InspectedVolume& volume = set.volumes[i];
    const InspectedVolume& first = set.volumes.front();
    if (volume.superblock.set_uuid != first.superblock.set_uuid) {
      return error(StatusCode::invalid_argument,
                   volume.path,
                   " and ",
                   first.path,
                   " belong to different sets; name the directories of one set");
    }
    if (volume.superblock.volume_count != set.volumes.size() ||
        volume.superblock.volume_index != i) {
      return error(
          StatusCode::invalid_argument,
          volume.path,
          " belongs to a set of other directories; name each of the set once: the set has ",
          volume.superblock.volume_count,
          ", named are ",
          set.volumes.size());
    }
  }
  set.superblock = set.volumes.front().superblock;
  return set;
}

CheckFinding not_flushed(const InspectedVolume& volume) {
  return {.is_lost = true,
          .path = volume.path,
          .offset_bytes = 0,
          .length_bytes = volume.bytes,
          .job = {},
          .shards = {},
          .part = "the drive's cache",
          .reason = concat(
              "it can't be flushed, so that the last commits may be gone after a power cut and no "
              "daemon starts on this volume; look at the device (dmesg): ",
              volume.flushed.message())};
}

Status read_once(const InspectedVolume& volume, uint64_t offset_bytes, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got =
        ::pread(volume.file.get(), into.data(), into.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return device_error(got < 0 ? errno : EIO,
                          concat("read ", volume.path, " at ", offset_bytes));
    }
    into = into.subspan(static_cast<size_t>(got));
    offset_bytes += static_cast<uint64_t>(got);
  }
  return Status::ok();
}

/// As the daemon itself does: a mismatch is read once more.
Status read_verified(const Set& set, const ExtentRecord& extent, std::span<std::byte> into) {
  const InspectedVolume& volume = set.volumes[extent.address.device];
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (Status status = read_once(volume, extent.address.offset_bytes, into); !status.is_ok()) {
      return status;
    }
    if (hash_extent(into, extent.address) == extent.checksum) return Status::ok();
  }
  return error(StatusCode::integrity, "its bytes are not those that were written (read twice)");
}

Status check_place(const Set& set, const ExtentRecord& extent) {
  if (extent.address.device >= set.volumes.size()) {
    return error(StatusCode::integrity,
                 "it lies on volume ",
                 extent.address.device,
                 ", which the set does not have");
  }
  const uint64_t end_bytes = set.volumes[extent.address.device].bytes - 2_MiB;
  const uint64_t offset_bytes = extent.address.offset_bytes;
  if (extent.length_bytes == 0 || !is_aligned(extent.length_bytes, kBlockBytes) ||
      !is_aligned(offset_bytes, kBlockBytes) || offset_bytes < 2_MiB || offset_bytes > end_bytes ||
      extent.length_bytes > end_bytes - offset_bytes) {
    return error(StatusCode::integrity, "it lies outside of the volume's space for extents");
  }
  return Status::ok();
}

CheckFinding finding_at(const Set& set, const ExtentRecord& extent, const Status& status) {
  CheckFinding finding;
  const uint16_t device = extent.address.device;
  finding.path = device < set.volumes.size() ? set.volumes[device].path : concat("volume ", device);
  finding.offset_bytes = extent.address.offset_bytes;
  finding.length_bytes = extent.length_bytes;
  finding.reason = status.message();
  return finding;
}

/// The bytes of a root or catalogue; where one of its extents is lost, a finding says which.
Result<std::vector<std::byte>> read_record(const Set& set,
                                           const std::vector<ExtentRecord>& extents,
                                           uint64_t bytes,
                                           const std::string& part,
                                           std::vector<CheckFinding>& findings) {
  std::vector<std::byte> out;
  Buffer buffer;
  for (const ExtentRecord& extent : extents) {
    Status status = check_place(set, extent);
    std::span<std::byte> block;
    if (status.is_ok()) {
      block = buffer.of(extent.length_bytes);
      status = read_verified(set, extent, block);
    }
    if (!status.is_ok()) {
      findings.push_back(finding_at(set, extent, status));
      findings.back().part = part;
      return status;
    }
    out.insert(out.end(), block.begin(), block.end());
  }
  if (out.size() < bytes) {
    CheckFinding finding;
    finding.path = set.volumes.front().path;
    finding.part = part;
    finding.reason = concat("it is shorter than it says: ", out.size(), " < ", bytes);
    findings.push_back(finding);
    return error(StatusCode::integrity, finding.reason);
  }
  out.resize(bytes);
  return out;
}

/// A record that is whole and makes no sense, or one of a newer version.
void add_malformed(const Set& set,
                   const ExtentRecord& extent,
                   const std::string& part,
                   const Status& status,
                   std::vector<CheckFinding>& findings) {
  findings.push_back(finding_at(set, extent, status));
  findings.back().part = part;
}

struct ReadSnapshot {
  std::string name;
  uint64_t step = 0;
  std::optional<JobRecord> record;  // nothing where its catalogue is damaged
};

struct Jobs {
  std::vector<JobRecord> records;
  std::map<uint64_t, std::vector<ReadSnapshot>> snapshots;  // by job id
  std::vector<ExtentUse> catalogues;  // of the root, of all jobs, and of their snapshots alone
};

/// Extents of one job, each once: its snapshots may name what it or others of them name.
class SharedExtents {
 public:
  /// Whether it is the first with this place, length and checksum.
  bool add(const ExtentRecord& extent) { return known_.insert(extent).second; }

 private:
  std::set<ExtentRecord> known_;
};

/// Ranges that two owners name. Sorted by place: each is compared with the one that reaches
/// farthest so far.
void add_overlaps(const Set& set,
                  const std::vector<std::pair<const ExtentUse*, std::string>>& uses,
                  std::vector<CheckFinding>& findings) {
  std::vector<size_t> order(uses.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto place = [&](size_t i) { return uses[i].first->extent.address; };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return place(a) < place(b); });
  size_t farthest = 0;
  const auto end_of = [&](size_t i) {
    const ExtentRecord& extent = uses[i].first->extent;
    return extent.address.offset_bytes + extent.length_bytes;
  };
  for (size_t at = 0; at < order.size(); ++at) {
    const size_t i = order[at];
    const bool same_device = at > 0 && place(order[farthest]).device == place(i).device;
    if (same_device && place(i).offset_bytes < end_of(order[farthest])) {
      const auto& [use, job] = uses[i];
      const auto& [other, other_job] = uses[order[farthest]];
      CheckFinding finding = finding_at(set, use->extent, Status::ok());
      finding.job = job;
      finding.shards = use->shards;
      finding.part = use->part;
      finding.reason = concat("it has two owners; the other is ",
                              other_job.empty() ? "" : concat(other_job, ", "),
                              other->part);
      findings.push_back(std::move(finding));
    }
    if (!same_device || end_of(i) > end_of(order[farthest])) farthest = at;
  }
}

std::string part_of(const RootEntry& entry) {
  return concat("the catalogue of job ", entry.job_id);
}

std::string part_of(const SnapshotEntry& entry) {
  return concat("the catalogue of snapshot ", entry.name, " of job ", entry.job.job_id);
}

/// An error only where the format is newer; everything else is a finding. After the jobs.
Status read_snapshot(const Set& set,
                     const SnapshotEntry& entry,
                     Jobs& jobs,
                     std::vector<CheckFinding>& findings) {
  const std::string part = part_of(entry);
  const size_t finding_first = findings.size();
  const auto bytes =
      read_record(set, entry.job.catalogue, entry.job.catalogue_bytes, part, findings);
  auto record = bytes.is_ok() ? decode_job(bytes.value(), FormatUse::read_only)
                              : Result<JobRecord>(bytes.status());
  if (record.status().code() == StatusCode::not_yet) return record.status();
  std::set<std::string> alone;
  const Status sound =
      record.is_ok() ? check_identity(entry.job, record.value(), alone) : record.status();
  if (bytes.is_ok() && !sound.is_ok()) {
    add_malformed(set, entry.job.catalogue.front(), part, sound, findings);
  }
  for (size_t i = finding_first; i < findings.size(); ++i) {
    findings[i].snapshot = entry.name;
    findings[i].part = "the snapshot's catalogue";
    for (const JobRecord& job : jobs.records) {
      if (job.job_id == entry.job.job_id) findings[i].job = job.name;
    }
  }
  ReadSnapshot read{.name = entry.name, .step = entry.step, .record = std::nullopt};
  if (sound.is_ok()) read.record = std::move(record).value();
  jobs.snapshots[entry.job.job_id].push_back(std::move(read));
  return Status::ok();
}

/// An error only where the format is newer; everything else is a finding.
Result<Jobs> read_jobs(const Set& set, std::vector<CheckFinding>& findings) {
  Jobs jobs;
  if (set.superblock.root_bytes == 0) return jobs;
  const ExtentRecord& root_extent = set.superblock.root;
  jobs.catalogues.push_back({.extent = root_extent, .part = "the list of jobs", .shards = {}});
  const auto root_bytes =
      read_record(set, {root_extent}, set.superblock.root_bytes, "the list of jobs", findings);
  if (!root_bytes.is_ok()) return jobs;
  const auto root = decode_root(root_bytes.value(), FormatUse::read_only);
  if (!root.is_ok()) {
    if (root.status().code() == StatusCode::not_yet) return root.status();
    add_malformed(set, root_extent, "the list of jobs", root.status(), findings);
    return jobs;
  }
  std::map<uint64_t, SharedExtents> shared;
  for (const RootEntry& entry : root.value().jobs) {
    for (const ExtentRecord& extent : entry.catalogue) {
      jobs.catalogues.push_back({.extent = extent, .part = part_of(entry), .shards = {}});
      shared[entry.job_id].add(extent);
    }
  }
  for (const SnapshotEntry& entry : root.value().snapshots) {
    for (const ExtentRecord& extent : entry.job.catalogue) {
      if (!shared[entry.job.job_id].add(extent)) continue;
      jobs.catalogues.push_back({.extent = extent, .part = part_of(entry), .shards = {}});
    }
  }
  // Before they are read: what the same bytes are named for again and again fits no memory. No
  // daemon starts from such a list.
  std::vector<std::pair<const ExtentUse*, std::string>> owners;
  for (const ExtentUse& use : jobs.catalogues) owners.emplace_back(&use, "");
  std::vector<CheckFinding> overlaps;
  add_overlaps(set, owners, overlaps);
  if (!overlaps.empty()) {
    findings.push_back(std::move(overlaps.front()));
    jobs.catalogues.resize(1);  // what was read
    return jobs;
  }
  std::set<std::string> names;
  for (const RootEntry& entry : root.value().jobs) {
    const std::string part = part_of(entry);
    const auto bytes = read_record(set, entry.catalogue, entry.catalogue_bytes, part, findings);
    if (!bytes.is_ok()) continue;
    auto job = decode_job(bytes.value(), FormatUse::read_only);
    if (job.status().code() == StatusCode::not_yet) return job.status();
    const Status sound = job.is_ok() ? check_identity(entry, job.value(), names) : job.status();
    if (!sound.is_ok()) {
      add_malformed(set, entry.catalogue.front(), part, sound, findings);
      continue;
    }
    jobs.records.push_back(std::move(job).value());
  }
  for (const SnapshotEntry& entry : root.value().snapshots) {
    if (Status newer = read_snapshot(set, entry, jobs, findings); !newer.is_ok()) return newer;
  }
  return jobs;
}

CheckedVolume told(const InspectedVolume& volume) {
  return {.directory = volume.directory,
          .path = volume.path,
          .bytes = volume.bytes,
          .holder = volume.holder,
          .superblock = volume.superblock,
          .copies = volume.copies};
}

std::vector<CheckedVolume> told(const Set& set) {
  std::vector<CheckedVolume> volumes;
  for (const InspectedVolume& volume : set.volumes) volumes.push_back(told(volume));
  return volumes;
}

CheckedJob told(const JobRecord& record, const std::vector<ExtentUse>& uses) {
  CheckedJob job{.job_id = record.job_id,
                 .name = record.name,
                 .step = record.step,
                 .shard_count = record.shards.size(),
                 .extent_count = uses.size(),
                 .bytes = 0,
                 .lost_shards = {}};
  for (const ExtentUse& use : uses) job.bytes += use.extent.length_bytes;
  return job;
}

const std::vector<ReadSnapshot>& snapshots_of(const Jobs& jobs, const JobRecord& record) {
  static const std::vector<ReadSnapshot> none;
  const auto found = jobs.snapshots.find(record.job_id);
  return found == jobs.snapshots.end() ? none : found->second;
}

CheckedSnapshot told(const ReadSnapshot& snapshot, const std::vector<ExtentUse>& uses) {
  CheckedSnapshot out{.name = snapshot.name,
                      .step = snapshot.step,
                      .is_lost = !snapshot.record.has_value(),
                      .extent_count = uses.size(),
                      .bytes = 0,
                      .lost_shards = {}};
  for (const ExtentUse& use : uses) out.bytes += use.extent.length_bytes;
  return out;
}

std::vector<ExtentUse> extents_of(const ReadSnapshot& snapshot) {
  return snapshot.record ? memd::extents_of(*snapshot.record) : std::vector<ExtentUse>{};
}

/// Reads and compares all of `tasks`, which are sorted by extent, on threads; what is lost becomes
/// a finding of each.
Status compare_all(const Set& set,
                   const std::vector<Task>& tasks,
                   const CheckOptions& options,
                   CheckReport& report) {
  // Equal ones are neighbours: each run of them is read once.
  std::vector<size_t> runs;
  uint64_t bytes_all = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (i > 0 && tasks[i - 1].use.extent == tasks[i].use.extent) continue;
    runs.push_back(i);
    bytes_all += tasks[i].use.extent.length_bytes;
  }
  std::atomic<size_t> next{0};
  std::atomic<uint64_t> bytes_done{0};
  std::atomic<bool> given_up{false};
  std::mutex mutex;
  std::condition_variable ended;
  size_t running = 0;
  std::vector<std::pair<size_t, Status>> lost;
  const auto work = [&] {
    Buffer buffer;
    while (!given_up.load(std::memory_order_relaxed)) {
      const size_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= runs.size()) break;
      const ExtentRecord& extent = tasks[runs[index]].use.extent;
      const Status status = read_verified(set, extent, buffer.of(extent.length_bytes));
      bytes_done.fetch_add(extent.length_bytes, std::memory_order_relaxed);
      if (status.is_ok()) continue;
      const size_t end = index + 1 < runs.size() ? runs[index + 1] : tasks.size();
      const std::lock_guard lock(mutex);
      for (size_t i = runs[index]; i < end; ++i) lost.emplace_back(i, status);
    }
    const std::lock_guard lock(mutex);
    --running;
    ended.notify_all();
  };
  const size_t count = std::min<size_t>(std::max(1u, options.thread_count), runs.size());
  std::vector<std::thread> threads;
  Status started;
  {
    // None of them ends before all are counted.
    std::unique_lock lock(mutex);
    started = start_threads(threads, count, work);
    running = threads.size();
    while (running > 0) {
      ended.wait_for(lock, kProgressInterval);
      if (!options.progress) continue;
      lock.unlock();
      if (!options.progress(bytes_done.load(), bytes_all)) given_up.store(true);
      lock.lock();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!started.is_ok()) return started;
  if (given_up.load()) return error(StatusCode::unavailable, "the check was broken off");
  report.bytes += bytes_all;
  std::sort(
      lost.begin(), lost.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [index, status] : lost) {
    const Task& task = tasks[index];
    CheckFinding finding = finding_at(set, task.use.extent, status);
    finding.job = report.jobs[task.job].name;
    finding.snapshot = task.snapshot;
    finding.shards = task.use.shards;
    finding.part = task.use.part;
    report.findings.push_back(std::move(finding));
  }
  return Status::ok();
}

void gather_lost_shards(CheckReport& report) {
  const auto lost = [&report](const CheckedJob& job, const std::string& snapshot) {
    std::set<std::string> names;
    for (const CheckFinding& finding : report.findings) {
      if (finding.is_lost && finding.job == job.name && finding.snapshot == snapshot) {
        names.insert(finding.shards.begin(), finding.shards.end());
      }
    }
    return std::vector<std::string>(names.begin(), names.end());
  };
  for (CheckedJob& job : report.jobs) {
    job.lost_shards = lost(job, "");
    for (CheckedSnapshot& snapshot : job.snapshots) snapshot.lost_shards = lost(job, snapshot.name);
  }
}

}  // namespace

bool CheckReport::anything_lost() const {
  return std::any_of(
      findings.begin(), findings.end(), [](const CheckFinding& each) { return each.is_lost; });
}

std::vector<CheckFinding> superblock_findings(const std::string& path,
                                              const std::array<SuperblockCopy, 4>& copies,
                                              uint64_t sequence) {
  std::vector<CheckFinding> findings;
  const auto is_damaged = [&copies](size_t i) { return copies.at(i).state == CopyState::damaged; };
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!is_damaged(i)) continue;
    CheckFinding finding;
    finding.is_lost = false;
    finding.path = path;
    finding.offset_bytes = copies.at(i).offset_bytes;
    finding.length_bytes = kSuperblockBytes;
    finding.part = "a superblock";
    finding.reason = copies.at(i).reason;
    // Both copies of a pair: what it held was a commit that never was, or one that is lost.
    if (i % 2 == 1 && is_damaged(i - 1)) {
      finding.reason += concat(
          "; both copies of its pair are, so that the last commit may be gone: the volume stands "
          "at sequence ",
          sequence);
    }
    findings.push_back(std::move(finding));
  }
  return findings;
}

std::vector<ExtentUse> extents_of(const JobRecord& job) {
  std::vector<ExtentUse> uses;
  if (job.undurable_since != 0) return uses;  // free to be overwritten, by anybody
  std::vector<std::vector<const ShardRecord*>> shards_of(job.buckets.size());
  for (const ShardRecord& shard : job.shards) {
    if (shard.kind == ShardKind::parameter) {
      shards_of[shard.bucket].push_back(&shard);
      continue;
    }
    for (size_t i = 0; i < shard.extents.size(); ++i) {
      const uint64_t begin = i * uint64_t{kBlobExtentBytes};
      uses.push_back({.extent = shard.extents[i],
                      .part = concat("bytes from ", begin),
                      .shards = {shard.name}});
    }
  }
  for (size_t bucket = 0; bucket < job.buckets.size(); ++bucket) {
    for (size_t tile = 0; tile < job.buckets[bucket].tiles.size(); ++tile) {
      const uint64_t begin = tile * kTileElements;
      std::vector<std::string> names;
      for (const ShardRecord* shard : shards_of[bucket]) {
        uint64_t elements = 1;
        for (const uint64_t size : shard->shape) elements *= size;
        if (shard->element_offset < begin + kTileElements &&
            shard->element_offset + elements > begin) {
          names.push_back(shard->name);
        }
      }
      const TileRecord& record = job.buckets[bucket].tiles[tile];
      for (const auto& [extent, what] : {std::pair(&record.parameter, "parameter"),
                                         std::pair(&record.rest, "optimizer state")}) {
        if (!extent->exists()) continue;
        uses.push_back(
            {.extent = *extent, .part = concat(what, " of tile ", tile), .shards = names});
      }
    }
  }
  return uses;
}

Result<CheckReport> check_volumes(const CheckOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  auto opened = open_set(options.directories, options.lock_wait_ms, options.flush_file);
  if (!opened.is_ok()) return opened.status();
  const Set& set = opened.value();
  for (const InspectedVolume& volume : set.volumes) {
    if (volume.holder.empty()) continue;
    return error(StatusCode::unavailable,
                 "data directory ",
                 volume.directory,
                 " is in use by ",
                 volume.holder,
                 "; let that daemon check them, with --socket instead of --data, or stop it first");
  }
  CheckReport report;
  report.volumes = told(set);
  for (const InspectedVolume& volume : set.volumes) {
    if (!volume.flushed.is_ok()) report.findings.push_back(not_flushed(volume));
    for (CheckFinding& finding :
         superblock_findings(volume.path, volume.copies, volume.superblock.sequence)) {
      report.findings.push_back(std::move(finding));
    }
  }
  const auto jobs = read_jobs(set, report.findings);
  if (!jobs.is_ok()) return jobs.status();
  for (const ExtentUse& use : jobs.value().catalogues) report.bytes += use.extent.length_bytes;

  std::vector<Task> tasks;
  // Stays where it is: owners point into it.
  std::deque<std::vector<ExtentUse>> uses_of;
  std::vector<std::pair<const ExtentUse*, std::string>> owners;
  for (const ExtentUse& use : jobs.value().catalogues) owners.emplace_back(&use, "");
  bool found = options.job.empty();
  for (const JobRecord& record : jobs.value().records) {
    const bool is_asked_for = options.job.empty() || record.name == options.job;
    SharedExtents shared;
    const auto check_uses = [&](std::vector<ExtentUse> all, const std::string& snapshot) {
      uses_of.push_back(std::move(all));
      for (const ExtentUse& use : uses_of.back()) {
        // An extent that a job itself names twice has two owners.
        const bool is_first = shared.add(use.extent);
        if (is_first || snapshot.empty()) owners.emplace_back(&use, record.name);
        if (!is_asked_for) continue;
        const Status status = check_place(set, use.extent);
        if (status.is_ok()) {
          tasks.push_back({.use = use, .job = report.jobs.size() - 1, .snapshot = snapshot});
          continue;
        }
        CheckFinding finding = finding_at(set, use.extent, status);
        finding.job = record.name;
        finding.snapshot = snapshot;
        finding.shards = use.shards;
        finding.part = use.part;
        report.findings.push_back(std::move(finding));
      }
    };
    std::vector<ExtentUse> own = extents_of(record);
    if (is_asked_for) report.jobs.push_back(told(record, own));
    found = found || is_asked_for;
    check_uses(std::move(own), "");
    for (const ReadSnapshot& snapshot : snapshots_of(jobs.value(), record)) {
      std::vector<ExtentUse> kept = extents_of(snapshot);
      if (is_asked_for) report.jobs.back().snapshots.push_back(told(snapshot, kept));
      check_uses(std::move(kept), snapshot.name);
    }
  }
  if (!found && !report.anything_lost()) {
    return error(StatusCode::not_found,
                 "there is no job ",
                 options.job,
                 " on these volumes; `memd volume list` shows those there are");
  }
  add_overlaps(set, owners, report.findings);
  // In the order in which they lie on disk; a job before its snapshots.
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    const auto key = [](const ExtentRecord& extent) {
      return std::pair(extent.address.offset_bytes, extent);
    };
    return key(a.use.extent) < key(b.use.extent);
  });
  if (Status status = compare_all(set, tasks, options, report); !status.is_ok()) return status;
  gather_lost_shards(report);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return report;
}

Result<CheckedVolume> inspect_alone(const std::string& directory) {
  const auto volume = inspect_volume(directory, 0);
  if (!volume.is_ok()) return volume.status();
  return told(volume.value());
}

Result<ListedVolumes> list_volumes(const std::vector<std::string>& directories) {
  auto opened = open_set(directories, 0);
  if (!opened.is_ok()) return opened.status();
  ListedVolumes listed;
  listed.volumes = told(opened.value());
  std::vector<CheckFinding> findings;
  const auto jobs = read_jobs(opened.value(), findings);
  if (!jobs.is_ok()) return jobs.status();
  for (const JobRecord& record : jobs.value().records) {
    listed.jobs.push_back(told(record, extents_of(record)));
    for (const ReadSnapshot& snapshot : snapshots_of(jobs.value(), record)) {
      listed.jobs.back().snapshots.push_back(told(snapshot, extents_of(snapshot)));
    }
  }
  // A damaged snapshot is listed, and its job is known.
  const auto first = std::find_if(
      findings.begin(), findings.end(), [](const auto& each) { return each.snapshot.empty(); });
  if (first != findings.end()) {
    listed.jobs_unknown = concat(first->part, " cannot be read: ", first->reason);
  }
  return listed;
}

}  // namespace memd
