#include "store/space/extent_store.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/block_bytes.h"

namespace memd {

ExtentStore::ExtentStore(IoQueue& io, VolumeSet set)
    : io_(io),
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

Status ExtentStore::lost(const ExtentRecord& extent,
                         const std::string& what,
                         const Status& cause) const {
  const std::string reason =
      cause.is_ok()
          ? "its bytes on disk are not those that were written (read twice)"
          : concat("its bytes on disk can't be read (tried twice: ", cause.message(), ")");
  return Status(StatusCode::integrity,
                concat(what,
                       ": ",
                       reason,
                       ": ",
                       path(extent.address.device),
                       " at ",
                       extent.address.offset_bytes,
                       ", ",
                       extent.length_bytes,
                       " bytes"),
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
  io_.submit({.kind = IoKind::read,
              .priority = io_class.priority,
              .job = io_class.job,
              .device = extent.address.device,
              .offset_bytes = extent.address.offset_bytes,
              .data = into,
              .complete = std::move(done)});
}

void ExtentStore::read(const ExtentRecord& extent,
                       std::span<std::byte> into,
                       IoClass io_class,
                       std::string what,
                       Done done) {
  read_unverified(extent,
                  into,
                  io_class,
                  [this, extent, into, io_class, what = std::move(what), done = std::move(done)](
                      const Status& status) {
                    if (status.is_ok() && matches(extent, into)) return done(status);
                    if (MEMD_PLANTED("read.checksum_not_verified")) return done(status);
                    if (status.is_ok()) count_checksum_failure(extent);
                    auto block = std::make_shared<BlockBytes>(uint64_t{extent.length_bytes});
                    const Done copied = [block, into, done](const Status& again) {
                      if (again.is_ok()) std::ranges::copy(block->span(), into.begin());
                      done(again);
                    };
                    // It can't be raised any more: somebody may wait for it by now.
                    IoClass again = io_class;
                    if (again.priority == IoPriority::prefetch) again.priority = IoPriority::demand;
                    read_again(extent, block->span(), again, what, copied);
                  });
}

void ExtentStore::read_again(const ExtentRecord& extent,
                             std::span<std::byte> into,
                             IoClass io_class,
                             std::string what,
                             Done done) {
  MEMD_FAILPOINT("read.before_second_attempt");
  read_unverified(
      extent,
      into,
      io_class,
      [this, extent, into, what = std::move(what), done = std::move(done)](const Status& status) {
        if (status.is_ok() && matches(extent, into)) return done(status);
        // The moment is to blame for these, not the medium.
        const int reason = status.error_number();
        if (reason == EAGAIN || reason == EINTR || reason == ENOMEM) {
          return done(Status(
              StatusCode::device, concat(what, ": ", status.message(), "; try again"), reason));
        }
        if (status.is_ok()) count_checksum_failure(extent);
        done(lost(extent, what, status));
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
    std::memcpy(block.data(), encoded.data(), encoded.size());
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
