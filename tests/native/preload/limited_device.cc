// Preloaded into a daemon that runs on threads: volumes move LIMITED_BYTES_PER_SECOND, reads and
// writes together, one after the other as they came.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

bool is_volume(int fd) {
  std::array<char, 64> link;
  std::snprintf(link.data(), link.size(), "/proc/self/fd/%d", fd);
  std::array<char, 4096> path;
  const ssize_t length = readlink(link.data(), path.data(), path.size());
  return length > 0 &&
         std::string_view(path.data(), static_cast<size_t>(length)).ends_with("/memd.volume");
}

double bytes_per_second() {
  const char* const text = std::getenv("LIMITED_BYTES_PER_SECOND");
  return text == nullptr ? 0 : std::strtod(text, nullptr);
}

void take_time(int fd, size_t bytes) {
  static const double speed = bytes_per_second();
  static std::mutex mutex;
  static Clock::time_point busy_until;
  if (speed <= 0 || !is_volume(fd)) return;
  Clock::time_point until;
  {
    const std::lock_guard lock(mutex);
    const std::chrono::duration<double> seconds(static_cast<double>(bytes) / speed);
    busy_until =
        std::max(busy_until, Clock::now()) + std::chrono::duration_cast<Clock::duration>(seconds);
    until = busy_until;
  }
  std::this_thread::sleep_until(until);
}

}  // namespace

extern "C" {

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  take_time(fd, bytes);
  return syscall(SYS_pread64, fd, data, bytes, offset);
}
ssize_t pread64(int fd, void* data, size_t bytes, off_t offset) {
  return pread(fd, data, bytes, offset);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  take_time(fd, bytes);
  return syscall(SYS_pwrite64, fd, data, bytes, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t offset) {
  return pwrite(fd, data, bytes, offset);
}

}  // extern "C"
