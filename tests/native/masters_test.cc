// fp32 numbers of bf16 parameters, which a load brings beside the values that are published of
// them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "optim/adam_variants.h"
#include "optim/bf16_master.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr AdamSettings kSettings{.lr = 0.01, .beta2 = 0.5, .weight_decay = 0.1, .amsgrad = true};
constexpr uint64_t kLarge = kTileElements + 1003;
constexpr uint64_t kSmall = 3005;  // the others share a bucket
constexpr uint64_t kCounts[]{kLarge, kSmall, kSmall};

/// A state that training has made: remainders of both signs, and all moments.
Twin trained(uint64_t count, uint32_t seed) {
  Twin twin = Twin::bf16(halves(count, seed));
  for (uint32_t step = 1; step < 4; ++step) twin.step(kSettings, halves(count, seed + step));
  return twin;
}

std::vector<float> masters_of(const Twin& twin) {
  std::vector<float> masters;
  for (size_t i = 0; i < twin.half.size(); ++i)
    masters.push_back(std::bit_cast<float>(bf16_master(twin.half[i], twin.remainder[i])));
  return masters;
}

struct Case {
  const char* durability = "step";
  Tier tier = Tier::nvme;
};

class MastersTest : public ::testing::TestWithParam<Case> {
 protected:
  MastersTest() {
    start();
    std::vector<ShardSpec> specs;
    for (const uint64_t count : kCounts) {
      specs.push_back(with_maximum(parameter(concat("p", specs.size()), count, DType::bfloat16)));
      specs.back().tier = GetParam().tier;
      twins_.push_back(trained(count, static_cast<uint32_t>(10 * specs.size())));
    }
    ids_ = heart_->declare(session_, specs);
    specs_ = std::move(specs);
  }

