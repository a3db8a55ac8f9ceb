// Preloaded into a daemon that runs on threads: while the file named by STALLED_WHILE exists, no
// read, write or sync of a volume ends.
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace {

void wait_while_stalled(int fd) {
  const char* const flag = std::getenv("STALLED_WHILE");
  if (flag == nullptr) return;
  std::array<char, 64> link;
  std::snprintf(link.data(), link.size(), "/proc/self/fd/%d", fd);
  std::array<char, 4096> path;
  const ssize_t length = readlink(link.data(), path.data(), path.size());
  if (length <= 0) return;
  if (!std::string_view(path.data(), static_cast<size_t>(length)).ends_with("/memd.volume")) return;
  while (access(flag, F_OK) == 0) usleep(10'000);
}

}  // namespace

extern "C" {

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  wait_while_stalled(fd);
  return syscall(SYS_pread64, fd, data, bytes, offset);
}
ssize_t pread64(int fd, void* data, size_t bytes, off_t offset) {
  return pread(fd, data, bytes, offset);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  wait_while_stalled(fd);
  return syscall(SYS_pwrite64, fd, data, bytes, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t offset) {
  return pwrite(fd, data, bytes, offset);
}
int fdatasync(int fd) {
  wait_while_stalled(fd);
  return static_cast<int>(syscall(SYS_fdatasync, fd));
}

}  // extern "C"
