#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/failpoint.h"
#include "powercut/corruption.h"
#include "powercut/explorer.h"
#include "powercut/recording.h"

namespace memd::powercut {
namespace {

constexpr uint64_t kOperations = 14;
constexpr uint64_t kSnapshotOperations = 24;
// In the last of them two commits overlap so closely that extents which are released too early are
// used again by the other job before the superblock is durable.
constexpr uint64_t kSeedFirst = 3;
constexpr uint64_t kSeeds = 8;
// In some of them a job of tier host goes back to a snapshot, and trains past one that it has left.
constexpr uint64_t kHostSeedFirst = 12;
constexpr uint64_t kStates = 40'000;
constexpr uint64_t kImages = 2'000;

/// A test that a planted bug has to fail: see base/failpoint.h.
void plant_what_is_asked_for() {
#ifdef MEMD_FAULTS
  const char* const name = std::getenv("MEMD_PLANT");
  failpoint::plant(name == nullptr ? "" : name);
#endif
}

std::string all_of(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += text + "\n";
  return all;
}

class PowerCut : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { plant_what_is_asked_for(); }
};

TEST_P(PowerCut, every_state_is_the_acknowledged_operation_or_the_one_under_way) {
  const Recording recording = record(GetParam(), kOperations);
  ASSERT_EQ(recording.fault, "");
  const ExploreResult result = explore(recording,
                                       {.state_count = kStates / kSeeds,
                                        .exhaustive_operations = 3,
                                        .read_all_every = 250,
                                        .seed = 1,
                                        .progress = {}});
  EXPECT_EQ(result.violation_count, 0u) << all_of(result.violations);
  EXPECT_GE(result.state_count, kStates / kSeeds);
  EXPECT_GT(result.exhaustive_count, 1'000u);
  EXPECT_GT(result.torn_count, 1'000u);
  EXPECT_GT(result.before_count, 1'000u);
  EXPECT_GT(result.after_count, 20u);
  EXPECT_GT(result.read_all_count, 5u);
  RecordProperty("states", static_cast<int>(result.state_count));
}

TEST_P(PowerCut, damaged_bytes_are_errors_that_name_what_is_lost) {
  const Recording recording = record(GetParam(), kOperations);
  ASSERT_EQ(recording.fault, "");
  const CorruptResult result = corrupt(
      recording, {.count = kImages / kSeeds, .seed = 1, .read_all_every = 10, .progress = {}});
  EXPECT_EQ(result.violation_count, 0u) << all_of(result.violations);
  EXPECT_EQ(result.count, kImages / kSeeds);
  EXPECT_GT(result.whole_count, 10u);
  EXPECT_GT(result.lost_count, 10u);
  EXPECT_GT(result.refused_count, 10u);
  EXPECT_GT(result.read_all_count, 5u);
}

TEST(PowerCutEarly, what_was_updated_before_its_step_is_closed_changes_no_state) {
  plant_what_is_asked_for();
  uint64_t adopted = 0;
  uint64_t discarded = 0;
  for (uint64_t seed = kSeedFirst; seed < kSeedFirst + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Recording recording = record(seed, kOperations, {.early = true});
    ASSERT_EQ(recording.fault, "");
    adopted += recording.early_adopted;
    discarded += recording.early_discarded;
    const ExploreResult result = explore(recording,
                                         {.state_count = kStates / kSeeds / 2,
                                          .exhaustive_operations = 2,
                                          .read_all_every = 250,
                                          .seed = 1,
                                          .progress = {}});
    EXPECT_EQ(result.violation_count, 0u) << all_of(result.violations);
    EXPECT_GE(result.state_count, kStates / kSeeds / 2);
    EXPECT_GT(result.before_count, 500u);
    EXPECT_GT(result.after_count, 10u);
  }
  EXPECT_GT(adopted, 40u);
  EXPECT_GT(discarded, 10u);
}

TEST(PowerCutRestarts, what_a_restarted_daemon_found_is_what_a_power_cut_leaves) {
  plant_what_is_asked_for();
  uint64_t restarts = 0;
  uint64_t found_after = 0;
  for (uint64_t seed = kSeedFirst; seed < kSeedFirst + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Recording recording =
        record(seed, kOperations, {.early = seed / 2 % 2 == 0, .restarts = true});
    ASSERT_EQ(recording.fault, "");
    restarts += recording.restart_count;
    found_after += recording.found_after_count;
    const ExploreResult result = explore(recording,
                                         {.state_count = kStates / kSeeds,
                                          .exhaustive_operations = 2,
                                          .read_all_every = 250,
                                          .seed = 1,
                                          .progress = {}});
    ASSERT_EQ(result.violation_count, 0u) << all_of(result.violations);
    EXPECT_GE(result.state_count, kStates / kSeeds);
  }
  EXPECT_GT(restarts, 30u);
  EXPECT_GT(found_after, 10u) << "commits that only the drive's cache held";
}

TEST(PowerCutSnapshots, each_is_whole_or_absent_and_its_job_at_a_commit) {
  plant_what_is_asked_for();
  uint64_t kept = 0;
  for (uint64_t seed = kSeedFirst; seed < kSeedFirst + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Recording recording =
        record(seed, kSnapshotOperations, {.restarts = seed % 2 == 0, .snapshots = true});
    ASSERT_EQ(recording.fault, "");
    for (const SetState& state : recording.states)
      kept += std::any_of(state.begin(), state.end(), is_snapshot) ? 1 : 0;
    const ExploreResult result = explore(recording,
                                         {.state_count = kStates / kSeeds,
                                          .exhaustive_operations = 2,
                                          .read_all_every = 250,
                                          .seed = 1,
                                          .progress = {}});
    ASSERT_EQ(result.violation_count, 0u) << all_of(result.violations);
    EXPECT_GE(result.state_count, kStates / kSeeds);
  }
  EXPECT_GT(kept, 40u);
}

TEST(PowerCutHostTier, the_whole_job_is_at_its_last_snapshot_or_has_none) {
  plant_what_is_asked_for();
  uint64_t kept = 0;
  uint64_t lost = 0;
  uint64_t older = 0;
  for (uint64_t seed = kHostSeedFirst; seed < kHostSeedFirst + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Recording recording =
        record(seed, kSnapshotOperations, {.snapshots = true, .host = true});
    ASSERT_EQ(recording.fault, "");
    older += recording.older_snapshot_count;
    for (const SetState& state : recording.states) {
      for (const JobState& job : state) {
        if (job.name == "train") ++(job.shards.empty() ? lost : kept);
      }
    }
    const ExploreResult result = explore(recording,
                                         {.state_count = kStates / kSeeds,
                                          .exhaustive_operations = 2,
                                          .read_all_every = 250,
                                          .seed = 1,
                                          .progress = {}});
    ASSERT_EQ(result.violation_count, 0u) << all_of(result.violations);
    EXPECT_GE(result.state_count, kStates / kSeeds);
  }
  EXPECT_GT(kept, 40u);
  EXPECT_GT(lost, 20u);
  EXPECT_GT(older, 2u) << "snapshots that a job went back to, before one that it left";
}

class PowerCutLoads : public ::testing::TestWithParam<bool> {};

TEST_P(PowerCutLoads, leave_the_job_that_was_there_or_all_of_the_other) {
  plant_what_is_asked_for();
  for (uint64_t seed = kSeedFirst; seed < kSeedFirst + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    const Recording recording =
        record(seed,
               kSnapshotOperations,
               {.restarts = !GetParam() && seed % 2 == 0, .host = GetParam(), .loads = true});
    ASSERT_EQ(recording.fault, "");
    const ExploreResult result = explore(recording,
                                         {.state_count = kStates / kSeeds / 4,
                                          .exhaustive_operations = 2,
                                          .read_all_every = 100,
                                          .seed = 1,
                                          .progress = {}});
    ASSERT_EQ(result.violation_count, 0u) << all_of(result.violations);
    EXPECT_GE(result.state_count, kStates / kSeeds / 4);
    EXPECT_GT(result.before_count, 0u);
    EXPECT_GT(result.after_count, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(WithoutAndWithTierHost, PowerCutLoads, ::testing::Bool());

INSTANTIATE_TEST_SUITE_P(Seeds, PowerCut, ::testing::Range(kSeedFirst, kSeedFirst + kSeeds));

TEST(PowerCutRecording, the_same_seed_gives_the_same_events_and_bytes) {
  plant_what_is_asked_for();
  const Recording one = record(5, kOperations);
  const Recording two = record(5, kOperations);
  ASSERT_EQ(one.fault, "");
  ASSERT_EQ(one.events.size(), two.events.size());
  for (size_t i = 0; i < one.events.size(); ++i) {
    ASSERT_EQ(one.events[i].kind, two.events[i].kind) << i;
    ASSERT_EQ(one.events[i].index, two.events[i].index) << i;
  }
  EXPECT_EQ(one.image(), two.image());
  EXPECT_NE(one.image(), record(7, kOperations).image());
}

TEST(PowerCutRecording, what_is_freed_is_used_again_within_few_operations) {
  plant_what_is_asked_for();
  const Recording recording = record(2, kOperations);
  ASSERT_EQ(recording.fault, "");
  const uint64_t superblocks_end = 2 * 1024 * 1024;
  uint64_t again_count = 0;
  for (size_t i = 0; i < recording.writes.size(); ++i) {
    const RecordedWrite& write = recording.writes[i];
    if (write.begin_bytes < superblocks_end) continue;
    for (size_t j = 0; j < i; ++j) {
      const RecordedWrite& earlier = recording.writes[j];
      again_count += earlier.begin_bytes < write.begin_bytes + write.bytes.size() &&
                     write.begin_bytes < earlier.begin_bytes + earlier.bytes.size();
    }
  }
  EXPECT_GT(again_count, 20u);
}

}  // namespace
}  // namespace memd::powercut
