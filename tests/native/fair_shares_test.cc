// Two jobs that train on one daemon: what each gets of the disk and of the workers.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "block.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr std::array<double, 3> kWeights = {1, 3, 0.5};  // of the first job; the second has 1

struct Setting {
  uint64_t shard_count = 0;
  uint64_t shard_elements = 0;
  uint64_t arena_segments = 0;
  uint64_t nvme_bytes = kQuotaBytes;
  std::optional<Durability> durability{};
  double speed = 1;  // of the machine
  bool workers_take_time = false;
};

/// A disk of 64 MiB a second and one worker, which work when the daemon has nothing to do: the same
/// in every run, however busy the machine is.
class FairShares : public ::testing::Test {
 protected:
  struct Trainer {
    uint64_t job_id = 0;
    uint64_t session_id = 0;
    std::vector<uint32_t> shard_ids;
  };

  ~FairShares() override { end(); }
  void start(const Setting& setting) {
    setting_ = setting;
    heart_ = std::make_unique<Heart>(
        std::make_shared<MemoryDisk>(400_MiB),
        HeartOptions{.segment_count = 2 * (kFloorSegments + setting.arena_segments),
                     .bytes_per_second = per_second(setting.speed, 64_MiB),
                     .workers_by_hand = true});
    ASSERT_TRUE(heart_->loaded.is_ok());
    heart_->io().set_limits(0, {.depth = 8, .chunk_bytes = kChunkBytesMin});
    heart_->io().after_transfer = [this](JobId job, uint64_t bytes) { moved_[job.value] += bytes; };
    heart_->when_idle = [this] { return work() || wait_for_machine(); };
    for (const char* const name : {"one", "two"}) trainers_.push_back(open(name));
    for (int i = 0; i < 2; ++i) train([] { return false; });
  }
  void end() {
    flood_ends_ = true;
    heart_.reset();
    trainers_.clear();
    worker_until_ns_ = 0;
  }
  /// The same as a daemon would be told by `memd job weight`.
  void set_weight(double weight) {
    const auto wanted = JobWeight::of(weight);
    ASSERT_TRUE(wanted.is_ok());
    ASSERT_TRUE(
        heart_->store().admissions().set_weight(trainers_[0].job_id, wanted.value()).is_ok());
  }
  static uint64_t per_second(double speed, uint64_t bytes) {
    return static_cast<uint64_t>(speed * static_cast<double>(bytes));
  }
  /// The first job's steps alone; how long one takes by the clock.
  double step_seconds(int step_count) {
    uint64_t all_ns = 0;
    const Trainer& trainer = trainers_[0];
    for (int i = 0; i < step_count; ++i) {
      for (const uint32_t id : trainer.shard_ids) {
        heart_->write(trainer.session_id, id, numbers(setting_.shard_elements, id), Part::gradient);
      }
      StepRequest request;
      request.session_id = trainer.session_id;
      request.groups = {{.settings = {}, .shard_ids = trainer.shard_ids}};
      const uint64_t start_ns = heart_->clock.now_ns();
      EXPECT_TRUE(heart_->step(request).first.is_ok());
      all_ns += heart_->clock.now_ns() - start_ns;
    }
    return static_cast<double>(all_ns) * 1e-9 / step_count;
  }
  /// As many reads and as much work of the second job as there is place for, until flood_ends_.
  void flood() {
    flood_ends_ = false;
    for (int i = 0; i < 64; ++i) flood_disk();
    for (int i = 0; i < 64; ++i) flood_workers();
  }
  /// One step of both. `stops` says when what was counted so far is remembered.
  void train(const std::function<bool()>& stops) {
    for (const Trainer& trainer : trainers_) {
      for (const uint32_t id : trainer.shard_ids) {
        heart_->write(trainer.session_id, id, numbers(setting_.shard_elements, id), Part::gradient);
      }
    }
    moved_.clear();
    updated_.clear();
    size_t done_count = 0;
    for (const Trainer& trainer : trainers_) {
      StepRequest request;
      request.session_id = trainer.session_id;
      request.groups = {{.settings = {}, .shard_ids = trainer.shard_ids}};
      heart_->store().operations().step(request, [&](const Status& status, const StepReport&) {
        EXPECT_TRUE(status.is_ok()) << status.message();
        ++done_count;
      });
    }
    bool stopped = false;
    EXPECT_TRUE(heart_->until([&] {
      if (!stopped && stops()) {
        stopped = true;
        EXPECT_EQ(done_count, 0u) << "both were busy all the time";
        moved_then_ = moved_;
        updated_then_ = updated_;
      }
      return done_count == trainers_.size();
    }));
  }
  /// What the first job has of both.
  double part(std::map<uint64_t, uint64_t>& counts) const {
    const auto first = static_cast<double>(counts[trainers_[0].job_id]);
    return first / (first + static_cast<double>(counts[trainers_[1].job_id]));
  }
  static uint64_t largest(const std::map<uint64_t, uint64_t>& counts) {
    uint64_t most = 0;
    for (const auto& [job_id, count] : counts) most = std::max(most, job_id == 0 ? 0 : count);
    return most;
  }

