// Plans in the store: what sessions use is recorded, and what comes is there before they ask.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "noting_client.h"
#include "plan/simulation.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::HeartOptions;
using testing::Held;
using testing::NotingClient;

constexpr uint64_t kShardBytes = 1_MiB;

std::vector<ShardSpec> parameters(uint32_t count, const std::string& prefix = "p") {
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < count; ++i) {
    specs.push_back({.name = prefix + std::to_string(i),
                     .kind = ShardKind::parameter,
                     .dtype = DType::float32,
                     .tier = Tier::nvme,
                     .shape = {kShardBytes / 4}});
  }
  return specs;
}

struct Model {
  explicit Model(uint32_t count, uint64_t arena_segments)
      : heart(disk, HeartOptions{.segment_count = testing::kFloorSegments + arena_segments}),
        job_id(heart.open("job", arena_segments, 215_MiB)),
        session_id(heart.attach(job_id)),
        client(heart, session_id),
        ids(heart.declare(session_id, parameters(count))) {
    for (const uint32_t id : ids) {
      heart.write<float>(
          session_id, id, std::vector<float>(kShardBytes / 4, 1.0f + static_cast<float>(id)));
    }
    EXPECT_TRUE(heart.sync(session_id).is_ok());
  }

  /// From now on one chunk is in flight at a time.
  void slow_device() {
    heart.faults().set_limits(0, {.depth = 1, .chunk_bytes = kChunkBytesMin});
    heart.io().after_read = [this](std::span<std::byte> data) { read.push_back(data.data()); };
  }
  /// Until others_read_before().
  void stop_device() {
    heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  }
  std::vector<uint32_t> filling() {
    std::vector<uint32_t> found;
    for (const uint32_t id : ids) {
      const Entry& entry = *heart.job(session_id).shards().find_entry(id, Part::value);
      if (entry.residency() == Residency::filling) found.push_back(id);
    }
    return found;
  }
  /// Waits for one that the stopped device shall read; how many others it reads first.
  size_t others_read_before(uint32_t id) {
    const auto answer = heart.ask(session_id, id);
    heart.turn();
    read.clear();
    EXPECT_TRUE(heart.faults().has_stalled());
    heart.faults().release_stalled();
    EXPECT_TRUE(heart.until([&] { return answer->has_value(); }));
    const Held held = answer->value_or(Held{});
    EXPECT_TRUE(held.is_ok()) << held.status.message();
    const auto place = std::ranges::find(read, held.grant.data);
    EXPECT_NE(place, read.end());
    heart.release(held);
    return static_cast<size_t>(place - read.begin());
  }

  uint32_t count() const { return static_cast<uint32_t>(ids.size()); }
  const JobCounters& counters() { return heart.job(session_id).cache().counters(); }
  /// Returns how many leases waited.
  uint32_t forward() {
    uint32_t misses = 0;
    for (const uint32_t id : ids) misses += !client.use_slowly(id);
    return misses;
  }
  uint32_t backward(bool gradients) {
    uint32_t misses = 0;
    for (uint32_t i = count(); i-- > 0;) {
      misses += !client.use_slowly(ids[i]);
      if (gradients) client.use_slowly(ids[i], LeaseMode::overwrite, Part::gradient);
    }
    return misses;
  }
  void step() {
    const StepRequest request{.session_id = session_id,
                              .groups = {{.settings = {}, .shard_ids = ids}},
                              .staged_buffers = {},
                              .step = heart.job(session_id).progress().committed_step() + 1};
    const auto [status, report] = heart.step(request);
    EXPECT_TRUE(status.is_ok()) << status.message();
    client.settle();
  }

  std::shared_ptr<MemoryDisk> disk = std::make_shared<MemoryDisk>(232_MiB);
  std::vector<const std::byte*> read;  // into which memory, in the device's order
  Heart heart;
  uint64_t job_id;
  uint64_t session_id;
  NotingClient client;
  std::vector<uint32_t> ids;
};

