// Updates that are made before their step is closed: what a step takes over, and what is thrown
// away.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "store/state/early_updates.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

struct Case {
  std::string durability = "step";
  DType dtype = DType::float32;
  uint64_t arena_segments = 8;
};

constexpr uint64_t kLarge = 2 * kTileElements + 1000;
constexpr uint64_t kSmall = 3000;
constexpr uint64_t kTiles = 4;

/// A tensor of three tiles and a bucket of two small ones, trained beside their twins.
class Training {
 public:
  Training(Heart& heart, const Case& chosen, uint64_t quota_bytes = kQuotaBytes)
      : heart_(heart), case_(chosen) {
    job_id_ = heart.open(
        "job", chosen.arena_segments, quota_bytes, Durability::parse(chosen.durability).value());
    session_ = heart.attach(job_id_);
    ids_ = heart.declare(session_,
                         {parameter("large", kLarge, chosen.dtype),
                          parameter("small", kSmall, chosen.dtype),
                          parameter("tiny", 10, chosen.dtype)});
    for (size_t i = 0; i < ids_.size(); ++i) write_value(i, static_cast<uint32_t>(i) + 1);
    EXPECT_TRUE(heart.sync(session_).is_ok());
  }

  void write_value(size_t i, uint32_t seed) {
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
    for (size_t at = 0; at < fresh.remainder.size(); ++at) {
      if (twins[i].half[at] == fresh.half[at]) fresh.remainder[at] = twins[i].remainder[at];
    }
    fresh.m = std::move(twins[i].m);
    fresh.v = std::move(twins[i].v);
    fresh.t = twins[i].t;
    twins[i] = std::move(fresh);
  }
  void write_gradient(size_t i, uint32_t seed) {
    if (case_.dtype == DType::float32) {
      heart_.write(session_, ids_[i], numbers(count(i), seed), Part::gradient);
    } else {
      heart_.write(session_, ids_[i], halves(count(i), seed), Part::gradient);
    }
  }
  void expect() {
    EXPECT_TRUE(heart_.store().gradients().expect_step(session_, request().groups).is_ok());
  }
  /// As a backward does it; returns when nothing more is made early.
  void backward() {
    expect();
    ++seed_;
    for (size_t i = ids_.size(); i-- > 0;) {
      write_gradient(i, seed_);
      heart_.store().gradients().is_final(session_, ids_[i]);
    }
    wait();
  }
  void wait() {
    EXPECT_TRUE(heart_.until([&] {
      return !job().state().early().has_waiting() && job().state().early().running_count() == 0 &&
             !job().cache().activities().any();
    }));
  }
  StepRequest request() const {
    return {.session_id = session_, .groups = {{.settings = settings, .shard_ids = ids_}}};
  }
  void step() {
    const auto [status, report] = heart_.step(request());
    ASSERT_TRUE(status.is_ok()) << status.message();
    advance();
  }
  void advance() {
    for (size_t i = 0; i < ids_.size(); ++i) advance(i, seed_);
  }
  void advance(size_t i, uint32_t seed) {
    if (case_.dtype == DType::float32) {
      twins[i].step(settings, numbers(count(i), seed));
    } else {
      twins[i].step(settings, halves(count(i), seed));
    }
  }

  void expect_equal() { expect_equal(heart_, session_); }
  void expect_equal(Heart& heart, uint64_t session) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (case_.dtype == DType::float32) {
        EXPECT_TRUE(heart.read<float>(session, ids_[i]) == twins[i].theta) << "shard " << i;
      } else {
        EXPECT_TRUE(heart.read<uint16_t>(session, ids_[i]) == twins[i].half) << "shard " << i;
      }
      const auto [m, v] = heart.moments(session, ids_[i]);
      EXPECT_TRUE(m == twins[i].m) << "shard " << i;
      EXPECT_TRUE(v == twins[i].v) << "shard " << i;
      EXPECT_EQ(heart.job(session).shards()[ids_[i]].generation, twins[i].t);
    }
  }
  /// Nothing is taken of disk, quota or arena but what the job's entries name.
  void expect_nothing_leaked() {
    ASSERT_TRUE(heart_.until([&] { return job().state().early().bucket_count() == 0; }));
    wait();
    ASSERT_TRUE(heart_.sync(session_).is_ok());
    job().durable().note_change();
    ASSERT_TRUE(heart_.sync(session_).is_ok()) << "what the commit before named is free now";
    testing::expect_all_bytes_held(job());
  }

  Job& job() { return heart_.job(session_); }
  uint64_t adopted() { return job().cache().counters().early_tiles_adopted; }
  uint64_t discarded(EarlyDiscard why) {
    return job().cache().counters().early_tiles_discarded[static_cast<size_t>(why)];
  }
  uint64_t session() const { return session_; }
  const std::vector<uint32_t>& ids() const { return ids_; }
  uint32_t seed() const { return seed_; }

  std::vector<Twin> twins;
  AdamSettings settings{.lr = 0.01, .weight_decay = 0.1};

 private:
  uint64_t count(size_t i) const { return i == 0 ? kLarge : i == 1 ? kSmall : 10; }

  Heart& heart_;
  const Case case_;
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  uint32_t seed_ = 100;
};

