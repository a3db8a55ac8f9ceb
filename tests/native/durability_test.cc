// Commits in memory: tiles that are updated in place, and what of them is on disk when.
#include "store/format/durability.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/bulk_bytes.h"
#include "released_memory.h"
#include "ring/layout.h"
#include "ring/shared_memory.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

Durability durability(const std::string& text) { return Durability::parse(text).value(); }

TEST(DurabilityText, says_what_it_takes_and_refuses_the_rest) {
  for (const char* text : {"step", "every:1", "every:10", "every:2147483648", "none"}) {
    const auto parsed = Durability::parse(text);
    ASSERT_TRUE(parsed.is_ok()) << text;
    EXPECT_EQ(parsed.value().text(), text);
    EXPECT_TRUE(Durability::is_code(parsed.value().code()));
  }
  for (const char* text : {"",
                           "Step",
                           "every",
                           "every:",
                           "every:0",
                           "every:x",
                           "every:01",
                           "every:-1",
                           "every:3 ",
                           "every:2147483649",
                           "every:99999999999999999999",
                           "None"}) {
    const auto parsed = Durability::parse(text);
    ASSERT_FALSE(parsed.is_ok()) << text;
    EXPECT_EQ(parsed.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(parsed.status().message().find("\"every:k\" with k from 1"), std::string::npos);
  }
}

struct Case {
  std::string durability;
  DType dtype = DType::float32;
  uint64_t arena_segments = 8;
  /// Of the four tiles, those that stay in memory; 1 for some of them.
  uint64_t staying = 4;
  bool amsgrad = false;
};

/// Two tensors, one of three tiles and a bucket of small ones, trained beside their twins.
class Training {
 public:
  static constexpr uint64_t kLarge = 2 * kTileElements + 1000;
  static constexpr uint64_t kSmall = 3000;

  Training(Heart& heart, const Case& chosen) : heart_(heart), case_(chosen) {
    job_id_ = heart.open("job", chosen.arena_segments, kQuotaBytes, durability(chosen.durability));
    session_ = heart.attach(job_id_);
    ids_ = heart.declare(session_,
                         {with_maximum(parameter("large", kLarge, chosen.dtype), chosen.amsgrad),
                          with_maximum(parameter("small", kSmall, chosen.dtype), chosen.amsgrad)});
  }

  void write_all() {
    for (size_t i = 0; i < ids_.size(); ++i) write(i, static_cast<uint32_t>(i) + 1);
  }
  void write(size_t i, uint32_t seed) {
    Twin fresh;
    if (case_.dtype == DType::float32) {
      const auto values = numbers(count(i), seed);
      heart_.write(session_, ids_[i], values);
      fresh = Twin::fp32(values);
    } else {
      const auto values = halves(count(i), seed);
      heart_.write(session_, ids_[i], values);
      fresh = Twin::bf16(values);
    }
    if (twins.size() <= i) {
      twins.push_back(std::move(fresh));
      return;
    }
    // Moments stay, and of what was touched the remainder goes.
    for (size_t at = 0; at < fresh.remainder.size(); ++at) {
      if (twins[i].half[at] == fresh.half[at]) fresh.remainder[at] = twins[i].remainder[at];
    }
    fresh.m = std::move(twins[i].m);
    fresh.v = std::move(twins[i].v);
    fresh.v_max = std::move(twins[i].v_max);
    fresh.t = twins[i].t;
    twins[i] = std::move(fresh);
  }

  StepRequest request(uint64_t step = 0) const {
    return {.session_id = session_,
            .groups = {{.settings = settings_, .shard_ids = ids_}},
            .staged_buffers = {},
            .step = step};
  }
  void write_gradients() {
    ++seed_;
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (case_.dtype == DType::float32) {
        heart_.write(session_, ids_[i], numbers(count(i), seed_), Part::gradient);
      } else {
        heart_.write(session_, ids_[i], halves(count(i), seed_), Part::gradient);
      }
    }
  }
  std::pair<Status, StepReport> step(uint64_t number = 0) {
    write_gradients();
    const auto done = heart_.step(request(number));
    if (done.first.is_ok()) advance(twins, seed_);
    return done;
  }
  void advance(std::vector<Twin>& all, uint32_t seed) const {
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (case_.dtype == DType::float32) {
        all[i].step(settings_, numbers(count(i), seed));
      } else {
        all[i].step(settings_, halves(count(i), seed));
      }
    }
  }

  /// Parameters, moments and generations have the twin's bits.
  void expect_equal() { expect_equal(heart_, session_, twins); }
  void expect_equal(Heart& heart, uint64_t session, const std::vector<Twin>& expected) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (case_.dtype == DType::float32) {
        EXPECT_TRUE(heart.read<float>(session, ids_[i]) == expected[i].theta) << "shard " << i;
      } else {
        EXPECT_TRUE(heart.read<uint16_t>(session, ids_[i]) == expected[i].half) << "shard " << i;
      }
      const MomentValues moments = heart.moment_values(session, ids_[i]);
      EXPECT_TRUE(moments.exp_avg == expected[i].m) << "shard " << i;
      EXPECT_TRUE(moments.exp_avg_sq == expected[i].v) << "shard " << i;
      if (case_.amsgrad) EXPECT_TRUE(moments.max_exp_avg_sq == expected[i].v_max) << "shard " << i;
      EXPECT_EQ(heart.job(session).shards()[ids_[i]].generation, expected[i].t);
    }
  }

  Job& job() { return heart_.job(session_); }
  uint64_t session() const { return session_; }
  uint64_t job_id() const { return job_id_; }
  const std::vector<uint32_t>& ids() const { return ids_; }
  uint32_t seed() const { return seed_; }

  std::vector<Twin> twins;

 private:
  uint64_t count(size_t i) const { return i == 0 ? kLarge : kSmall; }

  Heart& heart_;
  const Case case_;
  const AdamSettings settings_{.lr = 0.01, .weight_decay = 0.1, .amsgrad = case_.amsgrad};
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  uint32_t seed_ = 100;
};

