// Parameters of tier host: memory keeps them, and the disk has them in snapshots alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "store/state/host_tiles.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kSegments = kFloorSegments + 24;
constexpr uint64_t kJobSegments = 20;  // beside the private floor
constexpr uint64_t kLarge = 2 * kTileElements + 1000;
constexpr uint64_t kSmall = 3000;

ShardSpec in_host(ShardSpec spec) {
  spec.tier = Tier::host;
  return spec;
}
ShardSpec value_only(ShardSpec spec) {
  spec.value_only = true;
  return spec;
}

std::vector<float> positive_numbers(uint64_t count, uint32_t seed) {
  std::vector<float> values = numbers(count, seed);
  for (float& value : values) value = std::abs(value);
  return values;
}

struct Case {
  DType dtype = DType::float32;
  bool amsgrad = false;
  bool mixed = false;  // with a parameter of tier nvme
  uint64_t large = kLarge;
  uint64_t disk = kTileElements / 2;
  const char* durability = "step";
};

Status restored(Heart& heart, uint64_t job_id, const std::string& name) {
  std::optional<Status> answer;
  heart.store().snapshots().restore(
      job_id, name, [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
  EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
  return answer.value_or(error(StatusCode::deadline, "no answer"));
}

Status snapshot_made(Heart& heart, uint64_t job_id, const std::string& name) {
  std::optional<Status> answer;
  heart.store().snapshots().create(
      {.job_id = job_id, .name = name, .created_s = 1, .number = 0},
      [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
  EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
  return answer.value_or(error(StatusCode::deadline, "no answer"));
}

/// A job with parameters of tier host, trained beside plain memory.
class Training {
 public:
  Training(Heart& heart, const Case& chosen, uint64_t nvme_bytes = kQuotaBytes)
      : heart_(heart), case_(chosen) {
    job_id_ =
        heart.open("job", kJobSegments, nvme_bytes, Durability::parse(chosen.durability).value());
    session_ = heart.attach(job_id_);
    const auto spec = [&](const std::string& name, uint64_t count) {
      return with_maximum(parameter(name, count, chosen.dtype), chosen.amsgrad);
    };
    specs_ = {in_host(spec("large", chosen.large)), in_host(spec("small", kSmall))};
    if (chosen.mixed) specs_.push_back(spec("disk", chosen.disk));
    ids_ = heart.declare(session_, specs_);
  }
  /// The job as another daemon has it.
  Training(Heart& heart, const Training& before, uint64_t session)
      : twins(before.twins),
        heart_(heart),
        case_(before.case_),
        job_id_(before.job_id_),
        session_(session),
        specs_(before.specs_),
        seed_(before.seed_) {
    ids_ = heart.declare(session, specs_);
  }

  void write_all() {
    for (size_t i = 0; i < ids_.size(); ++i) write(i, static_cast<uint32_t>(i) + 1);
  }
  void write(size_t i, uint32_t seed) {
    Twin fresh =
        is_half() ? Twin::bf16(halves(count(i), seed)) : Twin::fp32(numbers(count(i), seed));
    is_half() ? heart_.write(session_, ids_[i], fresh.half)
              : heart_.write(session_, ids_[i], fresh.theta);
    if (twins.size() <= i) return twins.push_back(std::move(fresh));
    Twin& twin = twins[i];
    for (size_t at = 0; at < fresh.half.size(); ++at) {
      if (twin.half[at] != fresh.half[at]) twin.remainder[at] = 0;
    }
    twin.theta = std::move(fresh.theta);
    twin.half = std::move(fresh.half);
  }
  void write_gradients() {
    ++seed_;
    for (size_t i = 0; i < ids_.size(); ++i) {
      is_half() ? heart_.write(session_, ids_[i], halves(count(i), seed_), Part::gradient)
                : heart_.write(session_, ids_[i], numbers(count(i), seed_), Part::gradient);
    }
  }
  StepRequest request() const {
    return {.session_id = session_, .groups = {{.settings = settings_, .shard_ids = ids_}}};
  }
  std::pair<Status, StepReport> step() {
    write_gradients();
    const auto done = heart_.step(request());
    if (done.first.is_ok()) advance();
    return done;
  }
  void advance() {
    for (size_t i = 0; i < ids_.size(); ++i) {
      is_half() ? twins[i].step(settings_, halves(count(i), seed_))
                : twins[i].step(settings_, numbers(count(i), seed_));
    }
  }
  void expect_equal() { expect_equal(twins); }
  void expect_equal(const std::vector<Twin>& expected) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      const Twin& twin = expected[i];
      const bool is_same = is_half() ? heart_.read<uint16_t>(session_, ids_[i]) == twin.half
                                     : heart_.read<float>(session_, ids_[i]) == twin.theta;
      EXPECT_TRUE(is_same) << i;
      const MomentValues moments = heart_.moment_values(session_, ids_[i]);
      EXPECT_TRUE(moments.exp_avg == twin.m) << i;
      EXPECT_TRUE(moments.exp_avg_sq == twin.v) << i;
      if (case_.amsgrad) EXPECT_TRUE(moments.max_exp_avg_sq == twin.v_max) << i;
      EXPECT_EQ(job().shards()[ids_[i]].generation, twin.t) << i;
    }
  }

  Status snapshot(const std::string& name) { return snapshot_made(heart_, job_id_, name); }
  Status drop(const std::string& name) {
    std::optional<Status> answer;
    heart_.store().snapshots().drop(
        job_id_, name, [&](const Status& dropped) { answer = dropped; });
    EXPECT_TRUE(heart_.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status go_back(const std::string& name) {
    EXPECT_TRUE(heart_.store().detach(session_).is_ok());
    Status status = restored(heart_, job_id_, name);
    session_ = heart_.attach(job_id_);
    ids_ = heart_.declare(session_, specs_);
    return status;
  }

  Job& job() { return heart_.job(session_); }
  bool is_half() const { return case_.dtype == DType::bfloat16; }
  uint64_t session() const { return session_; }
  uint64_t job_id() const { return job_id_; }
  const std::vector<uint32_t>& ids() const { return ids_; }
  /// Extents of parameters of tier host.
  uint64_t extent_count() {
    uint64_t count = 0;
    for (const Bucket& bucket : job().shards().buckets()) {
      if (!bucket.is_host()) continue;
      for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
        count += bucket.value->replicas()[tile].exists() ? 1 : 0;
        count += bucket.rest[tile].exists() ? 1 : 0;
      }
    }
    return count;
  }

  std::vector<Twin> twins;

 private:
  uint64_t count(size_t i) const { return specs_[i].shape[0]; }

  Heart& heart_;
  const Case case_;
  const AdamSettings settings_{.lr = 0.01, .weight_decay = 0.1, .amsgrad = case_.amsgrad};
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  std::vector<ShardSpec> specs_;
  std::vector<uint32_t> ids_;
  uint32_t seed_ = 100;
};

OpenJobRequest reopened() {
  return {.name = "job",
          .uid = 1000,
          .host_bytes = (kFloorSegments + kJobSegments) * kSegmentBytes,
          .nvme_bytes = 0,
          .fresh = false,
          .durability = std::nullopt};
}

/// The job after a start, attached again once it went back to a snapshot, if it does; or why not.
Result<uint64_t> attach_again(Heart& heart) {
  if (const auto held = heart.store().reports().find_job("job"); held.is_ok()) {
    bool has_gone_back = false;
    heart.store().returns_to_snapshots().when_ended(held.value().job_id,
                                                    [&] { has_gone_back = true; });
    EXPECT_TRUE(heart.until([&] { return has_gone_back; }));
  }
  const auto opened = heart.store().admissions().open(reopened());
  if (!opened.is_ok()) return opened.status();
  return heart.attach(opened.value().job_id);
}

class HostTierTest : public ::testing::TestWithParam<Case> {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_P(HostTierTest, has_the_bits_of_plain_memory_and_writes_nothing_of_them) {
  Heart heart(disk_, kSegments);
  Training training(heart, GetParam());
  training.write_all();
  for (int step = 0; step < 3; ++step) {
    const auto [status, report] = training.step();
    ASSERT_TRUE(status.is_ok()) << status.message();
    if (!GetParam().mixed) EXPECT_EQ(report.written_bytes, 0U);
    EXPECT_EQ(report.durable_step, 0U);
  }
  training.expect_equal();
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  EXPECT_EQ(training.extent_count(), 0U);
  training.write(0, 77);
  ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
  EXPECT_EQ(training.extent_count(), 0U);
  expect_all_bytes_held(training.job());
}

TEST_P(HostTierTest, pressure_takes_their_slots_and_never_their_state) {
  Heart heart(disk_, kSegments);
  Training training(heart, GetParam());
  training.write_all();
  ASSERT_TRUE(training.step().first.is_ok());
  const uint64_t arena_bytes = training.job().memory()->arena_bytes_max();
  const auto blob = heart.declare(training.session(), {bytes_shard("blob", arena_bytes)});
  for (uint32_t round = 0; round < 3; ++round) {
    heart.write(training.session(), blob[0], pattern(arena_bytes, static_cast<uint8_t>(round)));
    for (const uint32_t id : training.ids())
      EXPECT_FALSE(training.job().shards()[id].value->is_resident());
    training.expect_equal();
    EXPECT_EQ(training.extent_count(), 0U);
    // A value that the user writes goes to its place in memory when its slot goes.
    training.write(0, 200 + round);
    heart.write(training.session(), blob[0], pattern(arena_bytes, static_cast<uint8_t>(round + 9)));
    training.expect_equal();
    ASSERT_TRUE(training.step().first.is_ok());
    training.expect_equal();
  }
}

TEST_P(HostTierTest, a_power_cut_leaves_the_last_snapshot_of_all_tiers) {
  std::vector<Twin> kept;
  {
    Heart heart(disk_, kSegments);
    Training training(heart, GetParam());
    training.write_all();
    for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(training.snapshot("first").is_ok());
    ASSERT_TRUE(training.step().first.is_ok());
    const Status made = training.snapshot("last");
    ASSERT_TRUE(made.is_ok()) << made.message();
    kept = training.twins;
    for (int step = 0; step < 2; ++step) {
      const auto [status, report] = training.step();
      ASSERT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.durable_step, 3U);
    }
    EXPECT_EQ(training.extent_count(), 0U);
    training.expect_equal();
    // A sync says nothing else.
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
  }
  disk_->crash([](const UnsyncedWrite&) { return false; });
  Heart shape_heart(std::make_shared<MemoryDisk>(kDiskBytes), kSegments);
  Training shape(shape_heart, GetParam());
  Heart heart(disk_, kSegments);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  ASSERT_EQ(heart.store().load_notes().size(), 1U);
  EXPECT_NE(heart.store().load_notes()[0].find("goes back to snapshot last, at step 3"),
            std::string::npos)
      << heart.store().load_notes()[0];
  const auto session = attach_again(heart);
  ASSERT_TRUE(session.is_ok()) << session.status().message();
  EXPECT_EQ(heart.job(session.value()).progress().committed_step(), 3U);
  shape.twins = kept;
  Training training(heart, shape, session.value());
  training.expect_equal();
  for (int step = 0; step < 2; ++step) {
    const auto [status, report] = training.step();
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  training.expect_equal();
  EXPECT_EQ(training.extent_count(), 0U);
  expect_all_bytes_held(training.job());
}

TEST_P(HostTierTest, a_power_cut_without_a_snapshot_leaves_nothing_and_says_so) {
  {
    Heart heart(disk_, kSegments);
    Training training(heart, GetParam());
    training.write_all();
    for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
  }
  disk_->crash([](const UnsyncedWrite&) { return true; });
  Heart heart(disk_, kSegments);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  const auto session = attach_again(heart);
  ASSERT_FALSE(session.is_ok());
  EXPECT_EQ(session.status().code(), StatusCode::integrity);
  const std::string& text = session.status().message();
  EXPECT_NE(text.find("kept parameters in tier host alone since step 1"), std::string::npos)
      << text;
  EXPECT_NE(text.find("connect(fresh=True)"), std::string::npos) << text;
}

TEST_P(HostTierTest, a_kill_of_the_daemon_loses_nothing) {
  TestKeeper keeper;
  auto* heart = new Heart(disk_, kSegments, &keeper);
  auto training = std::make_unique<Training>(*heart, GetParam());
  // Memory that outlives the daemon is of a job that the disk knows.
  ASSERT_TRUE(heart->sync(training->session()).is_ok());
  training->write_all();
  const auto start_again = [&] {
    const uint64_t session = training->session();
    heart->kill();  // and never destroyed
    heart = new Heart(disk_, kSegments, &keeper);
    ASSERT_TRUE(heart->loaded.is_ok()) << heart->loaded.message();
    EXPECT_TRUE(heart->store().load_notes().empty()) << heart->store().load_notes()[0];
    training = std::make_unique<Training>(*heart, *training, session);
    training->expect_equal();
  };
  start_again();  // values in slots
  ASSERT_TRUE(heart->sync(training->session()).is_ok());
  start_again();  // in their places
  ASSERT_TRUE(training->step().first.is_ok());
  start_again();
  ASSERT_TRUE(training->step().first.is_ok());
  ASSERT_TRUE(heart->sync(training->session()).is_ok());
  training->write(0, 55);
  start_again();
  ASSERT_TRUE(training->step().first.is_ok());
  ASSERT_TRUE(training->snapshot("s").is_ok());
  start_again();
  ASSERT_TRUE(training->step().first.is_ok());
  start_again();
  ASSERT_TRUE(training->step().first.is_ok());
  training->expect_equal();
  EXPECT_EQ(training->job().progress().committed_step(), 5U);
  expect_all_bytes_held(training->job());
  delete heart;
}

TEST_P(HostTierTest, goes_back_to_a_snapshot_and_lives_in_memory_again) {
  Heart heart(disk_, kSegments);
  Training training(heart, GetParam());
  training.write_all();
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  const std::vector<Twin> kept = training.twins;
  ASSERT_TRUE(training.snapshot("s").is_ok());
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  ASSERT_TRUE(training.go_back("s").is_ok());
  training.twins = kept;
  training.expect_equal();
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
  EXPECT_EQ(training.extent_count(), 0U);
  expect_all_bytes_held(training.job());
}

TEST_P(HostTierTest, moments_of_one_tile_are_loaded_into_a_parameter_that_is_on_disk_alone) {
  TestKeeper keeper;
  auto* heart = new Heart(disk_, kSegments, &keeper);
  auto training = std::make_unique<Training>(*heart, GetParam());
  training->write_all();
  ASSERT_TRUE(training->step().first.is_ok());
  ASSERT_TRUE(training->snapshot("s").is_ok());
  ASSERT_TRUE(training->go_back("s").is_ok());
  MomentValues loaded{.exp_avg = numbers(kTileElements, 5),
                      .exp_avg_sq = positive_numbers(kTileElements, 6),
                      .max_exp_avg_sq = {}};
  if (GetParam().amsgrad) loaded.max_exp_avg_sq = positive_numbers(kTileElements, 7);
  const uint32_t id = training->ids()[0];
  Twin& twin = training->twins[0];
  ASSERT_TRUE(heart->write_moments(training->session(), id, twin.t, loaded).is_ok());
  std::copy(loaded.exp_avg.begin(), loaded.exp_avg.end(), twin.m.begin());
  std::copy(loaded.exp_avg_sq.begin(), loaded.exp_avg_sq.end(), twin.v.begin());
  std::copy(loaded.max_exp_avg_sq.begin(), loaded.max_exp_avg_sq.end(), twin.v_max.begin());
  training->expect_equal();
  const uint64_t session = training->session();
  heart->kill();  // and never destroyed
  Heart next(disk_, kSegments, &keeper);
  ASSERT_TRUE(next.loaded.is_ok()) << next.loaded.message();
  EXPECT_TRUE(next.store().load_notes().empty()) << next.store().load_notes()[0];
  Training after(next, *training, session);
  after.expect_equal();
  ASSERT_TRUE(after.step().first.is_ok());
  after.expect_equal();
  expect_all_bytes_held(after.job());
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         HostTierTest,
                         ::testing::Values(Case{},
                                           Case{.dtype = DType::bfloat16},
                                           Case{.amsgrad = true},
                                           Case{.mixed = true},
                                           Case{.mixed = true, .durability = "every:2"},
                                           Case{.dtype = DType::bfloat16, .mixed = true},
                                           Case{.mixed = true, .durability = "none"}));

class HostTier : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(HostTier,
       a_declaration_that_its_host_quota_does_not_hold_names_each_term_and_changes_nothing) {
  Heart heart(disk_, kSegments);
  const uint64_t session = heart.attach(heart.open("job", kJobSegments));
  Job& job = heart.job(session);
  const uint64_t arena_bytes = job.memory()->arena_bytes_max();
  const auto refused =
      heart.store().declare(session, {in_host(parameter("w", 16 * kTileElements))});
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::capacity);
  // 16 tiles and two places of 3 MiB; the values and a gradient of 16 MiB; the floor.
  const std::string& text = refused.status().message();
  for (const char* const term : {" bytes = 56623104 (parameters of tier host",
                                 "50331648, and places",
                                 " + 33554432 (the largest parameter and its gradient)",
                                 " + 8388608 (tiles in work); host_bytes 50331648"})
    EXPECT_NE(text.find(term), std::string::npos) << term << ": " << text;
  EXPECT_EQ(job.memory()->arena_bytes_max(), arena_bytes);
  EXPECT_EQ(job.admission().durability().text(), "step");
  EXPECT_EQ(job.shards().count(), 0U);
  heart.declare(session, {in_host(parameter("w", 2 * kTileElements))});
  EXPECT_EQ(job.admission().durability().text(), "none");
  EXPECT_EQ(job.memory()->host_side().capacity_bytes(), 12_MiB);
  EXPECT_EQ(job.memory()->arena_bytes_max(), arena_bytes - 12_MiB);
}

TEST_F(HostTier, other_shards_that_fill_the_arena_leave_it_no_memory) {
  Heart heart(disk_, kSegments);
  const uint64_t session = heart.attach(heart.open("job", kJobSegments));
  const uint64_t bytes = heart.job(session).memory()->arena_bytes_max() - 4_MiB;
  const auto blob = heart.declare(session, {bytes_shard("blob", bytes)});
  heart.write(session, blob[0], pattern(bytes, 1));
  const auto refused = heart.store().declare(session, {in_host(parameter("w", 2 * kTileElements))});
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::capacity);
  EXPECT_NE(refused.status().message().find("keeps other shards where tier host would live"),
            std::string::npos)
      << refused.status().message();
  EXPECT_EQ(heart.job(session).memory()->host_side().capacity_bytes(), 0U);
}

// Its tiles take nothing of the private side, so that values need not make room for them.
TEST_F(HostTier, the_arena_has_room_for_all_values) {
  constexpr uint64_t kArenaSegments = 56;
  Heart heart(disk_, kFloorSegments + kArenaSegments);
  const uint64_t session = heart.attach(heart.open("job", kArenaSegments));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 16; ++i)
    specs.push_back(in_host(parameter("w" + std::to_string(i), kTileElements)));
  heart.declare(session, specs);
  const JobMemory& memory = *heart.job(session).memory();
  EXPECT_EQ(memory.private_bytes_max(), memory.shared_bytes() - 2 * 16 * 1_MiB);
}

TEST_F(HostTier, a_shard_stays_in_its_tier) {
  Heart heart(disk_, kSegments);
  const uint64_t session = heart.attach(heart.open("job", kJobSegments));
  heart.declare(session, {in_host(parameter("w", 100)), parameter("v", 100)});
  for (const ShardSpec& spec : {parameter("w", 100), in_host(parameter("v", 100))}) {
    const auto refused = heart.store().declare(session, {spec});
    ASSERT_FALSE(refused.is_ok());
    EXPECT_EQ(refused.status().code(), StatusCode::already_exists);
    EXPECT_NE(refused.status().message().find("the job holds it in tier \""), std::string::npos);
  }
}

TEST_F(HostTier, a_parameter_that_no_step_updates_takes_the_memory_of_its_value_until_one_does) {
  Heart heart(disk_, kSegments);
  const uint64_t session = heart.attach(heart.open("job", kJobSegments));
  const auto ids = heart.declare(session, {value_only(in_host(parameter("w", kLarge)))});
  Twin twin = Twin::fp32(numbers(kLarge, 1));
  heart.write(session, ids[0], twin.theta);
  ASSERT_TRUE(heart.sync(session).is_ok());
  Job& job = heart.job(session);
  EXPECT_EQ(job.memory()->host_side().used_bytes(), 2_MiB + 4_KiB);
  EXPECT_TRUE(heart.moments(session, ids[0]).first == std::vector<float>(kLarge));
  const AdamSettings settings{.lr = 0.01};
  for (uint32_t seed = 2; seed < 4; ++seed) {
    heart.write(session, ids[0], numbers(kLarge, seed), Part::gradient);
    const auto [status, report] =
        heart.step({.session_id = session, .groups = {{.settings = settings, .shard_ids = ids}}});
    ASSERT_TRUE(status.is_ok()) << status.message();
    twin.step(settings, numbers(kLarge, seed));
  }
  EXPECT_TRUE(heart.read<float>(session, ids[0]) == twin.theta);
  EXPECT_TRUE(heart.moments(session, ids[0]).second == twin.v);
  EXPECT_EQ(job.memory()->host_side().used_bytes(), 6_MiB + 12_KiB);
}

TEST_F(HostTier, a_loaded_state_survives_a_kill_and_a_snapshot) {
  TestKeeper keeper;
  auto* heart = new Heart(disk_, kSegments, &keeper);
  const uint64_t session = heart->attach(heart->open("job", kJobSegments));
  auto ids = heart->declare(session, {in_host(with_maximum(parameter("w", 5000)))});
  heart->write(session, ids[0], numbers(5000, 1));
  ASSERT_TRUE(heart->sync(session).is_ok());
  const MomentValues loaded{.exp_avg = numbers(5000, 2),
                            .exp_avg_sq = numbers(5000, 3),
                            .max_exp_avg_sq = numbers(5000, 4)};
  ASSERT_TRUE(heart->write_moments(session, ids[0], 7, loaded).is_ok());
  heart->kill();  // and never destroyed
  Heart next(disk_, kSegments, &keeper);
  ASSERT_TRUE(next.loaded.is_ok()) << next.loaded.message();
  const MomentValues found = next.moment_values(session, ids[0]);
  EXPECT_TRUE(found.exp_avg == loaded.exp_avg);
  EXPECT_TRUE(found.exp_avg_sq == loaded.exp_avg_sq);
  EXPECT_TRUE(found.max_exp_avg_sq == loaded.max_exp_avg_sq);
  EXPECT_EQ(next.job(session).shards()[ids[0]].generation, 7U);
  EXPECT_TRUE(next.read<float>(session, ids[0]) == numbers(5000, 1));
}

// The next daemon finds a tile in its new place before the bytes are on disk.
TEST_F(HostTier, a_write_that_fails_in_a_snapshot_leaves_each_tile_a_place_of_its_own) {
  for (const uint64_t passed_count : {0, 1, 2, 3}) {
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    TestKeeper keeper;
    auto* heart = new Heart(disk_, kSegments, &keeper);
    Training training(*heart, {.large = 3 * kTileElements + 1000});
    const auto later =
        heart->declare(training.session(), {in_host(parameter("later", 2 * kTileElements))});
    training.write_all();
    ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(heart->sync(training.session()).is_ok());
    // Its other tiles get places for maxima when they are copied.
    MomentValues loaded{.exp_avg = numbers(kTileElements, 5),
                        .exp_avg_sq = positive_numbers(kTileElements, 6),
                        .max_exp_avg_sq = positive_numbers(kTileElements, 7)};
    Twin& twin = training.twins[0];
    ASSERT_TRUE(
        heart->write_moments(training.session(), training.ids()[0], twin.t, loaded).is_ok());
    std::copy(loaded.exp_avg.begin(), loaded.exp_avg.end(), twin.m.begin());
    std::copy(loaded.exp_avg_sq.begin(), loaded.exp_avg_sq.end(), twin.v.begin());
    heart->faults().add_fault({.io_kind = IoKind::write, .skip_count = passed_count});
    EXPECT_FALSE(training.snapshot("s").is_ok());
    EXPECT_EQ(heart->faults().fault_hit_count(), 1U);
    // Its tiles take what memory is free.
    loaded.max_exp_avg_sq.clear();
    ASSERT_TRUE(heart->write_moments(training.session(), later[0], 1, loaded).is_ok());
    heart->kill();  // and never destroyed
    Heart next(disk_, kSegments, &keeper);
    ASSERT_TRUE(next.loaded.is_ok()) << next.loaded.message();
    EXPECT_TRUE(next.store().load_notes().empty()) << next.store().load_notes()[0];
    Training after(next, training, training.session());
    after.expect_equal();
    ASSERT_TRUE(after.step().first.is_ok());
    after.expect_equal();
    expect_all_bytes_held(after.job());
  }
}

/// A step meets a spilled gradient that is damaged.
Status step_that_fails_half_way(Heart& heart, Training& training, MemoryDisk& disk) {
  training.write_gradients();
  const Entry& gradient = *training.job().shards().find_entry(training.ids()[0], Part::gradient);
  const uint64_t arena_bytes = training.job().memory()->arena_bytes_max();
  const auto blob = heart.declare(training.session(), {bytes_shard("blob", arena_bytes)});
  heart.write(training.session(), blob[0], pattern(arena_bytes, 1));
  EXPECT_TRUE(gradient.has_replica());
  const ExtentRecord lost = gradient.replicas()[1].extent();
  disk.bytes()[lost.address.offset_bytes + 5] ^= std::byte{1};
  return heart.step(training.request()).first;
}

TEST_F(HostTier, a_step_that_fails_half_way_says_which_snapshot_the_job_goes_on_from) {
  for (const bool has_snapshot : {false, true}) {
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    Heart heart(disk_, kSegments);
    Training training(heart, {});
    training.write_all();
    ASSERT_TRUE(training.step().first.is_ok());
    const std::vector<Twin> kept = training.twins;
    if (has_snapshot) ASSERT_TRUE(training.snapshot("s").is_ok());
    ASSERT_TRUE(training.step().first.is_ok());
    const Status failed = step_that_fails_half_way(heart, training, *disk_);
    ASSERT_FALSE(failed.is_ok());
    const auto says = [&](const char* text) {
      return failed.message().find(text) != std::string::npos;
    };
    EXPECT_TRUE(says("cannot be undone with parameters in tier host")) << failed.message();
    EXPECT_FALSE(says("durability")) << failed.message();
    EXPECT_EQ(says("connect again to go on from its last snapshot, at step 1"), has_snapshot)
        << failed.message();
    EXPECT_EQ(says("in memory alone since step 1: what is on disk is no step"), !has_snapshot)
        << failed.message();
    EXPECT_EQ(says("connect(fresh=True)"), !has_snapshot) << failed.message();
    // It does as it says.
    const uint64_t before = training.session();
    ASSERT_TRUE(heart.store().detach(before).is_ok());
    heart.turns();
    const auto session = attach_again(heart);
    ASSERT_EQ(session.is_ok(), has_snapshot) << session.status().message();
    if (!has_snapshot) continue;
    training.twins = kept;
    Training after(heart, training, session.value());
    after.expect_equal();
  }
}

TEST_F(HostTier, a_step_that_fails_half_way_takes_it_to_the_snapshot_that_it_stands_on) {
  Heart heart(disk_, kSegments);
  Training training(heart, {});
  training.write_all();
  for (const char* const name : {"first", "second"}) {
    ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(training.snapshot(name).is_ok());
  }
  ASSERT_TRUE(training.go_back("first").is_ok());
  // Past the step of "second".
  for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
  ASSERT_TRUE(training.snapshot("third").is_ok());
  ASSERT_TRUE(training.step().first.is_ok());
  ASSERT_TRUE(training.drop("third").is_ok());
  const Status failed = step_that_fails_half_way(heart, training, *disk_);
  EXPECT_NE(failed.message().find("from its last snapshot, at step 1"), std::string::npos)
      << failed.message();
  ASSERT_TRUE(heart.store().detach(training.session()).is_ok());
  heart.turns();
  const auto session = attach_again(heart);
  ASSERT_TRUE(session.is_ok()) << session.status().message();
  EXPECT_EQ(heart.job(session.value()).progress().committed_step(), 1U);
}

TEST_F(HostTier,
       a_snapshot_that_the_disk_quota_does_not_hold_is_refused_before_anything_is_written) {
  Heart heart(disk_, kSegments);
  Training training(heart, {}, 12_MiB);
  training.write_all();
  ASSERT_TRUE(training.step().first.is_ok());
  const size_t operation_count = heart.io().operations.size();
  const Status refused = training.snapshot("s");
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("(tier host, as the last snapshot wrote it)"), std::string::npos)
      << refused.message();
  EXPECT_EQ(heart.io().operations.size(), operation_count);
  ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
}

