// Preloaded into a daemon that runs on threads: while the file named by STALLED_WHILE exists, no
// read, write or sync of a volume ends. Where STALLED_BYTES_MIN is set, shorter ones and syncs do.
// If the file has any content, they fail instead.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

bool is_volume(int fd) {
  std::array<char, 64> link;
  std::snprintf(link.data(), link.size(), "/proc/self/fd/%d", fd);
  std::array<char, 4096> path;
  const ssize_t length = readlink(link.data(), path.data(), path.size());
  if (length <= 0) return false;
  return std::string_view(path.data(), static_cast<size_t>(length)).ends_with("/memd.volume");
}

/// Returns whether it may be made.
bool wait_while_stalled(int fd, size_t bytes) {
  const char* const flag = std::getenv("STALLED_WHILE");
  if (flag == nullptr || !is_volume(fd)) return true;
  const char* const bytes_min = std::getenv("STALLED_BYTES_MIN");
  if (bytes_min != nullptr && bytes < std::strtoull(bytes_min, nullptr, 10)) return true;
  struct stat found;
  while (stat(flag, &found) == 0) {
    if (found.st_size != 0) {
      errno = EIO;
      return false;
    }
    usleep(10'000);
  }
  return true;
}

}  // namespace

extern "C" {

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  return wait_while_stalled(fd, bytes) ? syscall(SYS_pread64, fd, data, bytes, offset) : -1;
}
ssize_t pread64(int fd, void* data, size_t bytes, off_t offset) {
  return pread(fd, data, bytes, offset);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return wait_while_stalled(fd, bytes) ? syscall(SYS_pwrite64, fd, data, bytes, offset) : -1;
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t offset) {
  return pwrite(fd, data, bytes, offset);
}
int fdatasync(int fd) {
  return wait_while_stalled(fd, 0) ? static_cast<int>(syscall(SYS_fdatasync, fd)) : -1;
}

}  // extern "C"
