// Whose turn it is, and how much each job gets: the rule alone, without a device or a thread.
#include "base/job_turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "base/units.h"
#include "base/work_queue.h"

namespace memd::testing {
namespace {

constexpr JobId kA{1};
constexpr JobId kB{2};
constexpr JobId kC{3};

/// Each turn costs what `cost` says of the job, until all have spent `all`; what each spent.
std::map<JobId, uint64_t> spend(JobTurns& turns, uint64_t all, const auto& cost) {
  std::map<JobId, uint64_t> spent;
  for (uint64_t done = 0; done < all;) {
    const JobId job = turns.next().value();
    const uint64_t bytes = cost(job);
    turns.spend(job, bytes);
    spent[job] += bytes;
    done += bytes;
  }
  return spent;
}

double part(std::map<JobId, uint64_t>& spent, JobId job) {
  uint64_t all = 0;
  for (const auto& [each, bytes] : spent) all += bytes;
  return static_cast<double>(spent[job]) / static_cast<double>(all);
}

constexpr auto kMiB = [](JobId) { return 1_MiB; };

TEST(JobTurns, equal_jobs_get_the_same_whatever_the_size_of_what_they_do) {
  JobTurns turns(1_MiB);
  turns.want(kA);
  turns.want(kB);
  auto spent = spend(turns, 1000_MiB, [](JobId job) { return job == kA ? 4_KiB : 1_MiB; });
  EXPECT_NEAR(part(spent, kA), 0.5, 0.01);
}

TEST(JobTurns, weights_are_parts) {
  for (const auto [a, b] : {std::pair(3.0, 1.0), std::pair(10.0, 0.1), std::pair(0.25, 0.75)}) {
    JobTurns turns(1_MiB);
    turns.set_weight(kA, JobWeight::of(a).value());
    turns.want(kA);
    turns.want(kB);
    turns.set_weight(kB, JobWeight::of(b).value());
    std::minstd_rand dice(7);
    auto spent = spend(turns, 10000_MiB, [&](JobId) { return (1 + dice() % 256) * 4_KiB; });
    EXPECT_NEAR(part(spent, kA), a / (a + b), 0.01) << a << " to " << b;
  }
}

TEST(JobTurns, a_job_saves_nothing_up_while_it_wants_nothing) {
  JobTurns turns(1_MiB);
  turns.want(kA);
  turns.want(kB);
  spend(turns, 10_MiB, kMiB);
  turns.leave(kB);
  EXPECT_EQ(spend(turns, 1000_MiB, kMiB)[kA], 1000_MiB);
  turns.want(kB);
  auto spent = spend(turns, 20_MiB, kMiB);
  EXPECT_LE(spent[kB], 11_MiB);
  EXPECT_GE(spent[kB], 9_MiB);
}

TEST(JobTurns, who_was_away_for_a_round_is_next) {
  JobTurns turns(1_MiB);
  for (uint64_t id = 1; id <= 100; ++id) turns.want({id});
  spend(turns, 250_MiB, kMiB);
  turns.want({1000});
  EXPECT_EQ(turns.next(), JobId{1000});
}

TEST(JobTurns, small_things_one_after_the_other_are_first_until_they_are_a_quantum) {
  JobTurns turns(1_MiB);
  for (uint64_t id = 1; id <= 10; ++id) turns.want({id});
  spend(turns, 20_MiB, kMiB);
  for (int i = 0; i < 16; ++i) {
    turns.want(kDaemonJob);
    ASSERT_EQ(turns.next(), kDaemonJob) << i;
    turns.spend(kDaemonJob, 64_KiB);
    turns.leave(kDaemonJob);
    turns.spend(turns.next().value(), 64_KiB);
  }
  turns.want(kDaemonJob);
  EXPECT_NE(turns.next(), kDaemonJob);
}

TEST(JobTurns, who_leaves_after_each_thing_gets_no_more_than_its_part) {
  for (const double weight : {1.0, 0.1}) {
    JobTurns turns(1_MiB);
    turns.set_weight(kC, JobWeight::of(weight).value());
    turns.want(kA);
    turns.want(kB);
    uint64_t by_c = 0;
    uint64_t all = 0;
    turns.want(kC);
    for (; all < 3000_MiB; all += 1_MiB) {
      const JobId job = turns.next().value();
      turns.spend(job, 1_MiB);
      if (job != kC) continue;
      by_c += 1_MiB;
      turns.leave(kC);
      turns.want(kC);
    }
    EXPECT_LE(static_cast<double>(by_c) / static_cast<double>(all), 1.02 * weight / (2 + weight));
  }
}

TEST(JobTurns, who_does_one_thing_after_the_other_gets_its_part_and_no_more) {
  // It comes back as soon as somebody else had a turn.
  JobTurns turns(1_MiB);
  turns.set_weight(kB, JobWeight::of(0.1).value());
  turns.want(kA);
  std::map<JobId, uint64_t> spent;
  bool is_away = true;
  for (int i = 0; i < 10000; ++i) {
    if (std::exchange(is_away, false)) turns.want(kB);
    const JobId job = turns.next().value();
    turns.spend(job, 1_MiB);
    spent[job] += 1_MiB;
    if (job == kB) {
      turns.leave(kB);
    } else {
      is_away = true;
    }
  }
  EXPECT_NEAR(part(spent, kB), 0.1 / 1.1, 0.01);
}

TEST(JobTurns, who_is_held_keeps_nobody_waiting_and_goes_on_where_it_was) {
  JobTurns turns(2_MiB);
  turns.want(kA);
  turns.want(kB);
  ASSERT_EQ(turns.next(), kA);
  turns.spend(kA, 1_MiB);
  ASSERT_EQ(turns.next(), kA);
  turns.hold(kA);
  EXPECT_EQ(spend(turns, 10_MiB, kMiB)[kB], 10_MiB);
  ASSERT_EQ(turns.next(), kB);
  turns.hold(kB);
  EXPECT_EQ(turns.next(), std::nullopt);
  turns.resume(kA);
  EXPECT_EQ(turns.next(), kA);
  turns.resume(kB);
  auto spent = spend(turns, 100_MiB, kMiB);
  EXPECT_NEAR(part(spent, kA), 0.5, 0.06);
}

TEST(JobTurns, holding_and_resuming_gains_nothing) {
  JobTurns turns(1_MiB);
  turns.want(kA);
  turns.want(kB);
  std::map<JobId, uint64_t> spent;
  for (int i = 0; i < 1000; ++i) {
    JobId job = turns.next().value();
    const bool is_held = job == kA && i % 3 == 0;
    if (is_held) turns.hold(kA);
    if (is_held) job = turns.next().value();
    turns.spend(job, 1_MiB);
    spent[job] += 1_MiB;
    if (is_held) turns.resume(kA);
  }
  EXPECT_NEAR(part(spent, kA), 0.5, 0.01);
}

TEST(JobTurns, a_share_counts_who_was_there_a_moment_ago_and_never_the_daemon) {
  JobTurns turns(1_MiB);
  turns.want(kA);
  turns.want(kDaemonJob);
  EXPECT_EQ(turns.share(kA, 300), 300u);
  EXPECT_EQ(turns.share(kDaemonJob, 300), 300u);
  EXPECT_TRUE(turns.is_alone(kA));
  EXPECT_FALSE(turns.is_alone(kDaemonJob));
  turns.set_weight(kB, JobWeight::of(2).value());
  turns.want(kB);
  EXPECT_EQ(turns.share(kA, 300), 100u);
  EXPECT_EQ(turns.share(kB, 300), 200u);
  EXPECT_FALSE(turns.is_alone(kA));
  turns.leave(kDaemonJob);
  turns.leave(kB);
  spend(turns, 3 * JobTurns::kRoundsKept * 1_MiB - 1_MiB, kMiB);
  EXPECT_EQ(turns.share(kA, 300), 100u);
  EXPECT_FALSE(turns.is_alone(kA));
  spend(turns, 1_MiB, kMiB);
  EXPECT_EQ(turns.share(kA, 300), 300u);
  EXPECT_TRUE(turns.is_alone(kA));
}

TEST(JobWeight, a_weight_out_of_range_is_refused_in_one_sentence) {
  for (const double bad : {0.0,
                           -1.0,
                           0.099,
                           10.01,
                           1e300,
                           std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity()}) {
    const auto weight = JobWeight::of(bad);
    ASSERT_FALSE(weight.is_ok()) << bad;
    EXPECT_EQ(weight.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(weight.status().message().find("a job's weight is a number from 0.1 to 10: "),
              std::string::npos)
        << weight.status().message();
  }
  EXPECT_EQ(JobWeight::of(0.1).value().code(), 100u);
  EXPECT_EQ(JobWeight::of(10).value().code(), 10000u);
  EXPECT_EQ(JobWeight::of(1).value(), JobWeight());
  EXPECT_EQ(JobWeight::of(2.5004).value().value(), 2.5);
}

class Works : public ::testing::Test {
 protected:
  void add(JobId job, uint64_t bytes, int tag = 0, WorkKind kind = WorkKind::update) {
    queue_.add({.order = {.job = job, .bytes = bytes, .kind = kind},
                .work = [] {},
                .done = [this, tag] { order_.push_back(tag); }});
  }
  JobId take() {
    const auto work = queue_.take();
    EXPECT_TRUE(work.has_value());
    if (!work) return {};
    work->done();
    return work->order.job;
  }

  WorkQueue queue_;
  std::vector<int> order_;
};

TEST_F(Works, a_tile_does_not_wait_for_all_tiles_of_another_job) {
  for (int i = 0; i < 10000; ++i) add(kA, 3_MiB);
  for (int i = 0; i < 100; ++i) take();
  add(kB, 3_MiB);
  EXPECT_EQ(take(), kB);
}

TEST_F(Works, a_jobs_own_work_is_done_in_its_order) {
  for (int i = 0; i < 50; ++i) {
    add(kA, 3_MiB, i);
    add(kB, 1_MiB, 1000 + i);
  }
  for (int i = 0; i < 100; ++i) take();
  EXPECT_EQ(queue_.take().has_value(), false);
  EXPECT_TRUE(queue_.is_empty());
  std::vector<int> of_a, of_b;
  for (const int tag : order_) (tag < 1000 ? of_a : of_b).push_back(tag);
  EXPECT_TRUE(std::is_sorted(of_a.begin(), of_a.end()));
  EXPECT_TRUE(std::is_sorted(of_b.begin(), of_b.end()));
}

TEST_F(Works, bytes_that_somebody_waits_for_go_before_updates_of_the_same_job_only) {
  for (int i = 0; i < 4; ++i) {
    add(kA, 3_MiB, 1);
    add(kB, 3_MiB, 3);
  }
  for (int i = 0; i < 4; ++i) add(kA, 3_MiB, 2, WorkKind::bytes);
  std::array<int, 2> count{};
  for (int i = 0; i < 8; ++i) ++count[take() == kA ? 0 : 1];
  EXPECT_EQ(count[0], 4);
  std::erase(order_, 3);
  EXPECT_EQ(order_, std::vector<int>(4, 2));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(take(), kA);
}

TEST_F(Works, jobs_that_always_have_work_get_bytes_by_weight) {
  queue_.set_weight(kA, JobWeight::of(3).value());
  for (int i = 0; i < 4000; ++i) {
    add(kA, 3_MiB);
    add(kB, 1_MiB);
    add(kB, 512_KiB);
  }
  std::map<JobId, uint64_t> done;
  for (int i = 0; i < 4000; ++i) {
    const auto work = queue_.take();
    done[work->order.job] += work->order.bytes;
  }
  EXPECT_NEAR(part(done, kA), 0.75, 0.01);
}

}  // namespace
}  // namespace memd::testing