// A step on disk ends then as one that says that the disk has no step.
TEST_F(HostTier, a_step_in_flight_ends_well_beside_a_declaration_of_tier_host) {
  for (const char* const durability : {"step", "every:2"}) {
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    const AdamSettings settings{.lr = 0.01};
    {
      Heart heart(disk_, kSegments);
      const uint64_t session = heart.attach(
          heart.open("job", kJobSegments, kQuotaBytes, Durability::parse(durability).value()));
      std::vector<uint32_t> ids = heart.declare(session, {parameter("disk", kLarge)});
      std::vector<Twin> twins{Twin::fp32(numbers(kLarge, 1))};
      heart.write(session, ids[0], twins[0].theta);
      const auto begin_step = [&](uint32_t seed) {
        for (size_t i = 0; i < ids.size(); ++i) {
          heart.write(session, ids[i], numbers(kLarge, seed), Part::gradient);
          twins[i].step(settings, numbers(kLarge, seed));
        }
        auto answer = std::make_shared<std::optional<Status>>();
        heart.store().operations().step(
            {.session_id = session, .groups = {{.settings = settings, .shard_ids = ids}}},
            [answer](const Status& status, const StepReport&) { *answer = status; });
        return answer;
      };
      const auto is_done = [&](const std::shared_ptr<std::optional<Status>>& answer) {
        return heart.until([&] { return answer->has_value(); }) && (*answer)->is_ok();
      };
      ASSERT_TRUE(is_done(begin_step(2)));
      const auto in_flight = begin_step(3);
      ASSERT_FALSE(in_flight->has_value());
      ids.push_back(heart.declare(session, {in_host(parameter("w", kLarge))})[0]);
      twins.push_back(Twin::fp32(numbers(kLarge, 4)));
      heart.write(session, ids[1], twins[1].theta);
      ASSERT_TRUE(is_done(in_flight));
      ASSERT_TRUE(is_done(begin_step(5)));
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_TRUE(heart.read<float>(session, ids[i]) == twins[i].theta) << i;
        EXPECT_TRUE(heart.moments(session, ids[i]).second == twins[i].v) << i;
      }
      EXPECT_EQ(heart.job(session).progress().committed_step(), 3U);
      EXPECT_EQ(heart.job(session).progress().durable_step(), 0U);
      expect_all_bytes_held(heart.job(session));
    }
    disk_->crash([](const UnsyncedWrite&) { return true; });
    Heart heart(disk_, kSegments);
    ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
    EXPECT_EQ(attach_again(heart).status().code(), StatusCode::integrity) << durability;
  }
}

