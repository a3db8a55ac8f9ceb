#include "base/sparse_bytes.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace memd {

// A file in memory, and no anonymous memory, as it tells which of its pages were written.
SparseBytes::SparseBytes(uint64_t size_bytes)
    : size_bytes_(size_bytes), file_(::memfd_create("memd-sparse-bytes", MFD_CLOEXEC)) {
  MEMD_CHECK(file_.is_open());
  MEMD_CHECK_EQ(::ftruncate(file_.get(), static_cast<off_t>(size_bytes)), 0);
  void* const place =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  MEMD_CHECK(place != MAP_FAILED);
  data_ = static_cast<std::byte*>(place);
}

SparseBytes::SparseBytes(const SparseBytes& other) : SparseBytes(other.size_bytes_) {
  copy_written(other);
}

SparseBytes::~SparseBytes() { ::munmap(data_, size_bytes_); }

void SparseBytes::become(const SparseBytes& other) {
  MEMD_CHECK_EQ(size_bytes_, other.size_bytes_);
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  MEMD_CHECK_EQ(::fallocate(file_.get(), mode, 0, static_cast<off_t>(size_bytes_)), 0);
  copy_written(other);
}

void SparseBytes::copy_written(const SparseBytes& other) {
  off_t end = 0;
  while (true) {
    const off_t begin = ::lseek(other.file_.get(), end, SEEK_DATA);
    if (begin < 0) break;
    end = ::lseek(other.file_.get(), begin, SEEK_HOLE);
    MEMD_CHECK(end > begin);
    std::memcpy(data_ + begin, other.data_ + begin, static_cast<size_t>(end - begin));
  }
  MEMD_CHECK_EQ(errno, ENXIO);  // no data behind `end`
}

}  // namespace memd
