// A sealed memfd of fixed layout, mapped by the daemon and by one or more clients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "base/status.h"

namespace memd {

/// Owns the mapping and, on the daemon's side, the descriptor. Pages appear when they are touched.
class SharedMemory {
 public:
  /// A new memfd of `bytes` zeros, mode 0600, sealed against resizing and further seals.
  static Result<SharedMemory> create(const char* name, uint64_t bytes);
  /// As create(), and nothing but this mapping can write it: whoever is sent the descriptor maps it
  /// for reading alone (Linux 5.1).
  static Result<SharedMemory> create_for_readers(const char* name, uint64_t bytes);
  /// Maps what a daemon sent, after checking its size. A forked child does not inherit the mapping.
  static Result<SharedMemory> map(OwnedFd fd, uint64_t bytes);

  /// Maps what an earlier daemon made with create(), and keeps its descriptor. Refused where the
  /// seals, the mode or the size are others.
  static Result<SharedMemory> adopt(const char* name, OwnedFd fd, uint64_t bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept
      : fd_(std::move(other.fd_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  int fd() const { return fd_.get(); }
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  /// In a forked child, which did not inherit the mapping: the addresses may be somebody else's.
  void forget() { data_ = nullptr; }

 private:
  static Result<SharedMemory> create_sealed(const char* name, uint64_t bytes, int seals);
  SharedMemory(OwnedFd fd, std::byte* data, uint64_t bytes)
      : fd_(std::move(fd)), data_(data), bytes_(bytes) {}

  OwnedFd fd_;
  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace memd
