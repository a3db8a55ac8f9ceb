// Two sessions that train one job together: gradients that both add to, and the end of one of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::kQuotaBytes;
using testing::numbers;
using testing::parameter;
using testing::Twin;

constexpr uint64_t kElements = 1000;

std::vector<float> sum_of(std::vector<float> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

/// `first_` and `second_` are one group; `stranger_` is attached to the same job.
class TrainingGroupTest : public ::testing::Test {
 protected:
  TrainingGroupTest() {
    job_id_ = heart_.open("job", 24);
    first_ = heart_.attach(job_id_);
    second_ = heart_.attach(job_id_);
    stranger_ = heart_.attach(job_id_);
    for (const uint64_t session : {first_, second_}) EXPECT_TRUE(group().join(session).is_ok());
    ids_ = heart_.declare(first_, {parameter("v", kElements), parameter("w", kElements)});
    for (const size_t i : {0, 1}) {
      twins_.push_back(Twin::fp32(numbers(kElements, static_cast<uint32_t>(i + 1))));
      heart_.write(first_, ids_[i], twins_[i].theta);
    }
  }

  Job& job() { return heart_.job(stranger_); }
  TrainingGroup& group() { return heart_.job(first_).cache().group(); }
  Contributors contributors(size_t i) { return job().shards()[ids_[i]].contributors; }
  Held lease(uint64_t session, size_t i, LeaseMode mode) {
    return heart_.lease(session, ids_[i], mode, Part::gradient);
  }
  void overwrite(uint64_t session, size_t i, uint32_t seed) {
    heart_.write(session, ids_[i], numbers(kElements, seed), Part::gradient);
  }
  void add(uint64_t session, size_t i, uint32_t seed) {
    const Held held = lease(session, i, LeaseMode::write);
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    const auto values = numbers(kElements, seed);
    for (size_t k = 0; k < kElements; ++k) held.as<float>()[k] += values[k];
    heart_.release(held);
  }
  StepRequest request(uint64_t session) const {
    return {.session_id = session,
            .groups = {{.settings = settings_, .shard_ids = {ids_[0]}}},
            .staged_buffers = {}};
  }
  void expect_refused(const Status& status, const std::string& words) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }
  void expect_refused(const Held& held, const std::string& words) {
    expect_refused(held.status, words);
    if (held.is_ok()) heart_.release(held);
  }
  std::string void_of(size_t i, uint64_t session) const {
    return concat(
        "the gradient of shard job/", i == 0 ? "v" : "w", " is void, since session ", session);
  }

  Heart heart_{std::make_shared<MemoryDisk>(kDiskBytes), kFloorSegments + 24};
  uint64_t job_id_ = 0;
  uint64_t first_ = 0;
  uint64_t second_ = 0;
  uint64_t stranger_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  const AdamSettings settings_{.lr = 1e-2};
};

TEST_F(TrainingGroupTest, a_step_of_one_takes_the_sum_that_both_made) {
  overwrite(first_, 0, 10);
  add(second_, 0, 11);
  EXPECT_TRUE(group().has(contributors(0), first_));
  EXPECT_TRUE(group().has(contributors(0), second_));
  EXPECT_FALSE(group().has(contributors(0), stranger_));
  ASSERT_TRUE(heart_.step(request(second_)).first.is_ok());
  EXPECT_TRUE(contributors(0).empty());
  twins_[0].step(settings_, sum_of(numbers(kElements, 10), numbers(kElements, 11)));
  EXPECT_EQ(heart_.read<float>(stranger_, ids_[0]), twins_[0].theta);

  // What one alone made is the other's to step with as well.
  overwrite(first_, 0, 12);
  EXPECT_EQ(contributors(0), Contributors::one(first_));
  ASSERT_TRUE(heart_.step(request(second_)).first.is_ok());
  twins_[0].step(settings_, numbers(kElements, 12));
  EXPECT_EQ(heart_.read<float>(stranger_, ids_[0]), twins_[0].theta);
}

TEST_F(TrainingGroupTest, the_end_of_one_voids_the_sum_and_the_other_is_told_once) {
  overwrite(first_, 0, 10);
  add(second_, 0, 11);
  overwrite(second_, 1, 12);
  ASSERT_TRUE(heart_.store().detach(second_).is_ok());
  for (const size_t i : {0, 1}) EXPECT_TRUE(contributors(i).empty()) << i;
  EXPECT_EQ(job().shards().find_entry(ids_[0], Part::gradient)->slot(), nullptr);
  expect_refused(lease(first_, 0, LeaseMode::write), void_of(0, second_));
  overwrite(first_, 0, 13);
  ASSERT_TRUE(heart_.step(request(first_)).first.is_ok());
  twins_[0].step(settings_, numbers(kElements, 13));
  EXPECT_EQ(heart_.read<float>(first_, ids_[0]), twins_[0].theta);
}

