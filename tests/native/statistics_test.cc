#include "store/job/statistics.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::numbers;
using testing::parameter;
using testing::pattern;

constexpr uint64_t kSecond = 1'000'000'000;

class StatisticsTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::vector<SharedMemory> mapped_;
};

TEST_F(StatisticsTest, a_wait_for_room_is_backpressure_while_it_lasts_and_one_for_the_disk_is_not) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job", 2);
  const uint64_t holder = heart.attach(job_id);
  const uint64_t session = heart.attach(job_id);
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));  // no room for both: a is spilled
  EXPECT_EQ(heart.store().reports().statistics().room_wait_ns, 0u);

  const Held held = heart.lease(holder, ids[1]);
  ASSERT_TRUE(held.is_ok()) << held.status.message();
  const auto answer = heart.ask(session, ids[0]);
  heart.turns(5);
  EXPECT_FALSE(answer->has_value());
  heart.clock.advance(2 * kSecond);
  heart.turn();
  EXPECT_EQ(heart.store().reports().statistics().room_wait_ns, 2 * kSecond);
  heart.clock.advance(kSecond);
  heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  heart.release(held);
  // b is spilled, a is read.
  ASSERT_TRUE(heart.until([&] { return heart.io().operations.back().kind == IoKind::read; }));
  EXPECT_EQ(heart.store().reports().statistics().room_wait_ns, 3 * kSecond);
  EXPECT_FALSE(answer->has_value());
  heart.clock.advance(5 * kSecond);
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return answer->has_value(); }));
  ASSERT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
  EXPECT_EQ(heart.store().reports().statistics().room_wait_ns, 3 * kSecond);
  EXPECT_EQ(heart.job(session).cache().counters().lease_wait_ns, 8 * kSecond);
  heart.release(**answer);
}

TEST_F(StatisticsTest, the_stalls_of_a_jobs_sessions_are_summed_and_outlive_them) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const std::array sessions{heart.attach(job_id), heart.attach(job_id)};
  const auto board = [&](uint64_t session) -> StallBoard& {
    const int fd = heart.store().sessions().at(session)->ring.session_fd();
    auto memory = SharedMemory::map(OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), sizeof(SessionLayout));
    mapped_.push_back(std::move(memory).value());
    return reinterpret_cast<SessionLayout*>(mapped_.back().data())->header.stalls;
  };
  for (const uint64_t session : sessions) {
    StallBoard& its = board(session);
    its.counters.step_wall_ns = 100;
    count_stall(its.counters, {.phase = StallPhase::backward, .group = 1}, kStallRing, 7);
    std::strcpy(its.group_names[1], "h.*.attn");
    its.group_count = 2;
  }
  const auto expect_sum = [&] {
    const Stalls stalls = heart.store().reports().statistics().jobs.at(0).stalls;
    EXPECT_EQ(stalls.step_wall_ns(), 200u);
    EXPECT_EQ(stalls.phase_ns()[static_cast<size_t>(StallPhase::backward)][kStallRing], 14u);
    EXPECT_EQ(stalls.group_ns().at("h.*.attn")[kStallRing], 14u);
  };
  expect_sum();
  ASSERT_TRUE(heart.store().detach(sessions[0]).is_ok());
  heart.turns();
  expect_sum();
}

TEST_F(StatisticsTest, a_failed_sync_fences_the_volume_and_is_told_with_its_errno) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {bytes_shard("a", 64_KiB)});
  heart.write(session, ids[0], pattern(64_KiB, 1));
  EXPECT_FALSE(heart.store().reports().statistics().devices.at(0).fenced);
  heart.faults().add_fault({.io_kind = IoKind::sync, .error_number = ENOSPC});
  EXPECT_EQ(heart.sync(session).error_number(), ENOSPC);
  const DeviceStatistics device = heart.store().reports().statistics().devices.at(0);
  EXPECT_TRUE(device.fenced);
  EXPECT_EQ(device.io.sync.error_count_by_errno, (std::map<int, uint64_t>{{ENOSPC, 1}}));
  EXPECT_EQ(device.io.write.error_count(), 0u);
}

TEST_F(StatisticsTest, a_step_is_one_observation_of_each_phase_and_a_sync_is_none) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("w", 1000)});
  heart.write(session, ids[0], numbers(1000, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  EXPECT_EQ(heart.store().reports().statistics().step_phases.read.count(), 0u);
  heart.write(session, ids[0], numbers(1000, 2), Part::gradient);
  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = {.lr = 1e-2}, .shard_ids = ids}};
  const Status status = heart.step(request).first;
  ASSERT_TRUE(status.is_ok()) << status.message();
  const ServerStatistics seen = heart.store().reports().statistics();
  for (const SecondsHistogram& phase : {seen.step_phases.read,
                                        seen.step_phases.update,
                                        seen.step_phases.write,
                                        seen.step_phases.commit,
                                        seen.step_seconds}) {
    EXPECT_EQ(phase.count(), 1u);
  }
  EXPECT_EQ(seen.commit_seconds.count(), 2u);
}

}  // namespace
}  // namespace memd
