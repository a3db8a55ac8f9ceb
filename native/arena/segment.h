// One piece of the daemon's pool: a sealed memfd, mapped, pre-faulted and, where allowed, locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "base/status.h"

namespace memd {

/// Owns its descriptor and its mapping in the daemon. Mode 0600 and sealed against resizing and
/// further seals, so that a descriptor handed to a trainer can neither be shrunk under the daemon
/// nor be opened again by another user. Never recycled across users: a mapping cannot be revoked,
/// so the memory goes back to the kernel, which zeroes it.
class Segment {
 public:
  struct Options {
    uint64_t bytes = 0;       // a multiple of the page size
    bool huge_pages = false;  // 2 MiB pages; creation fails where none are reserved
  };

  /// Creates, seals, maps, and touches every page.
  static Result<Segment> create(const Options& options);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  int fd() const { return fd_.get(); }
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

  /// mlock of the mapping.
  Status lock();
  /// Moves the mapping (locked pages stay locked) to `address` inside a range reserved by the
  /// caller, replacing what is mapped there. A segment without a mapping gets one, locked if it
  /// was.
  Status move_to(std::byte* address);
  /// Gives up the mapping and leaves the addresses reserved without access, for the range's owner.
  /// The bytes stay; data() is null.
  void leave_reserved();

 private:
  Segment(OwnedFd fd, std::byte* data, uint64_t bytes)
      : fd_(std::move(fd)), data_(data), bytes_(bytes) {}
  void unmap();

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool locked_ = false;
};

}  // namespace memd
