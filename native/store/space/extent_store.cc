#include "store/space/extent_store.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/block_bytes.h"

namespace memd {

namespace {

// Before the second and the third try: what passes by itself, such as a path that fails over, takes
// about so long, and whoever waits for a lease hears within two seconds.
constexpr uint64_t kRetryWaitNs[] = {250'000'000, 1'000'000'000};
constexpr uint64_t kRetryEndNs = 2'000'000'000;

}  // namespace

ExtentStore::ExtentStore(IoQueue& io, Workers& workers, VolumeSet set, const Clock& clock)
    : io_(io),
      workers_(workers),
      clock_(clock),
      superblock_(set.superblock),
      superblock_blocks_(
          static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, 2 * uint64_t{kSuperblockBytes})),
          [](std::byte* bytes) { std::free(bytes); }) {
  for (Volume& volume : set.volumes) {
    const uint16_t device = io_.add_device(std::move(volume.file), volume.path);
    MEMD_CHECK_EQ(device, paths_.size());
    free_.add_device(device, volume.data_begin_bytes, volume.data_end_bytes);
    paths_.push_back(std::move(volume.path));
    device_bytes_.push_back(volume.bytes);
    checksum_failure_counts_.push_back(0);
  }
}

Result<ExtentRecord> ExtentStore::allocate(uint32_t length_bytes) {
  if (auto extent = free_.allocate(length_bytes)) return *extent;
  return error(StatusCode::capacity,
               "no room on disk: raise `nvme`, or drop a job (memd job list): wanted ",
               length_bytes,
               " bytes, free ",
               free_.free_bytes());
}

Status ExtentStore::reserve(const ExtentRecord& extent, ExtentHolder holder) {
  const bool is_job = holder == ExtentHolder::job;
  const PinnedExtents::Space space = is_job ? pinned_.hold(extent) : pinned_.pin(extent);
  if (space == PinnedExtents::Space::unchanged) return Status::ok();
  if (space == PinnedExtents::Space::conflict) {
    return error(StatusCode::integrity,
                 "an extent of a snapshot has two owners, or two checksums: ",
                 place_of(extent));
  }
  Status reserved = free_.reserve(extent);
  if (reserved.is_ok() && !is_job) pinned_.add(extent);
  return reserved;
}

bool ExtentStore::release(const ExtentRecord& extent, ExtentHolder holder) {
  const PinnedExtents::Space space =
      holder == ExtentHolder::job ? pinned_.release(extent) : pinned_.unpin(extent);
  if (space == PinnedExtents::Space::unchanged && !MEMD_PLANTED("snapshot.extents_not_kept"))
    return true;
  unreadable_.erase(extent.address);
  free_.release(extent);
  return false;
}

std::string ExtentStore::place_of(const ExtentRecord& extent) const {
  return concat(path(extent.address.device),
                " at ",
                extent.address.offset_bytes,
                ", ",
                extent.length_bytes,
                " bytes");
}

Status ExtentStore::lost(const ExtentRecord& extent, const std::string& what) const {
  return error(StatusCode::integrity,
               what,
               ": its bytes on disk are not those that were written (read twice): ",
               place_of(extent));
}

Status ExtentStore::unreadable(const ExtentRecord& extent,
                               const std::string& what,
                               const Status& cause) const {
  return Status(StatusCode::device,
                concat(what,
                       ": its bytes on disk can't be read now, though they may be whole; the next "
                       "use tries again, look at the device meanwhile: ",
                       place_of(extent),
                       ": ",
                       cause.message()),
                cause.error_number());
}

Status ExtentStore::check_writable() const {
  if (broken_.is_ok()) return Status::ok();
  return Status(
      StatusCode::device,
      concat("the volumes are fenced, because an earlier write failed: nothing is committed until "
             "the daemon is restarted, which finds out what is on disk; look at the device first: ",
             broken_.message()),
      broken_.error_number());
}

void ExtentStore::read_unverified(const ExtentRecord& extent,
                                  std::span<std::byte> into,
                                  IoClass io_class,
                                  Done done) {
  MEMD_CHECK_EQ(into.size(), extent.length_bytes);
  start(std::make_shared<Read>(
      Read{.extent = extent, .into = into, .io_class = io_class, .done = std::move(done)}));
}