TEST_F(HostTier, a_job_keeps_the_durability_that_it_asked_for) {
  Heart heart(disk_, kSegments);
  Training training(heart, {});
  EXPECT_EQ(training.job().admission().durability_asked().text(), "step");
  EXPECT_EQ(heart.store().reports().jobs()[0].durability, "step");
  EXPECT_EQ(heart.store().reports().jobs()[0].host_tier_bytes,
            training.job().shards().declared().host_tier_bytes());
}

TEST_F(HostTier, its_durable_step_is_that_of_the_last_snapshot_that_it_has) {
  Heart heart(disk_, kSegments);
  Training training(heart, {});
  training.write_all();
  for (const char* const name : {"first", "second"}) {
    ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(training.snapshot(name).is_ok());
  }
  ASSERT_TRUE(training.step().first.is_ok());
  const JobProgress& progress = training.job().progress();
  EXPECT_EQ(progress.durable_step(), 2U);
  ASSERT_TRUE(training.drop("second").is_ok());
  EXPECT_EQ(progress.durable_step(), 1U);
  ASSERT_TRUE(training.drop("first").is_ok());
  EXPECT_EQ(progress.durable_step(), 0U);
}

/// Cuts the power. Returns the step at which the job is then, and what the log says of it.
std::pair<uint64_t, std::string> left_after_power_cut(MemoryDisk& disk) {
  const auto copy = std::make_shared<MemoryDisk>(disk);
  copy->crash([](const UnsyncedWrite&) { return false; });
  Heart heart(copy, kSegments);
  EXPECT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  const auto session = attach_again(heart);
  EXPECT_TRUE(session.is_ok()) << session.status().message();
  if (!session.is_ok()) return {};
  const std::vector<std::string>& notes = heart.store().load_notes();
  return {heart.job(session.value()).progress().committed_step(), notes.empty() ? "" : notes[0]};
}

