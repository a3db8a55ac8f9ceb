// Parameters whose optimizer state has max_exp_avg_sq: who has it, since when, and where it lies.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/format/tile_rest.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr AdamSettings kPlain{.lr = 0.01, .beta2 = 0.5, .weight_decay = 0.1};
constexpr AdamSettings kAmsgrad{.lr = 0.01, .beta2 = 0.5, .weight_decay = 0.1, .amsgrad = true};
constexpr uint64_t kLarge = kTileElements + 1003;
constexpr uint64_t kSmall = 3005;  // torch updates the last ones one by one

class AmsgradTest : public ::testing::TestWithParam<std::pair<const char*, DType>> {
 protected:
  AmsgradTest() { start(); }

  /// The first start, or another after a power cut.
  void start() {
    heart_ = std::make_unique<Heart>(disk_, kFloorSegments + 20);
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
    job_id_ = heart_->open(
        "job", 12, kQuotaBytes, Durability::parse(std::string(GetParam().first)).value());
    session_ = heart_->attach(job_id_);
  }
  void restart() {
    ASSERT_TRUE(heart_->sync(session_).is_ok());
    heart_.reset();
    start();
  }
  /// A large parameter and two that share a bucket.
  void declare(std::vector<bool> keep, bool write = true) {
    const std::vector<uint64_t> counts{kLarge, kSmall, kSmall};
    std::vector<ShardSpec> specs;
    for (size_t i = 0; i < counts.size(); ++i)
      specs.push_back(with_maximum(parameter(concat("p", i), counts[i], dtype()), keep[i]));
    ids_ = heart_->declare(session_, specs);
    for (size_t i = 0; write && i < counts.size(); ++i) {
      const auto seed = static_cast<uint32_t>(i) + 1;
      if (dtype() == DType::float32) {
        twins_.push_back(Twin::fp32(numbers(counts[i], seed)));
        heart_->write(session_, ids_[i], twins_[i].theta);
      } else {
        twins_.push_back(Twin::bf16(halves(counts[i], seed)));
        heart_->write(session_, ids_[i], twins_[i].half);
      }
    }
  }
  /// One step of all of them, each with its settings.
  Status step(const std::vector<AdamSettings>& settings) {
    ++seed_;
    StepRequest request{.session_id = session_, .groups = {}, .staged_buffers = {}};
    for (size_t i = 0; i < ids_.size(); ++i) {
      const uint64_t count = twins_[i].m.size();
      if (dtype() == DType::float32) {
        heart_->write(session_, ids_[i], gradient(count), Part::gradient);
      } else {
        heart_->write(session_, ids_[i], halves(count, seed_), Part::gradient);
      }
      request.groups.push_back({.settings = settings[i], .shard_ids = {ids_[i]}});
    }
    const Status status = heart_->step(request).first;
    if (!status.is_ok()) return status;
    for (size_t i = 0; i < ids_.size(); ++i) {
      const uint64_t count = twins_[i].m.size();
      if (dtype() == DType::float32) {
        twins_[i].step(settings[i], gradient(count));
      } else {
        twins_[i].step(settings[i], halves(count, seed_));
      }
    }
    return status;
  }
  /// Gradients differ in size at each step, so most maxima are not the last moment.
  std::vector<float> gradient(uint64_t count) const {
    std::vector<float> values = numbers(count, seed_);
    for (float& value : values) value *= seed_ % 3 == 0 ? 1.0F : 0.1F;
    return values;
  }
  void expect_twins(const std::vector<bool>& keep) {
    for (size_t i = 0; i < ids_.size(); ++i) {
      SCOPED_TRACE(concat("parameter ", i));
      if (dtype() == DType::float32) {
        EXPECT_TRUE(heart_->read<float>(session_, ids_[i]) == twins_[i].theta);
      } else {
        EXPECT_TRUE(heart_->read<uint16_t>(session_, ids_[i]) == twins_[i].half);
      }
      const MomentValues values = heart_->moment_values(session_, ids_[i]);
      EXPECT_TRUE(values.exp_avg == twins_[i].m);
      EXPECT_TRUE(values.exp_avg_sq == twins_[i].v);
      EXPECT_TRUE(values.max_exp_avg_sq == (keep[i] ? twins_[i].v_max : std::vector<float>()));
      EXPECT_EQ(shard(i).keeps_maximum, keep[i]);
    }
  }
  const Shard& shard(size_t i) { return heart_->job(session_).shards()[ids_[i]]; }
  const Bucket& bucket(size_t i) { return heart_->job(session_).shards().bucket(shard(i).bucket); }
  static DType dtype() { return GetParam().second; }
  void write_moments(size_t i, MomentValues values) {
    const Status written = heart_->write_moments(session_, ids_[i], twins_[i].t, std::move(values));
    ASSERT_TRUE(written.is_ok()) << written.message();
  }