void ExtentStore::start(const std::shared_ptr<Read>& read) {
  ++read->tries;
  io_.submit({.kind = IoKind::read,
              .priority = read->io_class.priority,
              .job = read->io_class.job,
              .device = read->extent.address.device,
              .offset_bytes = read->extent.address.offset_bytes,
              .data = read->into,
              .complete = [this, read](const Status& status) { finish(read, status); }});
}

void ExtentStore::finish(const std::shared_ptr<Read>& read, const Status& status) {
  const Done done = read->done;
  if (status.is_ok()) {
    unreadable_.erase(read->extent.address);
    return done(status);
  }
  const uint64_t now_ns = clock_.now_ns();
  if (read->tries == 1) read->first_failed_ns = now_ns;
  if (read->tries <= std::size(kRetryWaitNs)) {
    read->due_ns = now_ns + kRetryWaitNs[read->tries - 1];
    if (read->due_ns <= read->first_failed_ns + kRetryEndNs) {
      // It can't be raised any more: somebody may wait for it by now.
      if (read->io_class.priority == IoPriority::prefetch)
        read->io_class.priority = IoPriority::demand;
      waiting_.push_back(read);
      return;
    }
  }
  MEMD_FAILPOINT("read.given_up");
  unreadable_.insert(read->extent.address);
  done(status);
}

bool ExtentStore::advance() {
  if (waiting_.empty()) return false;
  const uint64_t now_ns = clock_.now_ns();
  const auto due =
      std::stable_partition(waiting_.begin(), waiting_.end(), [now_ns](const auto& read) {
        return read->due_ns > now_ns;
      });
  const std::vector<std::shared_ptr<Read>> reads(due, waiting_.end());
  waiting_.erase(due, waiting_.end());
  for (const auto& read : reads) start(read);
  return !reads.empty();
}

uint64_t ExtentStore::next_ns() const {
  uint64_t next = 0;
  for (const auto& read : waiting_) next = next == 0 ? read->due_ns : std::min(next, read->due_ns);
  return next;
}

std::vector<ExtentStore::WaitingRead> ExtentStore::waiting_reads() const {
  std::vector<WaitingRead> all;
  for (const auto& read : waiting_)
    all.push_back({.extent = read->extent, .since_ns = read->first_failed_ns});
  return all;
}

void ExtentStore::verify(JobId job,
                         const std::shared_ptr<Verify>& verify,
                         std::function<void()> done) {
  workers_.submit(
      {.job = job,
       .bytes = verify->bytes.size() + 2 * verify->copy_into.size(),
       .kind = WorkKind::bytes},
      [verify] {
        verify->matches = matches(verify->extent, verify->bytes);
        if (!verify->matches || verify->copy_into.empty()) return;
        copy_bytes(verify->copy_into.data(), verify->bytes.data(), verify->copy_into.size());
      },
      std::move(done));
}

void ExtentStore::read(const ExtentRecord& extent,
                       std::span<std::byte> into,
                       IoClass io_class,
                       std::string what,
                       Done done) {
  const auto first = std::make_shared<Verify>(
      Verify{.extent = extent, .bytes = into, .copy_into = {}, .what = std::move(what)});
  const auto verified = [this, first, into, io_class, done] {
    if (first->matches) return done(Status::ok());
    if (MEMD_PLANTED("read.checksum_not_verified")) return done(Status::ok());
    count_checksum_failure(first->extent);
    const auto block = std::make_shared<BlockBytes>(uint64_t{first->extent.length_bytes});
    const auto second = std::make_shared<Verify>(Verify{
        .extent = first->extent, .bytes = block->span(), .copy_into = into, .what = first->what});
    // It can't be raised any more: somebody may wait for it by now.
    IoClass again = io_class;
    if (again.priority == IoPriority::prefetch) again.priority = IoPriority::demand;
    read_again(second, block->span(), again, [block, done](const Status& status) { done(status); });
  };
  read_unverified(extent,
                  into,
                  io_class,
                  [this, first, job = io_class.job, verified, done](const Status& status) {
                    if (!status.is_ok())
                      return done(unreadable(first->extent, first->what, status));
                    verify(job, first, verified);
                  });
}