/// Bytes of one period of reading all parameters, forward and backward.
double fewest_bytes(uint32_t count, uint64_t cache_bytes) {
  std::vector<PlanUse> uses;
  for (uint32_t i = 0; i < count; ++i) uses.push_back({.item = i});
  for (uint32_t i = count; i-- > 0;) uses.push_back({.item = i});
  return simulate(
             Plan(uses), std::vector<uint64_t>(count, kShardBytes), {.cache_bytes = cache_bytes})
      .read_bytes;
}

TEST(Prefetch, from_the_second_step_on_every_lease_finds_its_shard) {
  Model model(16, 11);  // 22 places for 16 parameters and 16 gradients
  model.forward();
  model.backward(true);
  model.step();
  for (int step = 0; step < 4; ++step) {
    const auto before = model.counters();
    EXPECT_EQ(model.forward(), 0u) << "step " << step;
    EXPECT_EQ(model.backward(true), 0u) << "step " << step;
    model.step();
    const auto after = model.counters();
    EXPECT_EQ(after.uses_unforeseen, before.uses_unforeseen);
    EXPECT_EQ(after.lease_misses, before.lease_misses);
    EXPECT_EQ(after.prefetched_bytes - before.prefetched_bytes,
              after.fetched_bytes - before.fetched_bytes);
    EXPECT_GT(after.prefetch_hits, before.prefetch_hits);
  }
  const auto counters = model.counters();
  EXPECT_GT(counters.plan_necessary_bytes, 0u);
  // What is necessary is what farthest next use moves, which is no exact bound.
  EXPECT_GE(counters.plan_moved_bytes, counters.plan_necessary_bytes * 95 / 100);
  EXPECT_LE(counters.plan_moved_bytes, counters.plan_necessary_bytes * 105 / 100);
}

TEST(Prefetch, one_that_somebody_waits_for_overtakes_those_that_nobody_does) {
  Model model(16, 11);
  for (int step = 0; step < 2; ++step) {
    model.forward();
    model.backward(true);
    model.step();
  }
  model.forward();
  model.backward(true);
  model.slow_device();
  const auto [status, report] =
      model.heart.step({.session_id = model.session_id,
                        .groups = {{.settings = {}, .shard_ids = model.ids}},
                        .staged_buffers = {},
                        .step = model.heart.job(model.session_id).progress().committed_step() + 1});
  ASSERT_TRUE(status.is_ok()) << status.message();
  // The end of the step makes room for these.
  model.stop_device();
  std::vector<uint32_t> wanted;
  ASSERT_TRUE(model.heart.until([&] {
    wanted = model.filling();
    return wanted.size() >= 4 && model.heart.workers().open_count() == 0;
  }));
  EXPECT_LE(model.others_read_before(wanted.back()), 1U);
  model.client.settle();
}

TEST(Prefetch, one_that_a_session_asked_for_is_raised_too) {
  Model model(24, 8);  // the first eight made room for the others
  model.slow_device();
  model.stop_device();
  for (uint32_t i = 0; i < 4; ++i) {
    model.heart.ask({.session_id = model.session_id,
                     .shard_id = model.ids[i],
                     .timeout_ns = 60'000'000'000,
                     .prefetch = true});
  }
  ASSERT_EQ(model.filling(), std::vector(model.ids.begin(), model.ids.begin() + 4));
  EXPECT_LE(model.others_read_before(model.ids[3]), 1U);
}

TEST(Prefetch, what_is_only_read_again_and_again_moves_hardly_more_than_it_must) {
  constexpr uint32_t kCount = 32;
  constexpr uint64_t kSegments = 12;  // room for 24 of 32
  Model model(kCount, kSegments);
  const auto period = [&] { return model.forward() + model.backward(false); };
  for (int i = 0; i < 4; ++i) period();
  const auto before = model.counters();
  constexpr int kPeriods = 4;
  uint32_t misses = 0;
  for (int i = 0; i < kPeriods; ++i) misses += period();
  EXPECT_EQ(misses, 0u);
  const double moved = static_cast<double>(model.counters().fetched_bytes - before.fetched_bytes);
  const double arena_bytes = kSegments * testing::kSegmentBytes;
  // One of the places holds what comes next, beside the one in use.
  EXPECT_LE(moved / kPeriods,
            1.05 * fewest_bytes(kCount, static_cast<uint64_t>(arena_bytes) - kShardBytes));
}