TEST(DurabilityRoom, a_dirty_tile_in_the_last_segment_is_written_before_the_arena_gets_its_memory) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job", 8, kQuotaBytes, durability("every:9")));
  const auto ids = heart.declare(
      session, {parameter("front", 2 * kTileElements), parameter("tail", kTileElements)});
  heart.write(session, ids[0], numbers(2 * kTileElements, 1));
  heart.write(session, ids[1], numbers(kTileElements, 2));
  const auto step = [&](const std::vector<uint32_t>& chosen) {
    for (const uint32_t id : chosen) {
      const uint64_t count = heart.job(session).shards()[id].element_count();
      heart.write(session, id, numbers(count, 3), Part::gradient);
    }
    const auto [status, report] =
        heart.step({.session_id = session, .groups = {{.settings = {}, .shard_ids = chosen}}});
    ASSERT_TRUE(status.is_ok()) << status.message();
  };
  step(ids);
  ASSERT_TRUE(heart.sync(session).is_ok());
  step({ids[1]});
  const auto tail = heart.read<float>(session, ids[1]);
  Job& job = heart.job(session);
  Arena& side = job.memory()->private_side();
  ASSERT_EQ(job.tiles().count(), 3U);
  ASSERT_EQ(testing::dirty_keys(job.tiles()), std::vector<uint64_t>{tile_key(1, 0)});
  ASSERT_GT(side.capacity_bytes(), job.memory()->private_floor_bytes());
  // Clean tiles free more than a segment in front of the dirty one, and nothing behind it.
  ASSERT_GT(*job.tiles().offset_of(tile_key(1, 0)), 4_MiB);
  ASSERT_LT(side.tail_free_bytes(), kSegmentBytes);

  const auto blobs = heart.declare(session, {bytes_shard("a", 13_MiB), bytes_shard("b", 3_MiB)});
  const Held a = heart.lease(session, blobs[0], LeaseMode::overwrite);
  const Held b = heart.lease(session, blobs[1], LeaseMode::overwrite);
  EXPECT_TRUE(a.is_ok()) << a.status.message();
  EXPECT_TRUE(b.is_ok()) << b.status.message();
  EXPECT_FALSE(job.tiles().has_dirty());
  EXPECT_EQ(side.capacity_bytes(), job.memory()->private_floor_bytes());
  heart.release(a);
  heart.release(b);
  EXPECT_EQ(heart.read<float>(session, ids[1]), tail);
}