class EarlyUpdateTest : public ::testing::TestWithParam<Case> {
 protected:
  bool is_in_memory() const { return GetParam().durability != "step"; }
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_P(EarlyUpdateTest, a_step_takes_over_what_was_made_and_nobody_sees_it_before) {
  {
    Heart heart(disk_);
    Training training(heart, GetParam());
    for (int step = 0; step < 6; ++step) {
      training.backward();
      const uint64_t adopted_before = training.adopted();
      const uint64_t made_count = training.job().state().early().bucket_count();
      training.expect_equal();  // N
      const Held view = heart.lease(training.session(), training.ids()[1]);
      const std::vector<uint8_t> bytes(view.as<uint8_t>().begin(), view.as<uint8_t>().end());
      training.step();
      EXPECT_EQ(training.adopted() > adopted_before, made_count > 0);
      if (!is_in_memory()) EXPECT_EQ(training.adopted() - adopted_before, kTiles);
      training.expect_equal();  // N + 1
      EXPECT_TRUE(std::ranges::equal(view.as<uint8_t>(), bytes)) << "a live view is never written";
      heart.release(view);
    }
    for (const uint64_t count : training.job().cache().counters().early_tiles_discarded)
      EXPECT_EQ(count, 0U);
    training.expect_nothing_leaked();
  }
  if (GetParam().durability == "none") return;
  // What is on disk is the last step too.
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  const uint64_t session = heart.attach(heart.open("job", GetParam().arena_segments));
  EXPECT_EQ(heart.job(session).progress().committed_step(), 6U);
  EXPECT_EQ(heart.job(session).lost().count(), 0U);
}

TEST_P(EarlyUpdateTest, what_a_step_finds_made_otherwise_is_made_again) {
  using Change = std::function<void(Training&, Heart&)>;
  const std::vector<std::pair<EarlyDiscard, Change>> changes = {
      {EarlyDiscard::settings,
       [](Training& training, Heart&) {
         training.settings.lr *= 0.5;
         training.step();
       }},
      {EarlyDiscard::settings,
       [](Training& training, Heart&) {
         training.settings.maximize = true;
         training.step();
       }},
      {EarlyDiscard::gradient,
       [](Training& training, Heart& heart) {
         training.write_gradient(0, 7);
         const auto [status, report] = heart.step(training.request());
         ASSERT_TRUE(status.is_ok()) << status.message();
         training.advance(0, 7);
         training.advance(1, training.seed());
         training.advance(2, training.seed());
       }},
      {EarlyDiscard::gradient,
       [](Training& training, Heart& heart) {
         ASSERT_TRUE(heart.store().gradients().drop(training.session(), {}).is_ok());
         training.expect_equal();
       }},
      {EarlyDiscard::state,
       [](Training& training, Heart&) {
         training.write_value(0, 55);
         training.step();
       }},
      {EarlyDiscard::state,
       [](Training& training, Heart& heart) {
         std::optional<Status> written;
         Twin& twin = training.twins[0];
         std::fill_n(twin.m.begin(), 100, 0.5F);
         std::fill_n(twin.v.begin(), 100, 0.25F);
         heart.store().operations().write_moments({.session_id = training.session(),
                                                   .shard_id = training.ids()[0],
                                                   .element_first = 0,
                                                   .element_count = 100},
                                                  twin.t,
                                                  {.exp_avg = std::vector<float>(100, 0.5F),
                                                   .exp_avg_sq = std::vector<float>(100, 0.25F),
                                                   .max_exp_avg_sq = {}},
                                                  [&](const Status& status) { written = status; });
         ASSERT_TRUE(heart.until([&] { return written.has_value(); }));
         ASSERT_TRUE(written->is_ok()) << written->message();
         training.step();
       }},
      {EarlyDiscard::step,
       [](Training& training, Heart& heart) {
         StepRequest request = training.request();
         std::erase(request.groups[0].shard_ids, training.ids()[1]);
         const auto [status, report] = heart.step(request);
         ASSERT_TRUE(status.is_ok()) << status.message();
         training.advance(0, training.seed());
         training.advance(2, training.seed());
         training.expect_equal();
         ASSERT_TRUE(heart.store().gradients().drop(training.session(), {}).is_ok());
       }},
  };
  Heart heart(disk_);
  Training training(heart, GetParam());
  for (size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [why, change] = changes[i];
    training.backward();
    const bool was_made = training.job().state().early().bucket_count() != 0;
    const uint64_t before = training.discarded(why);
    change(training, heart);
    if (!is_in_memory()) EXPECT_TRUE(was_made);
    if (was_made && !is_in_memory()) EXPECT_GT(training.discarded(why), before);
    training.expect_equal();
    training.backward();
    training.step();
    training.expect_equal();
    training.expect_nothing_leaked();
  }
}

TEST_P(EarlyUpdateTest, what_changes_while_tiles_are_made_waits_for_them_and_they_are_dropped) {
  Heart heart(disk_);
  Training training(heart, GetParam());
  for (int turns = 0; turns < 12; ++turns) {
    SCOPED_TRACE(turns);
    training.expect();
    for (size_t i = 0; i < 3; ++i) {
      training.write_gradient(i, 200);
      heart.store().gradients().is_final(training.session(), training.ids()[i]);
    }
    for (int turn = 0; turn < turns; ++turn) heart.turn();
    for (size_t i = 0; i < 3; ++i) training.write_gradient(i, 300);
    const auto [status, report] = heart.step(training.request());
    ASSERT_TRUE(status.is_ok()) << status.message();
    for (size_t i = 0; i < 3; ++i) training.advance(i, 300);
    training.expect_equal();
  }
  training.expect_nothing_leaked();
}

TEST_P(EarlyUpdateTest, a_step_that_comes_while_tiles_are_made_does_what_is_left) {
  Heart heart(disk_);
  Training training(heart, GetParam());
  for (int turns = 0; turns < 12; ++turns) {
    SCOPED_TRACE(turns);
    training.expect();
    for (size_t i = 0; i < 3; ++i) {
      training.write_gradient(i, 200);
      heart.store().gradients().is_final(training.session(), training.ids()[i]);
    }
    for (int turn = 0; turn < turns; ++turn) heart.turn();
    const auto [status, report] = heart.step(training.request());
    ASSERT_TRUE(status.is_ok()) << status.message();
    for (size_t i = 0; i < 3; ++i) training.advance(i, 200);
    training.expect_equal();
  }
  training.expect_nothing_leaked();
}

TEST_P(EarlyUpdateTest, a_session_that_ends_leaves_the_step_before_it_and_nothing_else) {
  Heart heart(disk_);
  Training training(heart, GetParam());
  training.backward();
  training.step();
  const uint64_t job_id = training.job().job_id();
  const uint64_t other = heart.attach(job_id);
  training.backward();
  ASSERT_TRUE(heart.store().detach(training.session()).is_ok());
  ASSERT_TRUE(heart.until([&] { return heart.store().is_idle(); }));
  training.expect_equal(heart, other);
  Job& job = heart.job(other);
  EXPECT_TRUE(job.state().early().bucket_count() == 0 &&
              job.state().early().final_shard_count() == 0);
  ASSERT_TRUE(heart.sync(other).is_ok());
  job.durable().note_change();
  ASSERT_TRUE(heart.sync(other).is_ok());
  uint64_t named_bytes = 0;
  job.shards().for_each_replica([&](ReplicaPlace each) { named_bytes += each->length_bytes(); });
  EXPECT_EQ(job.space().used_bytes(), named_bytes);
}

TEST_P(EarlyUpdateTest, a_daemon_that_dies_before_the_step_leaves_the_gradients_for_it) {
  TestKeeper keeper;
  auto heart = std::make_unique<Heart>(
      disk_, HeartOptions{.segment_count = kFloorSegments + 12, .keeper = &keeper});
  Training training(*heart, GetParam());
  training.backward();
  training.step();
  training.backward();
  const StepRequest request = training.request();
  heart->kill();
  [[maybe_unused]] auto* const leaked = heart.release();
  Heart next(disk_, HeartOptions{.segment_count = kFloorSegments + 12, .keeper = &keeper});
  ASSERT_TRUE(next.loaded.is_ok()) << next.loaded.message();
  training.expect_equal(next, request.session_id);
  Job& job = next.job(request.session_id);
  uint64_t slot_bytes = 0;
  for (Entry* const entry : job.shards().entries()) {
    if (entry->slot() != nullptr) slot_bytes += align_up(entry->slot()->bytes, kBlockBytes);
  }
  EXPECT_EQ(job.memory()->arena().used_bytes(), slot_bytes);
  const auto [status, report] = next.step(request);
  ASSERT_TRUE(status.is_ok()) << status.message();
  training.advance();
  training.expect_equal(next, request.session_id);
}

TEST_P(EarlyUpdateTest, a_daemon_that_dies_while_tiles_are_made_leaves_n) {
  TestKeeper keeper;
  const HeartOptions options{.segment_count = kFloorSegments + 12, .keeper = &keeper};
  auto heart = std::make_unique<Heart>(disk_, options);
  Training training(*heart, GetParam());
  training.backward();
  training.step();
  training.expect();
  for (size_t i = 0; i < 3; ++i) {
    training.write_gradient(i, 200);
    heart->store().gradients().is_final(training.session(), training.ids()[i]);
  }
  // Whatever they have written of N + 1 into N's slot.
  for (int turn = 0; turn < 3 && training.job().state().early().running_count() == 0; ++turn)
    heart->turn();
  if (!is_in_memory()) EXPECT_GT(training.job().state().early().running_count(), 0U);
  const StepRequest request = training.request();
  heart->kill();
  [[maybe_unused]] auto* const leaked = heart.release();
  Heart next(disk_, options);
  ASSERT_TRUE(next.loaded.is_ok()) << next.loaded.message();
  training.expect_equal(next, request.session_id);
  const auto [status, report] = next.step(request);
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (size_t i = 0; i < 3; ++i) training.advance(i, 200);
  training.expect_equal(next, request.session_id);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    EarlyUpdateTest,
    ::testing::Values(Case{},
                      Case{.dtype = DType::bfloat16},
                      Case{.arena_segments = 3},
                      Case{.dtype = DType::bfloat16, .arena_segments = 2},
                      Case{.durability = "every:3"},
                      Case{.durability = "every:3", .arena_segments = 3},
                      Case{.durability = "every:2", .dtype = DType::bfloat16, .arena_segments = 2},
                      Case{.durability = "none", .arena_segments = 3}),
    [](const auto& info) {
      std::string name = info.param.durability +
                         (info.param.dtype == DType::bfloat16 ? "_bf16_" : "_fp32_") +
                         std::to_string(info.param.arena_segments);
      std::replace(name.begin(), name.end(), ':', '_');
      return name;
    });

class EarlyFailureTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

// Streams every tile and fetches every value, so that each of them is read.
constexpr uint64_t kFewSegments = 2;

TEST_F(EarlyFailureTest, a_read_that_fails_is_the_steps_to_meet_again) {
  for (const MemoryFaultKind kind : {MemoryFaultKind::error, MemoryFaultKind::flipped_bit}) {
    uint64_t failed_count = 0;
    for (uint64_t index = 0;; ++index) {
      SCOPED_TRACE(index);
      const auto disk = std::make_shared<MemoryDisk>(kDiskBytes);
      Heart heart(disk);
      Training training(heart, {.arena_segments = kFewSegments});
      training.backward();
      training.step();
      training.expect_equal();
      const uint64_t hits_before = heart.faults().fault_hit_count();
      // One that is read again and fails again.
      heart.faults().add_fault(
          {.kind = kind, .io_kind = IoKind::read, .skip_count = index, .count = 1});
      training.backward();
      const bool was_hit = heart.faults().fault_hit_count() != hits_before;
      heart.faults().clear_faults();
      failed_count += training.discarded(EarlyDiscard::failed);
      training.step();
      training.expect_equal();
      EXPECT_EQ(training.job().lost().count(), 0U);
      training.expect_nothing_leaked();
      if (!was_hit) break;
      ASSERT_LT(index, 100U);
    }
    EXPECT_EQ(failed_count, 0U) << "what is read well the second time is no failure";
  }
}

TEST_F(EarlyFailureTest, bytes_that_are_gone_are_reported_by_the_step_and_it_stays_at_n) {
  Heart heart(disk_);
  Training training(heart, {.arena_segments = kFewSegments});
  training.backward();
  training.step();
  training.job().state().drop_clean_tiles();
  const ExtentRecord rest = training.job().shards().bucket(0).rest[1].extent();
  heart.faults().add_fault({.kind = MemoryFaultKind::flipped_bit,
                            .io_kind = IoKind::read,
                            .offset_bytes = rest.address.offset_bytes,
                            .count = 1000});
  training.backward();
  EXPECT_GT(training.discarded(EarlyDiscard::failed), 0U);
  EXPECT_EQ(training.job().lost().count(), 0U) << "nobody has asked for it yet";
  const auto [status, report] = heart.step(training.request());
  EXPECT_EQ(status.code(), StatusCode::integrity) << status.message();
  EXPECT_EQ(training.job().progress().committed_step(), 1U);
  EXPECT_EQ(training.job().shards()[training.ids()[0]].contributors.only(), training.session());
}

TEST_F(EarlyFailureTest, a_write_that_fails_leaves_n_on_disk_at_every_index) {
  uint64_t failed_count = 0;
  for (uint64_t index = 0;; ++index) {
    SCOPED_TRACE(index);
    const auto disk = std::make_shared<MemoryDisk>(kDiskBytes);
    bool was_hit = false;
    std::vector<Twin> twins;
    {
      Heart heart(disk);
      Training training(heart, {.arena_segments = 8});
      training.backward();
      training.step();
      twins = training.twins;
      heart.faults().add_fault(
          {.kind = MemoryFaultKind::error, .io_kind = IoKind::write, .skip_count = index});
      training.backward();
      was_hit = heart.faults().fault_hit_count() != 0;
      heart.faults().clear_faults();
      failed_count += training.discarded(EarlyDiscard::failed);
      if (was_hit) {
        EXPECT_FALSE(heart.extents().broken().is_ok());
        EXPECT_EQ(heart.step(training.request()).first.code(), StatusCode::device);
        EXPECT_EQ(training.job().progress().committed_step(), 1U);
        training.expect_equal();
      }
    }
    Heart heart(disk);
    ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
    const uint64_t session = heart.attach(heart.open("job", 8));
    EXPECT_EQ(heart.job(session).progress().committed_step(), 1U);
    EXPECT_TRUE(heart.read<float>(session, 0) == twins[0].theta);
    if (!was_hit) break;
    ASSERT_LT(index, 100U);
  }
  EXPECT_GT(failed_count, 0U);
}

TEST_F(EarlyFailureTest, without_room_on_disk_the_step_does_it_all) {
  Heart heart(disk_);
  Training training(heart, {.durability = "every:9", .arena_segments = kFewSegments});
  training.backward();
  training.step();
  const uint64_t adopted_before = training.adopted();
  EXPECT_GT(adopted_before, 0U);
  const uint64_t used_bytes = training.job().space().used_bytes();
  training.job().space().set_quota_bytes(used_bytes + 1_MiB);
  training.backward();
  EXPECT_LE(training.job().space().used_bytes(), training.job().space().quota_bytes());
  training.job().space().set_quota_bytes(kQuotaBytes);
  training.step();
  training.expect_equal();
  EXPECT_LE(training.adopted() - adopted_before, 1U);
}

TEST_F(EarlyFailureTest, whoever_needs_room_on_disk_gets_that_of_what_is_only_made_early) {
  for (const char* durability : {"step", "every:9"}) {
    Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
    Training training(heart, {.durability = durability, .arena_segments = kFewSegments});
    training.backward();
    training.step();
    training.backward();
    ASSERT_GE(training.job().state().early().bucket_count(), 2U);
    // What was made of the small bucket goes, as its settings are others; to make it again takes a
    // byte more than there is.
    training.job().space().set_quota_bytes(training.job().space().used_bytes() - 1);
    training.settings.lr = 0.02;
    StepRequest small = training.request();
    small.groups[0].shard_ids.erase(small.groups[0].shard_ids.begin());
    const auto [status, report] = heart.step(small);
    ASSERT_TRUE(status.is_ok()) << durability << ": " << status.message();
    for (const size_t i : {1, 2}) training.advance(i, training.seed());
    EXPECT_GT(training.discarded(EarlyDiscard::room), 0U) << durability;
    training.job().space().set_quota_bytes(kQuotaBytes);
    StepRequest large = training.request();
    large.groups[0].shard_ids.resize(1);
    ASSERT_TRUE(heart.step(large).first.is_ok());
    training.advance(0, training.seed());
    training.expect_equal();
    training.expect_nothing_leaked();
  }
}

TEST_F(EarlyFailureTest, whoever_needs_room_in_the_arena_gets_it_before_what_is_only_published) {
  Heart heart(disk_);
  Training training(heart, {.arena_segments = 8});
  training.backward();
  training.step();
  training.expect_equal();
  training.backward();
  // The small bucket's is too small to help anybody.
  const auto has_slot = [&] {
    return training.job().state().early().slot_of(*training.job().shards().bucket(0).value) !=
           nullptr;
  };
  ASSERT_TRUE(has_slot());
  const uint64_t spilled_before = training.job().cache().counters().spilled_bytes;
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 48; ++i) specs.push_back(bytes_shard(concat("blob", i), 512_KiB));
  const auto blobs = heart.declare(training.session(), specs);
  for (const uint32_t blob : blobs) {
    if (!has_slot()) break;
    EXPECT_EQ(training.job().cache().counters().spilled_bytes, spilled_before);
    heart.write(training.session(), blob, pattern(512_KiB, 1));
  }
  EXPECT_FALSE(has_slot());
  training.step();
  training.expect_equal();
  EXPECT_EQ(training.adopted(), 2 * kTiles);
}