TEST(Prefetch, least_recently_used_would_read_everything) {
  // The same without a log of uses, so that there is no plan.
  Model model(32, 12);
  uint64_t before = 0;
  for (int i = 0; i < 3; ++i) {
    before = model.counters().fetched_bytes;
    for (const uint32_t id : model.ids) model.heart.touch(model.session_id, id);
  }
  EXPECT_EQ(model.counters().fetched_bytes - before, 32 * kShardBytes);
  EXPECT_EQ(model.counters().prefetched_bytes, 0u);
}

TEST(Prefetch, what_is_brought_up_is_what_was_written) {
  Model model(16, 11);
  for (int i = 0; i < 3; ++i) {
    model.forward();
    model.backward(true);
    model.step();
    for (const uint32_t id : model.ids) {
      const auto values = model.heart.read<float>(model.session_id, id);
      model.client.note(id, LeaseMode::read, Part::value);
      model.client.settle();
      ASSERT_EQ(values.size(), kShardBytes / 4);
      EXPECT_TRUE(std::all_of(
          values.begin(), values.end(), [&](float value) { return value == values.front(); }));
      EXPECT_EQ(values.front(), 1.0f + static_cast<float>(id));
    }
  }
}

TEST(Prefetch, a_use_that_was_not_foreseen_is_fetched_and_the_plan_goes_on) {
  Model model(16, 11);
  const auto others = model.heart.declare(model.session_id, parameters(1, "other"));
  model.heart.write<float>(model.session_id, others[0], std::vector<float>(kShardBytes / 4, 5.0f));
  ASSERT_TRUE(model.heart.sync(model.session_id).is_ok());
  for (int i = 0; i < 3; ++i) {
    model.forward();
    model.backward(true);
    model.step();
  }
  uint32_t misses = 0;
  for (uint32_t i = 0; i < model.count(); ++i) {
    misses += !model.client.use_slowly(model.ids[i]);
    if (i == 10) model.client.use_slowly(others[0]);
  }
  EXPECT_EQ(misses, 0u);
  EXPECT_EQ(model.backward(true), 0u);
  model.step();
  EXPECT_EQ(model.forward(), 0u);
}

TEST(Prefetch, a_shard_that_is_deleted_or_declared_anew_ends_in_no_error) {
  Model model(8, 3);
  std::vector<ShardSpec> blobs;
  for (int i = 0; i < 4; ++i) {
    blobs.push_back({.name = "blob" + std::to_string(i),
                     .kind = ShardKind::blob,
                     .dtype = DType::float32,
                     .tier = Tier::nvme,
                     .shape = {kShardBytes / 4}});
  }
  auto ids = model.heart.declare(model.session_id, blobs);
  for (const uint32_t id : ids)
    model.heart.write<float>(model.session_id, id, std::vector<float>(kShardBytes / 4, 3.0f));
  ASSERT_TRUE(model.heart.sync(model.session_id).is_ok());
  const auto period = [&] {
    model.forward();
    for (const uint32_t id : ids) model.client.use_slowly(id);
  };
  for (int i = 0; i < 5; ++i) period();
  EXPECT_TRUE(model.heart.job(model.session_id).cache().plans().book().plan_count() > 0);
  const auto remove = [&](size_t which) {
    std::optional<bool> removed;
    model.heart.store().delete_shard(
        model.session_id, blobs[which].name, [&](const Result<bool>& done) {
          removed = done.is_ok() && done.value();
        });
    EXPECT_TRUE(model.heart.until([&] { return removed.has_value(); }));
    EXPECT_TRUE(removed.value_or(false));
  };
  remove(1);
  remove(2);
  ids.erase(ids.begin() + 1, ids.begin() + 3);
  period();
  // The same ids, other bytes, and one of them never written.
  const auto again = model.heart.declare(model.session_id, {blobs[2], blobs[1]});
  model.heart.write<float>(model.session_id, again[0], std::vector<float>(kShardBytes / 4, 4.0f));
  for (int i = 0; i < 3; ++i) period();
  EXPECT_EQ(model.heart.read<float>(model.session_id, again[0]).front(), 4.0f);
}