  bool flood_ends_ = true;
  Setting setting_;
  std::vector<Trainer> trainers_;
  std::map<uint64_t, uint64_t> moved_, moved_then_;      // bytes, by job
  std::map<uint64_t, uint64_t> updated_, updated_then_;  // elements
  std::unique_ptr<Heart> heart_;

 private:
  Trainer open(const std::string& name) {
    Trainer trainer;
    trainer.job_id =
        heart_->open(name, setting_.arena_segments, setting_.nvme_bytes, setting_.durability);
    trainer.session_id = heart_->attach(trainer.job_id);
    for (uint64_t i = 0; i < setting_.shard_count; ++i) {
      // A bucket, and so a tile, of its own: shards are packed together that are declared together.
      const std::string shard = "weight" + std::to_string(i);
      const auto ids =
          heart_->declare(trainer.session_id, {parameter(shard, setting_.shard_elements)});
      heart_->write(trainer.session_id, ids.at(0), numbers(setting_.shard_elements, 7));
      trainer.shard_ids.push_back(ids.at(0));
    }
    return trainer;
  }
  bool work() {
    if (heart_->clock.now_ns() < worker_until_ns_) return false;
    const auto order = heart_->workers().run_next();
    if (order && setting_.workers_take_time) {
      const uint64_t bytes_per_second = per_second(setting_.speed, 128_MiB);
      worker_until_ns_ = heart_->clock.now_ns() + order->bytes * 1'000'000'000 / bytes_per_second;
    }
    if (order && order->kind == WorkKind::update)
      updated_[order->job.value] += setting_.shard_elements;
    return order.has_value();
  }
  /// For whichever of disk and worker is done first.
  bool wait_for_machine() {
    const uint64_t now_ns = heart_->clock.now_ns();
    uint64_t next_ns = heart_->faults().next_ready_ns().value_or(~uint64_t{0});
    if (worker_until_ns_ > now_ns) next_ns = std::min(next_ns, worker_until_ns_);
    if (next_ns == ~uint64_t{0}) return false;
    heart_->clock.advance(next_ns - std::min(next_ns, now_ns));
    return true;
  }
  void flood_disk() {
    if (flood_ends_) return;
    heart_->io().submit({.job = JobId{trainers_[1].job_id},
                         .device = 0,
                         .offset_bytes = 4_MiB,
                         .data = flood_data_.span(),
                         .complete = [this](const Status&) { flood_disk(); }});
  }
  void flood_workers() {
    if (flood_ends_) return;
    heart_->workers().submit(
        {.job = JobId{trainers_[1].job_id}, .bytes = 3_MiB}, [] {}, [this] { flood_workers(); });
  }

  uint64_t worker_until_ns_ = 0;
  Block flood_data_{256_KiB};
};

