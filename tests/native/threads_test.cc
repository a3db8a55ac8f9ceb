#include "base/threads.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <memory>

#include "base/owned_fd.h"
#include "base/workers.h"
#include "few_threads.h"
#include "io/io_queue.h"

namespace memd {
namespace {

TEST(Threads, a_machine_that_gives_few_is_used_with_those) {
  if (!kThreadsCanBeFew) GTEST_SKIP() << "under a sanitizer";
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::unique_ptr<Workers> workers;
  {
    const FewThreads few(2);
    workers = std::make_unique<Workers>(16, wake.get());
    const auto queue = make_io_queue({.engine = IoEngine::threads});
    EXPECT_EQ(queue.status().code(), StatusCode::capacity) << "the workers have them all";
  }
  EXPECT_TRUE(workers->status().is_ok()) << workers->status().message();
  EXPECT_EQ(workers->thread_count(), 2u);
  int done_count = 0;
  for (int i = 0; i < 10; ++i) workers->submit({}, [] {}, [&] { ++done_count; });
  while (done_count < 10) {
    pollfd wait{.fd = wake.get(), .events = POLLIN, .revents = 0};
    poll(&wait, 1, -1);
    workers->reap();
  }
}

TEST(Threads, a_machine_that_gives_none_is_an_error_that_says_what_to_raise) {
  if (!kThreadsCanBeFew) GTEST_SKIP() << "under a sanitizer";
  const FewThreads none(0);
  const Workers workers(4, -1);
  const auto queue = make_io_queue({.engine = IoEngine::threads});
  for (const Status& status : {workers.status(), queue.status()}) {
    EXPECT_EQ(status.code(), StatusCode::capacity);
    EXPECT_EQ(status.error_number(), EAGAIN);
    EXPECT_NE(status.message().find("raise the limit of processes"), std::string::npos)
        << status.message();
  }
}

}  // namespace
}  // namespace memd