TEST_F(TrainingGroupTest, a_step_after_the_end_of_one_is_refused_and_the_next_backward_is_not) {
  overwrite(second_, 0, 10);
  add(first_, 0, 11);
  ASSERT_TRUE(heart_.store().detach(second_).is_ok());
  expect_refused(heart_.step(request(first_)).first, void_of(0, second_));
  expect_refused(heart_.step(request(first_)).first, "has no gradient from this session");
  EXPECT_EQ(job().progress().committed_step(), 0U);
  add(first_, 0, 12);
  ASSERT_TRUE(heart_.step(request(first_)).first.is_ok());
  twins_[0].step(settings_, numbers(kElements, 12));
  EXPECT_EQ(heart_.read<float>(first_, ids_[0]), twins_[0].theta);
}

TEST_F(TrainingGroupTest, who_drops_its_part_voids_the_sum) {
  overwrite(first_, 0, 10);
  add(second_, 0, 11);
  ASSERT_TRUE(heart_.store().gradients().drop(first_, {ids_[0]}).is_ok());
  EXPECT_TRUE(contributors(0).empty());
  expect_refused(lease(second_, 0, LeaseMode::read), void_of(0, first_));
  EXPECT_EQ(lease(first_, 0, LeaseMode::read).status.code(), StatusCode::not_found) << "it knows";
}

TEST_F(TrainingGroupTest, a_step_that_fails_gives_the_sum_back_to_both) {
  overwrite(first_, 0, 10);
  add(second_, 0, 11);
  job().space().set_quota_bytes(job().space().used_bytes());
  EXPECT_EQ(heart_.step(request(first_)).first.code(), StatusCode::capacity);
  job().space().set_quota_bytes(kQuotaBytes);
  EXPECT_TRUE(group().has(contributors(0), first_));
  EXPECT_TRUE(group().has(contributors(0), second_));
  ASSERT_TRUE(heart_.step(request(second_)).first.is_ok());
  twins_[0].step(settings_, sum_of(numbers(kElements, 10), numbers(kElements, 11)));
  EXPECT_EQ(heart_.read<float>(first_, ids_[0]), twins_[0].theta);
}

TEST_F(TrainingGroupTest, a_sealed_sum_outlives_one_of_both_until_its_step_fails) {
  const auto end_during_a_step = [this](uint64_t ended, uint64_t stays) {
    std::optional<Status> done;
    heart_.store().operations().step(
        request(stays), [&](const Status& status, const StepReport&) { done = status; });
    EXPECT_FALSE(done.has_value());
    EXPECT_TRUE(heart_.store().detach(ended).is_ok());
    EXPECT_TRUE(heart_.until([&] { return done.has_value(); }));
    return done.value_or(error(StatusCode::deadline, "no answer"));
  };
  overwrite(first_, 0, 10);
  add(second_, 0, 11);
  ASSERT_TRUE(end_during_a_step(second_, first_).is_ok());
  twins_[0].step(settings_, sum_of(numbers(kElements, 10), numbers(kElements, 11)));
  EXPECT_EQ(heart_.read<float>(first_, ids_[0]), twins_[0].theta);

  const uint64_t third = heart_.attach(job_id_);
  ASSERT_TRUE(group().join(third).is_ok());
  overwrite(third, 0, 12);
  add(first_, 0, 13);
  job().space().set_quota_bytes(job().space().used_bytes());
  EXPECT_EQ(end_during_a_step(third, first_).code(), StatusCode::capacity);
  job().space().set_quota_bytes(kQuotaBytes);
  EXPECT_TRUE(contributors(0).empty());
  expect_refused(lease(first_, 0, LeaseMode::overwrite), void_of(0, third));
  overwrite(first_, 0, 14);
  ASSERT_TRUE(heart_.step(request(first_)).first.is_ok());
}

TEST_F(TrainingGroupTest, nobody_replaces_or_adds_to_a_sum_of_others) {
  overwrite(first_, 0, 10);
  expect_refused(lease(second_, 0, LeaseMode::overwrite), "others of this training group made");
  add(second_, 0, 11);
  expect_refused(lease(first_, 0, LeaseMode::overwrite), "others of this training group made");
  expect_refused(lease(stranger_, 0, LeaseMode::write), "does not train with this one");
  EXPECT_EQ(heart_.read<float>(stranger_, ids_[0], Part::gradient),
            sum_of(numbers(kElements, 10), numbers(kElements, 11)));
  // A stranger's own gradient takes the place of all, as it always does.
  overwrite(stranger_, 0, 12);
  EXPECT_EQ(contributors(0), Contributors::one(stranger_));
  expect_refused(heart_.step(request(first_)).first, "has no gradient from this session");
  expect_refused(lease(first_, 0, LeaseMode::write), "does not train with this one");
}

TEST_F(TrainingGroupTest, members_reserve_no_slot_that_others_would_add_to) {
  const auto ahead = [this](uint64_t session) {
    const auto answer = heart_.ask({.session_id = session,
                                    .shard_id = ids_[0],
                                    .part = Part::gradient,
                                    .mode = LeaseMode::overwrite,
                                    .timeout_ns = 60'000'000'000,
                                    .is_expected = true});
    EXPECT_TRUE(heart_.until([&] { return answer->has_value(); }));
    return answer->value_or(Held{});
  };
  for (const uint64_t session : {first_, second_})
    EXPECT_EQ(ahead(session).status.code(), StatusCode::deadline);
  const Held alone = ahead(stranger_);
  ASSERT_TRUE(alone.is_ok()) << alone.status.message();
  heart_.release(alone);
}

}  // namespace
}  // namespace memd
