// What one turn of the store does for each session, whatever the others ask for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "asking_client.h"
#include "block.h"
#include "ring/layout.h"
#include "store/state/writeback.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint32_t kRequestsATurn = 64;
constexpr int kTurnsMax = 1000;

std::vector<ShardSpec> blobs(uint32_t count, uint64_t bytes) {
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < count; ++i) {
    specs.push_back({.name = "blob" + std::to_string(i),
                     .kind = ShardKind::blob,
                     .dtype = DType::uint8,
                     .shape = {bytes}});
  }
  return specs;
}

/// A bucket each.
std::vector<ShardSpec> parameters(uint32_t count) {
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < count; ++i) {
    specs.push_back({.name = "p" + std::to_string(i),
                     .kind = ShardKind::parameter,
                     .dtype = DType::float32,
                     .tier = Tier::nvme,
                     .shape = {kTileElements}});
  }
  return specs;
}

TEST(TurnsTest, a_session_that_floods_has_64_requests_served_before_anothers) {
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t job_id = heart.open("job");
  const uint64_t flooding = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const uint32_t shard_id = heart.declare(
      flooding,
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  heart.write(flooding, shard_id, std::vector<float>(64, 1.0F));
  heart.touch(flooding, shard_id);
  AskingClient flood(heart, flooding);
  AskingClient client(heart, other);

  flood.ask(shard_id, kRingEntries);
  client.ask(shard_id, 1);
  ASSERT_TRUE(heart.store().advance());
  EXPECT_EQ(flood.taken_count(), kRequestsATurn);
  EXPECT_EQ(client.answered_count(), 1u);

  // What is left is served by the turns that follow, and nobody has to ring for it.
  for (uint32_t turn = 2; turn <= kRingEntries / kRequestsATurn; ++turn) {
    client.ask(shard_id, 1);
    ASSERT_TRUE(heart.store().advance());
    EXPECT_EQ(flood.taken_count(), turn * kRequestsATurn);
    EXPECT_EQ(client.answered_count(), turn);
  }
  EXPECT_EQ(flood.answered_count(), kRingEntries);
}

TEST(TurnsTest, leases_that_sleep_are_not_tried) {
  constexpr uint32_t kSleeping = 1000;
  constexpr int kTurns = 100;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  heart.tries_sleepers = false;
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const uint32_t shard_id = heart.declare(
      session,
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  const Held first = heart.lease(session, shard_id, LeaseMode::overwrite);
  ASSERT_TRUE(first.is_ok());
  AskingClient client(heart, other);
  client.ask(shard_id, kSleeping);
  const Leases& leases = heart.job(session).cache().leases();
  ASSERT_TRUE(heart.until([&] { return client.taken_count() == kSleeping; }));
  EXPECT_EQ(leases.try_count(), 1 + kSleeping);

  for (int turn = 0; turn < kTurns; ++turn) EXPECT_FALSE(heart.store().advance());
  EXPECT_EQ(leases.try_count(), 1 + kSleeping);
  EXPECT_EQ(client.answered_count(), 0u);

  // One event: each of them is tried once.
  heart.release(first);
  ASSERT_TRUE(heart.store().advance());
  EXPECT_EQ(client.answered_count(), kSleeping);
  EXPECT_EQ(leases.try_count(), 1 + 2 * kSleeping);
}

/// A job whose arena is full of blobs of one block each, all of them clean. All but kFree are
/// leased for reading; those were used last.
class FullArena {
 public:
  static constexpr uint64_t kFree = 10;

  explicit FullArena(uint64_t segment_count)
      : slot_count_(segment_count * kSegmentBytes / kBlockBytes),
        heart_(std::make_shared<MemoryDisk>(400_MiB), kFloorSegments + segment_count) {
    heart_.tries_sleepers = false;
    const uint64_t job_id = heart_.open("job", segment_count);
    session_ = heart_.attach(job_id);
    other_ = heart_.attach(job_id);
    std::vector<ShardSpec> specs;
    for (uint64_t i = 0; i < slot_count_ + 2; ++i) {
      specs.push_back({.name = "blob" + std::to_string(i),
                       .kind = ShardKind::blob,
                       .dtype = DType::float32,
                       .shape = {kBlockBytes / sizeof(float)}});
    }
    ids_ = heart_.declare(session_, specs);
    for (uint64_t i = 0; i < slot_count_; ++i)
      heart_.write(session_, ids_[i], std::vector<float>(kBlockBytes / sizeof(float), 1.0F));
    EXPECT_TRUE(heart_.sync(session_).is_ok());
    for (uint64_t i = 0; i < slot_count_ - kFree; ++i)
      held_.push_back(heart_.lease(other_, ids_[i]));
    for (uint64_t i = slot_count_ - kFree; i < slot_count_; ++i) heart_.touch(other_, ids_[i]);
  }
  ~FullArena() {
    for (const Held& held : held_) heart_.release(held);
  }

  Heart& heart() { return heart_; }
  Job& job() { return heart_.job(session_); }
  /// A lease that needs the room of one blob.
  std::shared_ptr<std::optional<Held>> ask(uint64_t which) {
    return heart_.ask(session_, ids_[slot_count_ + which], LeaseMode::overwrite);
  }
  /// Nothing is left that could go.
  void hold_all() {
    for (uint64_t i = slot_count_ - kFree; i < slot_count_; ++i)
      held_.push_back(heart_.lease(other_, ids_[i]));
  }
  uint64_t held_count() const { return held_.size(); }
  void release_one() {
    heart_.release(held_.back());
    held_.pop_back();
  }

 private:
  const uint64_t slot_count_;
  Heart heart_;
  uint64_t session_ = 0;
  uint64_t other_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Held> held_;
};

TEST(TurnsTest, a_lease_looks_at_as_many_entries_beside_10000_as_beside_1000) {
  for (const uint64_t segment_count : {2, 20}) {
    SCOPED_TRACE(segment_count);
    FullArena full(segment_count);
    const Room& room = full.job().cache().room();
    uint64_t looked_at = room.looked_at_count();
    const auto looked = [&] {
      return room.looked_at_count() - std::exchange(looked_at, room.looked_at_count());
    };
    const auto first = full.ask(0);
    EXPECT_LE(looked(), 2 * Room::kLookedAtMax);
    for (int turn = 0; turn < kTurnsMax && !first->has_value(); ++turn) {
      ASSERT_TRUE(full.heart().store().advance());
      EXPECT_LE(looked(), 3 * Room::kLookedAtMax);
    }
    ASSERT_TRUE(first->has_value()) << "each turn looks at the same entries";
    ASSERT_TRUE((*first)->is_ok()) << (*first)->status.message();
    full.heart().release(**first);

    // What the first has met is not met again.
    const auto second = full.ask(1);
    ASSERT_TRUE(second->has_value() && (*second)->is_ok());
    EXPECT_LE(looked(), Room::kLookedAtMax + FullArena::kFree);
    full.heart().release(**second);
    // What a report counts anew is bounded as well.
    for (int call = 0; call < 3; ++call) (void)full.job().cache().slots().lease_count();
    EXPECT_EQ(full.job().cache().slots().lease_count(), full.held_count());
  }
}

TEST(TurnsTest, a_turn_in_which_a_lease_sleeps_for_room_is_bounded_whatever_is_leased) {
  for (const uint64_t segment_count : {2, 20}) {
    SCOPED_TRACE(segment_count);
    FullArena full(segment_count);
    full.hold_all();
    const auto waits = full.ask(0);
    int turns = 0;
    while (full.heart().store().advance() && turns < kTurnsMax) ++turns;
    ASSERT_LT(turns, kTurnsMax) << "the lease does not sleep";
    ASSERT_FALSE(waits->has_value());
    const Room& room = full.job().cache().room();
    const Leases& leases = full.job().cache().leases();
    const uint64_t tries = leases.try_count();
    for (int turn = 0; turn < 100; ++turn) {
      const uint64_t looked_at = room.looked_at_count();
      EXPECT_FALSE(full.heart().store().advance());
      EXPECT_LE(room.looked_at_count() - looked_at, Room::kLookedAtMax);
    }
    EXPECT_EQ(leases.try_count(), tries);
    // Before the server thread sleeps it looks at all of them.
    full.release_one();
    full.heart().store().look_for_releases();
    EXPECT_TRUE(full.heart().store().advance());
    ASSERT_TRUE(waits->has_value() && (*waits)->is_ok());
    EXPECT_EQ(leases.try_count(), tries + 1);
    full.heart().release(**waits);
  }
}

TEST(TurnsTest, a_large_lease_moves_few_small_entries_a_turn) {
  constexpr uint32_t kSmallCount = 500;
  constexpr uint64_t kSmallBytes = 8_KiB;
  for (const bool are_clean : {true, false}) {
    SCOPED_TRACE(are_clean ? "clean" : "dirty");
    Heart heart(std::make_shared<MemoryDisk>(400_MiB));
    const uint64_t session = heart.attach(heart.open("job", 2));
    std::vector<ShardSpec> specs = blobs(1 + kSmallCount, kSmallBytes);
    specs[0].shape = {4_MiB};
    const auto ids = heart.declare(session, specs);
    for (uint32_t i = 1; i <= kSmallCount; ++i)
      heart.write(session, ids[i], std::vector<uint8_t>(kSmallBytes, static_cast<uint8_t>(i)));
    if (are_clean) ASSERT_TRUE(heart.sync(session).is_ok());
    const JobCounters& counters = heart.job(session).cache().counters();
    const auto large = heart.ask(session, ids[0], LeaseMode::overwrite);
    int turns = 0;
    while (!large->has_value() && turns < 100 * kTurnsMax) {
      const uint64_t evicted_bytes = counters.evicted_bytes;
      const uint64_t spilled_bytes = counters.spilled_bytes;
      ++turns;
      heart.turn();
      ASSERT_LE(counters.evicted_bytes - evicted_bytes, Room::kMovedMax * kSmallBytes);
      ASSERT_LE(counters.spilled_bytes - spilled_bytes, Room::kMovedMax * kSmallBytes);
    }
    ASSERT_TRUE(large->has_value() && (*large)->is_ok());
    EXPECT_GE(turns, static_cast<int>(kSmallCount / Room::kMovedMax));
    EXPECT_EQ(counters.spilled_bytes, are_clean ? 0u : kSmallCount * kSmallBytes);
    heart.release(**large);
    for (uint32_t i = 1; i <= kSmallCount; ++i) {
      ASSERT_EQ(heart.read<uint8_t>(session, ids[i]),
                std::vector<uint8_t>(kSmallBytes, static_cast<uint8_t>(i)));
    }
  }
}

TEST(TurnsTest, a_search_for_what_may_be_spilled_goes_on_over_turns) {
  constexpr uint32_t kSmallCount = 7 * Room::kLookedAtMax;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t session = heart.attach(heart.open("job", 4));
  std::vector<ShardSpec> specs = blobs(2 + kSmallCount, kBlockBytes);
  specs[0].shape = {4_MiB};
  const auto ids = heart.declare(session, specs);
  const auto bytes_of = [](uint32_t i) {
    return std::vector<uint8_t>(kBlockBytes, static_cast<uint8_t>(i));
  };
  // A sync runs, and does not end. What is written behind it stays in memory until it has.
  heart.write(session, ids[1], bytes_of(1));
  heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
  std::optional<Status> synced;
  heart.store().operations().sync(
      session, [&](const Status& status, const StepReport&) { synced = status; });
  const Shards& shards = heart.job(session).shards();
  ASSERT_TRUE(heart.until(
      [&] { return shards.find_entry(ids[1], Part::value)->residency() == Residency::draining; }));
  for (uint32_t i = 2; i < ids.size(); ++i) heart.write(session, ids[i], bytes_of(i));
  while (heart.turn()) {
  }
  const JobCounters& counters = heart.job(session).cache().counters();
  const Room& room = heart.job(session).cache().room();
  const auto large = heart.ask(session, ids[0], LeaseMode::overwrite);
  int turns = 0;
  for (bool goes_on = true; goes_on && turns < kTurnsMax; ++turns) {
    const uint64_t looked_at_count = room.looked_at_count();
    goes_on = heart.store().advance();
    ASSERT_LE(room.looked_at_count() - looked_at_count, Room::kLookedAtMax);
  }
  EXPECT_GE(turns, 7);
  ASSERT_LT(turns, kTurnsMax) << "the lease does not sleep";
  ASSERT_FALSE(large->has_value()) << (*large)->status.message();
  EXPECT_EQ(counters.spilled_bytes, 0u);
  // The next search begins with the first once more.
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return large->has_value(); }));
  ASSERT_TRUE((*large)->is_ok()) << (*large)->status.message();
  ASSERT_TRUE(synced && synced->is_ok());
  EXPECT_GT(counters.spilled_bytes, 0u);
  heart.release(**large);
  for (uint32_t i = 1; i < ids.size(); ++i)
    ASSERT_EQ(heart.read<uint8_t>(session, ids[i]), bytes_of(i)) << i;
}

