// Verified reads and checksummed writes of extents, over all volumes of a set.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bulk_bytes.h"
#include "base/clock.h"
#include "base/join.h"
#include "base/status.h"
#include "base/workers.h"
#include "io/io_queue.h"
#include "store/format/volume.h"
#include "store/space/free_extents.h"
#include "store/space/pinned_extents.h"

namespace memd {

/// For whom, and how urgent it is among what is for the same job.
struct IoClass {
  JobId job;
  IoPriority priority = IoPriority::demand;
};

/// An extent's holders name it. A job and its snapshots may name the same one.
enum class ExtentHolder : uint8_t { job, snapshot };

/// Owned by the server thread; workers compute checksums. A failed write or sync fences all volumes
/// of the set, since a commit needs every one of them: the outcome on disk is unknown, so that
/// nothing is written or acknowledged any more until the daemon starts anew and reads what is
/// there. Reads go on.
///
/// A read that the device fails is tried three times within two seconds; between tries it waits for
/// its time, and nothing blocks. After that the extent counts as unreadable until a later read of
/// it succeeds: an error of the device says nothing about the bytes. Only bytes that do not match
/// their checksum, twice, are lost.
class ExtentStore {
 public:
  /// Takes over the set's files; `superblock()` is the newest one on disk.
  ExtentStore(IoQueue& io, Workers& workers, VolumeSet set, const Clock& clock);

  /// Space for `length_bytes` (whole blocks), without a checksum yet; capacity error where there is
  /// none.
  Result<ExtentRecord> allocate(uint32_t length_bytes);
  /// At a start: what is named on disk is taken. First what snapshots name, then what jobs do.
  Status reserve(const ExtentRecord& extent, ExtentHolder holder = ExtentHolder::job);
  /// A snapshot begins to name what its job holds.
  void pin_held(const ExtentRecord& extent) { pinned_.pin_held(extent); }
  /// The holder needs it no more; it is free once nobody else holds it. True: somebody does.
  bool release(const ExtentRecord& extent, ExtentHolder holder = ExtentHolder::job);

  /// Fills `into` (length_bytes) and verifies it. A mismatch is read once more, into private
  /// memory: trainers may have changed memory that they map between the read and the comparison,
  /// and only wrong bytes on disk are an integrity error. A failed read is a device error. Both
  /// name `what`, file and offset.
  void read(const ExtentRecord& extent,
            std::span<std::byte> into,
            IoClass io_class,
            std::string what,
            Done done);
  /// The second attempt, where the first was read_unverified(); `into` is private.
  void read_again(const ExtentRecord& extent,
                  std::span<std::byte> into,
                  IoClass io_class,
                  std::string what,
                  Done done);
  /// Fills `into`; the caller verifies with matches(), and asks read_again() where it does not.
  /// If the device fails it every time, `done` gets the device's own error: see unreadable().
  void read_unverified(const ExtentRecord& extent,
                       std::span<std::byte> into,
                       IoClass io_class,
                       Done done);
  /// The error for who asked for `what`, where the device failed each read with `cause`.
  Status unreadable(const ExtentRecord& extent, const std::string& what, const Status& cause) const;
  /// Extents of which the last read failed, every time.
  const std::set<ExtentAddress>& unreadable_places() const { return unreadable_; }

  /// Starts the reads whose time for another try has come; true where there was one.
  bool advance();
  /// When advance() has something to do next; 0: no read waits.
  uint64_t next_ns() const;
  /// A read that waits for its next try.
  struct WaitingRead {
    ExtentRecord extent;
    uint64_t since_ns = 0;
  };
  std::vector<WaitingRead> waiting_reads() const;

  /// Any thread but the server's, which moves no bytes.
  static bool matches(const ExtentRecord& extent, std::span<const std::byte> bytes) {
    return hash_extent(bytes, extent.address) == extent.checksum;
  }
  void count_checksum_failure(const ExtentRecord& extent) {
    ++checksum_failure_counts_[extent.address.device];
  }

  /// `bytes` are those the extent's checksum was computed over; they stay until `done`.
  void write(JobId job, const ExtentRecord& extent, std::span<std::byte> bytes, Done done);
  /// Every device, for the writes that completed before.
  void sync(Done done);
  /// The pair of `superblock.sequence` on the lead volume, and a sync of it: the commit point.
  void write_superblock(const Superblock& superblock, Done done);

  /// The failure that fenced the volumes; ok where they are written.
  const Status& broken() const { return broken_; }
  /// ok, or why no commit is possible any more, and what to do.
  Status check_writable() const;
  const Superblock& superblock() const { return superblock_; }
  uint64_t free_bytes() const { return free_.free_bytes(); }
  uint64_t free_bytes(uint16_t device) const { return free_.free_bytes(device); }
  uint64_t capacity_bytes() const { return free_.capacity_bytes(); }
  /// As PinnedExtents::begin_pass(), note_whole() and is_whole().
  uint32_t begin_verification() { return pinned_.begin_pass(); }
  void note_whole(const ExtentRecord& extent, uint32_t pass) { pinned_.note_whole(extent, pass); }
  bool is_whole(const ExtentRecord& extent, uint32_t pass) const {
    return pinned_.is_whole(extent, pass);
  }
  /// In extents that only snapshots name.
  uint64_t pinned_alone_bytes() const { return pinned_.pinned_alone_bytes(); }
  uint64_t checksum_failure_count(uint16_t device) const {
    return checksum_failure_counts_[device];
  }
  size_t device_count() const { return paths_.size(); }
  const std::string& path(uint16_t device) const { return paths_[device]; }
  uint64_t device_bytes(uint16_t device) const { return device_bytes_[device]; }
  IoQueue& io() { return io_; }
  Workers& workers() { return workers_; }

 private:
  /// One read, over all its tries.
  struct Read {
    ExtentRecord extent;
    std::span<std::byte> into;
    IoClass io_class;
    Done done;
    uint32_t tries = 0;
    uint64_t first_failed_ns = 0;
    uint64_t due_ns = 0;  // while it waits
  };
  /// Bytes that were read, and whether they are the extent's.
  struct Verify {
    ExtentRecord extent;
    std::span<const std::byte> bytes;
    std::span<std::byte> copy_into;  // of what matches; may be empty
    std::string what;
    bool matches = false;
  };
  /// `done` finds out in the same object.
  void verify(JobId job, const std::shared_ptr<Verify>& verify, std::function<void()> done);
  void read_again(const std::shared_ptr<Verify>& verify,
                  std::span<std::byte> into,
                  IoClass io_class,
                  Done done);
  void start(const std::shared_ptr<Read>& read);
  void finish(const std::shared_ptr<Read>& read, const Status& status);
  void fail(const Status& status);
  Status lost(const ExtentRecord& extent, const std::string& what) const;
  std::string place_of(const ExtentRecord& extent) const;

  IoQueue& io_;
  Workers& workers_;
  const Clock& clock_;
  FreeExtents free_;
  PinnedExtents pinned_;
  std::vector<std::string> paths_;
  std::vector<uint64_t> device_bytes_;
  Superblock superblock_;
  std::unique_ptr<std::byte, void (*)(std::byte*)> superblock_blocks_;  // two, aligned for O_DIRECT
  Status broken_;
  std::vector<uint64_t> checksum_failure_counts_;  // by device
  std::deque<std::shared_ptr<Read>> waiting_;      // for their next try
  std::set<ExtentAddress> unreadable_;
};

}  // namespace memd
