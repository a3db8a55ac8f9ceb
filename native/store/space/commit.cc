#include "store/space/commit.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/encoding.h"

namespace memd {
namespace {

// Some 5 µs each.
constexpr size_t kEncodedBytes = 1_KiB;
constexpr size_t kReleasedCount = 16;

// In one turn; the short form that stays takes as much again at most.
constexpr size_t kEncodedTurnBytes = kTurnBytesMax / 4;

const RootEntry* find_entry(const RootRecord& root, uint64_t job_id) {
  const auto found = std::find_if(root.jobs.begin(), root.jobs.end(), [job_id](const RootEntry& e) {
    return e.job_id == job_id;
  });
  return found == root.jobs.end() ? nullptr : &*found;
}

/// Moves the job's snapshots behind `name` to the front of the job's; others keep their order.
void list_last(std::vector<SnapshotEntry>& all, uint64_t job_id, const std::string& name) {
  const auto is_of_job = [&](const SnapshotEntry& each) { return each.job.job_id == job_id; };
  const auto found = std::ranges::find_if(
      all, [&](const SnapshotEntry& each) { return is_of_job(each) && each.name == name; });
  MEMD_CHECK(found != all.end());
  const auto end = std::stable_partition(std::next(found), all.end(), is_of_job);
  std::rotate(all.begin(), std::next(found), end);
}

}  // namespace

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

Result<std::vector<std::byte>> Commits::read(std::span<const ExtentRecord> from,
                                             uint64_t length_bytes,
                                             const std::string& what,
                                             const Turn& turn) {
  std::vector<std::byte> bytes;
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
  if (bytes.size() < length_bytes) {
    return error(StatusCode::integrity,
                 what,
                 " is shorter than it says: ",
                 bytes.size(),
                 " < ",
                 length_bytes);
  }
  bytes.resize(length_bytes);
  return bytes;
}

Result<std::vector<JobRecord>> Commits::load_records(const Turn& turn) {
  const Superblock& superblock = extents_.superblock();
  if (superblock.root_bytes == 0) return std::vector<JobRecord>{};
  MEMD_FAILPOINT("load.before_root");
  if (Status status = extents_.reserve(superblock.root); !status.is_ok()) return status;
  auto root_bytes = read({&superblock.root, 1}, superblock.root_bytes, "the volume's root", turn);
  if (!root_bytes.is_ok()) return root_bytes.status();
  auto root = decode_root(root_bytes.value());
  if (!root.is_ok()) return root.status();
  root_ = std::move(root).value();
  root_extent_ = superblock.root;

  // Their extents are pinned before a job holds any.
  for (const SnapshotEntry& snapshot : root_.snapshots) {
    if (Status status = load_snapshot(snapshot, turn); !status.is_ok()) return status;
  }
  std::vector<JobRecord> jobs;
  std::set<std::string> names;
  for (const RootEntry& entry : root_.jobs) {
    MEMD_FAILPOINT("load.before_catalogue");
    // Before anything is read: what the same bytes are named for again and again fits no memory.
    for (const ExtentRecord& extent : entry.catalogue) {
      if (Status status = extents_.reserve(extent); !status.is_ok()) return status;
    }
    const std::string what = concat("the catalogue of job ", entry.job_id);
    auto bytes = read(entry.catalogue, entry.catalogue_bytes, what, turn);
    if (!bytes.is_ok()) return bytes.status();
    auto job = decode_job(bytes.value());
    if (!job.is_ok()) return job.status();
    if (Status status = check_identity(entry, job.value(), names); !status.is_ok()) return status;
    jobs.push_back(std::move(job).value());
  }
  return jobs;
}

Status Commits::load_snapshot(const SnapshotEntry& entry, const Turn& turn) {
  MEMD_FAILPOINT("load.before_snapshot");
  for (const ExtentRecord& extent : entry.job.catalogue) {
    const Status status = extents_.reserve(extent, ExtentHolder::snapshot);
    if (!status.is_ok()) return status;
  }
  LoadedSnapshot loaded{.entry = entry, .record = nullptr, .damage = {}};
  const std::string what =
      concat("the catalogue of snapshot ", entry.name, " of job ", entry.job.job_id);
  auto bytes = read(entry.job.catalogue, entry.job.catalogue_bytes, what, turn);
  auto job = bytes.is_ok() ? decode_job(bytes.value()) : Result<JobRecord>(bytes.status());
  if (job.is_ok()) {
    std::set<std::string> alone;
    loaded.damage = check_identity(entry.job, job.value(), alone);
  } else {
    loaded.damage = job.status();
  }
  // A snapshot that is damaged is lost, and its job is not. What cannot be read now or is of a
  // newer format may be whole: without it its extents would be given away.
  const StatusCode code = loaded.damage.code();
  if (!loaded.damage.is_ok() && code != StatusCode::integrity) return loaded.damage;
  if (loaded.damage.is_ok()) {
    loaded.record = std::make_shared<const JobRecord>(std::move(job).value());
  }
  loaded_snapshots_.push_back(std::move(loaded));
  return Status::ok();
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

const RootEntry* Commits::root_entry(uint64_t job_id) const { return find_entry(root_, job_id); }

void Commits::commit(uint64_t job_id,
                     CatalogueSource& source,
                     std::function<void(const Status&, double)> done) {
  auto commit = std::make_shared<Commit>();
  commit->source = &source;
  commit->job_id = job_id;
  commit->done = std::move(done);
  enqueue(std::move(commit));
}

void Commits::commit_gone_back(uint64_t job_id,
                               const std::string& snapshot,
                               CatalogueSource& source,
                               std::function<void(const Status&, double)> done) {
  auto commit = std::make_shared<Commit>();
  commit->source = &source;
  commit->edit = [job_id, snapshot](RootRecord& root) {
    list_last(root.snapshots.edit(), job_id, snapshot);
  };
  commit->job_id = job_id;
  commit->done = std::move(done);
  enqueue(std::move(commit));
}

void Commits::remove(uint64_t job_id,
                     std::vector<ExtentRecord> extents,
                     std::vector<PinnedList> pinned,
                     Done done) {
  auto commit = std::make_shared<Commit>();
  commit->job_id = job_id;
  commit->edit = [job_id](RootRecord& root) {
    std::erase_if(root.jobs, [&](const RootEntry& entry) { return entry.job_id == job_id; });
    std::erase_if(root.snapshots.edit(),
                  [&](const SnapshotEntry& entry) { return entry.job.job_id == job_id; });
  };
  commit->releasable = std::move(extents);
  commit->pinned = std::move(pinned);
  commit->done = [done = std::move(done)](const Status& status, double) { done(status); };
  enqueue(std::move(commit));
}

void Commits::add_snapshot(const SnapshotEntry& snapshot, Done done) {
  auto commit = std::make_shared<Commit>();
  commit->job_id = snapshot.job.job_id;
  commit->edit = [snapshot](RootRecord& root) { root.snapshots.edit().push_back(snapshot); };
  commit->done = [done = std::move(done)](const Status& status, double) { done(status); };
  enqueue(std::move(commit));
}

void Commits::drop_snapshot(uint64_t job_id,
                            const std::string& name,
                            PinnedList pinned,
                            Done done) {
  auto commit = std::make_shared<Commit>();
  commit->job_id = job_id;
  commit->edit = [job_id, name](RootRecord& root) {
    std::erase_if(root.snapshots.edit(), [&](const SnapshotEntry& entry) {
      return entry.job.job_id == job_id && entry.name == name;
    });
  };
  commit->pinned.push_back(std::move(pinned));
  commit->done = [done = std::move(done)](const Status& status, double) { done(status); };
  enqueue(std::move(commit));
}

void Commits::enqueue(std::shared_ptr<Commit> commit) {
  commit->started_ns = clock_.now_ns();
  waiting_.push_back(std::move(commit));
  start_next();
}

std::vector<Commits::Open> Commits::open() const {
  std::vector<Open> all;
  if (running_ != nullptr) {
    all.push_back({.job_id = running_->job_id, .since_ns = running_->started_ns, .running = true});
  }
  for (const auto& commit : waiting_) {
    all.push_back({.job_id = commit->job_id, .since_ns = commit->started_ns, .running = false});
  }
  return all;
}

void Commits::start_next() {
  if (running_ != nullptr || waiting_.empty()) return;
  running_ = std::move(waiting_.front());
  waiting_.pop_front();
  running_->started_ns = clock_.now_ns();
  if (Status status = extents_.check_writable(); !status.is_ok()) return finish(status);
  if (running_->source != nullptr) running_->source->begin_commit();
}

bool Commits::advance(TurnBudget& turn) {
  if (running_ == nullptr) return false;
  if (running_->phase == Phase::encoding) {
    encode(turn);
    return true;
  }
  if (running_->phase == Phase::releasing) {
    release(turn);
    return true;
  }
  return false;
}

void Commits::encode(TurnBudget& turn) {
  Commit& commit = *running_;
  if (commit.source != nullptr) {
    for (size_t bytes = 0; !commit.source->encode(kEncodedBytes);) {
      bytes += kEncodedBytes;
      if (bytes >= kEncodedTurnBytes || turn.is_spent()) return;
    }
  }
  MEMD_FAILPOINT("commit.before_catalogue_allocated");
  if (Status status = allocate(commit); !status.is_ok()) return abandon(status);
  fill();
}

Status Commits::allocate(Commit& commit, size_t bytes) {
  auto allocated = extents_.allocate(static_cast<uint32_t>(align_up(bytes, kBlockBytes)));
  if (!allocated.is_ok()) return allocated.status();
  commit.writes.push_back({.extent = allocated.value(), .block = nullptr});
  return Status::ok();
}

Status Commits::allocate(Commit& commit) {
  commit.root = root_;
  if (commit.edit) commit.edit(commit.root);
  if (commit.source != nullptr) {
    std::erase_if(commit.root.jobs,
                  [&](const RootEntry& entry) { return entry.job_id == commit.job_id; });
    commit.catalogue = commit.source->take_encoded();
    const size_t all_bytes = commit.catalogue.size() + JobEncoder::kSealBytes;
    RootEntry entry{.job_id = commit.job_id, .catalogue_bytes = all_bytes, .catalogue = {}};
    for (size_t begin = 0; begin < all_bytes; begin += kBlobExtentBytes) {
      const size_t bytes = std::min<size_t>(kBlobExtentBytes, all_bytes - begin);
      if (Status status = allocate(commit, bytes); !status.is_ok()) return status;
      entry.catalogue.push_back(commit.writes.back().extent);
    }
    commit.root.jobs.push_back(std::move(entry));
  }
  commit.root_bytes = encoded_bytes(commit.root);
  return allocate(commit, commit.root_bytes);
}

void Commits::fill_blocks(Commit& commit) {
  const auto fill_block = [](Write& write, std::span<const std::byte> bytes) {
    write.block = std::make_unique<BlockBytes>(bytes);
    write.extent.checksum = hash_extent(write.block->span(), write.extent.address);
  };
  if (commit.source != nullptr) {
    JobEncoder::seal(commit.catalogue);
    const std::span<const std::byte> all = commit.catalogue;
    RootEntry& entry = commit.root.jobs.back();
    for (size_t i = 0; i < entry.catalogue.size(); ++i) {
      const size_t begin = i * kBlobExtentBytes;
      fill_block(commit.writes[i],
                 all.subspan(begin, std::min<size_t>(kBlobExtentBytes, all.size() - begin)));
      entry.catalogue[i] = commit.writes[i].extent;
    }
    commit.catalogue = {};
  }
  fill_block(commit.writes.back(), memd::encode(commit.root));
}

void Commits::fill() {
  running_->phase = Phase::filling;
  const uint64_t bytes = running_->catalogue.size() + running_->root_bytes;
  // Copied once, hashed twice.
  workers_.submit(
      {.job = JobId{running_->job_id}, .bytes = 4 * bytes, .kind = WorkKind::bytes},
      [commit = running_] { fill_blocks(*commit); },
      [this] { write(); });
}

void Commits::abandon(const Status& status) {
  MEMD_FAILPOINT("commit.abandoned");
  for (const Write& write : running_->writes) extents_.release(write.extent);
  if (running_->source != nullptr) running_->source->abandon_commit();
  finish(status);
}

void Commits::write() {
  Commit& commit = *running_;
  if (Status status = extents_.check_writable(); !status.is_ok()) return abandon(status);
  commit.phase = Phase::writing;
  // Extents that the previous catalogue alone named.
  const RootEntry* const old = find_entry(root_, commit.job_id);
  const bool is_replaced =
      commit.source != nullptr || find_entry(commit.root, commit.job_id) == nullptr;
  if (old != nullptr && is_replaced) {
    commit.releasable.insert(commit.releasable.end(), old->catalogue.begin(), old->catalogue.end());
  }
  if (root_extent_.exists()) commit.releasable.push_back(root_extent_);

  auto join = Join::start([this](const Status& status) {
    if (!status.is_ok()) return written(status);
    MEMD_FAILPOINT("commit.before_first_flush");
    if (MEMD_PLANTED("commit.no_first_flush")) return write_superblock();
    extents_.sync([this](const Status& synced) {
      MEMD_FAILPOINT("commit.after_first_flush");
      synced.is_ok() ? write_superblock() : written(synced);
    });
  });
  MEMD_FAILPOINT("commit.before_catalogue_written");
  if (MEMD_PLANTED("commit.superblock_before_data")) {
    Superblock early = extents_.superblock();
    ++early.sequence;
    early.root = commit.writes.back().extent;
    early.root_bytes = commit.root_bytes;
    extents_.write_superblock(early, [](const Status&) {});
  }
  // The last branch may end the commit.
  const std::shared_ptr<Commit> held = running_;
  for (const Write& each : held->writes) {
    extents_.write(kDaemonJob, each.extent, each.block->span(), join->branch());
    MEMD_FAILPOINT("commit.between_catalogue_writes");
  }
  join->finish(Status::ok());
}

void Commits::write_superblock() {
  MEMD_FAILPOINT("commit.before_superblock");
  Superblock next = extents_.superblock();
  ++next.sequence;
  next.root = running_->writes.back().extent;
  next.root_bytes = running_->root_bytes;
  extents_.write_superblock(next, [this](const Status& status) { written(status); });
}

void Commits::written(const Status& status) {
  Commit& commit = *running_;
  if (!status.is_ok()) {
    if (commit.source != nullptr) commit.source->fail_commit();
    return finish(status);
  }
  const uint64_t job_id_next = root_.job_id_next;
  root_ = std::move(commit.root);
  root_.job_id_next = job_id_next;
  root_extent_ = commit.writes.back().extent;
  if (commit.source != nullptr) commit.source->committed(catalogue_tag(commit.job_id));
  MEMD_FAILPOINT("commit.before_release");
  commit.phase = Phase::releasing;
}

bool Commits::unpin_next(Commit& commit) {
  while (!commit.pinned.empty() && commit.unpinned_count == commit.pinned.back()->size()) {
    commit.pinned.pop_back();
    commit.unpinned_count = 0;
  }
  if (commit.pinned.empty()) return false;
  extents_.release((*commit.pinned.back())[commit.unpinned_count++], ExtentHolder::snapshot);
  return true;
}

void Commits::release(TurnBudget& turn) {
  Commit& commit = *running_;
  for (;;) {
    if (!commit.releasable.empty()) {
      extents_.release(commit.releasable.back());
      commit.releasable.pop_back();
    } else if (!unpin_next(commit) &&
               (commit.source == nullptr ||
                commit.source->release_superseded(extents_, kReleasedCount))) {
      break;
    }
    if (turn.is_spent()) return;
  }
  MEMD_FAILPOINT("commit.after_release");
  finish(Status::ok());
}

void Commits::finish(const Status& status) {
  const std::shared_ptr<Commit> commit = std::move(running_);
  const double seconds = static_cast<double>(clock_.now_ns() - commit->started_ns) * 1e-9;
  if (status.is_ok()) seconds_.add(seconds);
  const auto done = std::move(commit->done);
  done(status, seconds);
  start_next();
}

}  // namespace memd
