// Plans: what is recorded, how a session is followed through it, and what should go first.
#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "plan/next_use_order.h"
#include "plan/plan_book.h"
#include "plan/simulation.h"

namespace memd {
namespace {

constexpr uint32_t kGradients = 1000;  // the gradient of item i

bool is_gradient(const PlanUse& use) { return use.item >= kGradients; }

std::vector<PlanUse> forward(uint32_t count, uint32_t first = 0) {
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < count; ++i) uses.push_back({.item = first + i});
  return uses;
}

std::vector<PlanUse> training_step(uint32_t count) {
  std::vector<PlanUse> uses = forward(count);
  for (uint32_t i = count; i-- > 0;) {
    uses.push_back({.item = i});
    uses.push_back({.item = kGradients + i, .kind = UseKind::overwrite});
  }
  return uses;
}

std::vector<PlanUse> updates(uint32_t count) {
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < count; ++i) {
    uses.push_back({.item = i, .kind = UseKind::change});
    uses.push_back({.item = kGradients + i, .kind = UseKind::last});
  }
  return uses;
}

/// A session, and how its uses were seen.
struct Trainer {
  std::shared_ptr<PlanBook> book = std::make_shared<PlanBook>();
  PlanCursor cursor{book};
  std::map<PlanCursor::Seen, uint32_t> seen;

  void use(const std::vector<PlanUse>& uses) {
    for (const PlanUse& use : uses) ++seen[cursor.use(use.item, use.kind)];
  }
  void step(uint32_t count) {
    use(training_step(count));
    cursor.end_step(is_gradient, updates(count));
    cursor.end_updates();
  }
  /// Of uses that were not of the plan, since the last call.
  uint32_t missed() {
    const uint32_t count = seen[PlanCursor::Seen::moved] + seen[PlanCursor::Seen::stranger] +
                           seen[PlanCursor::Seen::unknown];
    seen.clear();
    return count;
  }
};

TEST(Plan, knows_the_next_use_of_everything) {
  const Plan plan({{.item = 7}, {.item = 3}, {.item = 7}, {.item = 9}, {.item = 3}});
  EXPECT_EQ(plan.next_of_same(0), 2u);
  EXPECT_EQ(plan.next_of_same(1), 4u);
  EXPECT_EQ(plan.next_of_same(2), std::nullopt);
  EXPECT_EQ(plan.first_from(7, 0), 0u);
  EXPECT_EQ(plan.first_from(7, 1), 2u);
  EXPECT_EQ(plan.first_from(7, 3), std::nullopt);
  EXPECT_EQ(plan.first_from(8, 0), std::nullopt);
  EXPECT_EQ(plan.positions(3).size(), 2u);
  EXPECT_EQ(Plan({}).first_from(1, 0), std::nullopt);
}

TEST(Plan, tells_the_uses_by_sessions_on_either_side_of_an_update_phase) {
  std::mt19937 random(1);
  for (const uint32_t daemon_of_8 : {0u, 1u, 4u, 7u, 8u}) {
    std::vector<PlanUse> uses;
    for (uint32_t i = 0; i < 200; ++i)
      uses.push_back({.item = i, .by_daemon = random() % 8 < daemon_of_8});
    const Plan plan(uses);
    for (uint32_t at = 0; at <= uses.size(); ++at) {
      uint32_t from = at;
      while (from < uses.size() && uses[from].by_daemon) ++from;
      uint32_t until = at;
      while (until > 0 && uses[until - 1].by_daemon) --until;
      ASSERT_EQ(plan.session_from(at), from) << at;
      ASSERT_EQ(plan.session_until(at), until) << at;
    }
  }
  EXPECT_EQ(Plan({}).session_from(0), 0u);
}

TEST(PlanCursor, foresees_everything_from_the_second_step_on) {
  Trainer trainer;
  trainer.step(10);
  EXPECT_EQ(trainer.missed(), 30u);
  for (int step = 0; step < 5; ++step) {
    trainer.step(10);
    EXPECT_EQ(trainer.missed(), 0u);
  }
  EXPECT_EQ(trainer.book->plan_count(), 1u);
}

