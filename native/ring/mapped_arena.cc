#include "ring/mapped_arena.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace memd {

Result<std::unique_ptr<MappedArena>> MappedArena::reserve(uint64_t reserved_bytes,
                                                          uint64_t segment_bytes,
                                                          MoreSegments more_segments) {
  if (segment_bytes == 0 || reserved_bytes % segment_bytes != 0)
    return error(StatusCode::invalid_argument, "the arena is not whole segments");
  void* base =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    return device_error(errno, concat("reserving ", reserved_bytes, " bytes of addresses"));
  return std::unique_ptr<MappedArena>(new MappedArena(
      static_cast<std::byte*>(base), reserved_bytes, segment_bytes, std::move(more_segments)));
}

MappedArena::MappedArena(std::byte* base,
                         uint64_t reserved_bytes,
                         uint64_t segment_bytes,
                         MoreSegments more_segments)
    : base_(base),
      reserved_bytes_(reserved_bytes),
      segment_bytes_(segment_bytes),
      more_segments_(std::move(more_segments)) {}

MappedArena::~MappedArena() { munmap(base_, reserved_bytes_); }

bool MappedArena::has(uint64_t offset_bytes, uint64_t length_bytes) const {
  const uint64_t mapped_bytes = mapped_bytes_.load(std::memory_order_acquire);
  return length_bytes <= mapped_bytes && offset_bytes <= mapped_bytes - length_bytes;
}

Status MappedArena::map_up_to(uint64_t end_bytes, ReadLeases& reads) {
  if (end_bytes <= mapped_bytes_.load(std::memory_order_acquire)) return Status::ok();
  const std::lock_guard lock(mutex_);
  while (mapped_bytes_.load(std::memory_order_relaxed) < end_bytes) {
    const uint64_t mapped = mapped_bytes_.load(std::memory_order_relaxed);
    auto segments = more_segments_(mapped / segment_bytes_);
    if (!segments.is_ok()) return segments.status();
    if (segments.value().empty()) {
      return error(
          StatusCode::unavailable, "the daemon sent no segment for a lease at ", end_bytes);
    }
    uint64_t offset = mapped;
    for (const OwnedFd& segment : segments.value()) {
      if (Status status = map(segment, offset, reads); !status.is_ok()) return status;
      offset += segment_bytes_;
    }
    mapped_bytes_.store(offset, std::memory_order_release);
  }
  return Status::ok();
}

Status MappedArena::map(const OwnedFd& segment, uint64_t offset_bytes, ReadLeases& reads) {
  struct stat file{};
  if (offset_bytes + segment_bytes_ > reserved_bytes_ || fstat(segment.get(), &file) != 0 ||
      static_cast<uint64_t>(file.st_size) != segment_bytes_) {
    return error(StatusCode::invalid_argument, "the daemon sent a segment of another size");
  }
  void* at = mmap(base_ + offset_bytes,
                  segment_bytes_,
                  PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED,
                  segment.get(),
                  0);
  if (at == MAP_FAILED) return device_error(errno, concat("mapping a segment of ", segment_bytes_));
  return reads.map_segment(offset_bytes, segment_bytes_, segment);
}

}  // namespace memd