TEST_F(EarlyFailureTest, hints_that_come_too_late_or_of_others_begin_nothing) {
  Heart heart(disk_);
  Training training(heart, {});
  const uint64_t other = heart.attach(training.job().job_id());
  training.expect();
  for (size_t i = 0; i < 3; ++i) training.write_gradient(i, 200);
  for (const uint32_t id : training.ids()) heart.store().gradients().is_final(other, id);
  heart.store().gradients().is_final(training.session(), 12345);
  const Held writing =
      heart.lease(training.session(), training.ids()[0], LeaseMode::write, Part::gradient);
  heart.store().gradients().is_final(training.session(), training.ids()[0]);
  training.wait();
  EXPECT_EQ(training.job().state().early().bucket_count(), 0U);
  heart.release(writing);
  const auto [status, report] = heart.step(training.request());
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (const uint32_t id : training.ids())
    heart.store().gradients().is_final(training.session(), id);
  EXPECT_EQ(training.job().state().early().final_shard_count(), 0U);
  const Status unknown = heart.store().gradients().expect_step(
      training.session(), {{.settings = {}, .shard_ids = {77}}});
  EXPECT_EQ(unknown.code(), StatusCode::not_found) << unknown.message();
}

class EarlySlotTest : public ::testing::Test {
 protected:
  EarlySlotTest() {
    training.backward();
    training.step();
    training.expect_equal();
    offset_bytes = value().slot()->offset_bytes;
  }
  const Entry& value() { return *training.job().shards().bucket(0).value; }
  bool shows_n(const Held& view) {
    return std::ranges::equal(view.as<float>(), training.twins[0].theta);
  }

