// A writer dies: nothing that it had half written is read, and what others wrote beside it stays.
#include <gtest/gtest.h>

#include <vector>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;
using testing::TestKeeper;

constexpr uint64_t kElements = 1000;
constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says

/// Three shards share a bucket: `p` of a session that lives, `q` of one that dies.
class HalfWrittenTest : public ::testing::Test {
 protected:
  void start(TestKeeper* keeper = nullptr) {
    heart_ = std::make_unique<Heart>(disk_, kFloorSegments + 8, keeper);
    job_id_ = heart_->open("job");
    alive_ = heart_->attach(job_id_);
    dying_ = heart_->attach(job_id_);
    ids_ = heart_->declare(
        alive_, {parameter("p", kElements), parameter("q", kElements), parameter("r", kElements)});
    heart_->write(alive_, ids_[0], numbers(kElements, 1));
  }
  void write_all_and_sync() {
    heart_->write(alive_, ids_[1], numbers(kElements, 2));
    heart_->write(alive_, ids_[2], numbers(kElements, 3));
    ASSERT_TRUE(heart_->sync(alive_).is_ok());
    // Complete, given back, and not on disk.
    heart_->write(alive_, ids_[0], numbers(kElements, 10));
  }
  Held tear(uint64_t session, uint32_t shard_id) {
    const Held held = heart_->lease(session, shard_id, LeaseMode::write);
    EXPECT_TRUE(held.is_ok()) << held.status.message();
    std::fill_n(held.grant.data, 2000, std::byte{0x55});
    return held;
  }
  void expect_values(uint32_t p, uint32_t q, uint32_t r) {
    EXPECT_EQ(heart_->read<float>(alive_, ids_[0]), numbers(kElements, p));
    EXPECT_EQ(heart_->read<float>(alive_, ids_[1]), numbers(kElements, q));
    EXPECT_EQ(heart_->read<float>(alive_, ids_[2]), numbers(kElements, r));
  }
  void stall_a_read() {
    heart_->faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  }
  /// The daemon starts again on what the disk has.
  void restart() {
    heart_.reset();
    heart_ = std::make_unique<Heart>(disk_);
    alive_ = heart_->attach(heart_->open("job"));
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  uint64_t job_id_ = 0;
  uint64_t alive_ = 0;
  uint64_t dying_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(HalfWrittenTest, a_whole_write_beside_a_torn_one_is_read_and_synced) {
  start();
  write_all_and_sync();
  tear(dying_, ids_[1]);
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  expect_values(10, 2, 3);
  ASSERT_TRUE(heart_->sync(alive_).is_ok());
  restart();
  expect_values(10, 2, 3);
}

TEST_F(HalfWrittenTest, a_sync_waits_until_the_torn_shard_was_read_again) {
  start();
  write_all_and_sync();
  tear(dying_, ids_[1]);
  stall_a_read();
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  std::optional<Status> synced;
  heart_->store().operations().sync(
      alive_, [&](const Status& status, const StepReport&) { synced = status; });
  const auto reader = heart_->ask(alive_, ids_[1]);
  heart_->turns();
  EXPECT_FALSE(synced.has_value());
  EXPECT_FALSE(reader->has_value());
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return synced && *reader; }));
  EXPECT_TRUE(synced->is_ok()) << synced->message();
  heart_->release(**reader);
  restart();
  expect_values(10, 2, 3);
}

TEST_F(HalfWrittenTest, who_writes_beside_it_goes_on_and_may_die_as_well) {
  for (const bool dies : {false, true}) {
    SCOPED_TRACE(dies);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    start();
    write_all_and_sync();
    const uint64_t third = heart_->attach(job_id_);
    const Held other = tear(third, ids_[2]);
    tear(dying_, ids_[1]);
    stall_a_read();
    ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
    if (dies) ASSERT_TRUE(heart_->store().detach(third).is_ok());
    heart_->turns();
    heart_->faults().release_stalled();
    heart_->turns();
    if (!dies) {
      const auto fresh = numbers(kElements, 30);
      std::copy(fresh.begin(), fresh.end(), other.as<float>().begin());
      heart_->release(other);
    }
    expect_values(10, 2, dies ? 3 : 30);
    EXPECT_TRUE(heart_->sync(alive_).is_ok());
    EXPECT_EQ(heart_->job(alive_).cache().slots().lease_count(), 0u);
    heart_.reset();
  }
}

