// The order in which entries go where several sessions of a job have plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "store/cache/eviction.h"

namespace memd {
namespace {

constexpr uint32_t kEntries = 60;

/// One session that uses the same entries in each step, in an order of its own.
class Trainer {
 public:
  Trainer(FarthestNextUse& policy, uint32_t seed) : policy_(policy) {
    std::mt19937 random(seed);
    for (uint32_t i = 0; i < kEntries; ++i) {
      if (random() % 3 != 0) uses_.push_back({.item = i});
    }
    std::shuffle(uses_.begin(), uses_.end(), random);
    policy_.add(&plan);
  }
  ~Trainer() { policy_.remove(&plan); }

  /// The next use of its step.
  void use() {
    const PlanUse& use = uses_[position_];
    plan.use(use.item, use.kind);
    if (++position_ == uses_.size()) {
      position_ = 0;
      plan.cut({});
      plan.end_period([](const PlanUse&) { return true; });
    }
    policy_.followed(plan, std::array{use.item});
  }
  void step() {
    for (size_t i = 0; i < uses_.size(); ++i) use();
  }

  SessionPlan plan{std::make_shared<PlanBook>()};

 private:
  FarthestNextUse& policy_;
  std::vector<PlanUse> uses_;
  size_t position_ = 0;
};

class EvictionOrderTest : public ::testing::Test {
 protected:
  EvictionOrderTest() {
    for (uint32_t i = 0; i < kEntries; ++i) policy_.used(i, EvictionPrice::clean);
  }
  uint64_t distance(uint32_t entry_id) const {
    uint64_t nearest = kNeverUsed;
    for (const auto& trainer : trainers_)
      nearest = std::min(nearest, trainer->plan.distance(entry_id));
    return nearest;
  }
  /// All that are not aside, each once, and the one whose first use is farthest goes first.
  void expect_in_order(const std::set<uint32_t>& aside = {}) {
    std::set<uint32_t> met;
    uint64_t before = kNeverUsed;
    policy_.in_order(EvictionPrice::clean, [&](uint32_t entry_id, uint64_t told) {
      EXPECT_TRUE(met.insert(entry_id).second) << entry_id;
      EXPECT_EQ(told, distance(entry_id)) << entry_id;
      EXPECT_LE(told, before) << entry_id;
      before = told;
      return true;
    });
    EXPECT_EQ(met.size() + aside.size(), kEntries);
    for (const uint32_t each : aside) EXPECT_FALSE(met.contains(each));
  }

  FarthestNextUse policy_;
  std::vector<std::unique_ptr<Trainer>> trainers_;
};

TEST_F(EvictionOrderTest, the_session_that_needs_an_entry_first_counts_however_far_each_has_come) {
  std::mt19937 random(5);
  for (uint32_t seed = 0; seed < 3; ++seed)
    trainers_.push_back(std::make_unique<Trainer>(policy_, seed));
  for (const auto& trainer : trainers_) {
    for (int i = 0; i < 3; ++i) trainer->step();
    ASSERT_TRUE(trainer->plan.cursor().has_plan());
  }
  expect_in_order();
  for (int round = 0; round < 300; ++round) {
    // One may stand still while others go on.
    for (const auto& trainer : trainers_) {
      for (uint32_t i = random() % 8; i > 0 && random() % 2 == 0; --i) trainer->use();
    }
    expect_in_order();
  }
  trainers_.pop_back();
  expect_in_order();
}

TEST_F(EvictionOrderTest, what_is_aside_is_met_by_nobody_until_it_is_put_back) {
  for (uint32_t seed = 0; seed < 2; ++seed) {
    trainers_.push_back(std::make_unique<Trainer>(policy_, seed));
    for (int i = 0; i < 3; ++i) trainers_.back()->step();
  }
  expect_in_order();
  policy_.set_aside(7);
  policy_.set_aside(8);
  expect_in_order({7, 8});
  trainers_[0]->step();
  expect_in_order({7, 8});
  policy_.put_back(7);
  expect_in_order({8});
}

TEST_F(EvictionOrderTest, who_stopped_goes_on_behind_what_it_met) {
  for (uint32_t seed = 0; seed < 2; ++seed) {
    trainers_.push_back(std::make_unique<Trainer>(policy_, seed));
    for (int i = 0; i < 3; ++i) trainers_.back()->step();
  }
  EvictionCursor cursor;
  std::set<uint32_t> met;
  for (size_t call = 0; call < kEntries / 4; ++call) {
    int count = 0;
    policy_.in_order(EvictionPrice::clean, cursor, [&](uint32_t entry_id, uint64_t) {
      EXPECT_TRUE(met.insert(entry_id).second) << entry_id;
      return ++count < 4;
    });
  }
  EXPECT_EQ(met.size(), kEntries);
}

}  // namespace
}  // namespace memd