TEST_F(HostTier, a_power_cut_takes_it_to_the_snapshot_that_it_stands_on_and_not_to_one_it_left) {
  Heart heart(disk_, kSegments);
  Training training(heart, {});
  training.write_all();
  const auto train = [&](int count) {
    for (int i = 0; i < count; ++i) ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
  };
  const auto expect_left = [&](const std::string& name, uint64_t step) {
    SCOPED_TRACE(name);
    EXPECT_EQ(training.job().progress().durable_step(), step);
    const auto [left, note] = left_after_power_cut(*disk_);
    EXPECT_EQ(left, step);
    EXPECT_NE(note.find(concat("goes back to snapshot ", name, ", at step ", step)),
              std::string::npos)
        << note;
  };
  for (const char* const name : {"a0", "a", "b"}) {
    train(1);
    ASSERT_TRUE(training.snapshot(name).is_ok());
  }
  train(1);
  expect_left("b", 3);
  ASSERT_TRUE(training.go_back("a").is_ok());
  // It trains past the step of "b" again.
  train(3);
  expect_left("a", 2);
  ASSERT_TRUE(training.snapshot("c").is_ok());
  train(1);
  expect_left("c", 5);
  ASSERT_TRUE(training.drop("c").is_ok());
  expect_left("a", 2);
  ASSERT_TRUE(training.drop("a").is_ok());
  expect_left("a0", 1);
  // Nothing is left of those that it stood on.
  ASSERT_TRUE(training.drop("a0").is_ok());
  expect_left("b", 3);
}

