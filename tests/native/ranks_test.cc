// Ranks of one start: sums in their order, steps together, and the end of one of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;
using testing::Twin;

constexpr uint64_t kElements = 1000;
constexpr uint32_t kWorld = 3;

class RanksTest : public ::testing::Test {
 protected:
  RanksTest() {
    job_id_ = heart_.open("job", 24);
    start();
    ids_ = heart_.declare(ranks_[0], {parameter("v", kElements), parameter("w", kElements)});
    for (const size_t i : {0, 1}) {
      twins_.push_back(Twin::fp32(numbers(kElements, static_cast<uint32_t>(i + 1))));
      heart_.write(ranks_[0], ids_[i], twins_[i].theta);
    }
  }

  void start() {
    ranks_.clear();
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      ranks_.push_back(heart_.attach(job_id_));
      const Status joined = join(ranks_.back(), {.rank = rank, .world_size = kWorld});
      EXPECT_TRUE(joined.is_ok()) << joined.message();
    }
  }
  Status join(uint64_t session, const RankPlace& place) {
    return heart_.job(session).cache().group().join(session, "job", place);
  }
  std::vector<uint32_t> made_by_others(uint32_t rank) {
    return heart_.store().gradients().made_by_other_ranks(ranks_[rank]).value();
  }
  const std::shared_ptr<std::optional<Held>>& answered(
      const std::shared_ptr<std::optional<Held>>& asked) {
    EXPECT_TRUE(heart_.until([&] { return asked->has_value(); }));
    return asked;
  }
  std::shared_ptr<std::optional<Held>> ask(uint32_t rank, size_t i, LeaseMode mode) {
    return heart_.ask(ranks_[rank], ids_[i], mode, Part::gradient);
  }
  std::shared_ptr<std::optional<Held>> ask(uint32_t rank, size_t i, LeaseMode mode, Part part) {
    return heart_.ask(ranks_[rank], ids_[i], mode, part);
  }
  void accumulate(uint32_t rank, size_t i, LeaseMode mode, uint32_t seed) {
    const auto asked = answered(ask(rank, i, mode, Part::rank_sum));
    ASSERT_TRUE((*asked)->is_ok()) << (*asked)->status.message();
    if (mode == LeaseMode::overwrite) std::ranges::fill((*asked)->as<float>(), 0.0F);
    add(asked, seed);
  }
  std::vector<float> own(uint32_t rank, size_t i) {
    const auto asked = answered(ask(rank, i, LeaseMode::read, Part::rank_sum));
    EXPECT_TRUE((*asked)->is_ok()) << (*asked)->status.message();
    const auto held = (*asked)->as<float>();
    const std::vector<float> values(held.begin(), held.end());
    heart_.release(**asked);
    return values;
  }
  const Entry* own_entry(uint32_t rank) {
    return heart_.job(ranks_[0]).shards().find_entry(ids_[0], Part::rank_sum, rank);
  }
  bool is_answered(const std::shared_ptr<std::optional<Held>>& asked) {
    heart_.turns();
    return asked->has_value();
  }
  /// What `asked` was granted gets `seed` added.
  void add(const std::shared_ptr<std::optional<Held>>& asked, uint32_t seed) {
    ASSERT_TRUE(heart_.until([&] { return asked->has_value(); }));
    const Held& held = **asked;
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    const auto values = numbers(kElements, seed);
    for (size_t k = 0; k < kElements; ++k) held.as<float>()[k] += values[k];
    heart_.release(held);
  }
  void add(uint32_t rank, size_t i, uint32_t seed) { add(ask(rank, i, LeaseMode::write), seed); }
  void end(uint32_t rank) {
    const Status ended = heart_.store().gradients().end_of_rank(ranks_[rank]);
    EXPECT_TRUE(ended.is_ok()) << ended.message();
  }
  std::vector<float> sum(const std::vector<uint32_t>& seeds) const {
    std::vector<float> all(kElements, 0.0F);
    for (const uint32_t seed : seeds) {
      const auto values = numbers(kElements, seed);
      for (size_t k = 0; k < kElements; ++k) all[k] += values[k];
    }
    return all;
  }
  StepRequest request(std::vector<uint32_t> shard_ids, uint64_t step = 1) const {
    return {.session_id = ranks_[0],
            .groups = {{.settings = settings_, .shard_ids = std::move(shard_ids)}},
            .staged_buffers = {},
            .step = step,
            .call = step};
  }
  /// Ranks 1 and 2, who close it with rank 0.
  std::vector<StepCall> others(uint64_t call = 1) const {
    return {{.session_id = ranks_[1], .call = call}, {.session_id = ranks_[2], .call = call}};
  }
  Status step(const StepRequest& request, const std::vector<StepCall>& others) {
    std::optional<Status> answer;
    heart_.store().operations().step(
        request, others, [&](const Status& status, const StepReport&) { answer = status; });
    EXPECT_TRUE(heart_.until([&] { return answer.has_value(); }));
    return answer.value_or(Status::ok());
  }
  /// The step that a row of the table may follow: see PinWords.
  uint64_t resident_call(uint32_t rank) {
    const ServerRing& ring = heart_.store().sessions().find(ranks_[rank])->second->ring;
    const auto memory = SharedMemory::map(OwnedFd(dup(ring.session_fd())), sizeof(SessionLayout));
    return reinterpret_cast<const SessionLayout*>(memory.value().data())->header.resident_call;
  }
  std::shared_ptr<std::optional<Held>> ask_value_after(uint32_t rank, uint64_t call) {
    return heart_.ask({.session_id = ranks_[rank],
                       .shard_id = ids_[0],
                       .part = Part::value,
                       .mode = LeaseMode::read,
                       .timeout_ns = 60'000'000'000,
                       .after_call = call});
  }
  static void expect_words(const Status& status, StatusCode code, const std::string& words) {
    EXPECT_EQ(status.code(), code);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }

  Heart heart_{std::make_shared<MemoryDisk>(kDiskBytes), kFloorSegments + 24};
  uint64_t job_id_ = 0;
  std::vector<uint64_t> ranks_;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  const AdamSettings settings_{.lr = 1e-2};
};