  Heart heart{std::make_shared<MemoryDisk>(kDiskBytes)};
  Training training{heart, {}};
  uint64_t offset_bytes = 0;
};

TEST_F(EarlySlotTest, a_value_takes_the_place_of_the_one_before_and_is_not_read_again) {
  const uint64_t fetched_before = training.job().cache().counters().fetched_bytes;
  training.backward();
  EXPECT_EQ(value().residency(), Residency::absent);
  ASSERT_NE(training.job().state().early().slot_of(value()), nullptr);
  EXPECT_EQ(training.job().state().early().slot_of(value())->offset_bytes, offset_bytes);
  training.step();
  EXPECT_EQ(training.adopted(), 2 * kTiles);
  training.expect_equal();
  EXPECT_EQ(training.job().cache().counters().fetched_bytes, fetched_before);
  training.expect_nothing_leaked();
}

TEST_F(EarlySlotTest, whoever_wants_the_value_of_before_has_it_fetched) {
  training.backward();
  const uint64_t fetched_before = training.job().cache().counters().fetched_bytes;
  const Held view = heart.lease(training.session(), training.ids()[0]);
  ASSERT_TRUE(view.is_ok()) << view.status.message();
  EXPECT_EQ(training.job().cache().counters().fetched_bytes - fetched_before, value().bytes());
  EXPECT_TRUE(shows_n(view));
  const std::vector<float> n = training.twins[0].theta;
  training.step();
  EXPECT_TRUE(std::ranges::equal(view.as<float>(), n));
  heart.release(view);
  training.expect_equal();
  training.expect_nothing_leaked();
}

