// Time of the server thread's turns, and of the phases of the longest ones.
#include "server/turn_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "asking_client.h"
#include "base/clock.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr double kLongS = 2e-3;
constexpr double kShortS = 2e-4;

double& at(TurnPhaseSeconds& seconds, TurnPhase phase) {
  return seconds[static_cast<size_t>(phase)];
}

/// On the processor.
void be_busy(double seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < until) {
  }
}

TEST(TurnClock, the_longest_turn_is_split_into_its_phases) {
  TurnClock clock;
  clock.begin();
  be_busy(kShortS);
  clock.phases().end(TurnPhase::io);
  be_busy(kLongS);
  clock.phases().end(TurnPhase::serve);
  clock.end();

  TurnPhaseSeconds seconds = clock.statistics().phases_of_wall_max;
  EXPECT_GE(at(seconds, TurnPhase::io), kShortS);
  EXPECT_GE(at(seconds, TurnPhase::serve), kLongS);
  EXPECT_EQ(at(seconds, TurnPhase::leases), 0);
  // The clock of the turn is read outside its phases.
  EXPECT_LE(std::accumulate(seconds.begin(), seconds.end(), 0.0),
            clock.statistics().wall_seconds_max + 1e-6);
  EXPECT_EQ(clock.statistics().phases_of_cpu_max, seconds);
}

TEST(TurnClock, a_shorter_turn_replaces_no_phase_of_a_longer_one) {
  TurnClock clock;
  clock.begin();
  be_busy(kLongS);
  clock.phases().end(TurnPhase::serve);
  clock.end();
  const TurnPhaseSeconds longest = clock.statistics().phases_of_cpu_max;
  clock.phases().end(TurnPhase::work);
  clock.end();
  EXPECT_EQ(clock.statistics().phases_of_cpu_max, longest);
}

TEST(TurnClock, a_turn_that_waits_takes_no_processor_time) {
  TurnClock clock;
  clock.begin();
  std::this_thread::sleep_for(std::chrono::duration<double>(kLongS));
  clock.end();
  EXPECT_GE(clock.statistics().wall_seconds_max, kLongS);
  EXPECT_LT(clock.statistics().cpu_seconds_max, kLongS / 2);
}

TEST(TurnClock, idle_turns_before_it_do_not_count_as_the_processor_time_of_a_turn) {
  TurnClock clock;
  const uint64_t until_ns = clock.begin() + static_cast<uint64_t>(2 * kLongS * 1e9);
  while (clock.begin() < until_ns) {
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(kLongS));
  clock.end();
  EXPECT_LT(clock.statistics().cpu_seconds_max, kLongS / 2);
}

TEST(TurnClock, a_turn_that_ends_another_begins_where_that_ended) {
  TurnClock clock;
  clock.begin();
  be_busy(kLongS);
  clock.end();
  be_busy(kShortS);
  clock.end();
  const TurnStatistics& turns = clock.statistics();
  EXPECT_EQ(turns.wall_seconds.count(), 2u);
  EXPECT_GE(turns.wall_seconds.sum_seconds(), kLongS + kShortS);
  EXPECT_GE(turns.wall_seconds.sum_seconds(), turns.cpu_seconds.sum_seconds());
}

TEST(TurnClock, a_phase_that_a_turn_has_twice_is_summed) {
  TurnPhases phases;
  phases.begin(SteadyClock().now_ns());
  for (int i = 0; i < 2; ++i) {
    be_busy(kShortS);
    phases.end(TurnPhase::tiles);
  }
  TurnPhaseSeconds seconds = phases.seconds();
  EXPECT_GE(at(seconds, TurnPhase::tiles), 2 * kShortS);
}

TEST(TurnClock, the_store_ends_the_phases_that_had_something_to_do) {
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t session = heart.attach(heart.open("job"));
  const uint32_t shard_id = heart.declare(
      session,
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  heart.write(session, shard_id, std::vector<float>(64, 1.0F));
  AskingClient client(heart, session);
  while (heart.store().advance()) {
  }

  TurnPhases phases;
  phases.begin(SteadyClock().now_ns());
  EXPECT_FALSE(heart.store().advance(phases));
  EXPECT_EQ(phases.seconds(), TurnPhaseSeconds{});

  client.ask(shard_id, 1);
  EXPECT_TRUE(heart.store().advance(phases));
  EXPECT_EQ(client.answered_count(), 1u);
  TurnPhaseSeconds seconds = phases.seconds();
  EXPECT_GT(at(seconds, TurnPhase::serve), 0);
  EXPECT_EQ(at(seconds, TurnPhase::operations), 0);
}

}  // namespace
}  // namespace memd::testing