TEST_F(RanksTest, they_add_to_a_sum_in_their_order_however_they_ask) {
  const auto last = ask(2, 0, LeaseMode::write);
  const auto middle = ask(1, 0, LeaseMode::write);
  EXPECT_FALSE(is_answered(last));
  EXPECT_FALSE(is_answered(middle));
  add(0, 0, 10);
  EXPECT_FALSE(is_answered(last));
  add(middle, 11);
  add(last, 12);
  for (const uint32_t rank : {0, 1, 2}) end(rank);
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  for (const uint64_t session : ranks_)
    EXPECT_EQ(heart_.read<float>(session, ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, what_a_rank_accumulates_is_its_own_until_it_says_that_all_have_it) {
  accumulate(1, 0, LeaseMode::overwrite, 10);
  accumulate(1, 0, LeaseMode::write, 11);
  accumulate(2, 0, LeaseMode::write, 12);  // its first one: there is zero to add to
  EXPECT_EQ(own(1, 0), sum({10, 11}));
  EXPECT_EQ(own(2, 0), sum({12}));
  // It is no gradient: nobody's step has it, and a rank before them has none.
  const auto missing = answered(ask(0, 0, LeaseMode::read, Part::rank_sum));
  EXPECT_EQ((*missing)->status.code(), StatusCode::not_found);
  EXPECT_EQ((*answered(ask(1, 0, LeaseMode::read)))->status.code(), StatusCode::not_found);
  EXPECT_TRUE(made_by_others(0).empty());
  // Both shards are in one bucket: its bytes go with the last one.
  accumulate(1, 1, LeaseMode::overwrite, 13);
  heart_.store().gradients().end_rank_sum(ranks_[1], ids_[0]);
  EXPECT_EQ((*answered(ask(1, 0, LeaseMode::read, Part::rank_sum)))->status.code(),
            StatusCode::not_found);
  EXPECT_EQ(own(1, 1), sum({13}));
  EXPECT_NE(own_entry(1)->slot(), nullptr);
  end(1);
  EXPECT_EQ(own_entry(1)->slot(), nullptr);
  EXPECT_NE(own_entry(2)->slot(), nullptr);
}

TEST_F(RanksTest, what_a_rank_has_accumulated_goes_when_it_or_all_drop_it_and_with_its_session) {
  for (const uint32_t rank : {0, 1, 2}) accumulate(rank, 0, LeaseMode::overwrite, rank);
  ASSERT_TRUE(heart_.store().gradients().drop(ranks_[0], {ids_[0]}).is_ok());
  EXPECT_EQ(own_entry(0)->slot(), nullptr);
  EXPECT_EQ(own(1, 0), sum({1}));
  ASSERT_TRUE(heart_.store().gradients().drop_of_ranks(ranks_[0], {ids_[0]}).is_ok());
  EXPECT_EQ(own_entry(1)->slot(), nullptr);
  EXPECT_EQ(own_entry(2)->slot(), nullptr);
  accumulate(2, 0, LeaseMode::overwrite, 5);
  const auto kept = ask(2, 0, LeaseMode::read, Part::rank_sum);
  ASSERT_TRUE((*answered(kept))->is_ok());
  const Entry& entry = *own_entry(2);
  ASSERT_TRUE(heart_.store().detach(ranks_[2]).is_ok());
  heart_.turns();
  EXPECT_EQ(entry.slot(), nullptr);
  // Others are told who has ended when they accumulate further.
  const auto refused = answered(ask(1, 0, LeaseMode::overwrite, Part::rank_sum));
  expect_words((*refused)->status, StatusCode::fenced, "rank 2 of 3");
}

TEST_F(RanksTest, only_ranks_accumulate_and_only_gradients_of_parameters) {
  const uint64_t session = heart_.attach(job_id_);
  const auto refused = answered(heart_.ask(session, ids_[0], LeaseMode::write, Part::rank_sum));
  expect_words((*refused)->status, StatusCode::invalid_argument, "no rank");
  const auto unknown = answered(heart_.ask(ranks_[0], 77, LeaseMode::write, Part::rank_sum));
  EXPECT_EQ((*unknown)->status.code(), StatusCode::not_found);
}

TEST_F(RanksTest, a_rank_that_has_ended_its_gradients_is_waited_for_no_longer) {
  const auto last = ask(2, 0, LeaseMode::write);
  end(0);
  EXPECT_FALSE(is_answered(last));
  end(1);
  add(last, 12);
  EXPECT_TRUE(made_by_others(2).empty());
  EXPECT_EQ(made_by_others(0), std::vector{ids_[0]});
  end(2);
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({12}));
  EXPECT_EQ(heart_.read<float>(ranks_[1], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, a_rank_adds_once_to_each_sum_and_none_after_it_has_ended) {
  add(0, 0, 10);
  expect_words((**answered(ask(0, 0, LeaseMode::write))).status,
               StatusCode::invalid_argument,
               "adds one gradient to each sum");
  end(0);
  expect_words((**answered(ask(0, 1, LeaseMode::write))).status,
               StatusCode::invalid_argument,
               "adds one gradient to each sum");
  // When all have, a rank may change the sum, as to clip it.
  end(1);
  end(2);
  add(1, 0, 11);
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({10, 11}));
  EXPECT_EQ(heart_.read<float>(ranks_[2], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, the_end_of_a_rank_voids_its_sums_and_all_others_are_told_which_rank) {
  for (const uint32_t rank : {0, 1}) add(rank, 0, 10 + rank);
  const auto waiting = ask(2, 1, LeaseMode::write);
  EXPECT_FALSE(is_answered(waiting));
  ASSERT_TRUE(heart_.store().detach(ranks_[1]).is_ok());
  EXPECT_TRUE(heart_.job(ranks_[0]).shards()[ids_[0]].contributors.empty());
  const std::string who = "rank 1 of 3 (process 1) has ended";
  expect_words((**answered(waiting)).status, StatusCode::fenced, who);
  expect_words((**answered(ask(0, 1, LeaseMode::write))).status, StatusCode::fenced, who);
  expect_words(heart_.store().gradients().end_of_rank(ranks_[2]), StatusCode::fenced, who);
  expect_words(step(request({}), others()), StatusCode::fenced, who);
  EXPECT_EQ(heart_.job(ranks_[0]).progress().committed_step(), 0U);

  // Nobody takes its place before all have ended. Then they start again, and make the step.
  const uint64_t early = heart_.attach(job_id_);
  expect_words(join(early, {.rank = 1, .world_size = kWorld}), StatusCode::unavailable, who);
  for (const uint64_t session : {ranks_[0], ranks_[2], early})
    ASSERT_TRUE(heart_.store().detach(session).is_ok());
  start();
  for (const uint32_t rank : {0, 1, 2}) {
    add(rank, 0, 20 + rank);
    end(rank);
  }
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({20, 21, 22}));
  EXPECT_EQ(heart_.read<float>(ranks_[1], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, a_step_is_of_all_of_them_and_each_may_lease_after_it) {
  for (const uint32_t rank : {0, 1, 2}) add(rank, 0, 10 + rank);
  expect_words(
      step(request({ids_[0]}), {others()[0]}), StatusCode::invalid_argument, "this one is of 2");
  // A lease that follows the step waits for it, whichever rank asks.
  const auto early = ask_value_after(2, 7);
  EXPECT_FALSE(is_answered(early));
  std::vector<StepCall> calls = others(7);
  StepRequest again = request({ids_[0]});
  again.call = 7;
  ASSERT_TRUE(step(again, calls).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  const Held held = **answered(early);
  ASSERT_TRUE(held.is_ok()) << held.status.message();
  EXPECT_EQ(std::vector<float>(held.as<float>().begin(), held.as<float>().end()), twins_[0].theta);
  heart_.release(held);
}

TEST_F(RanksTest, a_step_that_fails_is_all_of_theirs_to_make_again) {
  for (const uint32_t rank : {0, 1, 2}) {
    add(rank, 0, 10 + rank);
    end(rank);
  }
  const Held held = heart_.lease(ranks_[1], ids_[1], LeaseMode::overwrite);
  ASSERT_FALSE(step(request({ids_[0]}), others()).is_ok());
  expect_words(
      (**answered(ask_value_after(2, 1))).status, StatusCode::invalid_argument, "was not made");
  const auto values = numbers(kElements, 2);
  std::copy(values.begin(), values.end(), held.as<float>().begin());
  heart_.release(held);
  StepRequest again = request({ids_[0]});
  again.call = 2;
  ASSERT_TRUE(step(again, others(2)).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  EXPECT_EQ(heart_.read<float>(ranks_[2], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, a_step_that_they_repeat_is_each_ones_newest_call_whether_it_is_made_or_fails) {
  for (const uint32_t rank : {0, 1, 2}) {
    add(rank, 0, 10 + rank);
    end(rank);
  }
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
  std::optional<Status> first;
  heart_.store().operations().step(
      request({ids_[0]}), others(), [&](const Status& status, const StepReport&) {
        first = status;
      });
  ASSERT_TRUE(heart_.until([&] { return heart_.faults().fault_hit_count() > 0; }));
  ASSERT_FALSE(first.has_value()) << "the disk holds it up";
  StepRequest repeated = request({ids_[0]});
  repeated.call = 5;
  std::optional<Status> second;
  heart_.store().operations().step(
      repeated, others(5), [&](const Status& status, const StepReport&) { second = status; });
  for (const uint32_t rank : {0, 1, 2}) EXPECT_EQ(resident_call(rank), 5U) << rank;
  JobSpace& space = heart_.job(ranks_[0]).space();
  const uint64_t quota_bytes = space.quota_bytes();
  space.set_quota_bytes(space.used_bytes());
  heart_.faults().clear_faults();
  heart_.faults().release_stalled();
  ASSERT_TRUE(heart_.until([&] { return first && second; }));
  ASSERT_EQ(second->code(), StatusCode::capacity) << second->message();
  // None of them goes on with the values of the step before.
  for (const uint32_t rank : {0, 1, 2}) {
    expect_words(
        (**answered(ask_value_after(rank, 5))).status, StatusCode::capacity, "was not made");
  }
  space.set_quota_bytes(quota_bytes);
  repeated.call = 6;
  ASSERT_TRUE(step(repeated, others(6)).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  // Its answer was lost.
  repeated.call = 7;
  ASSERT_TRUE(step(repeated, others(7)).is_ok());
  for (const uint32_t rank : {0, 1, 2}) {
    EXPECT_EQ(resident_call(rank), 7U) << rank;
    EXPECT_EQ(heart_.read<float>(ranks_[rank], ids_[0]), twins_[0].theta);
  }
}

TEST_F(RanksTest, a_repeated_step_that_is_refused_is_a_failed_call_of_each) {
  for (const uint32_t rank : {0, 1, 2}) add(rank, 0, 10 + rank);
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
  std::optional<Status> first;
  heart_.store().operations().step(
      request({ids_[0]}), others(), [&](const Status& status, const StepReport&) {
        first = status;
      });
  StepRequest another = request({ids_[0], ids_[1]});
  another.call = 5;
  expect_words(step(another, others(5)), StatusCode::invalid_argument, "twice, each time over");
  for (const uint32_t rank : {0, 1, 2}) {
    expect_words((**answered(ask_value_after(rank, 5))).status,
                 StatusCode::invalid_argument,
                 "was not made");
  }
  ASSERT_FALSE(first.has_value()) << "the disk holds it up";
  heart_.faults().clear_faults();
  heart_.faults().release_stalled();
  ASSERT_TRUE(heart_.until([&] { return first.has_value(); }));
  ASSERT_TRUE(first->is_ok()) << first->message();
  // Made already, and other gradients have come since.
  for (const uint32_t rank : {0, 1, 2}) add(rank, 0, 20 + rank);
  StepRequest late = request({ids_[0]});
  late.call = 8;
  ASSERT_FALSE(step(late, others(8)).is_ok());
  for (const uint32_t rank : {0, 1, 2}) {
    expect_words((**answered(ask_value_after(rank, 8))).status, StatusCode::fenced, "was not made");
  }
}

TEST_F(RanksTest, gradients_of_the_next_step_are_in_order_again) {
  for (const uint32_t rank : {0, 1, 2}) {
    add(rank, 0, 10 + rank);
    end(rank);
  }
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  const auto second = ask(1, 0, LeaseMode::write);
  EXPECT_FALSE(is_answered(second));
  add(0, 0, 20);
  add(second, 21);
  add(2, 0, 22);
  ASSERT_TRUE(step(request({ids_[0]}, 2), others(2)).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  twins_[0].step(settings_, sum({20, 21, 22}));
  EXPECT_EQ(heart_.read<float>(ranks_[2], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, gradients_that_all_drop_are_made_anew) {
  for (const uint32_t rank : {0, 1, 2}) {
    add(rank, 0, 10 + rank);
    add(rank, 1, 20 + rank);
    end(rank);
  }
  ASSERT_TRUE(heart_.store().gradients().drop_of_ranks(ranks_[0], {ids_[0]}).is_ok());
  const auto second = ask(1, 0, LeaseMode::write);
  EXPECT_FALSE(is_answered(second));
  add(0, 0, 30);
  add(second, 31);
  add(2, 0, 32);
  for (const uint32_t rank : {0, 1, 2}) end(rank);
  ASSERT_TRUE(step(request({ids_[0], ids_[1]}), others()).is_ok());
  twins_[0].step(settings_, sum({30, 31, 32}));
  twins_[1].step(settings_, sum({20, 21, 22}));
  for (const size_t i : {0, 1})
    EXPECT_EQ(heart_.read<float>(ranks_[1], ids_[i]), twins_[i].theta) << i;
}

TEST_F(RanksTest, a_rank_that_comes_late_is_waited_for) {
  for (const uint64_t session : ranks_) ASSERT_TRUE(heart_.store().detach(session).is_ok());
  ranks_ = {0, heart_.attach(job_id_), heart_.attach(job_id_)};
  for (const uint32_t rank : {1, 2})
    ASSERT_TRUE(join(ranks_[rank], {.rank = rank, .world_size = kWorld}).is_ok());
  const auto second = ask(1, 0, LeaseMode::write);
  EXPECT_FALSE(is_answered(second));
  ranks_[0] = heart_.attach(job_id_);
  ASSERT_TRUE(join(ranks_[0], {.rank = 0, .world_size = kWorld}).is_ok());
  EXPECT_FALSE(is_answered(second));
  add(0, 0, 10);
  add(second, 11);
  add(2, 0, 12);
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  EXPECT_EQ(heart_.read<float>(ranks_[1], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, nobody_else_steps_while_ranks_come) {
  for (const uint64_t session : ranks_) ASSERT_TRUE(heart_.store().detach(session).is_ok());
  const uint64_t other = heart_.attach(job_id_);
  StepRequest alone = request({});
  alone.session_id = other;
  for (const uint32_t rank : {0, 1, 2}) {
    ranks_[rank] = heart_.attach(job_id_);
    ASSERT_TRUE(join(ranks_[rank], {.rank = rank, .world_size = kWorld}).is_ok());
    expect_words(heart_.step(alone).first, StatusCode::in_use, "none of the 3 ranks");
  }
  for (const uint32_t rank : {0, 1, 2}) add(rank, 0, 10 + rank);
  ASSERT_TRUE(step(request({ids_[0]}), others()).is_ok());
  twins_[0].step(settings_, sum({10, 11, 12}));
  EXPECT_EQ(heart_.read<float>(ranks_[1], ids_[0]), twins_[0].theta);
}

TEST_F(RanksTest, a_place_is_taken_once_and_by_ranks_of_one_world) {
  const uint64_t other = heart_.attach(job_id_);
  expect_words(join(other, {.rank = 1, .world_size = kWorld}), StatusCode::in_use, "rank 1 of 3");
  expect_words(join(other, {.rank = 1, .world_size = 2}), StatusCode::in_use, "by 3 ranks");
  expect_words(
      join(other, {.rank = 3, .world_size = 3}), StatusCode::invalid_argument, "rank 3 of 3");
  expect_words(join(other, {.rank = 0, .world_size = Ranks::kWorldMax + 1}),
               StatusCode::invalid_argument,
               "at most 16");
  // It is not one of them, and steps with none of their gradients.
  add(0, 0, 10);
  StepRequest alone = request({ids_[0]});
  alone.session_id = other;
  expect_words(heart_.step(alone).first, StatusCode::in_use, "none of the 3 ranks");
  expect_words(
      heart_.store().gradients().end_of_rank(other), StatusCode::invalid_argument, "is no rank");
}

TEST_F(RanksTest, a_sum_that_waits_for_a_rank_too_long_names_it) {
  const auto late = heart_.ask({.session_id = ranks_[2],
                                .shard_id = ids_[0],
                                .part = Part::gradient,
                                .mode = LeaseMode::write,
                                .timeout_ns = 1'000'000});
  add(0, 0, 10);
  heart_.clock.advance(2'000'000);
  expect_words((**answered(late)).status,
               StatusCode::deadline,
               "the part of another rank in job/v gradient");
  EXPECT_NE((**late).status.message().find("rank 1 of 3 (process 1)"), std::string::npos);
}

}  // namespace
}  // namespace memd
