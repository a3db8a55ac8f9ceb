#include "arena/segment.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "arena/addresses.h"
#include "base/check.h"
#include "base/units.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace memd {
namespace {

constexpr char kName[] = "memd";
// The mode belongs to the memfd itself: every copy of the descriptor shows it, at once and for as
// long as one of them is left. Nobody is kept from anything by it but from opening it anew.
constexpr mode_t kModeClean = S_IRUSR | S_IWUSR;
constexpr mode_t kModeUsed = S_IRUSR;
constexpr mode_t kModeGivenUp = 0;
constexpr mode_t kModeGathered = S_ISVTX;  // beside one of the first two

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Result<OwnedFd> create_memfd(bool huge_pages) {
  const unsigned flags =
      MFD_CLOEXEC | MFD_ALLOW_SEALING | (huge_pages ? MFD_HUGETLB | MFD_HUGE_2MB : 0U);
  int fd = ::memfd_create(kName, flags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(kName, flags);  // kernels before 6.3
  if (fd < 0) return device_error(errno, "memfd_create of a pool segment");
  return OwnedFd(fd);
}

Status size_and_seal(int fd, uint64_t bytes) {
  if (::fchmod(fd, kModeClean) != 0) return device_error(errno, "fchmod of a pool segment");
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return device_error(errno, concat("ftruncate of a pool segment to ", bytes, " bytes"));
  }
  if (::fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return device_error(errno, "sealing of a pool segment");
  }
  return Status::ok();
}

/// Replaces what is mapped at `address`.
Result<std::byte*> map(int fd, uint64_t bytes, std::byte* address) {
  void* mapping = ::mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapping == MAP_FAILED)
    return device_error(errno, concat("mmap of a pool segment of ", bytes, " bytes"));
  // Only advice, and refused by kernels without huge pages for shared memory: 4 KiB pages serve as
  // well.
  (void)::madvise(mapping, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(mapping);
}

Result<std::byte*> map_aligned(int fd, uint64_t bytes) {
  std::byte* const address = reserve_addresses(bytes);
  if (address == nullptr)
    return device_error(errno,
                        concat("reserving addresses for a pool segment of ", bytes, " bytes"));
  Result<std::byte*> data = map(fd, bytes, address);
  if (!data.is_ok()) MEMD_CHECK_EQ(::munmap(address, bytes), 0);
  return data;
}

/// Works whatever the kernel is set to do by itself, since Linux 6.1. It touches one page of each
/// run, because it gathers nothing where there is no page at all. False: small pages serve as well.
bool gather(std::byte* data, uint64_t bytes) {
  for (uint64_t offset = 0; offset < bytes; offset += kHugePageBytes) {
    if (::madvise(data + offset, 4_KiB, MADV_POPULATE_WRITE) != 0) return false;
  }
  return ::madvise(data, bytes, MADV_COLLAPSE) == 0;
}

/// After some runs were gathered and some were not: a segment has pages of one kind.
void drop_pages(int fd, uint64_t bytes) {
  // Refused where there is nothing to drop.
  (void)::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
}

bool is_on_hugetlbfs(int fd) {
  struct statfs status{};
  return ::fstatfs(fd, &status) == 0 && status.f_type == HUGETLBFS_MAGIC;
}

Status touch(std::byte* data, uint64_t bytes) {
  int result = 0;
  do {
    result = ::madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return Status::ok();
  if (errno != EINVAL)
    return device_error(errno, concat("touching a pool segment of ", bytes, " bytes"));
  // Kernels before 5.14. Adding nothing keeps what another mapping of the segment has written.
  for (uint64_t offset = 0; offset < bytes; offset += 4_KiB) {
    __atomic_fetch_add(reinterpret_cast<unsigned char*>(data + offset), 0, __ATOMIC_RELAXED);
  }
  return Status::ok();
}

/// Not counted up: no daemon knows which numbers those before it gave.
uint64_t new_id() {
  uint64_t id = 0;
  while (id == 0) {
    const ssize_t got = ::getrandom(&id, sizeof(id), 0);
    if (got < 0 && errno == EINTR) continue;
    MEMD_CHECK_EQ(got, static_cast<ssize_t>(sizeof(id)));
  }
  return id;
}

}  // namespace

Result<Segment> Segment::create(const Options& options) {
  Result<OwnedFd> fd = create_memfd(options.huge_pages);
  if (!fd.is_ok()) return fd.status();
  if (Status sealed = size_and_seal(fd.value().get(), options.bytes); !sealed.is_ok())
    return sealed;
  Result<std::byte*> data = map_aligned(fd.value().get(), options.bytes);
  if (!data.is_ok()) return data.status();
  Segment segment(std::move(fd.value()), new_id(), data.value(), options.bytes);
  segment.has_huge_pages_ = options.huge_pages;
  if (options.gathered && !options.huge_pages) {
    segment.is_gathered_ = gather(segment.data_, segment.bytes_);
    if (!segment.is_gathered_) drop_pages(segment.fd_.get(), segment.bytes_);
    segment.note_mode();
  }
  if (Status touched = touch(segment.data_, segment.bytes_); !touched.is_ok()) return touched;
  return segment;
}

Result<Segment> Segment::adopt(OwnedFd fd, uint64_t id, uint64_t bytes) {
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) return device_error(errno, "fstat of a kept pool segment");
  // Only memfds have seals.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (id == 0 || seals < 0 || (seals & kSeals) != kSeals ||
      static_cast<uint64_t>(status.st_size) != bytes) {
    return error(StatusCode::invalid_argument,
                 "what was kept as segment ",
                 id,
                 " is none of ",
                 bytes,
                 " bytes: its size is ",
                 status.st_size,
                 ", its seals are ",
                 seals);
  }
  const mode_t mode = status.st_mode & ALLPERMS & ~kModeGathered;
  if (mode != kModeClean && mode != kModeUsed) {
    return error(StatusCode::not_found, "segment ", id, " was given up by the daemon before");
  }
  Result<std::byte*> data = map_aligned(fd.get(), bytes);
  if (!data.is_ok()) return data.status();
  Segment segment(std::move(fd), id, data.value(), bytes);
  segment.is_used_ = mode == kModeUsed;
  segment.is_gathered_ = (status.st_mode & kModeGathered) != 0;
  segment.has_huge_pages_ = is_on_hugetlbfs(segment.fd_.get());
  // Here, at the start, and not one by one while jobs wait.
  if (Status touched = touch(segment.data_, segment.bytes_); !touched.is_ok()) return touched;
  return segment;
}

