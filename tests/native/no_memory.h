// A process that gets no more memory.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>

namespace memd {

/// While it lives, large allocations fail: the address space may not grow, and what the allocator
/// has in reserve is taken.
class NoMemory {
 public:
  static bool is_possible() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
  }

  NoMemory() {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_AS, &none), 0);
    while (void* more = std::malloc(kLargeBytes)) {
      *static_cast<void**>(more) = taken_;
      taken_ = more;
    }
  }
  ~NoMemory() {
    while (taken_ != nullptr) {
      void* next = *static_cast<void**>(taken_);
      std::free(taken_);
      taken_ = next;
    }
    EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0);
  }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;

 private:
  static constexpr size_t kLargeBytes = size_t{256} << 10;

  rlimit before_{};
  void* taken_ = nullptr;  // each begins with the address of the next
};

}  // namespace memd