TEST_F(FairShares, a_step_beside_a_flood_takes_as_long_as_alone_with_half_of_the_machine) {
  Setting setting{.shard_count = 100,
                  .shard_elements = 16384,
                  .arena_segments = 8,
                  .nvme_bytes = 100_MiB,
                  .speed = 0.5,
                  .workers_take_time = true};
  start(setting);
  const double alone = step_seconds(3);
  end();
  setting.speed = 1;
  start(setting);
  EXPECT_LE(step_seconds(3), 0.6 * alone) << "the machine is twice as fast";
  flood();
  const double beside = step_seconds(3);
  flood_ends_ = true;
  RecordProperty("ratio", std::to_string(beside / alone));
  EXPECT_LE(beside, 1.1 * alone);
}

TEST_F(FairShares, states_that_are_on_disk_move_by_weight) {
  start({.shard_count = 100, .shard_elements = 16384, .arena_segments = 8, .nvme_bytes = 100_MiB});
  for (const double weight : kWeights) {
    SCOPED_TRACE(weight);
    set_weight(weight);
    moved_then_.clear();
    train([&] { return largest(moved_) >= 24_MiB; });
    // Most of 100 states of 192 KiB, read and written: 37.5 MiB.
    EXPECT_GE(largest(moved_), 30_MiB);
    ASSERT_FALSE(moved_then_.empty());
    EXPECT_NEAR(part(moved_then_), weight / (weight + 1), 0.05);
    EXPECT_NEAR(part(updated_then_), weight / (weight + 1), 0.05);
  }
}

TEST_F(FairShares, states_that_are_in_memory_are_updated_by_weight) {
  start({.shard_count = 16,
         .shard_elements = kTileElements,
         .arena_segments = 44,
         .nvme_bytes = 180_MiB,
         .durability = Durability::of_code(100)});
  for (const double weight : kWeights) {
    SCOPED_TRACE(weight);
    set_weight(weight);
    updated_then_.clear();
    train([&] { return largest(updated_) >= 13 * kTileElements; });
    EXPECT_EQ(largest(moved_), 0u) << "all of it was in memory";
    ASSERT_FALSE(updated_then_.empty());
    EXPECT_NEAR(part(updated_then_), weight / (weight + 1), 0.05);
  }
}

TEST_F(FairShares, a_shard_is_read_beside_another_jobs_step_as_if_it_were_half_as_long) {
  start({.shard_count = 40, .shard_elements = 16384, .arena_segments = 4, .nvme_bytes = 100_MiB});
  // What both read and write in a step, at 64 MiB a second, is 0.4 s; a shard of 64 KiB waits for
  // what is in flight, and for its own.
  const uint64_t wanted = trainers_[1].shard_ids.front();
  Entry& entry = *heart_->job(trainers_[1].session_id).shards()[wanted].value;
  for (const Trainer& trainer : trainers_) {
    for (const uint32_t id : trainer.shard_ids) {
      if (trainer.job_id != trainers_[0].job_id) continue;
      heart_->write(trainer.session_id, id, numbers(setting_.shard_elements, id), Part::gradient);
    }
  }
  Job& job = heart_->job(trainers_[1].session_id);
  ASSERT_TRUE(entry.is_resident());
  ASSERT_TRUE(job.cache().table().take_away(entry));
  const Residency was = entry.residency();
  ASSERT_EQ(was, Residency::clean);
  job.cache().residencies().move(entry, was, Residency::absent);
  job.cache().slots().retire(entry.take_slot());
  bool done = false;
  StepRequest request;
  request.session_id = trainers_[0].session_id;
  request.groups = {{.settings = {}, .shard_ids = trainers_[0].shard_ids}};
  heart_->store().operations().step(request,
                                    [&](const Status&, const StepReport&) { done = true; });
  moved_.clear();
  ASSERT_TRUE(heart_->until([&] { return moved_[trainers_[0].job_id] >= 1_MiB; }));
  const uint64_t start_ns = heart_->clock.now_ns();
  heart_->touch(trainers_[1].session_id, static_cast<uint32_t>(wanted));
  EXPECT_FALSE(done) << "the step is longer than that";
  EXPECT_LE(heart_->clock.now_ns() - start_ns, uint64_t{9} * 1'000'000'000 / 1024);
  ASSERT_TRUE(heart_->until([&] { return done; }));
}

}  // namespace
}  // namespace memd::testing