TEST(TurnsTest, a_sync_begins_few_writes_a_turn_and_commits_what_was_there_when_it_began) {
  constexpr uint32_t kBlobs = 500;
  const auto disk = std::make_shared<MemoryDisk>(400_MiB);
  const auto bytes_of = [](uint32_t i, uint8_t round) {
    return std::vector<uint8_t>(100, static_cast<uint8_t>(i + round));
  };
  {
    Heart heart(disk, HeartOptions{.pieces_a_turn = 1});
    const uint64_t session = heart.attach(heart.open("job"));
    const uint64_t other = heart.attach(heart.job(session).job_id());
    const auto ids = heart.declare(session, blobs(kBlobs, 100));
    std::vector<Held> held;
    for (const uint32_t id : ids) held.push_back(heart.lease(session, id, LeaseMode::overwrite));
    for (uint32_t i = 0; i < kBlobs; ++i) {
      std::ranges::copy(bytes_of(i, 0), reinterpret_cast<uint8_t*>(held[i].grant.data));
      heart.release(held[i]);
    }
    std::optional<Status> synced;
    heart.store().operations().sync(
        session, [&](const Status& status, const StepReport&) { synced = status; });
    const auto count_draining = [&] {
      return std::ranges::count_if(ids, [&](uint32_t id) {
        return heart.job(session).shards().find_entry(id, Part::value)->residency() ==
               Residency::draining;
      });
    };
    const auto count_pending = [&] {
      return std::ranges::count_if(ids, [&](uint32_t id) {
        return heart.job(session).shards().find_entry(id, Part::value)->pending() != nullptr;
      });
    };
    bool is_overwritten = false;
    ptrdiff_t draining_count = 0;
    ptrdiff_t pending_count = count_pending();
    ASSERT_GT(pending_count, ptrdiff_t{kBlobs / 2}) << "most of them take their place in the sync";
    while (!synced) {
      heart.turn();
      const ptrdiff_t pending_before = std::exchange(pending_count, count_pending());
      ASSERT_LE(pending_before - pending_count, ptrdiff_t{Writeback::kSubmittedMax});
      const ptrdiff_t before_count = std::exchange(draining_count, count_draining());
      ASSERT_LE(draining_count - before_count, ptrdiff_t{Writeback::kSubmittedMax});
      if (draining_count == 0 || std::exchange(is_overwritten, true)) continue;
      // The sync has begun. The first is on its way to the disk, the last is not.
      for (const uint32_t i : {0u, kBlobs - 1}) {
        heart.write(other, ids[i], bytes_of(i, 9));
        EXPECT_FALSE(synced.has_value());
        EXPECT_EQ(heart.read<uint8_t>(other, ids[i]), bytes_of(i, 9));
      }
      draining_count = count_draining();
      pending_count = count_pending();
    }
    ASSERT_TRUE(synced->is_ok()) << synced->message();
    ASSERT_TRUE(is_overwritten);
    for (const uint32_t i : {0u, kBlobs - 1})
      EXPECT_EQ(heart.read<uint8_t>(session, ids[i]), bytes_of(i, 9)) << i;
  }
  Heart next(disk);
  const uint64_t session = next.attach(next.open("job"));
  for (uint32_t i = 0; i < kBlobs; ++i) {
    const auto id = next.job(session).shards().find("blob" + std::to_string(i));
    ASSERT_TRUE(id.has_value());
    ASSERT_EQ(next.read<uint8_t>(session, *id), bytes_of(i, 0)) << i;
  }
}