TEST(DurabilityBytes, a_resident_step_copies_16_bytes_a_parameter_and_every_tenth_hashes_12_more) {
  constexpr uint64_t kElements = 4 * kTileElements;
  TestKeeper keeper;
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), kFloorSegments + 16, &keeper);
  const uint64_t session = heart.attach(heart.open("job", 16, kQuotaBytes, durability("every:10")));
  const auto ids = heart.declare(session, {parameter("w", kElements)});
  heart.write(session, ids[0], numbers(kElements, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  for (uint32_t step = 1; step <= 20; ++step) {
    heart.write(session, ids[0], numbers(kElements, step), Part::gradient);
    const uint64_t before = moved_elsewhere_bytes();
    const auto [status, report] =
        heart.step({.session_id = session, .groups = {{.settings = {}, .shard_ids = ids}}});
    ASSERT_TRUE(status.is_ok()) << status.message();
    const double moved = static_cast<double>(moved_elsewhere_bytes() - before) / kElements;
    // The first loads the tiles, and verifies what it has read.
    if (step == 1) continue;
    // The value that the arena shows, and pre-images of it and of moments where a tile has no other
    // copy; beside them the records of the commits.
    const double expected = step % 10 == 0 ? 28 : step % 10 == 1 ? 4 : 16;
    EXPECT_GE(moved, expected) << step;
    EXPECT_LE(moved, expected + 0.1) << step;
    EXPECT_EQ(report.written_bytes >= 12 * kElements, step % 10 == 0) << step;
  }
}

TEST(DurabilityGradients, go_with_the_update_where_the_step_cannot_be_undone) {
  for (const bool is_in_memory : {true, false}) {
    SCOPED_TRACE(is_in_memory ? "every:9" : "step");
    Heart heart(std::make_shared<MemoryDisk>(kDiskBytes),
                testing::HeartOptions{.workers_by_hand = true});
    heart.when_idle = [&] { return heart.workers().run_next().has_value(); };
    const uint64_t session = heart.attach(
        heart.open("job", 8, kQuotaBytes, durability(is_in_memory ? "every:9" : "step")));
    const auto ids = heart.declare(
        session, {parameter("first", kTileElements), parameter("second", kTileElements)});
    for (const uint32_t id : ids) {
      heart.write(session, id, numbers(kTileElements, id));
      heart.write(session, id, numbers(kTileElements, id + 7), Part::gradient);
    }
    const Job& job = heart.job(session);
    const Entry& first = *job.shards().find_entry(ids[0], Part::gradient);
    const Entry& second = *job.shards().find_entry(ids[1], Part::gradient);
    bool is_answered = false;
    heart.store().operations().step(
        {.session_id = session, .groups = {{.settings = {}, .shard_ids = ids}}},
        [&](const Status& status, const StepReport&) {
          EXPECT_TRUE(status.is_ok()) << status.message();
          is_answered = true;
        });
    ASSERT_TRUE(heart.until([&] { return job.shards()[ids[0]].is_uncommitted; }));
    EXPECT_FALSE(is_answered);
    EXPECT_EQ(first.slot() == nullptr, is_in_memory);
    EXPECT_NE(second.slot(), nullptr);
    if (is_in_memory) {
      // No zeros are read in its place, and none is added to it.
      const Held read = heart.lease(session, ids[0], LeaseMode::read, Part::gradient);
      EXPECT_EQ(read.status.code(), StatusCode::not_found) << read.status.message();
      const auto written = heart.ask(session, ids[0], LeaseMode::write, Part::gradient);
      heart.turn();
      EXPECT_FALSE(written->has_value());
      ASSERT_TRUE(heart.until([&] { return written->has_value(); }));
      EXPECT_EQ(job.progress().committed_step(), 1U);
      EXPECT_EQ((**written).as<float>()[0], 0.0F);
      heart.release(**written);
    }
    ASSERT_TRUE(heart.until([&] { return is_answered; }));
    EXPECT_EQ(second.slot(), nullptr);
  }
}

TEST(DurabilityStopped, a_job_that_no_catalogue_names_is_gone_once_nobody_uses_it) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t job_id = heart.open("job", 2, kQuotaBytes, durability("every:4"));
  const uint64_t session = heart.attach(job_id);
  const auto ids = heart.declare(session, {parameter("w", 300'000), bytes_shard("room", 4_MiB)});
  heart.write(session, ids[0], numbers(300'000, 1));
  heart.write(session, ids[0], numbers(300'000, 2), Part::gradient);
  heart.write(session, ids[1], pattern(4_MiB, 3));  // spills them
  const Entry& gradient = *heart.job(session).shards().find_entry(ids[0], Part::gradient);
  ASSERT_FALSE(gradient.is_resident());
  heart.faults().add_fault({.kind = MemoryFaultKind::flipped_bit,
                            .io_kind = IoKind::read,
                            .offset_bytes = gradient.replicas()[1].extent().address.offset_bytes,
                            .count = 1000});
  const auto [status, report] =
      heart.step({.session_id = session, .groups = {{.settings = {}, .shard_ids = {ids[0]}}}});
  EXPECT_EQ(status.code(), StatusCode::integrity) << status.message();
  ASSERT_TRUE(heart.store().detach(session).is_ok());
  ASSERT_TRUE(heart.until([&] { return heart.store().reports().jobs().empty(); }));
  ASSERT_TRUE(heart.until([&] { return heart.store().is_idle(); }));
  EXPECT_EQ(testing::replace_released(heart.store().memory()), kFloorSegments + 2);
  std::optional<Status> dropped;
  heart.store().drop_job(job_id, false, [&](const Status& each) { dropped = each; });
  ASSERT_TRUE(dropped);
  EXPECT_EQ(dropped->code(), StatusCode::not_found);
}

class DurabilityTest : public ::testing::TestWithParam<Case> {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_P(DurabilityTest, a_power_cut_leaves_the_last_commit_on_disk) {
  const Durability chosen = durability(GetParam().durability);
  std::vector<Twin> on_disk;
  uint64_t durable_step = 0;
  {
    Heart heart(disk_);
    Training training(heart, GetParam());
    training.write_all();
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
    on_disk = training.twins;
    for (uint64_t step = 1; step <= 7; ++step) {
      const auto [status, report] = training.step();
      ASSERT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.committed_step, step);
      if (chosen.is_due(step - durable_step)) {
        durable_step = step;
        on_disk = training.twins;
      }
      EXPECT_EQ(report.durable_step, chosen.is_none() ? 0 : durable_step);
      const uint64_t dirty = testing::dirty_keys(training.job().tiles()).size();
      const bool on_disk_now = durable_step == step || !chosen.is_in_memory();
      const bool some = GetParam().staying == 1 && !on_disk_now;
      if (some) {
        EXPECT_TRUE(dirty > 0 && dirty < 4) << dirty;
      } else {
        EXPECT_EQ(dirty, on_disk_now ? 0 : GetParam().staying);
      }
      // What stays is not written.
      if (GetParam().staying == 4 && step > 1 && !on_disk_now) {
        EXPECT_EQ(report.written_bytes, 0U);
      }
    }
    training.expect_equal();
  }
  disk_->crash([](const UnsyncedWrite&) { return false; });
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  const auto opened = heart.store().admissions().open({.name = "job",
                                                       .uid = 1000,
                                                       .host_bytes = 0,
                                                       .nvme_bytes = 0,
                                                       .fresh = false,
                                                       .durability = std::nullopt});
  if (chosen.is_none()) {
    ASSERT_FALSE(opened.is_ok());
    EXPECT_EQ(opened.status().code(), StatusCode::integrity);
    EXPECT_NE(opened.status().message().find("without durability since step 1"), std::string::npos);
    EXPECT_NE(opened.status().message().find("connect(fresh=True)"), std::string::npos);
    return;
  }
  ASSERT_TRUE(opened.is_ok()) << opened.status().message();
  EXPECT_EQ(opened.value().committed_step, durable_step);
  EXPECT_EQ(opened.value().durability, GetParam().durability);
  const uint64_t session = heart.attach(opened.value().job_id);
  Heart twin_heart(std::make_shared<MemoryDisk>(kDiskBytes));
  Training shape(twin_heart, GetParam());
  shape.expect_equal(heart, session, on_disk);
}

TEST_P(DurabilityTest, a_sync_puts_every_step_on_disk) {
  std::vector<Twin> twins;
  {
    Heart heart(disk_);
    Training training(heart, GetParam());
    training.write_all();
    for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
    EXPECT_EQ(training.job().progress().durable_step(), 2U);
    EXPECT_FALSE(training.job().tiles().has_dirty());
    ASSERT_TRUE(training.step().first.is_ok());
    training.expect_equal();
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
    twins = training.twins;
  }
  disk_->crash([](const UnsyncedWrite&) { return false; });
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  const uint64_t session = heart.attach(heart.open("job", GetParam().arena_segments));
  EXPECT_EQ(heart.job(session).progress().committed_step(), 3U);
  EXPECT_EQ(heart.job(session).progress().durable_step(), 3U);
  Heart twin_heart(std::make_shared<MemoryDisk>(kDiskBytes));
  Training shape(twin_heart, GetParam());
  shape.expect_equal(heart, session, twins);
}

TEST_P(DurabilityTest, what_the_user_writes_over_a_dirty_tile_keeps_its_moments) {
  Heart heart(disk_);
  Training training(heart, GetParam());
  training.write_all();
  ASSERT_TRUE(training.step().first.is_ok());
  training.write(0, 77);
  training.write(1, 78);
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
}

TEST_P(DurabilityTest, parameters_evicted_over_dirty_tiles_come_back_as_they_are) {
  Heart heart(disk_);
  Training training(heart, GetParam());
  training.write_all();
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  Job& job = training.job();
  for (const uint32_t id : training.ids()) {
    Entry& entry = *job.shards()[id].value;
    if (entry.residency() != Residency::clean) continue;
    job.cache().residencies().move(entry, Residency::clean, Residency::absent);
    job.cache().slots().free(entry.take_slot());
  }
  training.expect_equal();
  ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
}

class InMemoryTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(InMemoryTest, a_step_whose_commit_to_the_disk_fails_is_made_and_the_next_one_tries_again) {
  Heart heart(disk_);
  Training training(heart, {"every:2"});
  training.write_all();
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  ASSERT_TRUE(training.step(1).first.is_ok());
  training.write_gradients();
  std::optional<std::pair<Status, StepReport>> answer;
  const auto ask = [&](uint64_t number) {
    answer.reset();
    heart.store().operations().step(
        training.request(number),
        [&](const Status& status, const StepReport& it) { answer.emplace(status, it); });
  };
  ask(2);
  heart.turn();
  ASSERT_EQ(training.job().shards().bucket(0).value->residency(), Residency::filling)
      << "it updates";
  training.job().space().set_quota_bytes(training.job().space().used_bytes());
  ASSERT_TRUE(heart.until([&] { return answer.has_value(); }));
  ASSERT_TRUE(answer->first.is_ok()) << answer->first.message();
  EXPECT_EQ(answer->second.committed_step, 2U);
  EXPECT_EQ(answer->second.durable_step, 0U);
  EXPECT_NE(answer->second.disk_error.find("there it stays at step 0"), std::string::npos);
  EXPECT_NE(answer->second.disk_error.find("used up its disk quota"), std::string::npos);
  training.advance(training.twins, training.seed());
  training.expect_equal();
  // Whoever did not hear the answer hears the same again.
  ask(2);
  ASSERT_TRUE(answer.has_value() && answer->first.is_ok());
  EXPECT_NE(answer->second.disk_error.find("used up its disk quota"), std::string::npos);
  training.job().space().set_quota_bytes(kQuotaBytes);
  const auto [status, report] = training.step(3);
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(report.durable_step, 3U);
  EXPECT_EQ(report.disk_error, "");
  training.expect_equal();
}

TEST_F(InMemoryTest, a_step_that_meets_a_broken_disk_is_made_and_the_next_one_is_refused) {
  Heart heart(disk_);
  Training training(heart, {"every:2"});
  training.write_all();
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  ASSERT_TRUE(training.step(1).first.is_ok());
  heart.faults().add_fault({.kind = MemoryFaultKind::error, .io_kind = IoKind::write});
  const auto [status, report] = training.step(2);
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(report.committed_step, 2U);
  EXPECT_NE(report.disk_error, "");
  training.expect_equal();
  training.write_gradients();
  EXPECT_EQ(heart.step(training.request(3)).first.code(), StatusCode::device);
  EXPECT_EQ(training.job().progress().committed_step(), 2U);
  for (const uint32_t id : training.ids()) {
    EXPECT_EQ(training.job().shards()[id].contributors.only(), training.session()) << "as it was";
  }
}

TEST_F(InMemoryTest, gradients_that_came_after_a_step_are_not_taken_for_those_it_used) {
  Heart heart(disk_);
  Training training(heart, {"every:2"});
  training.write_all();
  ASSERT_TRUE(training.step(1).first.is_ok());
  training.write_gradients();
  const auto [status, report] = heart.step(training.request(1));
  EXPECT_EQ(status.code(), StatusCode::fenced);
  EXPECT_NE(status.message().find("a gradient of shard large came after it"), std::string::npos)
      << status.message();
  training.expect_equal();
  EXPECT_TRUE(heart.step(training.request(2)).first.is_ok());
  training.advance(training.twins, training.seed());
  training.expect_equal();
}

TEST_F(InMemoryTest, buffers_staged_after_a_step_are_not_taken_for_those_it_used) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, kQuotaBytes, durability("every:2")));
  const auto ids = heart.declare(session,
                                 {bytes_shard("buffer", 1000, ShardKind::buffer),
                                  bytes_shard("staged", 1000, ShardKind::buffer)});
  StepRequest request{
      .session_id = session, .groups = {}, .staged_buffers = {{ids[1], ids[0]}}, .step = 1};
  heart.write(session, ids[1], pattern(1000, 1));
  ASSERT_TRUE(heart.step(request).first.is_ok());
  EXPECT_TRUE(heart.step(request).first.is_ok()) << "the same call again";
  heart.write(session, ids[1], pattern(1000, 2));
  EXPECT_EQ(heart.step(request).first.code(), StatusCode::fenced);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(1000, 1));
  request.step = 2;
  EXPECT_TRUE(heart.step(request).first.is_ok());
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(1000, 2));
}

TEST_F(InMemoryTest, what_is_written_while_a_sync_prepares_the_disk_is_committed_whole) {
  const auto before = numbers(3000, 7);
  const auto after = numbers(3000, 8);
  for (const bool is_synced_again : {false, true}) {
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    {
      Heart heart(disk_);
      Training training(heart, {"every:4"});
      training.write_all();
      const uint64_t session = training.session();
      const uint32_t other = heart.declare(session, {parameter("other", 3000)})[0];
      heart.write(session, other, before);
      if (is_synced_again) {
        ASSERT_TRUE(heart.sync(session).is_ok());
      }
      ASSERT_TRUE(training.step().first.is_ok());
      if (!is_synced_again) heart.write(session, other, before);
      heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
      std::optional<Status> synced;
      heart.store().operations().sync(
          session, [&](const Status& status, const StepReport&) { synced = status; });
      ASSERT_TRUE(heart.until([&] { return heart.faults().has_stalled(); }));
      const auto asked = heart.ask(session, other, LeaseMode::overwrite);
      heart.turns(5);
      const auto write = [&](size_t first, size_t count) {
        std::copy_n(after.begin() + first, count, (**asked).as<float>().begin() + first);
      };
      if (asked->has_value()) write(0, 1500);
      heart.faults().release_stalled();
      ASSERT_TRUE(heart.until([&] { return synced.has_value() && asked->has_value(); }));
      EXPECT_TRUE(synced->is_ok()) << synced->message();
      ASSERT_TRUE((*asked)->is_ok());
      write(0, 3000);
      heart.release(**asked);
      if (is_synced_again) {
        ASSERT_TRUE(heart.sync(session).is_ok());
      }
    }
    disk_->crash([](const UnsyncedWrite&) { return false; });
    Heart heart(disk_);
    ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
    const uint64_t session = heart.attach(heart.open("job"));
    const uint32_t other = heart.job(session).shards().id_of("other");
    EXPECT_TRUE(heart.read<float>(session, other) == (is_synced_again ? after : before));
  }
}

TEST_F(InMemoryTest, a_sync_makes_durable_what_was_spilled_after_the_step_that_ran_meanwhile) {
  const auto after = numbers(kTileElements, 8);
  {
    Heart heart(disk_);
    const uint64_t session = heart.attach(heart.open("job", 2));
    const auto ids = heart.declare(session,
                                   {parameter("w", kTileElements),
                                    parameter("other", kTileElements),
                                    parameter("third", kTileElements)});
    for (const uint32_t id : ids) heart.write(session, id, numbers(kTileElements, id + 1));
    ASSERT_TRUE(heart.sync(session).is_ok());
    heart.write(session, ids[0], numbers(kTileElements, 5), Part::gradient);
    std::optional<Status> answer;
    heart.store().operations().step(
        {.session_id = session,
         .groups = {{.settings = {}, .shard_ids = {ids[0]}}},
         .staged_buffers = {}},
        [&](const Status& status, const StepReport&) { answer = status; });
    heart.turn();
    heart.write(session, ids[1], after);
    ASSERT_TRUE(heart.until([&] { return answer.has_value(); }));
    ASSERT_TRUE(answer->is_ok()) << answer->message();
    // Gradients take the room that it has.
    for (const uint32_t id : ids)
      heart.write(session, id, numbers(kTileElements, 6), Part::gradient);
    heart.touch(session, ids[0]);
    const Job& job = heart.job(session);
    ASSERT_EQ(job.shards()[ids[1]].value->slot(), nullptr) << "it was spilled";
    ASSERT_TRUE(heart.sync(session).is_ok());
  }
  disk_->crash([](const UnsyncedWrite&) { return false; });
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  EXPECT_TRUE(heart.read<float>(session, heart.job(session).shards().id_of("other")) == after);
}

TEST_F(InMemoryTest, a_step_begins_only_where_the_disk_has_room_for_all_that_memory_may_displace) {
  Heart heart(disk_);
  Training training(heart, {"every:3"});
  training.write_all();
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  ASSERT_TRUE(training.step().first.is_ok());
  training.job().space().set_quota_bytes(training.job().space().used_bytes() + 1_MiB);
  const Status refused = training.step().first;
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("no room on disk for its next step"), std::string::npos)
      << refused.message();
  EXPECT_TRUE(training.job().progress().stopped().is_ok());
  EXPECT_EQ(training.job().space().promised_bytes(), 0U);
  training.expect_equal();
  training.job().space().set_quota_bytes(kQuotaBytes);
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
}

TEST_F(InMemoryTest, a_step_of_more_tiles_than_a_turn_looks_at_needs_room_for_all) {
  constexpr size_t kTiles = 24;
  constexpr uint64_t kTileBytes = kTileElements * 12;
  Heart heart(disk_, kFloorSegments + 60);
  const uint64_t session = heart.attach(heart.open("job", 60, kQuotaBytes, durability("every:9")));
  std::vector<ShardSpec> specs;
  for (size_t i = 0; i < kTiles; ++i)
    specs.push_back(parameter(concat("w", i), kTileElements, DType::bfloat16));
  const auto ids = heart.declare(session, specs);
  for (const uint32_t id : ids) heart.write(session, id, halves(kTileElements, id + 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  const auto step = [&] {
    for (const uint32_t id : ids)
      heart.write(session, id, halves(kTileElements, id + 50), Part::gradient);
    return heart
        .step({.session_id = session,
               .groups = {{.settings = {}, .shard_ids = ids}},
               .staged_buffers = {}})
        .first;
  };
  Job& job = heart.job(session);
  // Every tile has its place on disk and needs another one; all but the last two would fit.
  const uint64_t used_bytes = job.space().used_bytes();
  job.space().set_quota_bytes(used_bytes + (kTiles - 2) * kTileBytes);
  const Status refused = step();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find(concat(kTiles * kTileBytes, " more needed")), std::string::npos)
      << refused.message();
  EXPECT_TRUE(job.progress().stopped().is_ok());
  job.space().set_quota_bytes(kQuotaBytes);
  EXPECT_TRUE(step().is_ok());
}

TEST_F(InMemoryTest, a_gradient_is_not_spilled_into_the_room_of_a_step_that_runs) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 5, kQuotaBytes, durability("every:9")));
  const auto ids =
      heart.declare(session, {parameter("w", kTileElements), parameter("other", kTileElements)});
  for (const size_t i : {0, 1}) heart.write(session, ids[i], numbers(kTileElements, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  for (const size_t i : {1, 0})
    heart.write(session, ids[i], numbers(kTileElements, 2), Part::gradient);
  std::optional<Status> answer;
  heart.store().operations().step(
      {.session_id = session,
       .groups = {{.settings = {}, .shard_ids = {ids[0]}}},
       .staged_buffers = {}},
      [&](const Status& status, const StepReport&) { answer = status; });
  heart.turn();
  Job& job = heart.job(session);
  ASSERT_GT(job.space().promised_bytes(), job.space().used_bytes());
  const auto blob = heart.declare(session, {bytes_shard("blob", 8_MiB)});
  heart.limit_state(session, job.space().promised_bytes());
  const Entry& gradient = *job.shards().find_entry(ids[1], Part::gradient);
  const auto asked = heart.ask(session, blob[0], LeaseMode::overwrite);
  EXPECT_FALSE(asked->has_value());
  EXPECT_EQ(gradient.residency(), Residency::dirty) << "it waits for the step's end";
  ASSERT_TRUE(heart.until([&] { return answer.has_value(); }));
  EXPECT_TRUE(answer->is_ok()) << answer->message();
  ASSERT_TRUE(heart.until([&] { return asked->has_value(); }));
  EXPECT_TRUE((*asked)->is_ok()) << (*asked)->status.message();
  EXPECT_TRUE(gradient.has_replica());
}

TEST_F(InMemoryTest, a_job_that_stops_says_what_is_on_disk_and_what_to_do) {
  for (const bool is_none : {false, true}) {
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    Heart heart(disk_);
    Training training(heart, {is_none ? "none" : "every:9", DType::float32, 4, 0});
    training.write_all();
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
    ASSERT_TRUE(training.step().first.is_ok());
    training.write_gradients();
    std::optional<Status> answer;
    heart.store().operations().step(
        training.request(), [&](const Status& status, const StepReport&) { answer = status; });
    heart.turn();
    training.job().space().set_quota_bytes(0);
    ASSERT_TRUE(heart.until([&] { return answer.has_value(); }));
    ASSERT_FALSE(answer->is_ok());
    const bool says_step =
        answer->message().find("go on from the last step on disk, which is 0") != std::string::npos;
    const bool says_fresh =
        answer->message().find("without durability since step 1") != std::string::npos &&
        answer->message().find("connect(fresh=True)") != std::string::npos;
    EXPECT_EQ(says_step, !is_none) << answer->message();
    EXPECT_EQ(says_fresh, is_none) << answer->message();
  }
}

TEST_F(InMemoryTest, the_stalls_of_a_jobs_sessions_outlive_its_return_to_disk) {
  disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  Heart heart(disk_);
  Training training(heart, {"every:9", DType::float32, 4, 0});
  training.write_all();
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  ASSERT_TRUE(training.step().first.is_ok());
  const uint64_t job_id = training.job().job_id();
  const int fd = heart.store().sessions().at(training.session())->ring.session_fd();
  auto board = SharedMemory::map(OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), sizeof(SessionLayout));
  ASSERT_TRUE(board.is_ok());
  reinterpret_cast<SessionLayout*>(board.value().data())->header.stalls.counters.step_wall_ns = 100;
  // A step that fails while its state is updated in place stops the job.
  training.write_gradients();
  std::optional<Status> answer;
  heart.store().operations().step(
      training.request(), [&](const Status& status, const StepReport&) { answer = status; });
  heart.turn();
  training.job().space().set_quota_bytes(0);
  ASSERT_TRUE(heart.until([&] { return answer.has_value(); }));
  ASSERT_TRUE(training.job().progress().goes_to_disk()) << answer->message();
  ASSERT_TRUE(heart.store().detach(training.session()).is_ok());
  heart.turns();
  const uint64_t again = heart.attach(job_id);
  ASSERT_NE(again, 0u) << "it is refused until it has returned";
  EXPECT_FALSE(heart.job(again).progress().goes_to_disk());
  EXPECT_EQ(heart.store().reports().statistics().jobs.at(0).stalls.step_wall_ns(), 100u);
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         DurabilityTest,
                         ::testing::Values(Case{"step"},
                                           Case{"every:1"},
                                           Case{"every:2"},
                                           Case{"every:3"},
                                           Case{"none"},
                                           Case{"every:3", DType::bfloat16},
                                           Case{"none", DType::bfloat16},
                                           Case{"every:3", DType::float32, 5, 1},
                                           Case{"none", DType::float32, 4, 1},
                                           Case{"every:2", DType::bfloat16, 2, 0},
                                           Case{"none", DType::bfloat16, 4, 1},
                                           Case{"step", DType::float32, 8, 4, true},
                                           Case{"every:3", DType::bfloat16, 8, 4, true},
                                           Case{"none", DType::float32, 4, 1, true}),
                         [](const auto& info) {
                           std::string name =
                               info.param.durability +
                               (info.param.dtype == DType::bfloat16 ? "_bf16_" : "_fp32_") +
                               std::to_string(info.param.arena_segments) +
                               (info.param.amsgrad ? "_amsgrad" : "");
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

}  // namespace
}  // namespace memd::testing
