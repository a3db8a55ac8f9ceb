// Whether the process is still the one that made an object.
#pragma once

#include <unistd.h>

#include <atomic>

namespace memd {

/// A forked child has none of the memory that is mapped for the parent alone. Any thread may ask;
/// it costs one load where nobody forked. Owned by the object that has the mapping.
class ForkWatch {
 public:
  ForkWatch();

  bool is_in_child() const noexcept {
    return in_forked_child_.load(std::memory_order_relaxed) && getpid() != pid_;
  }
  /// The process that made it.
  pid_t pid() const { return pid_; }

 private:
  // Set in a forked child before it runs anything else: a flag instead of getpid() on every
  // release.
  static inline std::atomic<bool> in_forked_child_{false};

  pid_t pid_;
};

}  // namespace memd
