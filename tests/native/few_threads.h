// A machine that gives a process only so many threads.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

#include "base/units.h"

namespace memd {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadsCanBeFew = false;  // a sanitizer maps memory of its own for each
#else
inline constexpr bool kThreadsCanBeFew = true;
#endif

/// While it lives, `count` more threads can be started, and no further one: a thread's stack takes
/// 1 GiB of addresses, of which there are just so many left. (Limits of processes do not hold for
/// root.)
class FewThreads {
 public:
  explicit FewThreads(uint64_t count) {
    EXPECT_EQ(pthread_getattr_default_np(&attributes_), 0);
    pthread_attr_t large = attributes_;
    EXPECT_EQ(pthread_attr_setstacksize(&large, 1_GiB), 0);
    EXPECT_EQ(pthread_setattr_default_np(&large), 0);
    EXPECT_EQ(getrlimit(RLIMIT_AS, &limit_), 0);
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit few = limit_;
    // Half a stack for what else is allocated meanwhile.
    few.rlim_cur = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + count * 1_GiB + 512_MiB;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &few), 0);
  }
  ~FewThreads() {
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit_), 0);
    EXPECT_EQ(pthread_setattr_default_np(&attributes_), 0);
  }
  FewThreads(const FewThreads&) = delete;
  FewThreads& operator=(const FewThreads&) = delete;

 private:
  pthread_attr_t attributes_{};
  rlimit limit_{};
};

}  // namespace memd
