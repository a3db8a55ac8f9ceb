// A daemon is killed and the next one goes on with what its jobs had in memory.
#include "store/ledger.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::kDiskBytes;
using testing::numbers;
using testing::parameter;

OwnedFd copy_of(int fd) { return OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

TEST(LedgerTest, the_last_whole_record_is_read_and_only_on_the_catalogue_that_it_builds_on) {
  auto ledger = Ledger::create(7).value();
  EXPECT_FALSE(ledger->read_record(0).has_value());
  JobRecord record;
  record.job_id = 7;
  record.name = "job";
  for (uint64_t step = 1; step <= 5; ++step) {
    record.step = step;
    ASSERT_TRUE(ledger->write_record(record, step * 10).is_ok());
    const auto next = Ledger::adopt(copy_of(ledger->fd()), 7);
    ASSERT_TRUE(next.is_ok()) << next.status().message();
    ASSERT_TRUE(next.value()->read_record(step * 10).has_value());
    EXPECT_EQ(next.value()->read_record(step * 10)->step, step);
    EXPECT_FALSE(next.value()->read_record(step * 10 - 10).has_value());
  }
  EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 8).status().code(), StatusCode::integrity);
}

class RepeatedStepTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(RepeatedStepTest, a_step_that_is_asked_for_twice_is_made_once) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("w", 1000)});
  heart.write(session, ids[0], numbers(1000, 1));
  heart.write(session, ids[0], numbers(1000, 2), Part::gradient);
  StepRequest request{
      .session_id = session, .groups = {{.settings = {}, .shard_ids = ids}}, .staged_buffers = {}};
  request.step = 1;
  int answers = 0;
  for (int i = 0; i < 2; ++i) {
    heart.store().step(request, [&](const Status& status, const StepReport& report) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.committed_step, 1U);
      ++answers;
    });
  }
  ASSERT_TRUE(heart.until([&] { return answers == 2; }));
  const auto after = heart.read<float>(session, ids[0]);
  const auto [again, report] = heart.step(request);
  EXPECT_TRUE(again.is_ok()) << again.message();
  EXPECT_EQ(report.committed_step, 1U);
  EXPECT_EQ(heart.read<float>(session, ids[0]), after);
}

TEST_F(RepeatedStepTest, a_step_that_another_session_made_is_refused) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const auto ids = heart.declare(session, {parameter("v", 1000), parameter("w", 1000)});
  for (int i = 0; i < 2; ++i) {
    heart.write(session, ids[i], numbers(1000, 1));
    heart.write(i == 0 ? session : other, ids[i], numbers(1000, 2), Part::gradient);
  }
  StepRequest first{.session_id = session,
                    .groups = {{.settings = {}, .shard_ids = {ids[0]}}},
                    .staged_buffers = {},
                    .step = 1};
  ASSERT_TRUE(heart.step(first).first.is_ok());
  StepRequest second{.session_id = other,
                     .groups = {{.settings = {}, .shard_ids = {ids[1]}}},
                     .staged_buffers = {},
                     .step = 1};
  const Status refused = heart.step(second).first;
  EXPECT_EQ(refused.code(), StatusCode::fenced);
  EXPECT_NE(refused.message().find("stands at step"), std::string::npos) << refused.message();
  second.step = 2;
  EXPECT_TRUE(heart.step(second).first.is_ok());
}

}  // namespace
}  // namespace memd