TEST(Prefetch, a_shard_that_is_lost_is_not_asked_for_again_and_again) {
  Model model(16, 4);
  for (int i = 0; i < 4; ++i) model.forward();
  const Job& job = model.heart.job(model.session_id);
  const Entry* victim = nullptr;
  for (Entry* const entry : job.shards().entries()) {
    if (entry != nullptr && entry->kind() == EntryKind::parameter &&
        entry->residency() == Residency::absent)
      victim = entry;
  }
  ASSERT_NE(victim, nullptr);
  const uint64_t offset_bytes = victim->replicas()[0].extent().address.offset_bytes;
  model.disk->bytes()[offset_bytes] ^= std::byte{1};
  for (uint32_t i = 0; i < 3 * model.count(); ++i) {
    const uint32_t id = model.ids[i % model.count()];
    if (job.shards()[id].value == victim) continue;
    model.client.use_slowly(id);
  }
  EXPECT_TRUE(job.lost().contains(model.ids[victim->owner()]));
  model.heart.settle();  // what else was on its way has come
  const uint64_t fetched_bytes = job.cache().counters().fetched_bytes;
  model.heart.turns();
  EXPECT_EQ(job.cache().counters().fetched_bytes, fetched_bytes);
  const Held held = model.heart.lease(model.session_id, model.ids[victim->owner()]);
  EXPECT_EQ(held.status.code(), StatusCode::integrity);
}

TEST(Prefetch, a_shard_whose_prefetch_failed_is_fetched_for_who_asks_and_foreseen_again) {
  Model model(16, 4);
  for (int i = 0; i < 4; ++i) model.forward();
  const Job& job = model.heart.job(model.session_id);
  const Entry* victim = nullptr;
  for (Entry* const entry : job.shards().entries()) {
    if (entry != nullptr && entry->kind() == EntryKind::parameter &&
        entry->residency() == Residency::absent)
      victim = entry;
  }
  ASSERT_NE(victim, nullptr);
  const uint32_t id = model.ids[victim->owner()];
  // The device reads nothing there, in all tries.
  const auto& extent = victim->replicas()[0].extent();
  model.heart.faults().add_fault({.io_kind = IoKind::read,
                                  .offset_bytes = extent.address.offset_bytes,
                                  .count = 64,
                                  .error_number = EIO});
  for (uint32_t i = 0; i < 2 * model.count() && !victim->prefetch().has_failed(); ++i) {
    if (model.ids[i % model.count()] != id) model.client.use_slowly(model.ids[i % model.count()]);
  }
  ASSERT_TRUE(victim->prefetch().has_failed());
  EXPECT_FALSE(job.lost().contains(id)) << "only a mismatch is proof";
  // Nobody asks again for a plan alone.
  model.heart.settle();  // what else was on its way has come
  const uint64_t fetched_bytes = job.cache().counters().fetched_bytes;
  model.heart.turns();
  EXPECT_EQ(job.cache().counters().fetched_bytes, fetched_bytes);
  model.heart.faults().clear_faults();
  EXPECT_FALSE(model.client.use_slowly(id));
  EXPECT_FALSE(victim->prefetch().has_failed());
  for (int i = 0; i < 2; ++i) model.forward();
  EXPECT_EQ(model.forward(), 0u);
}