TEST_F(HalfWrittenTest, a_shard_whose_first_write_is_torn_was_never_written) {
  start();
  heart_->write(alive_, ids_[2], numbers(kElements, 3));
  ASSERT_TRUE(heart_->sync(alive_).is_ok());
  heart_->write(alive_, ids_[0], numbers(kElements, 10));
  tear(dying_, ids_[1]);
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  EXPECT_EQ(heart_->lease(alive_, ids_[1]).status.code(), StatusCode::not_found);
  EXPECT_EQ(heart_->read<float>(alive_, ids_[0]), numbers(kElements, 10));
  const Held again = heart_->lease(alive_, ids_[1], LeaseMode::write);
  ASSERT_TRUE(again.is_ok());
  for (const float value : again.as<float>()) ASSERT_EQ(value, 0);
  heart_->release(again);
}

TEST_F(HalfWrittenTest, where_the_disk_has_lost_it_nothing_further_is_committed) {
  start();
  write_all_and_sync();
  tear(dying_, ids_[1]);
  heart_->faults().add_fault({.io_kind = IoKind::read, .count = 1000});
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  ASSERT_TRUE(heart_->until([&] { return heart_->store().is_idle(); }));
  EXPECT_EQ(heart_->sync(alive_).code(), StatusCode::integrity);
  EXPECT_EQ(heart_->job(alive_).job_info().lost_shards, (std::vector<std::string>{"p", "q", "r"}));
  heart_->faults().clear_faults();
  EXPECT_EQ(heart_->read<float>(alive_, ids_[1]), numbers(kElements, 2));
}

TEST_F(HalfWrittenTest, a_stream_that_breaks_off_over_a_parameter_leaves_no_trace) {
  start();
  write_all_and_sync();
  for (const uint32_t shard_id :
       {ids_[1], heart_->declare(alive_, {parameter("alone", 300'000)})[0]}) {
    const bool is_alone = shard_id != ids_[1];
    if (is_alone) {
      heart_->write(alive_, shard_id, numbers(300'000, 5));
      ASSERT_TRUE(heart_->sync(alive_).is_ok());
    }
    const auto answer = heart_->ask({.session_id = dying_,
                                     .shard_id = shard_id,
                                     .part = Part::value,
                                     .mode = LeaseMode::overwrite,
                                     .timeout_ns = 1,
                                     .for_service = true,
                                     .prefetch = false});
    ASSERT_TRUE(answer->has_value() && (*answer)->is_ok());
    std::fill_n((*answer)->grant.data, 2000, std::byte{0x55});
    heart_->store().release_service_lease(job_id_, (*answer)->grant, true);
    if (is_alone) EXPECT_EQ(heart_->read<float>(alive_, shard_id), numbers(300'000, 5));
    expect_values(10, 2, 3);
    EXPECT_EQ(heart_->job(alive_).cache().slots().service_lease_count(), 0u);
  }
}

TEST_F(HalfWrittenTest, a_daemon_that_is_killed_before_it_was_read_again_leaves_it_to_the_next) {
  TestKeeper keeper;
  start(&keeper);
  write_all_and_sync();
  tear(dying_, ids_[1]);
  stall_a_read();
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  heart_->turns();
  heart_->kill();
  static auto* const dead = new std::vector<const Heart*>;  // refers to it: it is no leak
  dead->push_back(heart_.release());
  heart_ = std::make_unique<Heart>(disk_, kFloorSegments + 8, &keeper);
  ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  const auto resumed = heart_->store().resume_session(alive_, kOwner);
  ASSERT_TRUE(resumed.is_ok()) << resumed.status().message();
  ASSERT_EQ(heart_->store().kept_sessions().size(), 1u);
  ASSERT_EQ(heart_->store().kept_sessions()[0].session_id, dying_);
  ASSERT_TRUE(heart_->store().detach(dying_).is_ok());
  expect_values(10, 2, 3);
  ASSERT_TRUE(heart_->sync(alive_).is_ok());
  EXPECT_EQ(heart_->job(alive_).cache().slots().lease_count(), 0u);
  heart_.reset();  // before its keeper
}

}  // namespace
}  // namespace memd
