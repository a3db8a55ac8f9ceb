#include "ring/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

namespace memd {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Result<SharedMemory> SharedMemory::create(const char* name, uint64_t bytes) {
  return create_sealed(name, bytes, kSeals);
}

Result<SharedMemory> SharedMemory::create_for_readers(const char* name, uint64_t bytes) {
  return create_sealed(name, bytes, kSeals | F_SEAL_FUTURE_WRITE);
}

Result<SharedMemory> SharedMemory::create_sealed(const char* name, uint64_t bytes, int seals) {
  OwnedFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_open()) return device_error(errno, concat("memfd_create of ", bytes, " bytes"));
  // memfd inodes are mode 0777: without this a process of another user that was handed the
  // descriptor can open it anew.
  if (fchmod(fd.get(), 0600) != 0) return device_error(errno, "fchmod of a memfd");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return device_error(errno, concat("ftruncate of a memfd to ", bytes, " bytes"));
  }
  // Before the seals, which may allow no mapping for writing any more.
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return device_error(errno, concat("mmap of ", bytes, " bytes"));
  SharedMemory memory(std::move(fd), static_cast<std::byte*>(data), bytes);
  if (fcntl(memory.fd(), F_ADD_SEALS, seals) != 0) return device_error(errno, "sealing a memfd");
  return memory;
}

Result<SharedMemory> SharedMemory::adopt(const char* name, OwnedFd fd, uint64_t bytes) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) return device_error(errno, "fstat of a kept descriptor");
  const int seals = fcntl(fd.get(), F_GET_SEALS);  // only memfds have them
  if (seals < 0 || (seals & kSeals) != kSeals || static_cast<uint64_t>(status.st_size) != bytes ||
      (status.st_mode & ALLPERMS) != 0600) {
    return error(StatusCode::invalid_argument,
                 "what was kept as ",
                 name,
                 " is none of this version's: ",
                 bytes,
                 " bytes expected, got ",
                 status.st_size,
                 " with seals ",
                 seals);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return device_error(errno, concat("mmap of ", bytes, " bytes"));
  return SharedMemory(std::move(fd), static_cast<std::byte*>(data), bytes);
}

Result<SharedMemory> SharedMemory::map(OwnedFd fd, uint64_t bytes) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) return device_error(errno, "fstat of the daemon's descriptor");
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    return error(StatusCode::invalid_argument,
                 "the daemon's shared memory has another layout: client and daemon are of "
                 "different versions; ",
                 "install the same one: ",
                 bytes,
                 " bytes expected, got ",
                 status.st_size);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return device_error(errno, concat("mmap of ", bytes, " bytes"));
  SharedMemory memory(OwnedFd(), static_cast<std::byte*>(data), bytes);
  if (madvise(data, bytes, MADV_DONTFORK) != 0)
    return device_error(errno, "madvise(MADV_DONTFORK)");
  return memory;
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, bytes_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace memd
