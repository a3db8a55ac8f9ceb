#include "base/histogram.h"

#include <gtest/gtest.h>

#include <numeric>

namespace memd {
namespace {

TEST(SecondsHistogram, bounds_are_powers_of_two_from_the_first) {
  EXPECT_DOUBLE_EQ(kIoSecondsBounds.front(), 62.5e-6);
  EXPECT_DOUBLE_EQ(kIoSecondsBounds.back(), 2.048);
  EXPECT_DOUBLE_EQ(kStepSecondsBounds.front(), 0.001);
  EXPECT_DOUBLE_EQ(kStepSecondsBounds.back(), 32.768);
}

TEST(SecondsHistogram, a_duration_falls_below_its_bound_and_the_slowest_above_all) {
  SecondsHistogram histogram(kStepSecondsBounds);
  histogram.add(0);
  histogram.add(0.001);  // a bound belongs to the bucket it closes
  histogram.add(0.0011);
  histogram.add(1000);
  EXPECT_EQ(histogram.counts()[0], 2U);
  EXPECT_EQ(histogram.counts()[1], 1U);
  EXPECT_EQ(histogram.counts().back(), 1U);
  EXPECT_EQ(std::accumulate(histogram.counts().begin(), histogram.counts().end(), uint64_t{0}),
            histogram.count());
  EXPECT_DOUBLE_EQ(histogram.sum_seconds(), 1000.0021);
}

}  // namespace
}  // namespace memd