  /// Memory that a task neither reads nor zeroes is not zero by chance.
  void dirty_private_memory() {
    JobMemory& memory = *heart_->job(session_).memory();
    while (memory.grow_private()) {
    }
    std::vector<uint64_t> taken;
    for (uint64_t bytes = 2_MiB; bytes >= kBlockBytes; bytes /= 2) {
      while (const auto offset_bytes = memory.private_side().allocate(bytes)) {
        std::memset(memory.private_side().at(*offset_bytes), 0x3F, bytes);
        taken.push_back(*offset_bytes);
      }
    }
    for (const uint64_t offset_bytes : taken) memory.private_side().free(offset_bytes);
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  uint32_t seed_ = 10;
};

TEST_P(AmsgradTest, steps_have_the_bits_of_plain_memory_and_so_has_what_is_on_disk) {
  declare({true, true, true});
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
  expect_twins({true, true, true});
  // A group that turns it off keeps the maximum as it is.
  ASSERT_TRUE(step({kPlain, kAmsgrad, kPlain}).is_ok());
  restart();
  expect_twins({true, true, true});
  ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
  expect_twins({true, true, true});
  EXPECT_FALSE(twins_[0].v == twins_[0].v_max) << "else nothing was tested";
}

TEST_P(AmsgradTest, a_parameter_without_a_maximum_is_not_updated_with_amsgrad) {
  declare({true, false, true});
  const auto refused = [&] {
    const Status status = step({kAmsgrad, kAmsgrad, kAmsgrad});
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find("job/p1 is to be updated with amsgrad, and its optimizer state "
                                    "has no max_exp_avg_sq"),
              std::string::npos)
        << status.message();
  };
  refused();
  expect_twins({true, false, true});
  ASSERT_TRUE(step({kAmsgrad, kPlain, kAmsgrad}).is_ok());
  expect_twins({true, false, true});
  // After an update, declarations change nothing.
  declare({false, true, false}, false);
  expect_twins({true, false, true});
  refused();
}

TEST_P(AmsgradTest, before_its_first_update_each_declaration_says_anew_whether_it_has_one) {
  declare({false, false, false});
  declare({true, true, false}, false);
  restart();
  declare({true, false, true}, false);
  ASSERT_TRUE(step({kAmsgrad, kPlain, kAmsgrad}).is_ok());
  restart();
  expect_twins({true, false, true});
}

TEST_P(AmsgradTest, moments_from_before_it_get_a_place_for_it_where_one_is_written) {
  declare({false, false, false});
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(step({kPlain, kPlain, kPlain}).is_ok());
  EXPECT_FALSE(bucket(0).keeps_maxima || bucket(1).keeps_maxima);
  // The first tile of the large one alone, and the second of the small ones.
  std::vector<float> maximum(kTileElements);
  for (size_t i = 0; i < maximum.size(); ++i) maximum[i] = static_cast<float>(i % 2);
  twins_[0].v_max = maximum;
  twins_[0].v_max.resize(kLarge);
  const auto first_tile = [](std::vector<float> values) {
    values.resize(kTileElements);
    return values;
  };
  write_moments(0,
                {.exp_avg = first_tile(twins_[0].m),
                 .exp_avg_sq = first_tile(twins_[0].v),
                 .max_exp_avg_sq = maximum});
  twins_[2].v_max.assign(kSmall, 5.0F);
  write_moments(
      2, {.exp_avg = twins_[2].m, .exp_avg_sq = twins_[2].v, .max_exp_avg_sq = twins_[2].v_max});
  EXPECT_TRUE(bucket(0).keeps_maxima && bucket(1).keeps_maxima);
  expect_twins({true, false, true});
  restart();
  dirty_private_memory();
  expect_twins({true, false, true});
  EXPECT_EQ(bucket(0).rest[1].extent().length_bytes, bucket(0).rest_bytes_narrow(1))
      << "nobody has written it since";
  ASSERT_TRUE(step({kAmsgrad, kPlain, kAmsgrad}).is_ok());
  expect_twins({true, false, true});
  restart();
  expect_twins({true, false, true});
}

TEST_P(AmsgradTest, moments_without_one_take_it_away_and_a_later_one_begins_with_zeros) {
  declare({true, true, true});
  ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
  twins_[1].t = 0;
  for (auto* const values : {&twins_[1].m, &twins_[1].v, &twins_[1].v_max})
    std::fill(values->begin(), values->end(), 0.0F);
  write_moments(1, {.exp_avg = twins_[1].m, .exp_avg_sq = twins_[1].v, .max_exp_avg_sq = {}});
  expect_twins({true, false, true});
  restart();
  expect_twins({true, false, true});
  declare({true, true, true}, false);
  expect_twins({true, true, true});
  ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
  expect_twins({true, true, true});
}