TEST(PlanCursor, knows_uses_across_the_update_and_the_next_step) {
  Trainer trainer;
  trainer.step(4);
  trainer.use(forward(2));
  const uint64_t now = trainer.cursor.now();
  // 0 1 | 2 3 3 g3 2 g2 1 g1 0 g0 | updates of 0, g0, 1, g1 …
  EXPECT_EQ(trainer.cursor.next_use(2), now);
  EXPECT_EQ(trainer.cursor.next_use(3), now + 1);
  EXPECT_EQ(trainer.cursor.next_use(1), now + 6);
  EXPECT_EQ(trainer.cursor.next_use(0), now + 8);
  EXPECT_EQ(trainer.cursor.next_use(kGradients), now + 9);
  EXPECT_EQ(trainer.cursor.next_use(99), std::nullopt);
  const std::vector<PlanUse> whole = training_step(4);
  trainer.use({whole.begin() + 2, whole.end()});
  trainer.cursor.end_step(is_gradient, updates(4));
  // The update of 0 comes before its next forward.
  EXPECT_EQ(trainer.cursor.next_use(0), trainer.cursor.now());
  trainer.cursor.end_updates();
  EXPECT_EQ(trainer.cursor.next_use(0), trainer.cursor.now());
  EXPECT_EQ(trainer.cursor.next_use(3), trainer.cursor.now() + 3);
}

TEST(PlanCursor, a_use_that_was_added_does_not_lose_the_plan) {
  Trainer trainer;
  trainer.step(20);
  trainer.step(20);
  trainer.missed();
  std::vector<PlanUse> uses = training_step(20);
  uses.insert(uses.begin() + 8, {.item = 500});
  trainer.use(uses);
  trainer.cursor.end_step(is_gradient, updates(20));
  trainer.cursor.end_updates();
  EXPECT_EQ(trainer.missed(), 1u);
  trainer.step(20);
  EXPECT_EQ(trainer.missed(), 0u);
}

TEST(PlanCursor, uses_that_were_left_out_do_not_lose_the_plan) {
  for (const size_t left_out : {1, 3, 12}) {
    Trainer trainer;
    trainer.step(20);
    trainer.step(20);
    trainer.missed();
    std::vector<PlanUse> uses = training_step(20);
    uses.erase(uses.begin() + 3, uses.begin() + 3 + static_cast<ptrdiff_t>(left_out));
    trainer.use(uses);
    trainer.cursor.end_step(is_gradient, updates(20));
    trainer.cursor.end_updates();
    // Far ahead a second use has to agree.
    EXPECT_LE(trainer.missed(), left_out > 8 ? 2u : 1u) << left_out;
    trainer.step(20);
    EXPECT_EQ(trainer.missed(), 0u);
  }
}

TEST(PlanCursor, what_is_used_before_the_daemon_hears_of_the_step_begins_the_next_period) {
  Trainer trainer;
  std::mt19937 random(7);
  trainer.step(10);
  std::vector<PlanUse> ahead;
  for (int step = 0; step < 20; ++step) {
    std::vector<PlanUse> uses = training_step(10);
    trainer.use({uses.begin() + static_cast<ptrdiff_t>(ahead.size()), uses.end()});
    // Of the next forward, before the step is heard of.
    ahead = forward(random() % 4);
    trainer.use(ahead);
    trainer.cursor.end_step(is_gradient, updates(10));
    trainer.cursor.end_updates();
  }
  EXPECT_EQ(trainer.book->plan_count(), 1u);
  const auto before = trainer.missed();
  EXPECT_LE(before, 30u);
}

TEST(PlanCursor, training_and_evaluation_have_a_plan_each) {
  Trainer trainer;
  for (int round = 0; round < 3; ++round) {
    for (int step = 0; step < 5; ++step) trainer.step(12);
    for (int batch = 0; batch < 6; ++batch) trainer.use(forward(12));
  }
  trainer.missed();
  EXPECT_EQ(trainer.book->plan_count(), 2u);
  for (int round = 0; round < 3; ++round) {
    for (int step = 0; step < 5; ++step) trainer.step(12);
    // The first step after an evaluation looks like one until its backward begins, and the first
    // batch like a step until it does not.
    EXPECT_LE(trainer.missed(), 1u);
    for (int batch = 0; batch < 6; ++batch) trainer.use(forward(12));
    EXPECT_LE(trainer.missed(), 1u);
  }
}

