#include "arena/memory_limits.h"

#include <linux/capability.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace memd {
namespace {

/// The number after `key` in a file of lines "key value ..." (/proc/meminfo, /proc/self/status,
/// memory.stat).
std::optional<uint64_t> value_of(const std::string& path, std::string_view key, int base = 10) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::string value;
    if (!(words >> name >> value) || name != key) continue;
    return std::stoull(value, nullptr, base);
  }
  return std::nullopt;
}

/// The number that is the file's only content; nothing for "max" and for a file that is not there.
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

struct CgroupFiles {
  std::string mount;
  std::string path;  // below the mount, "/" for its root
  const char* limit;
  const char* usage;
};

/// The memory cgroups of this process: one under v1 or v2, both in a hybrid set-up.
std::vector<CgroupFiles> memory_cgroups(const std::string& root) {
  std::vector<CgroupFiles> cgroups;
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // hierarchy:controllers:path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      cgroups.push_back({root + "/sys/fs/cgroup", path, "memory.max", "memory.current"});
    } else if (controllers.find(",memory,") != std::string::npos) {
      cgroups.push_back(
          {root + "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"});
    }
  }
  return cgroups;
}

void take_lower(std::optional<AvailableMemory>& lowest, uint64_t bytes, const std::string& source) {
  if (!lowest || bytes < lowest->bytes) lowest = AvailableMemory{bytes, source};
}

/// Walks from the process's own cgroup to the root: a limit anywhere above holds as well.
void take_lower(std::optional<AvailableMemory>& lowest, const CgroupFiles& cgroup) {
  std::string path = cgroup.path == "/" ? "" : cgroup.path;
  while (true) {
    const std::string folder = cgroup.mount + path + "/";
    const auto limit = number_in(folder + cgroup.limit);
    const auto usage = number_in(folder + cgroup.usage);
    if (limit && usage) {
      const uint64_t cache_bytes = value_of(folder + "memory.stat", "inactive_file").value_or(0) +
                                   value_of(folder + "memory.stat", "active_file").value_or(0);
      const uint64_t held_bytes = *usage - std::min(*usage, cache_bytes);
      take_lower(lowest, *limit - std::min(*limit, held_bytes), folder + cgroup.limit);
    }
    if (path.empty()) return;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

}  // namespace

std::optional<AvailableMemory> available_memory(const std::string& root) {
  std::optional<AvailableMemory> lowest;
  const std::string meminfo = root + "/proc/meminfo";
  if (const auto kibibytes = value_of(meminfo, "MemAvailable:")) {
    take_lower(lowest, *kibibytes * 1024, "MemAvailable in " + meminfo);
  }
  for (const CgroupFiles& cgroup : memory_cgroups(root)) take_lower(lowest, cgroup);
  return lowest;
}

std::optional<MemlockAllowance> memlock_allowance() {
  const uint64_t capabilities = value_of("/proc/self/status", "CapEff:", 16).value_or(0);
  if ((capabilities >> CAP_IPC_LOCK & 1) != 0) return std::nullopt;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::nullopt;
  return MemlockAllowance{
      .limit_bytes = limit.rlim_cur,
      .locked_bytes = value_of("/proc/self/status", "VmLck:").value_or(0) * 1024};
}

}  // namespace memd