TEST_P(AmsgradTest, a_step_that_fails_leaves_moments_and_maximum_as_they_were) {
  if (std::string(GetParam().first) != "step") GTEST_SKIP() << "in memory a step is not undone";
  declare({true, true, true});
  for (int i = 0; i < 2; ++i) {
    // Some tiles find room and others do not.
    heart_->limit_state(session_, heart_->job(session_).space().used_bytes() + 2_MiB);
    EXPECT_EQ(step({kAmsgrad, kAmsgrad, kAmsgrad}).code(), StatusCode::capacity);
    heart_->limit_state(session_, kQuotaBytes);
    expect_twins({true, true, true});
    --seed_;
    ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
    expect_twins({true, true, true});
  }
}

TEST_P(AmsgradTest, tiles_are_updated_before_the_step_once_they_have_a_place_for_it) {
  declare({true, true, true});
  ASSERT_TRUE(step({kAmsgrad, kAmsgrad, kAmsgrad}).is_ok());
  if (heart_->job(session_).admission().durability().is_in_memory()) GTEST_SKIP() << "tiles stay";
  const std::vector<StepGroup> groups{{.settings = kAmsgrad, .shard_ids = ids_}};
  ASSERT_TRUE(heart_->store().gradients().expect_step(session_, groups).is_ok());
  ++seed_;
  for (size_t i = 0; i < ids_.size(); ++i) {
    const uint64_t count = twins_[i].m.size();
    if (dtype() == DType::float32) {
      heart_->write(session_, ids_[i], gradient(count), Part::gradient);
      twins_[i].step(kAmsgrad, gradient(count));
    } else {
      heart_->write(session_, ids_[i], halves(count, seed_), Part::gradient);
      twins_[i].step(kAmsgrad, halves(count, seed_));
    }
    heart_->store().gradients().is_final(session_, ids_[i]);
  }
  Job& job = heart_->job(session_);
  ASSERT_TRUE(heart_->until(
      [&] { return !job.state().early().has_waiting() && !job.cache().activities().any(); }));
  ASSERT_TRUE(
      heart_->step({.session_id = session_, .groups = groups, .staged_buffers = {}}).first.is_ok());
  EXPECT_EQ(job.cache().counters().early_tiles_adopted, 3U);
  expect_twins({true, true, true});
  restart();
  expect_twins({true, true, true});
}

TEST_P(AmsgradTest, another_jobs_commit_says_of_this_one_what_its_own_last_commit_said) {
  if (std::string(GetParam().first) != "step") GTEST_SKIP() << "what is in memory alone is lost";
  declare({true, false, true});
  ASSERT_TRUE(step({kAmsgrad, kPlain, kAmsgrad}).is_ok());
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  write_moments(1,
                {.exp_avg = twins_[1].m, .exp_avg_sq = twins_[1].v, .max_exp_avg_sq = twins_[1].v});
  ASSERT_TRUE(shard(1).keeps_maximum);
  const uint64_t other = heart_->attach(heart_->open("other", 4, 8_MiB));
  const uint32_t blob =
      heart_
          ->declare(
              other,
              {{.name = "b", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {1024}}})
          .at(0);
  heart_->write(other, blob, std::vector<float>(1024, 1.0F));
  ASSERT_TRUE(heart_->sync(other).is_ok());
  heart_.reset();
  start();
  expect_twins({true, false, true});
}

TEST(AmsgradRoom, a_step_that_makes_the_place_writes_no_other_buckets_tiles) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session =
      heart.attach(heart.open("job", 8, kQuotaBytes, Durability::parse("every:9").value()));
  const auto ids = heart.declare(
      session,
      {parameter("plain", kTileElements), with_maximum(parameter("amsgrad", kTileElements), true)});
  for (const uint32_t id : ids) heart.write(session, id, numbers(kTileElements, id + 1));
  const auto step = [&](const std::vector<uint32_t>& chosen, const AdamSettings& settings) {
    for (const uint32_t id : chosen)
      heart.write(session, id, numbers(kTileElements, 3), Part::gradient);
    const Status status =
        heart.step({.session_id = session, .groups = {{.settings = settings, .shard_ids = chosen}}})
            .first;
    ASSERT_TRUE(status.is_ok()) << status.message();
  };
  step(ids, kPlain);
  ASSERT_TRUE(heart.sync(session).is_ok());
  step({ids[0]}, kPlain);
  const PrivateTiles& tiles = heart.job(session).tiles();
  ASSERT_TRUE(tiles.is_dirty(tile_key(0, 0)));
  step({ids[1]}, kAmsgrad);
  EXPECT_TRUE(heart.job(session).shards().bucket(1).keeps_maxima);
  EXPECT_TRUE(tiles.is_dirty(tile_key(0, 0)));
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         AmsgradTest,
                         ::testing::Values(std::pair{"step", DType::float32},
                                           std::pair{"step", DType::bfloat16},
                                           std::pair{"every:3", DType::float32},
                                           std::pair{"none", DType::bfloat16}),
                         [](const auto& info) {
                           const std::string durability = info.param.first;
                           return durability.substr(0, durability.find(':')) +
                                  (info.param.second == DType::bfloat16 ? "_bf16" : "_fp32");
                         });

}  // namespace
}  // namespace memd::testing