TEST(PlanCursor, branches_that_are_chosen_at_run_time_cost_a_use_each) {
  Trainer trainer;
  std::mt19937 random(3);
  // Eight blocks, each with one of two experts, in forward and again in backward.
  const auto step = [&] {
    std::vector<PlanUse> uses;
    std::vector<uint32_t> chosen;
    for (uint32_t block = 0; block < 8; ++block) {
      uses.push_back({.item = block});
      chosen.push_back(100 + 2 * block + static_cast<uint32_t>(random() % 2));
      uses.push_back({.item = chosen.back()});
    }
    for (uint32_t block = 8; block-- > 0;) {
      uses.push_back({.item = chosen[block]});
      uses.push_back({.item = kGradients + chosen[block], .kind = UseKind::overwrite});
      uses.push_back({.item = block});
      uses.push_back({.item = kGradients + block, .kind = UseKind::overwrite});
    }
    trainer.use(uses);
    trainer.cursor.end_step(is_gradient, updates(8));
    trainer.cursor.end_updates();
    return uses.size();
  };
  for (int i = 0; i < 5; ++i) step();
  trainer.missed();
  size_t use_count = 0;
  for (int i = 0; i < 50; ++i) use_count += step();
  // Blind, half of the experts would be missed: in forward, in backward, and their gradients.
  EXPECT_LE(trainer.missed(), use_count / 4);
  EXPECT_LE(trainer.book->plan_count(), PlanBook::kPlanCountMax);
}

TEST(PlanCursor, follows_another_plan_where_the_beginning_is_shared) {
  Trainer trainer;
  std::vector<PlanUse> other = forward(10);
  for (const PlanUse& use : forward(10, 40)) other.push_back(use);
  other.push_back({.item = kGradients + 49, .kind = UseKind::overwrite});
  const auto other_step = [&] {
    trainer.use(other);
    trainer.cursor.end_step(is_gradient, updates(2));
    trainer.cursor.end_updates();
  };
  for (int i = 0; i < 3; ++i) trainer.step(10);
  other_step();
  for (int i = 0; i < 3; ++i) trainer.step(10);
  trainer.missed();
  other_step();
  EXPECT_LE(trainer.missed(), 1u);
}

TEST(PlanCursor, a_model_that_is_only_read_has_a_period_too) {
  Trainer trainer;
  for (int batch = 0; batch < 4; ++batch) trainer.use(forward(9));
  trainer.missed();
  for (int batch = 0; batch < 10; ++batch) trainer.use(forward(9));
  EXPECT_EQ(trainer.missed(), 0u);
  EXPECT_EQ(trainer.book->plan_count(), 1u);
}