TEST(TurnsTest, overwrites_that_are_over_take_their_place_as_others_begin) {
  constexpr uint32_t kBlobs = 100;
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), HeartOptions{});
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, blobs(kBlobs, 100));
  const Residencies& residencies = heart.job(session).cache().residencies();
  for (const uint32_t id : ids) {
    heart.write(session, id, std::vector<uint8_t>(100, 1));
    // The beginning of a sync, and the end of a session, look at each of them.
    ASSERT_LE(residencies.pending_ids().size(), 1U);
  }
  EXPECT_EQ(heart.read<uint8_t>(session, ids.back()), std::vector<uint8_t>(100, 1));
  EXPECT_TRUE(residencies.pending_ids().empty());
}

TEST(TurnsTest, a_parameter_that_a_sync_has_yet_to_write_is_not_written_to) {
  constexpr uint32_t kParameters = Writeback::kSubmittedMax + 4;
  const auto disk = std::make_shared<MemoryDisk>(400_MiB);
  const std::vector<float> old(kTileElements, 1.0F);
  const std::vector<float> late(kTileElements, 2.0F);
  {
    Heart heart(disk, {.segment_count = kFloorSegments + 40, .pieces_a_turn = 1});
    const uint64_t session = heart.attach(heart.open("job", 40, 390_MiB));
    const auto ids = heart.declare(session, parameters(kParameters));
    for (const uint32_t id : ids) heart.write(session, id, old);
    std::optional<Status> synced;
    heart.store().operations().sync(
        session, [&](const Status& status, const StepReport&) { synced = status; });
    const Shards& shards = heart.job(session).shards();
    const auto residency = [&](uint32_t id) {
      return shards.find_entry(id, Part::value)->residency();
    };
    ASSERT_TRUE(heart.until([&] { return residency(ids[0]) == Residency::draining; }));
    ASSERT_EQ(residency(ids.back()), Residency::dirty) << "the sync has written to it already";
    heart.write(session, ids.back(), late, Part::value, LeaseMode::write);
    ASSERT_TRUE(heart.until([&] { return synced.has_value(); }));
    ASSERT_TRUE(synced->is_ok()) << synced->message();
    EXPECT_TRUE(heart.read<float>(session, ids.back()) == late);
  }
  Heart next(disk, kFloorSegments + 40);
  const uint64_t session = next.attach(next.open("job", 40, 390_MiB));
  const auto id = next.job(session).shards().find("p" + std::to_string(kParameters - 1));
  ASSERT_TRUE(id.has_value());
  EXPECT_TRUE(next.read<float>(session, *id) == old);
}

