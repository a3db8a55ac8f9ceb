// The arena as a trainer maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/read_leases.h"

namespace memd {

/// Descriptors of the arena's segments from the given index on.
using MoreSegments = std::function<Result<std::vector<OwnedFd>>(uint64_t first)>;

/// Segments back to back in one reserved range, each mapped when a lease first lies there, and as
/// long as this object lives. Any thread may call.
class MappedArena {
 public:
  static Result<std::unique_ptr<MappedArena>> reserve(uint64_t reserved_bytes,
                                                      uint64_t segment_bytes,
                                                      MoreSegments more_segments);
  ~MappedArena();
  MappedArena(const MappedArena&) = delete;
  MappedArena& operator=(const MappedArena&) = delete;

  std::byte* base() const { return base_; }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t segment_bytes() const { return segment_bytes_; }

  /// Whether these bytes of the arena are mapped.
  bool has(uint64_t offset_bytes, uint64_t length_bytes) const;
  /// Maps what is missing, here and for `reads`. May wait for the daemon to send it.
  Status map_up_to(uint64_t end_bytes, ReadLeases& reads);

 private:
  MappedArena(std::byte* base,
              uint64_t reserved_bytes,
              uint64_t segment_bytes,
              MoreSegments more_segments);
  Status map(const OwnedFd& segment, uint64_t offset_bytes, ReadLeases& reads);

  std::byte* base_;
  uint64_t reserved_bytes_;
  uint64_t segment_bytes_;
  MoreSegments more_segments_;
  std::mutex mutex_;
  std::atomic<uint64_t> mapped_bytes_{0};
};

}  // namespace memd