TEST(PlanCursor, without_any_order_it_learns_nothing_and_keeps_little) {
  Trainer trainer;
  std::mt19937 random(5);
  for (int i = 0; i < 300'000; ++i) trainer.use({{.item = static_cast<uint32_t>(random())}});
  EXPECT_EQ(trainer.book->plan_count(), 0u);
  EXPECT_FALSE(trainer.cursor.has_plan());
  EXPECT_EQ(trainer.cursor.next_use(1), std::nullopt);
}

TEST(PlanCursor, what_was_learned_once_and_long_ago_is_dropped_first) {
  PlanBook book;
  const auto kept = book.learn(forward(5), std::nullopt);
  book.completed(kept, kept);
  for (uint32_t i = 1; i < 100; ++i) book.learn(forward(5, 10 * i), kept);
  EXPECT_EQ(book.plan_count(), PlanBook::kPlanCountMax);
  EXPECT_NE(book.find(kept), nullptr);
}

TEST(PlanCursor, a_plan_that_was_dropped_follows_no_other) {
  PlanBook book;
  const auto kept = book.learn(forward(5), std::nullopt);
  book.completed(kept, std::nullopt);
  const auto dropped = book.learn(forward(5, 1000), kept);
  EXPECT_EQ(book.successor(kept), dropped);
  for (uint32_t i = 1; i < 100; ++i) book.learn(forward(5, 10 * i), std::nullopt);
  EXPECT_EQ(book.find(dropped), nullptr);
  EXPECT_NE(book.find(book.successor(kept)), nullptr);
}

// Every answer is the one that a search through the real future gives, whatever the session leaves
// out, adds or repeats, once it is back on the plan.
TEST(PlanCursor, a_plan_that_is_dropped_while_it_is_foreseen_costs_nothing_but_itself) {
  // More paths than a book has places, read by sessions that begin anywhere in them.
  std::mt19937 random(7);
  const auto book = std::make_shared<PlanBook>();
  uint32_t use_count = 0;
  uint32_t seen_count = 0;
  for (uint32_t session = 0; session < 3000; ++session) {
    Trainer trainer{.book = book, .cursor = PlanCursor(book), .seen = {}};
    for (uint32_t round = 0; round < 6; ++round) {
      const uint32_t path = random() % 2 == 0 ? random() % 40 : random() % 3;
      std::vector<PlanUse> uses = forward(5, 10 * path);
      if (round == 0) uses.erase(uses.begin(), uses.begin() + random() % 5);
      for (uint32_t times = 1 + random() % 3; times > 0; --times) {
        trainer.use(uses);
        use_count += uses.size();
      }
    }
    for (const auto& [seen, count] : trainer.seen) seen_count += count;
  }
  EXPECT_EQ(seen_count, use_count);
}

TEST(PlanCursor, next_uses_are_those_of_the_future) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<PlanUse> uses;
    const uint32_t item_count = 3 + random() % 20;
    const size_t length = 5 + random() % 60;
    while (uses.size() < length) {
      const auto item = static_cast<uint32_t>(random() % item_count);
      uses.push_back({.item = item});
    }
    uses.push_back({.item = kGradients, .kind = UseKind::overwrite});
    Trainer trainer;
    const auto end = [&] {
      trainer.cursor.end_step(is_gradient, updates(1));
      trainer.cursor.end_updates();
    };
    for (int i = 0; i < 3; ++i) {
      trainer.use(uses);
      end();
    }
    // One step with a deviation.
    std::vector<PlanUse> deviating = uses;
    const auto at = static_cast<ptrdiff_t>(random() % (uses.size() - 1));
    if (random() % 2 == 0) {
      deviating.insert(deviating.begin() + at, {.item = 700});
    } else {
      deviating.erase(deviating.begin() + at);
    }
    trainer.use(deviating);
    end();
    trainer.missed();
    uint64_t last = trainer.cursor.now();
    for (size_t i = 0; i < uses.size(); ++i) {
      trainer.use({uses[i]});
      EXPECT_GT(trainer.cursor.now(), last);
      last = trainer.cursor.now();
      for (uint32_t item = 0; item < item_count; ++item) {
        const auto next = std::find_if(uses.begin() + static_cast<ptrdiff_t>(i) + 1,
                                       uses.end(),
                                       [item](const PlanUse& use) { return use.item == item; });
        if (next == uses.end()) continue;  // after the update: in the period that follows
        const auto distance = static_cast<uint64_t>(next - uses.begin()) - i - 1;
        EXPECT_EQ(trainer.cursor.next_use(item), trainer.cursor.now() + distance)
            << "seed " << seed << ", use " << i << ", item " << item;
      }
    }
    end();
    EXPECT_EQ(trainer.missed(), 0u) << "seed " << seed;
  }
}

TEST(NextUseOrder, farthest_goes_first_and_what_has_no_use_before_it) {
  NextUseOrder order;
  order.put(1, 110, EvictionPrice::clean);
  order.put(2, 150, EvictionPrice::clean);
  order.put(3, 100 + 16 * 40, EvictionPrice::dirty);
  order.put_without_use(4, EvictionPrice::clean);
  order.put_without_use(5, EvictionPrice::clean);
  const auto in_order = [&] {
    std::vector<uint32_t> items;
    order.in_order(100, [&](uint32_t item, uint64_t, EvictionPrice) {
      items.push_back(item);
      return true;
    });
    return items;
  };
  EXPECT_EQ(in_order(), (std::vector<uint32_t>{4, 5, 2, 3, 1}));
  order.remove(4);
  order.put(1, 1000, EvictionPrice::clean);
  EXPECT_EQ(in_order(), (std::vector<uint32_t>{5, 1, 2, 3}));
  EXPECT_TRUE(order.overdue(150).empty());
  EXPECT_EQ(order.overdue(151), (std::vector<uint32_t>{2}));
}