TEST(TurnsTest, a_lease_looks_at_no_more_retired_slots_however_many_readers_keep) {
  constexpr uint32_t kRetired = 1000;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  heart.tries_sleepers = false;
  const uint64_t job_id = heart.open("job");
  const uint64_t writer = heart.attach(job_id);
  const uint64_t reader = heart.attach(job_id);
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < kRetired; ++i) {
    specs.push_back({.name = "blob" + std::to_string(i),
                     .kind = ShardKind::blob,
                     .dtype = DType::float32,
                     .shape = {1}});
  }
  const auto ids = heart.declare(writer, specs);
  std::vector<Held> held;
  for (const uint32_t id : ids) {
    heart.write(writer, id, std::vector<float>(1, 1.0F));
    held.push_back(heart.lease(reader, id));
    heart.write(writer, id, std::vector<float>(1, 2.0F));
  }
  for (const uint32_t id : ids) heart.touch(writer, id);  // what was written takes its place
  Slots& slots = heart.job(writer).cache().slots();
  ASSERT_EQ(slots.retired_count(), kRetired);
  const uint64_t looked_at_count = slots.retired_looked_at_count();
  slots.free_retired();
  EXPECT_EQ(slots.retired_looked_at_count() - looked_at_count, Slots::kRetiredLookedAtMax);
  EXPECT_EQ(slots.pinned_by_others(writer), true);

  // Those that are free are found wherever they are.
  heart.release(held[kRetired / 2]);
  for (uint32_t i = 0; i < kRetired / Slots::kRetiredLookedAtMax + 1; ++i) slots.free_retired();
  EXPECT_EQ(slots.retired_count(), kRetired - 1);
  held.erase(held.begin() + kRetired / 2);
  EXPECT_EQ(slots.pinned_by_others(reader), false);
  // The session's own, whatever the job has.
  const auto lease_count = heart.store().detach(reader);
  ASSERT_TRUE(lease_count.is_ok());
  EXPECT_EQ(lease_count.value(), held.size());
  EXPECT_EQ(slots.pinned_by_others(writer), false);
}

