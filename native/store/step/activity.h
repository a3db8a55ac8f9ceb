// Work that was begun and is not done, for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace memd {

/// Something that was begun and is not done.
struct Activity {
  /// "read", "write", "sync" of a volume; "lease", "step", "sync", "moments", "drop", "export" of a
  /// job; "commit".
  std::string kind{};
  uint64_t job_id = 0;  // 0: of no job
  std::string job{};
  uint32_t uid = 0;        // the job's
  std::string what{};      // volume and range; shard; phase of a step
  std::string waits_on{};  // empty where it is being done
  std::string priority{};  // of I/O
  uint64_t age_ns = 0;
};

/// "step of job gpt (updates tiles) for 3.2 s": the oldest `count` of them.
std::string describe(const std::vector<Activity>& activities, size_t count);

}  // namespace memd
