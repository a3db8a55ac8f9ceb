#include "base/free_on_worker.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <memory>

#include "base/owned_fd.h"

namespace memd {
namespace {

TEST(FreeOnWorker, it_ends_when_a_worker_has_time_and_not_before) {
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Workers workers(Workers::ByHand{}, wake.get());
  const auto watched = std::make_shared<int>(0);
  free_on_worker(workers, JobId{1}, 64, std::make_unique<std::shared_ptr<int>>(watched));
  EXPECT_EQ(watched.use_count(), 2);
  const auto order = workers.run_next();
  ASSERT_TRUE(order.has_value());
  EXPECT_EQ(order->bytes, 64u);
  EXPECT_EQ(watched.use_count(), 1);
  EXPECT_EQ(workers.reap(), 1u);
}

}  // namespace
}  // namespace memd