TEST(Prefetch, uses_that_were_overwritten_before_they_were_read_do_not_lose_the_plan) {
  Model model(16, 4);
  for (int i = 0; i < 4; ++i) model.forward();
  ASSERT_EQ(model.forward(), 0u);
  const auto& book = model.heart.job(model.session_id).cache().plans().book();
  const size_t plan_count = book.plan_count();
  // More than a lap of the log, from the middle of one forward to that of another.
  const uint64_t lap_count = kUseLogEntries / model.count() + 2;
  for (uint32_t i = 0; i < 8; ++i) model.client.use_slowly(model.ids[i]);
  for (uint64_t i = 0; i < lap_count * model.count(); ++i)
    model.client.note(model.ids[(8 + i) % model.count()], LeaseMode::read, Part::value);
  model.client.settle();
  EXPECT_EQ(model.client.taken_count(), model.client.noted_count());
  for (uint32_t i = 8; i < 16; ++i) model.client.use_slowly(model.ids[i]);
  EXPECT_EQ(model.forward(), 0u);
  EXPECT_EQ(book.plan_count(), plan_count) << "half of a forward is no plan";
}

TEST(Prefetch, sessions_have_a_place_each_and_end_when_they_like) {
  Model model(20, 6);
  std::optional<uint64_t> other_id = model.heart.attach(model.job_id);
  std::optional<NotingClient> other(std::in_place, model.heart, *other_id);
  const auto other_use = [&](uint32_t id) {
    const Held held = model.heart.lease(*other_id, id);
    ASSERT_TRUE(held.is_ok());
    other->note(id, LeaseMode::read, Part::value);
    model.heart.release(held);
  };
  for (int round = 0; round < 4; ++round) {
    for (uint32_t i = 0; i < model.count(); ++i) {
      model.client.use_slowly(model.ids[i]);
      other_use(model.ids[model.count() - 1 - i]);
    }
  }
  EXPECT_GE(model.heart.job(model.session_id).cache().plans().book().plan_count(), 2u);
  const auto detached = model.heart.store().detach(*other_id);
  EXPECT_TRUE(detached.is_ok());
  other.reset();
  model.forward();
  uint32_t misses = 0;
  for (int i = 0; i < 3; ++i) misses = model.forward();
  EXPECT_EQ(misses, 0u);
}

TEST(Prefetch, uses_that_make_no_sense_are_passed_over) {
  Model model(6, 4);
  model.client.note(1'000'000, LeaseMode::read, Part::value);
  model.client.note(model.ids[0], LeaseMode::overwrite, Part::gradient);
  EXPECT_EQ(model.forward(), 0u);
  EXPECT_EQ(model.heart.read<float>(model.session_id, model.ids[3]).front(),
            1.0f + static_cast<float>(model.ids[3]));
}

TEST(Prefetch, of_a_long_log_no_more_than_a_part_is_followed_in_a_turn) {
  Model model(6, 4);
  model.client.settle();
  std::mt19937 random(1);
  for (uint64_t i = 0; i < kUseLogEntries; ++i)
    model.client.note(model.ids[random() % 6], LeaseMode::read, Part::value);
  uint64_t turn_count = 0;
  while (model.client.taken_count() < model.client.noted_count()) {
    const uint64_t before = model.client.taken_count();
    EXPECT_TRUE(model.heart.turn()) << "there is more to read: the daemon must not sleep";
    ASSERT_LE(model.client.taken_count() - before, PlanProgress::kFollowedATurn);
    ASSERT_GT(model.client.taken_count(), before);
    ++turn_count;
  }
  EXPECT_EQ(turn_count, kUseLogEntries / PlanProgress::kFollowedATurn);
}