TEST_F(HostTier, a_snapshot_with_lost_bytes_is_no_durable_step) {
  Heart heart(disk_, kSegments);
  Training training(heart, {});
  training.write_all();
  ExtentRecord lost;  // of the second snapshot, in the end
  for (const char* const name : {"first", "second"}) {
    ASSERT_TRUE(training.step().first.is_ok());
    ASSERT_TRUE(training.snapshot(name).is_ok());
    lost = training.job().shards().bucket(0).rest[0].extent();
  }
  ASSERT_TRUE(training.step().first.is_ok());
  EXPECT_EQ(training.job().job_info().durable_step, 2U);
  disk_->bytes()[lost.address.offset_bytes + 5] ^= std::byte{1};
  heart.store().set_scrub_rate(uint64_t{1} << 40);
  ASSERT_TRUE(heart.until([&] {
    heart.clock.advance(1'000'000'000);
    return heart.store().reports().statistics().scrub.pass_count > 0;
  }));
  EXPECT_EQ(training.job().job_info().durable_step, 1U);
  heart.store().set_scrub_rate(0);
  ASSERT_TRUE(training.drop("second").is_ok());
  EXPECT_EQ(training.job().job_info().durable_step, 1U);
}

TEST_F(HostTier, a_job_goes_back_within_the_quota_that_its_snapshot_was_admitted_with) {
  uint64_t quota_bytes = 0;
  {
    Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), kSegments);
    Training training(heart, {});
    const Admission& admission = training.job().admission();
    // Its own and the snapshot's, each with a catalogue, and the catalogue that replaces its own.
    quota_bytes =
        2 * training.job().shards().declared().host_tier_bytes() + 3 * admission.catalogue_bytes();
  }
  for (const uint64_t missing_bytes : {uint64_t{0}, uint64_t{4_KiB}}) {
    Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), kSegments);
    Training training(heart, {}, quota_bytes - missing_bytes);
    training.write_all();
    ASSERT_TRUE(training.step().first.is_ok());
    const Status made = training.snapshot("s");
    ASSERT_EQ(made.code(), missing_bytes == 0 ? StatusCode::ok : StatusCode::capacity)
        << made.message();
    if (!made.is_ok()) continue;
    const std::vector<Twin> kept = training.twins;
    for (int step = 0; step < 2; ++step) ASSERT_TRUE(training.step().first.is_ok());
    const Status gone_back = training.go_back("s");
    ASSERT_TRUE(gone_back.is_ok()) << gone_back.message();
    training.twins = kept;
    training.expect_equal();
    ASSERT_TRUE(training.step().first.is_ok());
    training.expect_equal();
  }
}

