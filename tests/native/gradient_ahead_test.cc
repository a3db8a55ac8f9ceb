// Gradients whose slots are leased before backward has made them, and that may never come.
#include <gtest/gtest.h>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;

class GradientAheadTest : public ::testing::Test {
 protected:
  GradientAheadTest() {
    session_ = heart_.attach(heart_.open("job", 24));
    ids_ = heart_.declare(
        session_, {parameter("large", kTileElements), parameter("a", 8), parameter("b", 8)});
    heart_.write(session_, ids_[0], numbers(kTileElements, 1));
    for (size_t i : {1, 2}) heart_.write(session_, ids_[i], numbers(8, 1));
  }
  std::shared_ptr<std::optional<Held>> ask(size_t i,
                                           bool is_expected,
                                           LeaseMode mode = LeaseMode::overwrite) {
    return heart_.ask({.session_id = session_,
                       .shard_id = ids_[i],
                       .part = Part::gradient,
                       .mode = mode,
                       .timeout_ns = 60'000'000'000,
                       .is_expected = is_expected});
  }
  Job& job() { return heart_.job(session_); }
  const Shard& shard(size_t i) { return job().shards()[ids_[i]]; }
  const Entry& gradient(size_t i) { return *job().shards().find_entry(ids_[i], Part::gradient); }
  void unused(size_t i) { heart_.store().gradients().unused(session_, ids_[i]); }

  Heart heart_{std::make_shared<MemoryDisk>(kDiskBytes), 2 * kFloorSegments + 24};
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(GradientAheadTest, one_that_does_not_come_is_none) {
  const auto ahead = ask(0, true);
  ASSERT_TRUE(ahead->has_value() && (*ahead)->is_ok());
  EXPECT_EQ(shard(0).contributors, Contributors::one(session_))
      << "until it is said that it does not come";
  heart_.release(**ahead);
  unused(0);
  EXPECT_TRUE(shard(0).contributors.empty());
  EXPECT_EQ(gradient(0).slot(), nullptr);
  const auto reader = ask(0, false, LeaseMode::read);
  ASSERT_TRUE(reader->has_value());
  EXPECT_EQ((*reader)->status.code(), StatusCode::not_found);
}

// Two small parameters share a bucket, which has no bytes yet.
TEST_F(GradientAheadTest, who_waits_for_zeros_waits_for_the_workers_and_not_for_the_disk) {
  const auto asked = ask(1, false);
  ASSERT_FALSE(asked->has_value());
  const auto behind = ask(2, false);
  heart_.clock.advance(1'000'000);
  ASSERT_TRUE(heart_.until([&] { return asked->has_value() && behind->has_value(); }));
  for (const auto& answer : {asked, behind}) {
    ASSERT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
    EXPECT_EQ((*answer)->grant.wait_reason, LeaseWait::update);
    EXPECT_EQ((*answer)->grant.wait_ns, 1'000'000u);
    heart_.release(**answer);
  }
}

TEST_F(GradientAheadTest, one_that_came_stays) {
  const auto ahead = ask(0, true);
  ASSERT_TRUE(ahead->has_value() && (*ahead)->is_ok());
  heart_.release(**ahead);
  const auto more = ask(0, false, LeaseMode::write);
  ASSERT_TRUE(more->has_value() && (*more)->is_ok());
  heart_.release(**more);
  unused(0);
  EXPECT_EQ(shard(0).contributors, Contributors::one(session_));
  // One that is there is asked for in vain: a step may take it at any moment.
  const auto again = ask(0, true);
  ASSERT_TRUE(again->has_value());
  EXPECT_EQ((*again)->status.code(), StatusCode::deadline);
  unused(0);
  EXPECT_EQ(shard(0).contributors, Contributors::one(session_));
  ASSERT_TRUE(
      heart_.step({.session_id = session_, .groups = {{.shard_ids = {ids_[0]}}}}).first.is_ok());
}

TEST_F(GradientAheadTest, a_slot_that_is_still_held_is_freed_when_it_is_given_back) {
  const auto ahead = ask(0, true);
  ASSERT_TRUE(ahead->has_value() && (*ahead)->is_ok());
  const uint64_t used_bytes = job().memory()->arena().used_bytes();
  unused(0);
  EXPECT_TRUE(shard(0).contributors.empty());
  EXPECT_EQ(job().memory()->arena().used_bytes(), used_bytes);
  heart_.release(**ahead);
  job().cache().slots().free_retired();
  EXPECT_LT(job().memory()->arena().used_bytes(), used_bytes);
}

TEST_F(GradientAheadTest, a_question_that_waits_still_is_answered_and_forgotten) {
  heart_.write(session_, ids_[0], numbers(kTileElements, 2), Part::gradient);
  bool is_over = false;
  heart_.store().operations().step({.session_id = session_, .groups = {{.shard_ids = {ids_[0]}}}},
                                   [&](const Status& status, const StepReport&) {
                                     EXPECT_TRUE(status.is_ok()) << status.message();
                                     is_over = true;
                                   });
  const auto ahead = ask(0, true);
  const auto ordinary = ask(0, false);
  ASSERT_FALSE(is_over);
  ASSERT_FALSE(ahead->has_value());
  unused(0);
  ASSERT_TRUE(ahead->has_value());
  EXPECT_FALSE((*ahead)->is_ok());
  EXPECT_FALSE(ordinary->has_value()) << "somebody waits for it";
  ASSERT_TRUE(heart_.until([&] { return ordinary->has_value(); }));
  heart_.release(**ordinary);
  EXPECT_EQ(shard(0).contributors, Contributors::one(session_));
}

TEST_F(GradientAheadTest, its_neighbours_in_a_bucket_keep_theirs) {
  heart_.write(session_, ids_[1], numbers(8, 5), Part::gradient);
  const auto ahead = ask(2, true);
  ASSERT_TRUE(ahead->has_value() && (*ahead)->is_ok());
  heart_.release(**ahead);
  unused(2);
  unused(1);
  EXPECT_TRUE(shard(2).contributors.empty());
  EXPECT_EQ(shard(1).contributors, Contributors::one(session_));
  ASSERT_TRUE(
      heart_.step({.session_id = session_, .groups = {{.shard_ids = {ids_[1]}}}}).first.is_ok());
  EXPECT_EQ(gradient(1).slot(), nullptr) << "nothing keeps the bucket's slot";
}

TEST_F(GradientAheadTest, what_is_no_parameter_is_ignored) {
  heart_.store().gradients().unused(session_, 77);
  heart_.store().gradients().unused(session_ + 99, ids_[0]);
  unused(0);
  EXPECT_TRUE(shard(0).contributors.empty());
}

}  // namespace
}  // namespace memd