TEST(TurnsTest, a_session_that_ends_looks_at_buckets_with_gradients_alone) {
  constexpr uint32_t kParameters = 12;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB), kFloorSegments + 60);
  const uint64_t job_id = heart.open("job", 60, 215_MiB);
  const uint64_t idle = heart.attach(job_id);
  const uint64_t ending = heart.attach(job_id);
  const uint64_t staying = heart.attach(job_id);
  const auto ids = heart.declare(staying, parameters(kParameters));
  const std::vector<float> values(kTileElements, 1.0F);
  for (const uint32_t id : ids) heart.write(staying, id, values);
  for (const uint32_t id : {ids[2], ids[5]}) heart.write(ending, id, values, Part::gradient);
  heart.write(staying, ids[7], values, Part::gradient);
  const Gradients& gradients = heart.store().gradients();
  const auto looked_at_by_the_end_of = [&](uint64_t session) {
    const uint64_t before = gradients.looked_at_count();
    EXPECT_TRUE(heart.store().detach(session).is_ok());
    return gradients.looked_at_count() - before;
  };
  EXPECT_EQ(looked_at_by_the_end_of(ending), 3U);
  EXPECT_EQ(looked_at_by_the_end_of(idle), 1U);
  EXPECT_EQ(heart.lease(staying, ids[2], LeaseMode::read, Part::gradient).status.code(),
            StatusCode::not_found);
  EXPECT_EQ(heart.read<float>(staying, ids[7], Part::gradient), values);
  EXPECT_EQ(looked_at_by_the_end_of(staying), 1U);
}