TEST_F(HostTier, what_a_dropped_snapshot_wrote_counts_until_a_step_changes_it) {
  Heart heart(disk_, kSegments);
  Training training(heart, {}, 20_MiB);
  training.write_all();
  ASSERT_TRUE(training.step().first.is_ok());
  ASSERT_TRUE(training.snapshot("s").is_ok());
  ASSERT_TRUE(training.drop("s").is_ok());
  const ShardSpec blob = bytes_shard("blob", 16_MiB);
  const auto refused = heart.store().declare(training.session(), {blob});
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.status().code(), StatusCode::capacity);
  EXPECT_NE(refused.status().message().find("(tier host, as the last snapshot wrote it)"),
            std::string::npos)
      << refused.status().message();
  ASSERT_TRUE(training.step().first.is_ok());
  EXPECT_EQ(training.extent_count(), 0U);
  const auto ids = heart.declare(training.session(), {blob});
  heart.write(training.session(), ids[0], pattern(16_MiB, 1));
  ASSERT_TRUE(heart.sync(training.session()).is_ok());
  ASSERT_TRUE(training.step().first.is_ok());
  training.expect_equal();
}

// Segments of the arena never leave it.
TEST_F(HostTier,
       a_snapshot_for_which_the_memory_is_in_others_use_is_refused_before_it_is_too_late) {
  Heart heart(disk_, kSegments);
  const uint64_t job_id = heart.open("job", kJobSegments);
  uint64_t session = heart.attach(job_id);
  const auto small = heart.declare(session, {bytes_shard("small", 1000)});
  heart.write(session, small[0], pattern(1000, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  ASSERT_TRUE(snapshot_made(heart, job_id, "without").is_ok());
  const auto w = heart.declare(session, {in_host(parameter("w", 2 * kTileElements))});
  heart.write(session, w[0], numbers(2 * kTileElements, 1));
  ASSERT_TRUE(snapshot_made(heart, job_id, "with").is_ok());
  ASSERT_TRUE(heart.store().detach(session).is_ok());
  ASSERT_TRUE(restored(heart, job_id, "without").is_ok());
  session = heart.attach(job_id);
  EXPECT_EQ(heart.job(session).memory()->host_side().capacity_bytes(), 0U);
  const uint64_t bytes = heart.job(session).memory()->arena_bytes_max();
  const auto large = heart.declare(session, {bytes_shard("large", bytes)});
  heart.write(session, large[0], pattern(bytes, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());
  ASSERT_TRUE(heart.store().detach(session).is_ok());
  const Status refused = restored(heart, job_id, "with");
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("export the snapshot instead"), std::string::npos)
      << refused.message();
  // Nothing is lost, and the job goes on.
  session = heart.attach(job_id);
  EXPECT_TRUE(heart.job(session).progress().stopped().is_ok());
  const auto found = heart.declare(session, {bytes_shard("large", bytes)});
  EXPECT_TRUE(heart.read<uint8_t>(session, found[0]) == pattern(bytes, 2));
  expect_all_bytes_held(heart.job(session));
}

/// The parts of a disk that were written.
using Image = std::map<uint64_t, std::vector<std::byte>>;

Image image_of(MemoryDisk& disk) {
  constexpr uint64_t kPartBytes = 16_KiB;
  static const std::vector<std::byte> zeros(kPartBytes);
  Image image;
  for (uint64_t at = 0; at < disk.bytes().size(); at += kPartBytes) {
    const auto part = disk.bytes().subspan(at, kPartBytes);
    if (!std::equal(part.begin(), part.end(), zeros.begin()))
      image[at].assign(part.begin(), part.end());
  }
  return image;
}

std::shared_ptr<MemoryDisk> disk_of(const Image& image, uint64_t bytes) {
  auto disk = std::make_shared<MemoryDisk>(bytes);
  for (const auto& [at, part] : image) {
    std::copy(part.begin(), part.end(), disk->bytes().begin() + static_cast<ptrdiff_t>(at));
    std::copy(part.begin(), part.end(), disk->durable_bytes().begin() + static_cast<ptrdiff_t>(at));
  }
  return disk;
}

// At any of them, the whole job is at its last snapshot, or says that it has none.
TEST_F(HostTier, power_is_cut_at_every_write_and_the_job_is_at_one_step) {
  constexpr uint64_t kSmallDiskBytes = 16_MiB;
  constexpr uint64_t kSmallQuota = 3_MiB;
  constexpr Case kCase{.mixed = true, .large = 5000, .disk = 4000};
  struct Cut {
    Image image;
    std::set<uint64_t> steps;  // that it may be at
    bool may_have_none = false;
  };
  std::vector<Cut> cuts;
  std::map<uint64_t, std::vector<Twin>> twins_of;
  disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
  {
    Heart heart(disk_, kSegments);
    Training training(heart, kCase, kSmallQuota);
    std::set<uint64_t> steps{0};
    bool may_have_none = true;
    heart.io().before_submit = [&](const DiskQueue::Operation& operation) {
      if (operation.kind == IoKind::read) return;
      for (const bool keeps : {false, true}) {
        MemoryDisk copy(*disk_);
        copy.crash([keeps](const UnsyncedWrite&) { return keeps; });
        Cut cut{image_of(copy), steps, may_have_none};
        const bool is_new = cuts.empty() || cuts.back().image != cut.image ||
                            cuts.back().steps != cut.steps ||
                            cuts.back().may_have_none != cut.may_have_none;
        if (is_new) cuts.push_back(std::move(cut));
      }
    };
    training.write_all();
    ASSERT_TRUE(heart.sync(training.session()).is_ok());
    ASSERT_TRUE(training.step().first.is_ok());
    for (const std::string name : {"first", "second"}) {
      const uint64_t step = training.job().progress().committed_step();
      twins_of[step] = training.twins;
      steps.insert(step);
      ASSERT_TRUE(training.snapshot(name).is_ok());
      steps = {step};
      may_have_none = false;
      for (int i = 0; i < 2; ++i) ASSERT_TRUE(training.step().first.is_ok());
      ASSERT_TRUE(heart.sync(training.session()).is_ok());
    }
    heart.io().before_submit = nullptr;
  }
  ASSERT_GT(cuts.size(), 20U);
  Heart shape_heart(std::make_shared<MemoryDisk>(kSmallDiskBytes), kSegments);
  Training shape(shape_heart, kCase, kSmallQuota);
  std::set<uint64_t> seen;
  for (const Cut& cut : cuts) {
    Heart heart(disk_of(cut.image, kSmallDiskBytes), kSegments);
    ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
    const auto session = attach_again(heart);
    if (!session.is_ok()) {
      EXPECT_TRUE(cut.may_have_none) << session.status().message();
      continue;
    }
    const uint64_t step = heart.job(session.value()).progress().committed_step();
    std::string said;
    for (const std::string& note : heart.store().load_notes()) said += note + "\n";
    EXPECT_TRUE(cut.steps.contains(step))
        << step << ", cut " << (&cut - cuts.data()) << " of " << cuts.size() << ": " << said;
    seen.insert(step);
    if (step == 0) continue;
    shape.twins = twins_of.at(step);
    Training training(heart, shape, session.value());
    training.expect_equal();
    ASSERT_TRUE(training.step().first.is_ok());
    training.expect_equal();
  }
  EXPECT_EQ(seen, (std::set<uint64_t>{0, 1, 3}));
}

}  // namespace
}  // namespace memd::testing