/// Belady's rule by searching the whole future at each eviction; all items are clean and of one
/// size, where it moves the fewest bytes there are.
uint64_t fewest_reads(const std::vector<PlanUse>& uses,
                      size_t cache_items,
                      int warm,
                      int measured) {
  std::vector<uint32_t> trace;
  for (int i = 0; i < warm + measured + 2; ++i) {
    for (const PlanUse& use : uses) trace.push_back(use.item);
  }
  std::vector<uint32_t> cache;
  uint64_t reads = 0;
  for (size_t t = 0; t < uses.size() * static_cast<size_t>(warm + measured); ++t) {
    if (std::find(cache.begin(), cache.end(), trace[t]) != cache.end()) continue;
    if (t >= uses.size() * static_cast<size_t>(warm)) ++reads;
    if (cache.size() == cache_items) {
      cache.erase(std::max_element(cache.begin(), cache.end(), [&](uint32_t a, uint32_t b) {
        const auto from = trace.begin() + static_cast<ptrdiff_t>(t);
        return std::find(from, trace.end(), a) < std::find(from, trace.end(), b);
      }));
    }
    cache.push_back(trace[t]);
  }
  return reads;
}

TEST(Simulation, of_equal_clean_items_moves_the_fewest_bytes) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const uint32_t item_count = 2 + random() % 12;
    std::vector<PlanUse> uses;
    for (uint32_t i = 0; i < 40; ++i)
      uses.push_back({.item = static_cast<uint32_t>(random() % item_count)});
    const size_t cache_items = 1 + random() % item_count;
    const BytesMoved moved = simulate(Plan(uses),
                                      std::vector<uint64_t>(item_count, 10),
                                      {.cache_bytes = 10 * cache_items, .warm_count = 3});
    EXPECT_EQ(moved.read_bytes * 8 / 10, static_cast<double>(fewest_reads(uses, cache_items, 3, 8)))
        << "seed " << seed;
    EXPECT_EQ(moved.written_bytes, 0);
  }
}

TEST(Simulation, what_is_changed_is_written_once_or_only_where_it_must_go) {
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < 10; ++i) uses.push_back({.item = i, .kind = UseKind::change});
  const std::vector<uint64_t> bytes(10, 100);
  const auto moved = [&](uint64_t cache_bytes, bool writes_changes) {
    return simulate(
        Plan(uses), bytes, {.cache_bytes = cache_bytes, .writes_changes = writes_changes});
  };
  EXPECT_EQ(moved(1000, true).written_bytes, 1000);
  EXPECT_EQ(moved(1000, true).read_bytes, 0);
  EXPECT_EQ(moved(1000, false).written_bytes, 0);
  EXPECT_EQ(moved(100, false).written_bytes, 1000);
  EXPECT_EQ(moved(100, false).read_bytes, 1000);
  // Nine stay, and the tenth place is used by the rest.
  EXPECT_LT(moved(900, true).read_bytes, 300);
}

TEST(Simulation, gradients_that_fit_are_never_on_disk) {
  std::vector<PlanUse> uses = training_step(8);
  for (const PlanUse& use : updates(8)) uses.push_back(use);
  std::vector<uint64_t> bytes(kGradients + 8, 10);
  const BytesMoved moved =
      simulate(Plan(uses), bytes, {.cache_bytes = 160, .writes_changes = false});
  EXPECT_EQ(moved.read_bytes, 0);
  EXPECT_EQ(moved.written_bytes, 0);
}

