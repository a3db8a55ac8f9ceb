// A daemon dies between a step's commit and what it says of it afterwards, and the next one may die
// while it takes over: what the step replaced is seen by nobody any more.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "stop.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says
constexpr uint64_t kElements = 1000;
constexpr uint64_t kBufferBytes = 5000;
constexpr uint64_t kDisk = 48_MiB;

class MadeStepTest : public ::testing::Test {
 protected:
  void start() {
    heart_ = new Heart(
        disk_,
        HeartOptions{.segment_count = kFloorSegments + 8, .keeper = &keeper_, .worker_count = 1});
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  void TearDown() override { delete std::exchange(heart_, nullptr); }

  void begin(const std::string& durability) {
    start();
    job_id_ = heart_->open("job", 3, kDisk - 10_MiB, Durability::parse(durability).value());
    session_ = heart_->attach(job_id_);
    const auto ids = heart_->declare(session_,
                                     {parameter("w", kElements),
                                      bytes_shard("buffer", kBufferBytes, ShardKind::buffer),
                                      bytes_shard("staged", kBufferBytes, ShardKind::buffer)});
    w_ = ids[0];
    buffer_ = ids[1];
    staged_ = ids[2];
    heart_->write(session_, w_, numbers(kElements, 1));
    put(buffer_, 1);
    ASSERT_TRUE(heart_->sync(session_).is_ok());
  }
  void put(uint32_t shard_id, uint8_t seed) {
    heart_->write(session_, shard_id, pattern(kBufferBytes, seed));
  }
  StepRequest request(uint64_t step) const {
    return {.session_id = session_,
            .groups = {{.settings = {.lr = 1e-2}, .shard_ids = {w_}}},
            .staged_buffers = {{staged_, buffer_}},
            .step = step};
  }
  void write_gradient() { heart_->write(session_, w_, numbers(kElements, 7), Part::gradient); }

  /// Runs `body`, which reaches the moment; there the daemon is dead.
  void die_at(const std::string& moment, std::function<void(Heart*)> body) {
    auto* const stop = new Stop(moment, 1);
    Heart* const heart = std::exchange(heart_, nullptr);
    std::thread server([heart, stop, body = std::move(body)] {
      body(heart);
      stop->end_turns();
    });
    stop->wait(server.get_id());
    const bool is_dead = stop->is_stopped();
    EXPECT_TRUE(is_dead) << "never reached: " << moment;
    is_dead ? server.detach() : server.join();
    if (heart != nullptr) heart->kill();
    failpoint::set_observer({});
  }
  void die_in_step(uint64_t step, const std::string& moment) {
    die_at(moment, [asked = request(step)](Heart* heart) {
      bool answered = false;
      heart->store().operations().step(asked,
                                       [&](const Status&, const StepReport&) { answered = true; });
      while (!answered) heart->turn();
    });
  }
  /// A daemon that dies while it takes over.
  void die_at_start(const std::string& moment) {
    die_at(moment, [disk = disk_, keeper = &keeper_](Heart*) {
      new Heart(
          disk,
          HeartOptions{.segment_count = kFloorSegments + 8, .keeper = keeper, .worker_count = 1});
    });
  }
  void go_on() {
    start();
    if (HasFatalFailure()) return;
    for (const std::string& note : heart_->store().load_notes()) ADD_FAILURE() << note;
    const auto session = heart_->store().resume_session(session_, kOwner);
    ASSERT_TRUE(session.is_ok()) << session.status().message();
  }
  /// In memory, and on disk where it is there too.
  void expect_buffer(uint8_t seed) {
    EXPECT_TRUE(heart_->read<uint8_t>(session_, buffer_) == pattern(kBufferBytes, seed));
    Job& job = heart_->job(session_);
    Entry& entry = *job.shards()[buffer_].value;
    if (entry.residency() == Residency::clean) {
      job.cache().residencies().move(entry, Residency::clean, Residency::absent);
      job.cache().slots().free(entry.take_slot());
      EXPECT_TRUE(heart_->read<uint8_t>(session_, buffer_) == pattern(kBufferBytes, seed))
          << "on disk";
    }
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDisk);
  TestKeeper keeper_;
  Heart* heart_ = nullptr;
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  uint32_t w_ = 0;
  uint32_t buffer_ = 0;
  uint32_t staged_ = 0;
};

TEST_F(MadeStepTest, a_buffer_that_a_commit_in_memory_replaced_has_no_bytes_on_disk_any_more) {
  begin("every:2");
  put(staged_, 2);
  write_gradient();
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  // The buffer is spilled: only the ledger says where.
  const auto blob = heart_->declare(session_, {bytes_shard("blob", 6_MiB)});
  heart_->write(session_, blob[0], pattern(6_MiB, 9));
  ASSERT_TRUE(heart_->job(session_).shards()[buffer_].value->has_replica());
  put(staged_, 3);
  write_gradient();
  die_in_step(2, "ledger.memory_commit_recorded");
  go_on();
  expect_buffer(3);
  ASSERT_TRUE(heart_->step(request(2)).first.is_ok());
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  expect_buffer(3);
}

TEST_F(MadeStepTest, of_bytes_that_were_put_again_the_older_ones_on_disk_are_not_the_steps) {
  begin("every:4");
  put(staged_, 2);
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  put(staged_, 3);
  write_gradient();
  die_in_step(1, "step.before_gradients_dropped");
  go_on();
  expect_buffer(3);
}

TEST_F(MadeStepTest, a_daemon_that_dies_while_it_takes_a_made_step_over_brings_nothing_back) {
  begin("step");
  put(staged_, 2);
  write_gradient();
  die_in_step(1, "step.before_staged_dropped");
  die_at_start("adoption.slots_noted");
  go_on();
  expect_buffer(2);
}

TEST_F(MadeStepTest, a_step_that_failed_without_its_session_costs_no_memory) {
  begin("step");
  const uint64_t other = heart_->attach(job_id_);
  put(staged_, 2);
  write_gradient();
  const Held writer = heart_->lease(other, w_, LeaseMode::write);
  ASSERT_TRUE(writer.is_ok()) << writer.status.message();
  die_at("ledger.step_done", [asked = request(1)](Heart* heart) {
    bool answered = false;
    heart->store().operations().step(asked,
                                     [&](const Status&, const StepReport&) { answered = true; });
    static_cast<void>(heart->store().detach(asked.session_id));
    while (!answered) heart->turn();
  });
  session_ = other;
  go_on();
  ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 0U);
  EXPECT_EQ(heart_->lease(session_, w_, LeaseMode::read, Part::gradient).status.code(),
            StatusCode::not_found);
}

}  // namespace
}  // namespace memd::testing
