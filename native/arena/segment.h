// One piece of the daemon's pool: a sealed memfd, mapped, pre-faulted and, where allowed, locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/owned_fd.h"
#include "base/status.h"
#include "base/units.h"

namespace memd {

inline constexpr uint64_t kHugePageBytes = 2_MiB;

/// Owns its descriptor and its mapping in the daemon. Mode 0600 and sealed against resizing and
/// further seals, so that a descriptor handed to a trainer can neither be shrunk under the daemon
/// nor be opened again by another user. It can still punch holes: a small page is there again at
/// the next touch, a huge one maybe not, so that huge pages are for trusted trainers. Never
/// recycled across users: a mapping cannot be revoked, so the memory goes back to the kernel, which
/// zeroes it.
///
/// Gathered pages are small ones that lie together in memory and are mapped as one (transparent
/// huge pages): a transfer of 1 MiB has one segment instead of 256. Punching a hole in them
/// brings small pages back. Gathering takes two to three times as long as touching.
///
/// Its memory may outlive the daemon's process with a DescriptorKeeper, as `segment.<id>`.
class Segment {
 public:
  struct Options {
    uint64_t bytes = 0;       // a multiple of the page size
    bool huge_pages = false;  // reserved 2 MiB pages; creation fails where there are none
    bool gathered = false;    // small pages in runs of 2 MiB, where the kernel has them: see below
  };

  /// Creates, seals, maps, and touches every page.
  static Result<Segment> create(const Options& options);
  /// Maps what an earlier daemon made, and its pages, which are all there. Refused where the
  /// descriptor is no segment of `bytes`, or one that was given up (see mark_given_up()).
  static Result<Segment> adopt(OwnedFd fd, uint64_t id, uint64_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  int fd() const { return fd_.get(); }
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  /// Random, never 0: no other segment has it, in this daemon's life or another's.
  uint64_t id() const { return id_; }
  std::string kept_name() const { return concat("segment.", id_); }

  /// Call it before a job gets the segment: no later daemon takes it for a clean one.
  void mark_used();
  bool is_gathered() const { return is_gathered_; }
  /// Reserved ones.
  bool has_huge_pages() const { return has_huge_pages_; }
  bool is_used() const { return is_used_; }
  /// Nobody adopts it from now on, whoever still has its descriptor. It goes on working: who leases
  /// from it may outlive the job.
  void mark_given_up();

  /// mlock of the mapping.
  Status lock();
  /// Moves the mapping (locked pages stay locked) to `address` inside a range reserved by the
  /// caller, replacing what is mapped there. A segment without a mapping gets one, locked if it
  /// was.
  Status move_to(std::byte* address);
  /// Moves the mapping to addresses of its own and leaves those of before reserved without access,
  /// for the range's owner. 64 MiB of small pages take 50 µs; to give a mapping up and to map and
  /// lock the segment anew takes 5 and 25 ms. Where the kernel moves no such mapping (before Linux
  /// 5.13, and reserved huge pages, which are mapped fast), as leave_reserved().
  void move_away();
  /// Gives up the mapping and leaves the addresses reserved without access, for the range's owner.
  /// The bytes stay; data() is null.
  void leave_reserved();

 private:
  Segment(OwnedFd fd, uint64_t id, std::byte* data, uint64_t bytes)
      : fd_(std::move(fd)), id_(id), data_(data), bytes_(bytes) {}
  void unmap();
  void note_mode();

  OwnedFd fd_;
  uint64_t id_ = 0;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool locked_ = false;
  bool is_used_ = false;
  bool is_gathered_ = false;
  bool has_huge_pages_ = false;
};

}  // namespace memd
