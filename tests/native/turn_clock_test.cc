// Time of the server thread's turns, and of the phases of the longest ones.
#include "server/turn_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <numeric>

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

TEST(TurnClock, a_phase_that_a_turn_has_twice_is_summed) {
  TurnPhases phases;
  phases.begin();
  for (int i = 0; i < 2; ++i) {
    be_busy(kShortS);
    phases.end(TurnPhase::tiles);
  }
  TurnPhaseSeconds seconds = phases.seconds();
  EXPECT_GE(at(seconds, TurnPhase::tiles), 2 * kShortS);
}

TEST(TurnClock, the_store_ends_each_of_its_phases) {
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  heart.attach(heart.open("job"));
  TurnPhases phases;
  phases.begin();
  heart.store().advance(phases);
  TurnPhaseSeconds seconds = phases.seconds();
  for (const TurnPhase phase : {TurnPhase::serve,
                                TurnPhase::tiles,
                                TurnPhase::leases,
                                TurnPhase::prefetch,
                                TurnPhase::operations,
                                TurnPhase::upkeep}) {
    EXPECT_GT(at(seconds, phase), 0) << kTurnPhaseNames[static_cast<size_t>(phase)];
  }
}

}  // namespace
}  // namespace memd::testing