TEST(PlanCursor, what_is_used_everywhere_is_compared_in_few_places) {
  // Item 0 between all others, and a session that goes through them in an order of its own.
  constexpr uint32_t kCount = 20'000;
  Trainer trainer;
  std::vector<PlanUse> uses;
  for (uint32_t i = 1; i <= kCount; ++i) {
    uses.push_back({.item = kGradients + i});
    uses.push_back({.item = 0});
  }
  const auto is_of_step = [](const PlanUse& use) { return use.kind != UseKind::read; };
  const PlanUse gradient{.item = 1, .kind = UseKind::overwrite};
  for (int plan = 0; plan < 20; ++plan) {
    auto period = uses;
    period.push_back({.item = 2 + static_cast<uint32_t>(plan)});
    period.push_back(gradient);
    trainer.use(period);
    trainer.cursor.end_step(is_of_step, {});
    trainer.cursor.end_updates();
  }
  ASSERT_EQ(trainer.book->plan_count(), 13u) << "half a million uses in all";
  const uint64_t places_max =
      PlanBook::kPlacesNearMax + PlanBook::kPlanCountMax * PlanBook::kPlacesElsewhereMax;
  std::mt19937 random(3);
  const auto any = [&random] { return static_cast<uint32_t>(random()) % kCount; };
  uint64_t most = 0;
  for (int i = 0; i < 2000; ++i) {
    const uint64_t before = trainer.book->compared_count();
    trainer.use({{.item = random() % 2 == 0 ? 0 : kGradients + 1 + any()}});
    most = std::max(most, trainer.book->compared_count() - before);
  }
  EXPECT_GT(most, PlanBook::kPlacesNearMax) << "and in as many as may be";
  EXPECT_LE(most, places_max);
  // All of it comes after a step of one gradient: only the end of it is followed again.
  trainer.use({gradient});
  for (uint32_t i = 0; i < 50'000; ++i) trainer.use({{.item = i % 7 == 0 ? 0 : any()}});
  const uint64_t before = trainer.book->compared_count();
  trainer.cursor.end_step(is_of_step, {});
  EXPECT_LE(trainer.book->compared_count() - before, 1100 * places_max);
  EXPECT_EQ(trainer.cursor.period().size(), 50'000u) << "and nothing of it is lost";
}

TEST(PlanCursor, a_long_forward_that_has_begun_before_the_first_step_is_heard_of_is_followed) {
  constexpr uint32_t kCount = 3000;
  Trainer trainer;
  const auto is_of_step = [](const PlanUse& use) { return use.kind != UseKind::read; };
  const auto ahead = forward(2500);
  std::vector<PlanUse> step = forward(kCount);
  step.push_back({.item = kCount, .kind = UseKind::overwrite});
  trainer.use(step);
  trainer.use(ahead);
  trainer.cursor.end_step(is_of_step, updates(1));
  EXPECT_EQ(trainer.cursor.period(), ahead);
  EXPECT_EQ(trainer.cursor.position(), ahead.size());
  trainer.missed();
  trainer.use(std::vector(step.begin() + 2500, step.end()));
  EXPECT_EQ(trainer.missed(), 0u);
  trainer.cursor.end_step(is_of_step, updates(1));
  EXPECT_EQ(trainer.book->plan_count(), 1u);
}

TEST(PlanCursor, of_many_places_the_one_that_is_ahead_by_the_least_is_found) {
  // As in a loop: each round is the same but for one item of its own.
  constexpr uint32_t kRounds = 1000;
  Trainer trainer;
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < kRounds; ++i) {
    for (const uint32_t item : {0u, 1u, 2u, 3u}) uses.push_back({.item = item});
    uses.push_back({.item = 10 + i % 900});
  }
  uses.push_back({.item = kGradients, .kind = UseKind::overwrite});
  for (int step = 0; step < 2; ++step) {
    trainer.use(uses);
    trainer.cursor.end_step(is_gradient, {});
    trainer.cursor.end_updates();
  }
  trainer.missed();
  // The third step leaves out the item of round 500.
  for (uint32_t i = 0; i < uses.size(); ++i) {
    if (i != 500 * 5 + 4) trainer.use({uses[i]});
  }
  EXPECT_EQ(trainer.missed(), 1u);
  EXPECT_EQ(trainer.cursor.position(), uses.size());
}

TEST(PlanCursor, follows_a_plan_of_a_hundred_thousand_uses) {
  constexpr uint32_t kCount = 20'000;
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < kCount; ++i) uses.push_back({.item = i});
  for (uint32_t i = kCount; i-- > 0;) {
    uses.push_back({.item = i});
    uses.push_back({.item = kCount + i, .kind = UseKind::overwrite});
  }
  Trainer trainer;
  const auto is_of_step = [](const PlanUse& use) { return use.kind != UseKind::read; };
  std::vector<PlanUse> made;
  for (uint32_t i = 0; i < kCount; ++i) made.push_back({.item = i, .kind = UseKind::change});
  for (int step = 0; step < 3; ++step) {
    trainer.use(uses);
    trainer.cursor.end_step(is_of_step, made);
    trainer.cursor.end_updates();
  }
  EXPECT_EQ(trainer.book->plan_count(), 1u);
  EXPECT_EQ(trainer.cursor.plan()->size(), 80'000u);
  EXPECT_EQ(trainer.seen[PlanCursor::Seen::foreseen], 2 * uses.size());
}

}  // namespace
}  // namespace memd