  /// The first start, or another after a power cut.
  void start() {
    heart_ = std::make_unique<Heart>(disk_, kFloorSegments + 24);
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
    const uint64_t job_id = heart_->open(
        "job", 20, kQuotaBytes, Durability::parse(std::string(GetParam().durability)).value());
    session_ = heart_->attach(job_id);
  }
  void write_values() {
    for (size_t i = 0; i < ids_.size(); ++i) heart_->write(session_, ids_[i], twins_[i].half);
  }
  /// A run of elements of one tile.
  Status write_state(size_t i, const Twin& twin, uint64_t first, uint64_t count) {
    const auto part = [&](const std::vector<float>& all) {
      const auto begin = all.begin() + static_cast<ptrdiff_t>(first);
      return std::vector<float>(begin, begin + static_cast<ptrdiff_t>(count));
    };
    return write({.session_id = session_,
                  .shard_id = ids_[i],
                  .element_first = first,
                  .element_count = count},
                 twin.t,
                 {.exp_avg = part(twin.m),
                  .exp_avg_sq = part(twin.v),
                  .max_exp_avg_sq = part(twin.v_max),
                  .masters = part(masters_of(twin))});
  }
  Status write(const MomentsRequest& request, uint64_t generation, MomentValues values) {
    std::optional<Status> answer;
    heart_->store().operations().write_moments(
        request, generation, std::move(values), [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  void write_states() {
    for (size_t i = 0; i < ids_.size(); ++i) {
      for (uint64_t first = 0; first < kCounts[i]; first += kTileElements) {
        const uint64_t count = std::min(kTileElements, kCounts[i] - first);
        const Status status = write_state(i, twins_[i], first, count);
        ASSERT_TRUE(status.is_ok()) << status.message();
      }
    }
  }
  void step() {
    ++seed_;
    for (size_t i = 0; i < ids_.size(); ++i)
      heart_->write(session_, ids_[i], halves(kCounts[i], seed_), Part::gradient);
    const Status status =
        heart_
            ->step({.session_id = session_, .groups = {{.settings = kSettings, .shard_ids = ids_}}})
            .first;
    ASSERT_TRUE(status.is_ok()) << status.message();
    for (size_t i = 0; i < ids_.size(); ++i) twins_[i].step(kSettings, halves(kCounts[i], seed_));
  }
  void expect_twins() {
    for (size_t i = 0; i < ids_.size(); ++i) {
      SCOPED_TRACE(concat("parameter ", i));
      EXPECT_TRUE(heart_->read<uint16_t>(session_, ids_[i]) == twins_[i].half);
      const MomentValues moments = heart_->moment_values(session_, ids_[i], true);
      EXPECT_TRUE(moments.exp_avg == twins_[i].m);
      EXPECT_TRUE(moments.exp_avg_sq == twins_[i].v);
      EXPECT_TRUE(moments.max_exp_avg_sq == twins_[i].v_max);
      EXPECT_TRUE(moments.masters == masters_of(twins_[i]));
    }
  }
  uint64_t generation(size_t i) const { return heart_->job(session_).shards()[ids_[i]].generation; }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  uint64_t session_ = 0;
  std::vector<ShardSpec> specs_;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  uint32_t seed_ = 100;
};

TEST_P(MastersTest, a_job_with_the_values_and_the_state_of_another_goes_on_as_that_does) {
  write_values();
  write_states();
  expect_twins();
  // Steps of 1e-2 move most of a value's bits, and the remainders decide about the last ones.
  for (int i = 0; i < 3; ++i) ASSERT_NO_FATAL_FAILURE(step());
  expect_twins();
  for (size_t i = 0; i < ids_.size(); ++i) EXPECT_EQ(generation(i), twins_[i].t);
}

TEST_P(MastersTest, what_the_job_had_trained_before_leaves_no_trace) {
  std::vector<Twin> loaded = std::exchange(twins_, {});
  for (const uint64_t count : kCounts) twins_.push_back(Twin::bf16(halves(count, 77)));
  write_values();
  for (int i = 0; i < 2; ++i) ASSERT_NO_FATAL_FAILURE(step());
  twins_ = std::move(loaded);
  write_values();
  write_states();
  expect_twins();
  ASSERT_NO_FATAL_FAILURE(step());
  expect_twins();
}

TEST_P(MastersTest, after_a_sync_the_next_daemon_has_them) {
  if (GetParam().tier == Tier::host) GTEST_SKIP() << "memory alone has tier host";
  write_values();
  write_states();
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  heart_.reset();
  start();
  ids_ = heart_->declare(session_, specs_);
  expect_twins();
  ASSERT_NO_FATAL_FAILURE(step());
  expect_twins();
}

TEST_P(MastersTest, masters_of_other_values_are_refused_and_change_nothing) {
  write_values();
  write_states();
  for (size_t i = 0; i < ids_.size(); ++i) {
    const uint64_t first = i == 0 ? kTileElements : 0;
    const uint64_t count = std::min(kTileElements, kCounts[i] - first);
    Twin other = twins_[i];
    std::fill(other.m.begin(), other.m.end(), 1.0F);
    std::fill(other.remainder.begin(), other.remainder.end(), int16_t{5});
    // The last one alone belongs to another value.
    other.half[first + count - 1] ^= 1;
    other.t = 70;
    const Status refused = write_state(i, other, first, count);
    EXPECT_EQ(refused.code(), StatusCode::invalid_argument);
    EXPECT_NE(refused.message().find(concat("job/p",
                                            i,
                                            " has other bfloat16 values than training publishes of "
                                            "these fp32 values; write the values first that "
                                            "belong to them: element ",
                                            first + count - 1)),
              std::string::npos)
        << refused.message();
    EXPECT_EQ(generation(i), twins_[i].t);
  }
  expect_twins();
  ASSERT_NO_FATAL_FAILURE(step());
  expect_twins();
}

TEST_P(MastersTest, a_parameter_that_somebody_writes_takes_none_before_he_has_ended) {
  write_values();
  const Held held = heart_->lease(session_, ids_[1], LeaseMode::write);
  ASSERT_TRUE(held.is_ok());
  // It shares the bucket, whose bytes would go to disk half-written.
  const Status refused = write_state(2, twins_[2], 0, kSmall);
  EXPECT_EQ(refused.code(), StatusCode::invalid_argument);
  EXPECT_NE(refused.message().find("is still leased for writing"), std::string::npos)
      << refused.message();
  heart_->release(held);
  write_states();
  expect_twins();
}

TEST_P(MastersTest, a_later_write_keeps_the_remainders_of_the_values_that_it_does_not_change) {
  write_values();
  write_states();
  for (size_t i = 0; i < ids_.size(); ++i) {
    for (size_t at = 0; at < kCounts[i]; at += 3) {
      twins_[i].half[at] ^= 1;
      twins_[i].remainder[at] = 0;
    }
  }
  write_values();
  ASSERT_NO_FATAL_FAILURE(step());
  expect_twins();
}

TEST_P(MastersTest, masters_of_what_somebody_has_written_are_its_values) {
  for (Twin& twin : twins_) {
    twin = Twin::bf16(halves(twin.half.size(), 5));
  }
  write_values();
  // No update has made a place for remainders.
  for (size_t i = 0; i < ids_.size(); ++i)
    EXPECT_TRUE(heart_->moment_values(session_, ids_[i], true).masters == masters_of(twins_[i]));
  ASSERT_NO_FATAL_FAILURE(step());
  for (Twin& twin : twins_) {
    for (size_t at = 0; at < twin.half.size(); at += 3) {
      twin.half[at] ^= 1;
      twin.remainder[at] = 0;
    }
  }
  write_values();
  expect_twins();
}

TEST_P(MastersTest, while_somebody_writes_a_parameter_its_masters_are_not_read) {
  write_values();
  write_states();
  const Held held = heart_->lease(session_, ids_[1], LeaseMode::write);
  ASSERT_TRUE(held.is_ok());
  std::optional<Status> answer;
  const MomentsRequest request{.session_id = session_,
                               .shard_id = ids_[1],
                               .element_first = 0,
                               .element_count = kSmall,
                               .reads_masters = true};
  heart_->store().operations().read_moments(
      request, [&](const Status& status, const MomentValues&) { answer = status; });
  ASSERT_TRUE(heart_->until([&] { return answer.has_value(); }));
  EXPECT_EQ(answer->code(), StatusCode::invalid_argument);
  EXPECT_NE(answer->message().find("is still leased for writing"), std::string::npos)
      << answer->message();
  heart_->release(held);
  expect_twins();
}

TEST_P(MastersTest, of_float32_and_of_another_number_of_elements_they_are_refused) {
  const auto ids = heart_->declare(session_, {parameter("whole", 8)});
  heart_->write(session_, ids[0], numbers(8, 1));
  const std::vector<float> some(8, 0.5F);
  EXPECT_TRUE(heart_->moment_values(session_, ids[0], true).masters.empty());
  const MomentsRequest request{
      .session_id = session_, .shard_id = ids[0], .element_first = 0, .element_count = 8};
  const Status refused = write(
      request, 1, {.exp_avg = some, .exp_avg_sq = some, .max_exp_avg_sq = {}, .masters = some});
  EXPECT_EQ(refused.code(), StatusCode::invalid_argument);
  EXPECT_NE(refused.message().find("job/whole is float32"), std::string::npos) << refused.message();
  MomentsRequest shorter = request;
  shorter.shard_id = ids_[1];
  write_values();
  const Status other = write(shorter,
                             1,
                             {.exp_avg = some,
                              .exp_avg_sq = some,
                              .max_exp_avg_sq = {},
                              .masters = std::vector<float>(7)});
  EXPECT_EQ(other.code(), StatusCode::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         MastersTest,
                         ::testing::Values(Case{},
                                           Case{.durability = "every:3"},
                                           Case{.durability = "none"},
                                           Case{.tier = Tier::host}),
                         [](const auto& info) {
                           const std::string durability = info.param.durability;
                           return durability.substr(0, durability.find(':')) +
                                  (info.param.tier == Tier::host ? "_host" : "");
                         });

TEST(Bf16Master, of_each_number_that_an_update_stores_the_remainder_is_found_again) {
  // With a learning rate of zero an update changes no number, and stores it again.
  constexpr AdamSettings kStill{.lr = 0};
  uint32_t remainder = 1;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    remainder = remainder * 1664525U + 1013904223U;
    for (const auto each : {uint16_t{0}, uint16_t{0x7FFF}, uint16_t{0x8000}, uint16_t(remainder)}) {
      uint16_t half = static_cast<uint16_t>(bits);
      auto low = static_cast<int16_t>(each);
      float m = 0;
      float v = 0;
      const uint16_t gradient = 0;
      internal::adam_reference(adam_scalars(kStill, 1),
                               internal::AdamBf16{1, &half, &low, &m, &v, nullptr, &gradient});
      ASSERT_EQ(bf16_remainder(bf16_master(half, low), half), low) << half << " " << low;
      const bool is_nan = (half & 0x7FFFU) > 0x7F80U;
      const uint16_t other = is_nan ? uint16_t{0x3F80} : static_cast<uint16_t>(half ^ 1U);
      ASSERT_EQ(bf16_remainder(bf16_master(half, low), other), std::nullopt) << half << " " << low;
    }
  }
}

}  // namespace
}  // namespace memd::testing