// Both do the same steps; of one the daemon hears use for use, of the other when a step is closed,
// which is more than it follows in a turn.
TEST(Prefetch, a_step_is_planned_whole_however_much_of_it_is_still_to_be_read) {
  constexpr uint32_t kRounds = 400;
  const auto run = [](bool hears_at_once) {
    Model model(6, 8);
    std::vector<std::vector<PlanUse>> periods;
    const auto note = [&](uint32_t id, LeaseMode mode, Part part) {
      model.client.note(id, mode, part);
      if (hears_at_once) model.heart.turn();
    };
    for (uint64_t step = 1; step <= 3; ++step) {
      for (const uint32_t id : model.ids) {
        const Held held =
            model.heart.lease(model.session_id, id, LeaseMode::overwrite, Part::gradient);
        EXPECT_TRUE(held.is_ok()) << held.status.message();
        std::memset(held.grant.data, 0, held.grant.length_bytes);
        model.heart.release(held);
      }
      model.heart.turn();
      for (uint32_t i = 0; i < kRounds; ++i) {
        for (const uint32_t id : model.ids) note(id, LeaseMode::read, Part::value);
        note(model.ids[i % 6], LeaseMode::overwrite, Part::gradient);
      }
      // The next forward has begun.
      for (uint32_t i = 0; i < 4; ++i) note(model.ids[i], LeaseMode::read, Part::value);
      const uint64_t unread_count = model.client.noted_count() - model.client.taken_count();
      EXPECT_EQ(unread_count > PlanProgress::kFollowedATurn, !hears_at_once);
      const auto [status, report] =
          model.heart.step({.session_id = model.session_id,
                            .groups = {{.settings = {}, .shard_ids = model.ids}},
                            .staged_buffers = {},
                            .step = step});
      EXPECT_TRUE(status.is_ok()) << status.message();
      model.heart.turns();
      const PlanCursor& cursor =
          model.heart.store().sessions().at(model.session_id)->plan->cursor();
      const auto plan =
          cursor.last_period()
              ? model.heart.job(model.session_id).cache().plans().book().find(*cursor.last_period())
              : nullptr;
      if (plan != nullptr) periods.emplace_back(plan->uses().begin(), plan->uses().end());
      periods.push_back(cursor.period());
    }
    return periods;
  };
  const auto whole = run(true);
  ASSERT_EQ(whole.size(), 6u);
  for (size_t i = 0; i < 6; i += 2) {
    EXPECT_GT(whole[i].size(), size_t{7 * kRounds});
    EXPECT_EQ(whole[i + 1].size(), 4u);
  }
  EXPECT_EQ(run(false), whole);
}

// Whatever a session does, it reads what it wrote, and the store's books balance.
TEST(Prefetch, random_sessions_read_what_they_wrote) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed);
    const auto chance = [&](uint32_t percent) { return random() % 100 < percent; };
    Model model(18, 4 + seed % 4);
    const auto values_hold = [&](uint32_t id, float expected) {
      const auto values = model.heart.read<float>(model.session_id, id);
      model.client.note(id, LeaseMode::read, Part::value);
      return !values.empty() && values.front() == expected && values.back() == expected;
    };
    for (int round = 0; round < 12; ++round) {
      const bool evaluates = chance(30);
      for (const uint32_t id : model.ids) {
        if (chance(5)) continue;
        if (chance(5)) model.client.use(model.ids[random() % model.count()]);
        EXPECT_TRUE(values_hold(id, 1.0f + static_cast<float>(id))) << "seed " << seed;
        if (chance(50)) model.client.settle();
      }
      if (evaluates) continue;
      for (uint32_t i = model.count(); i-- > 0;) {
        if (chance(5)) continue;
        model.client.use(model.ids[i]);
        model.client.use(model.ids[i], LeaseMode::overwrite, Part::gradient);
        if (chance(50)) model.client.settle();
      }
      // A step that came to nothing: its gradients are dropped.
      ASSERT_TRUE(model.heart.store().gradients().drop(model.session_id, {}).is_ok());
    }
    model.client.settle();
    uint64_t ahead_bytes = 0;
    for (Entry* const entry : model.heart.job(model.session_id).shards().entries()) {
      if (entry != nullptr && entry->prefetch().state() != EntryPrefetch::State::no)
        ahead_bytes += entry->bytes();
    }
    EXPECT_EQ(model.heart.job(model.session_id).cache().window().bytes(), ahead_bytes);
    EXPECT_EQ(model.heart.job(model.session_id).cache().window().reading_bytes(), 0u);
  }
}

}  // namespace
}  // namespace memd