void Segment::mark_used() {
  if (is_used_) return;
  is_used_ = true;
  note_mode();
}

void Segment::note_mode() {
  const mode_t mode = (is_used_ ? kModeUsed : kModeClean) | (is_gathered_ ? kModeGathered : 0);
  MEMD_CHECK_EQ(::fchmod(fd_.get(), mode), 0);
}

void Segment::mark_given_up() { MEMD_CHECK_EQ(::fchmod(fd_.get(), kModeGivenUp), 0); }

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      id_(std::exchange(other.id_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      locked_(std::exchange(other.locked_, false)),
      is_used_(std::exchange(other.is_used_, false)),
      is_gathered_(std::exchange(other.is_gathered_, false)),
      has_huge_pages_(std::exchange(other.has_huge_pages_, false)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this == &other) return *this;
  unmap();
  fd_ = std::move(other.fd_);
  id_ = std::exchange(other.id_, 0);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  locked_ = std::exchange(other.locked_, false);
  is_used_ = std::exchange(other.is_used_, false);
  is_gathered_ = std::exchange(other.is_gathered_, false);
  has_huge_pages_ = std::exchange(other.has_huge_pages_, false);
  return *this;
}

Segment::~Segment() { unmap(); }

void Segment::unmap() {
  if (data_ != nullptr) MEMD_CHECK_EQ(::munmap(std::exchange(data_, nullptr), bytes_), 0);
}

Status Segment::lock() {
  MEMD_CHECK(data_ != nullptr);
  if (::mlock(data_, bytes_) != 0)
    return device_error(errno, concat("mlock of ", bytes_, " bytes"));
  locked_ = true;
  return Status::ok();
}

Status Segment::move_to(std::byte* address) {
  if (data_ != nullptr) {
    void* moved = ::mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, address);
    if (moved != MAP_FAILED) {
      data_ = address;
      return Status::ok();
    }
    // Kernels before 5.16 can't move mappings of huge pages; there the segment is mapped anew.
    if (errno != EINVAL)
      return device_error(errno, concat("mremap of a pool segment of ", bytes_, " bytes"));
    unmap();
  }
  Result<std::byte*> mapped = map(fd_.get(), bytes_, address);
  if (!mapped.is_ok()) return mapped.status();
  data_ = address;
  if (Status touched = touch(data_, bytes_); !touched.is_ok()) return touched;
  return locked_ ? lock() : Status::ok();
}

void Segment::move_away() {
  MEMD_CHECK(data_ != nullptr);
  std::byte* const address = reserve_addresses(bytes_);
  if (address == nullptr) return leave_reserved();
  constexpr int kFlags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (::mremap(data_, bytes_, bytes_, kFlags, address) == MAP_FAILED) {
    MEMD_CHECK_EQ(::munmap(address, bytes_), 0);
    return leave_reserved();
  }
  reserve_in_place(std::exchange(data_, address), bytes_);
}

void Segment::leave_reserved() {
  MEMD_CHECK(data_ != nullptr);
  reserve_in_place(std::exchange(data_, nullptr), bytes_);
}

}  // namespace memd
