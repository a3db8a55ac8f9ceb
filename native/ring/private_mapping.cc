#include "ring/private_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.h"

namespace memd {

Result<std::byte*> map_privately(std::byte* at, uint64_t length_bytes, const OwnedFd& file) {
  // Locked or not, pages that nobody may touch are not brought in.
  void* mapped = mmap(at,
                      length_bytes,
                      PROT_NONE,
                      MAP_PRIVATE | MAP_NORESERVE | (at != nullptr ? MAP_FIXED : 0),
                      file.get(),
                      0);
  if (mapped == MAP_FAILED || munlock(mapped, length_bytes) != 0 ||
      mprotect(mapped, length_bytes, PROT_READ | PROT_WRITE) != 0)
    return device_error(errno, concat("mapping ", length_bytes, " bytes to read them"));
  return static_cast<std::byte*>(mapped);
}

void drop_copies(std::span<std::byte> pages) {
  if (madvise(pages.data(), pages.size(), MADV_DONTNEED) == 0) return;
  // mlockall() has locked them.
  MEMD_CHECK_EQ(errno, EINVAL);
  MEMD_CHECK_EQ(munlock(pages.data(), pages.size()), 0);
  MEMD_CHECK_EQ(madvise(pages.data(), pages.size(), MADV_DONTNEED), 0);
}

Result<std::unique_ptr<MlockWatch>> MlockWatch::create() {
  const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const OwnedFd file(memfd_create("memd-mlock-watch", MFD_CLOEXEC));
  if (!file.is_open() || ftruncate(file.get(), static_cast<off_t>(page_bytes)) != 0)
    return device_error(errno, "making a page that is mapped twice");
  void* shared = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (shared == MAP_FAILED) return device_error(errno, "mapping a page");
  auto own = map_privately(nullptr, page_bytes, file);
  if (!own.is_ok()) {
    munmap(shared, page_bytes);
    return own.status();
  }
  return std::unique_ptr<MlockWatch>(
      new MlockWatch(static_cast<std::byte*>(shared), own.value(), page_bytes));
}

MlockWatch::~MlockWatch() {
  munmap(shared_, page_bytes_);
  munmap(own_, page_bytes_);
}

bool MlockWatch::has_copied() {
  // Volatile: the compiler does not know that the two addresses are one place.
  *reinterpret_cast<volatile uint64_t*>(shared_) = ++count_;
  if (*reinterpret_cast<const volatile uint64_t*>(own_) == count_) return false;
  drop_copies({own_, page_bytes_});
  return true;
}

}  // namespace memd