TEST(TurnsTest, a_step_that_is_published_looks_at_its_own_gradients_alone) {
  constexpr uint32_t kParameters = 12;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB), kFloorSegments + 60);
  const uint64_t session = heart.attach(heart.open("job", 60, 215_MiB));
  const auto ids = heart.declare(session, parameters(kParameters));
  for (const uint32_t id : ids) heart.write(session, id, std::vector<float>(kTileElements, 1.0F));
  for (const uint32_t id : {ids[2], ids[5]})
    heart.write(session, id, std::vector<float>(kTileElements, 1.0F), Part::gradient);
  const Gradients& gradients = heart.store().gradients();
  const uint64_t looked_at_count = gradients.looked_at_count();
  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = {.lr = 1e-2}, .shard_ids = {ids[2]}}};
  const Status status = heart.step(request).first;
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(gradients.looked_at_count() - looked_at_count, 1u);
  EXPECT_EQ(heart.job(session).shards()[ids[2]].contributors.empty(), true);
  // So does who drops one by name.
  ASSERT_TRUE(heart.store().gradients().drop(session, {ids[5]}).is_ok());
  EXPECT_EQ(gradients.looked_at_count() - looked_at_count, 2u);
  EXPECT_EQ(heart.job(session).shards()[ids[5]].contributors.empty(), true);
}

}  // namespace
}  // namespace memd::testing