void ExtentStore::read_again(const ExtentRecord& extent,
                             std::span<std::byte> into,
                             IoClass io_class,
                             std::string what,
                             Done done) {
  read_again(std::make_shared<Verify>(
                 Verify{.extent = extent, .bytes = into, .copy_into = {}, .what = std::move(what)}),
             into,
             io_class,
             std::move(done));
}

void ExtentStore::read_again(const std::shared_ptr<Verify>& second,
                             std::span<std::byte> into,
                             IoClass io_class,
                             Done done) {
  MEMD_FAILPOINT("read.before_second_attempt");
  const auto verified = [this, second, done] {
    if (second->matches) return done(Status::ok());
    count_checksum_failure(second->extent);
    done(lost(second->extent, second->what));
  };
  read_unverified(second->extent,
                  into,
                  io_class,
                  [this, second, job = io_class.job, verified, done](const Status& status) {
                    if (!status.is_ok()) {
                      return done(unreadable(second->extent, second->what, status));
                    }
                    verify(job, second, verified);
                  });
}

void ExtentStore::fail(const Status& status) {
  MEMD_FAILPOINT("volume.fencing");
  if (MEMD_PLANTED("write.failure_not_fenced")) return;
  if (broken_.is_ok()) broken_ = status;
}

void ExtentStore::write(JobId job,
                        const ExtentRecord& extent,
                        std::span<std::byte> bytes,
                        Done done) {
  MEMD_CHECK_EQ(bytes.size(), extent.length_bytes);
  io_.submit({.kind = IoKind::write,
              .priority = IoPriority::writeback,
              .job = job,
              .device = extent.address.device,
              .offset_bytes = extent.address.offset_bytes,
              .data = bytes,
              .complete = [this, done = std::move(done)](const Status& status) {
                if (!status.is_ok()) fail(status);
                done(status);
              }});
}

void ExtentStore::sync(Done done) {
  auto join = Join::start([this, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) fail(status);
    done(status);
  });
  for (uint16_t device = 0; device < paths_.size(); ++device) {
    io_.submit({.kind = IoKind::sync,
                .priority = IoPriority::demand,
                .device = device,
                .offset_bytes = 0,
                .data = {},
                .complete = join->branch()});
  }
  join->finish(Status::ok());
}

void ExtentStore::write_superblock(const Superblock& superblock, Done done) {
  const uint64_t pair =
      superblock.sequence + (MEMD_PLANTED("commit.superblock_in_the_other_pair") ? 1 : 0);
  const auto offsets = superblock_pair_offsets(pair, device_bytes_[0]);
  auto join = Join::start([this, superblock, done = std::move(done)](const Status& status) {
    if (!status.is_ok()) {
      fail(status);
      return done(status);
    }
    MEMD_FAILPOINT("commit.before_second_flush");
    if (MEMD_PLANTED("commit.acknowledged_before_second_flush")) {
      superblock_ = superblock;
      return done(status);
    }
    io_.submit({.kind = IoKind::sync,
                .priority = IoPriority::demand,
                .device = 0,
                .offset_bytes = 0,
                .data = {},
                .complete = [this, superblock, done](const Status& synced) {
                  MEMD_FAILPOINT("commit.after_second_flush");
                  synced.is_ok() ? void(superblock_ = superblock) : fail(synced);
                  done(synced);
                }});
  });
  for (size_t copy = 0; copy < offsets.size(); ++copy) {
    const std::span<std::byte> block(superblock_blocks_.get() + copy * kSuperblockBytes,
                                     kSuperblockBytes);
    const auto encoded = encode_superblock(superblock, offsets[copy]);
    copy_bytes(block.data(), encoded.data(), encoded.size());
    io_.submit({.kind = IoKind::write,
                .priority = IoPriority::demand,
                .device = 0,
                .offset_bytes = offsets[copy],
                .data = block,
                .complete = join->branch()});
    MEMD_FAILPOINT("commit.superblock_copy_submitted");
  }
  join->finish(Status::ok());
}

}  // namespace memd
