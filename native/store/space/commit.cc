#include "store/space/commit.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/encoding.h"

namespace memd {

Result<std::vector<JobRecord>> Commits::load(const std::function<Status()>& turn) {
  auto jobs = load_records(turn);
  const StatusCode code = jobs.status().code();
  if (code != StatusCode::integrity && code != StatusCode::device) return jobs;
  // Nobody can start a job over: no daemon starts.
  return Status(code,
                concat("the volumes cannot be used; look at the device, restore the volumes, or "
                       "move them away to start empty: ",
                       jobs.status().message()),
                jobs.status().error_number());
}

Result<std::vector<JobRecord>> Commits::load_records(const std::function<Status()>& turn) {
  const Superblock& superblock = extents_.superblock();
  if (superblock.root_bytes == 0) return std::vector<JobRecord>{};
  const auto read = [&](const std::vector<ExtentRecord>& from,
                        uint64_t length_bytes,
                        const std::string& what) -> Result<std::vector<std::byte>> {
    uint64_t padded_bytes = 0;
    for (const ExtentRecord& extent : from) padded_bytes += extent.length_bytes;
    if (padded_bytes < length_bytes) {
      return error(StatusCode::integrity,
                   what,
                   " is shorter than it says: ",
                   padded_bytes,
                   " < ",
                   length_bytes);
    }
    // Before anything is read: what the same bytes are named for again and again fits no memory.
    for (const ExtentRecord& extent : from) {
      if (Status status = extents_.reserve(extent); !status.is_ok()) return status;
    }
    std::vector<std::byte> bytes;
    bytes.reserve(padded_bytes);
    for (const ExtentRecord& extent : from) {
      // It belongs to the continuation, not to this frame: the device may write to it after we gave
      // up.
      struct Reading {
        BlockBytes block;
        std::optional<Status> finished;
      };
      const auto reading = std::make_shared<Reading>(
          Reading{.block = BlockBytes(uint64_t{extent.length_bytes}), .finished = std::nullopt});
      const std::span<std::byte> block = reading->block.span();
      extents_.read(extent, block, {.job = kDaemonJob}, what, [reading](const Status& status) {
        reading->finished = status;
      });
      while (!reading->finished) {
        extents_.advance();
        if (Status status = turn(); !status.is_ok()) return status;
      }
      if (!reading->finished->is_ok()) return *reading->finished;
      bytes.insert(bytes.end(), block.begin(), block.end());
    }
    bytes.resize(length_bytes);
    return bytes;
  };

  MEMD_FAILPOINT("load.before_root");
  auto root_bytes = read({superblock.root}, superblock.root_bytes, "the volume's root");
  if (!root_bytes.is_ok()) return root_bytes.status();
  auto root = decode_root(root_bytes.value());
  if (!root.is_ok()) return root.status();
  root_ = std::move(root).value();
  root_extent_ = superblock.root;

  std::vector<JobRecord> jobs;
  std::set<std::string> names;
  for (const RootEntry& entry : root_.jobs) {
    MEMD_FAILPOINT("load.before_catalogue");
    const std::string what = concat("the catalogue of job ", entry.job_id);
    auto bytes = read(entry.catalogue, entry.catalogue_bytes, what);
    if (!bytes.is_ok()) return bytes.status();
    auto job = decode_job(bytes.value());
    if (!job.is_ok()) return job.status();
    if (Status status = check_identity(entry, job.value(), names); !status.is_ok()) return status;
    jobs.push_back(std::move(job).value());
  }
  return jobs;
}

uint64_t Commits::catalogue_tag(uint64_t job_id) const {
  for (const RootEntry& entry : root_.jobs) {
    if (entry.job_id != job_id) continue;
    std::vector<std::byte> bytes;
    FieldWriter writer(bytes);
    writer.put(entry.catalogue_bytes);
    for (const ExtentRecord& extent : entry.catalogue) writer.put(extent);
    return std::max<uint64_t>(hash_record(bytes), 1);
  }
  return 0;
}

std::span<const ExtentRecord> Commits::catalogue(uint64_t job_id) const {
  if (job_id == 0) {
    return root_extent_.exists() ? std::span(&root_extent_, 1) : std::span<const ExtentRecord>();
  }
  for (const RootEntry& entry : root_.jobs) {
    if (entry.job_id == job_id) return entry.catalogue;
  }
  return {};
}

void Commits::commit(uint64_t job_id,
                     CatalogueSource& source,
                     std::function<void(const Status&, double)> done) {
  auto commit = std::make_shared<Commit>();
  commit->source = &source;
  commit->job_id = job_id;
  commit->done = std::move(done);
  commit->started_ns = clock_.now_ns();
  waiting_.push_back(std::move(commit));
  start_next();
}

void Commits::remove(uint64_t job_id, std::vector<ExtentRecord> extents, Done done) {
  auto commit = std::make_shared<Commit>();
  commit->job_id = job_id;
  commit->releasable = std::move(extents);
  commit->done = [done = std::move(done)](const Status& status, double) { done(status); };
  commit->started_ns = clock_.now_ns();
  waiting_.push_back(std::move(commit));
  start_next();
}

Status Commits::add_write(Commit& commit, std::span<const std::byte> bytes, ExtentRecord* extent) {
  auto block = std::make_unique<BlockBytes>(bytes);
  auto allocated = extents_.allocate(static_cast<uint32_t>(block->span().size()));
  if (!allocated.is_ok()) return allocated.status();
  *extent = allocated.value();
  extent->checksum = hash_extent(block->span(), extent->address);
  commit.writes.emplace_back(*extent, std::move(block));
  return Status::ok();
}

Status Commits::prepare(Commit& commit) {
  if (Status status = extents_.check_writable(); !status.is_ok()) return status;
  MEMD_FAILPOINT("commit.before_catalogue_allocated");
  const Owed owed(OwedPlace::commit_encoded);
  commit.root = root_;
  const auto same_job = [&](const RootEntry& entry) { return entry.job_id == commit.job_id; };
  std::erase_if(commit.root.jobs, same_job);
  if (commit.source != nullptr) {
    const std::vector<std::byte> encoded = commit.source->begin_commit();
    const std::span<const std::byte> all = encoded;
    RootEntry entry{.job_id = commit.job_id, .catalogue_bytes = all.size(), .catalogue = {}};
    for (size_t begin = 0; begin < all.size(); begin += kBlobExtentBytes) {
      ExtentRecord extent;
      const auto part = all.subspan(begin, std::min<size_t>(kBlobExtentBytes, all.size() - begin));
      if (Status status = add_write(commit, part, &extent); !status.is_ok()) return status;
      entry.catalogue.push_back(extent);
    }
    commit.root.jobs.push_back(std::move(entry));
  }
  const std::vector<std::byte> root = encode(commit.root);
  commit.root_bytes = root.size();
  return add_write(commit, root, &commit.root_extent);
}

std::vector<Commits::Open> Commits::open() const {
  std::vector<Open> all;
  if (running_) all.push_back(current_);
  for (const auto& commit : waiting_) {
    all.push_back({.job_id = commit->job_id, .since_ns = commit->started_ns, .running = false});
  }
  return all;
}

void Commits::abandon(Commit& commit) {
  MEMD_FAILPOINT("commit.abandoned");
  for (const auto& [extent, bytes] : commit.writes) extents_.release(extent);
}

void Commits::start_next() {
  if (running_ || waiting_.empty()) return;
  running_ = true;
  const auto commit = waiting_.front();
  waiting_.pop_front();
  commit->started_ns = clock_.now_ns();
  current_ = {.job_id = commit->job_id, .since_ns = commit->started_ns, .running = true};
  if (const Status status = prepare(*commit); !status.is_ok()) {
    abandon(*commit);
    return finish(commit, status);
  }
  if (commit->source != nullptr) {
    const auto releasable = commit->source->mark_committing();
    commit->releasable.insert(commit->releasable.end(), releasable.begin(), releasable.end());
  }
  // Extents that the previous catalogue alone named.
  for (const RootEntry& entry : root_.jobs) {
    if (entry.job_id != commit->job_id) continue;
    commit->releasable.insert(
        commit->releasable.end(), entry.catalogue.begin(), entry.catalogue.end());
  }
  if (root_extent_.exists()) commit->releasable.push_back(root_extent_);

  const auto write_superblock = [this, commit] {
    MEMD_FAILPOINT("commit.before_superblock");
    Superblock next = extents_.superblock();
    ++next.sequence;
    next.root = commit->root_extent;
    next.root_bytes = commit->root_bytes;
    extents_.write_superblock(next,
                              [this, commit](const Status& status) { finish(commit, status); });
  };
  auto join = Join::start([this, commit, write_superblock](const Status& status) {
    if (!status.is_ok()) return finish(commit, status);
    MEMD_FAILPOINT("commit.before_first_flush");
    if (MEMD_PLANTED("commit.no_first_flush")) return write_superblock();
    extents_.sync([this, commit, write_superblock](const Status& synced) {
      MEMD_FAILPOINT("commit.after_first_flush");
      synced.is_ok() ? write_superblock() : finish(commit, synced);
    });
  });
  MEMD_FAILPOINT("commit.before_catalogue_written");
  if (MEMD_PLANTED("commit.superblock_before_data")) {
    Superblock early = extents_.superblock();
    ++early.sequence;
    early.root = commit->root_extent;
    early.root_bytes = commit->root_bytes;
    extents_.write_superblock(early, [](const Status&) {});
  }
  for (const auto& [extent, bytes] : commit->writes) {
    extents_.write(kDaemonJob, extent, bytes->span(), join->branch());
    MEMD_FAILPOINT("commit.between_catalogue_writes");
  }
  join->finish(Status::ok());
}

void Commits::finish(const std::shared_ptr<Commit>& commit, const Status& status) {
  if (status.is_ok()) {
    const uint64_t job_id_next = root_.job_id_next;
    root_ = std::move(commit->root);
    root_.job_id_next = job_id_next;
    root_extent_ = commit->root_extent;
    MEMD_FAILPOINT("commit.before_release");
    for (const ExtentRecord& extent : commit->releasable) extents_.release(extent);
    MEMD_FAILPOINT("commit.after_release");
    if (commit->source != nullptr) {
      commit->source->committed(catalogue_tag(commit->job_id));
    }
  }
  const double seconds = static_cast<double>(clock_.now_ns() - commit->started_ns) * 1e-9;
  if (status.is_ok()) seconds_.add(seconds);
  running_ = false;
  const auto done = std::move(commit->done);
  done(status, seconds);
  start_next();
}

}  // namespace memd