TEST(EarlySlot, whoever_wants_the_value_of_before_waits_for_no_tile_that_was_not_begun) {
  Heart heart{std::make_shared<MemoryDisk>(4 * kDiskBytes), kFloorSegments + 24};
  const uint64_t session = heart.attach(heart.open("job", 24, 3 * kQuotaBytes));
  const uint64_t tile_count = 12;
  const auto values = numbers(tile_count * kTileElements, 1);
  const std::vector<uint32_t> ids = heart.declare(session, {parameter("huge", values.size())});
  heart.write(session, ids[0], values);
  ASSERT_TRUE(heart.sync(session).is_ok());
  ASSERT_TRUE(
      heart.store().gradients().expect_step(session, {{.settings = {}, .shard_ids = ids}}).is_ok());
  heart.write(session, ids[0], numbers(values.size(), 2), Part::gradient);
  heart.store().gradients().is_final(session, ids[0]);
  Job& job = heart.job(session);
  ASSERT_TRUE(heart.until([&] { return job.state().early().running_count() != 0; }));
  const uint64_t begun_count = job.state().early().find(0)->tile_next;
  const auto reader =
      heart.ask({.session_id = session, .shard_id = ids[0], .timeout_ns = 60'000'000'000});
  const Entry& value = *job.shards().find_entry(ids[0], Part::value);
  ASSERT_EQ(value.residency(), Residency::absent);
  ASSERT_TRUE(heart.until([&] { return value.residency() != Residency::absent; }));
  EXPECT_LE(job.state().early().find(0)->tile_next, begun_count + 4);
  ASSERT_TRUE(heart.until([&] { return reader->has_value(); }));
  ASSERT_TRUE((*reader)->is_ok()) << (*reader)->status.message();
  EXPECT_TRUE(std::ranges::equal((*reader)->as<float>(), values));
  ASSERT_TRUE(heart.until([&] {
    return !job.state().early().has_waiting() && job.state().early().running_count() == 0;
  }));
  heart.release(**reader);
  ASSERT_TRUE(heart.step({.session_id = session, .groups = {{.shard_ids = ids}}}).first.is_ok());
  EXPECT_EQ(job.cache().counters().early_tiles_adopted, tile_count)
      << "the others were made after that";
}

TEST(EarlySlot, a_gradient_that_is_spilled_between_two_tiles_is_waited_for) {
  Heart heart{std::make_shared<MemoryDisk>(4 * kDiskBytes), kFloorSegments + 6};
  const uint64_t session = heart.attach(heart.open("job", 6, 3 * kQuotaBytes));
  const auto values = numbers(5 * kTileElements, 1);
  const auto gradient = numbers(values.size(), 2);
  const std::vector<uint32_t> ids = heart.declare(
      session, {parameter("large", values.size()), parameter("other", 3 * kTileElements)});
  heart.write(session, ids[0], values);
  heart.write(session, ids[1], numbers(3 * kTileElements, 3));
  ASSERT_TRUE(heart.sync(session).is_ok());
  const Held view = heart.lease(session, ids[0]);  // so that no room can be had of the value
  const StepRequest request{.session_id = session, .groups = {{.shard_ids = {ids[0]}}}};
  ASSERT_TRUE(heart.store().gradients().expect_step(session, request.groups).is_ok());
  heart.write(session, ids[0], gradient, Part::gradient);
  heart.store().gradients().is_final(session, ids[0]);
  Job& job = heart.job(session);
  ASSERT_TRUE(heart.until([&] { return job.state().early().running_count() != 0; }));
  job.state().early().pause(*job.shards().find_entry(ids[0], Part::value));
  const auto writer = heart.ask({.session_id = session,
                                 .shard_id = ids[1],
                                 .part = Part::gradient,
                                 .mode = LeaseMode::overwrite,
                                 .timeout_ns = 60'000'000'000});
  const Entry& spilled = *job.shards().find_entry(ids[0], Part::gradient);
  ASSERT_TRUE(heart.until([&] { return spilled.residency() == Residency::draining; }));
  EXPECT_EQ(job.state().early().find(0)->tile_next, 4U);
  ASSERT_TRUE(heart.until([&] { return writer->has_value(); }));
  ASSERT_TRUE((*writer)->is_ok()) << (*writer)->status.message();
  ASSERT_TRUE(heart.until([&] {
    return !job.state().early().has_waiting() && job.state().early().running_count() == 0;
  }));
  heart.release(view);
  heart.release(**writer);
  ASSERT_TRUE(heart.step(request).first.is_ok());
  EXPECT_EQ(job.cache().counters().early_tiles_adopted, 5U);
  Twin twin = Twin::fp32(values);
  twin.step({}, gradient);
  EXPECT_TRUE(heart.read<float>(session, ids[0]) == twin.theta);
}

TEST_F(EarlySlotTest, a_value_that_is_leased_stays_where_it_is) {
  const Held view = heart.lease(training.session(), training.ids()[0]);
  training.backward();
  EXPECT_EQ(value().residency(), Residency::clean);
  EXPECT_TRUE(shows_n(view));
  heart.release(view);
  training.step();
  training.expect_equal();
  training.expect_nothing_leaked();
}

TEST_F(EarlySlotTest, what_is_thrown_away_leaves_no_place_taken) {
  training.backward();
  ASSERT_TRUE(heart.store().gradients().drop(training.session(), {}).is_ok());
  EXPECT_EQ(training.job().state().early().slot_of(value()), nullptr);
  training.expect_equal();
  training.expect_nothing_leaked();
}

TEST_F(EarlySlotTest, what_a_trainer_wrote_into_a_value_it_read_is_in_no_update) {
  const Held view = heart.lease(training.session(), training.ids()[0]);
  auto* const shown = reinterpret_cast<float*>(view.grant.data);
  heart.release(view);
  shown[kTileElements + 7] += 1;
  training.backward();
  training.step();
  training.expect_equal();
}

TEST_F(EarlySlotTest, a_step_finds_tiles_that_were_not_begun_in_their_place) {
  training.expect();
  for (size_t i = 0; i < 3; ++i) training.write_gradient(i, 200);
  // A quota of which one tile is made.
  const Bucket& bucket = training.job().shards().bucket(0);
  heart.limit_state(
      training.session(),
      training.job().space().used_bytes() + bucket.value->replica_bytes(0) + bucket.rest_bytes(0));
  for (const uint32_t shard_id : training.ids())
    heart.store().gradients().is_final(training.session(), shard_id);
  training.wait();
  ASSERT_EQ(training.job().state().early().slot_of(value())->offset_bytes, offset_bytes);
  training.job().space().set_quota_bytes(kQuotaBytes);
  training.job().state().drop_clean_tiles();
  const uint64_t read_before = heart.io().device_statistics(0).read.bytes;
  const auto [status, report] = heart.step(training.request());
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(training.adopted(), kTiles + 1);
  const uint64_t read_bytes = heart.io().device_statistics(0).read.bytes - read_before;
  uint64_t rest_bytes = 0;
  for (const Bucket& each : training.job().shards().buckets()) {
    for (size_t tile = 0; tile < each.tile_count(); ++tile) rest_bytes += each.rest_bytes(tile);
  }
  EXPECT_EQ(read_bytes, rest_bytes - bucket.rest_bytes(0));
  for (size_t i = 0; i < 3; ++i) training.advance(i, 200);
  training.expect_equal();
  training.expect_nothing_leaked();
}

}  // namespace
}  // namespace memd::testing
