#include "store/shard_store.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <map>

#include "released_memory.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::halves;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::kSegmentBytes;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::Twin;

class ShardStoreTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

// ---- Leases

TEST_F(ShardStoreTest, a_miss_is_fetched_verified_and_then_hit) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));  // no room for both: a is spilled
  EXPECT_EQ(heart.job(session).cache().counters().spilled_bytes, 3_MiB);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(3_MiB, 1));
  EXPECT_EQ(heart.job(session).cache().counters().fetched_bytes, 3_MiB);
  const uint64_t hits = heart.job(session).cache().counters().lease_hits;
  heart.touch(session, ids[0]);
  EXPECT_EQ(heart.job(session).cache().counters().lease_hits, hits + 1);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[1]), pattern(3_MiB, 2));
}

TEST_F(ShardStoreTest, a_bit_that_the_bus_flipped_is_read_again_and_one_on_the_disk_is_an_error) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));
  heart.faults().add_fault({.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::read});
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(3_MiB, 1));
  EXPECT_EQ(heart.extents().checksum_failure_count(0), 1u);
  heart.touch(session, ids[1]);
  heart.faults().clear_faults();
  heart.faults().add_fault(
      {.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::read, .count = 100});
  const Held held = heart.lease(session, ids[0]);
  EXPECT_EQ(held.status.code(), StatusCode::integrity);
  EXPECT_NE(held.status.message().find("job/a"), std::string::npos) << held.status.message();
  EXPECT_EQ(heart.job(session).job_info().lost_shards, std::vector<std::string>{"a"});
  heart.faults().clear_faults();
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(3_MiB, 1));
}

TEST_F(ShardStoreTest, a_read_that_the_device_fails_is_tried_three_times_within_two_seconds) {
  for (const uint64_t failures : {2u, 3u}) {
    SCOPED_TRACE(failures);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    Heart heart(disk_, 2 * kFloorSegments + 8);
    const uint64_t other = heart.attach(heart.open("other", 2, 4_MiB));
    const auto others = heart.declare(other, {bytes_shard("c", 1000)});
    heart.write(other, others[0], pattern(1000, 3));
    const uint64_t job_id = heart.open("job", 2);
    const uint64_t session = heart.attach(job_id);
    const auto ids = heart.declare(session, {bytes_shard("a", 1_MiB), bytes_shard("b", 4_MiB)});
    heart.write(session, ids[0], pattern(1_MiB, 1));
    heart.write(session, ids[1], pattern(4_MiB, 2));  // a is spilled
    ASSERT_TRUE(heart.sync(session).is_ok());
    heart.touch(session, ids[1]);
    heart.faults().add_fault(
        {.kind = MemoryFaultKind::error, .io_kind = IoKind::read, .count = failures});
    heart.holds_tries_up = true;
    const uint64_t began_ns = heart.clock.now_ns();
    const auto answer = heart.ask(session, ids[0]);
    for (uint64_t tries = 1; tries < 3; ++tries) {
      heart.turns();
      EXPECT_EQ(heart.faults().fault_hit_count(), tries);
      EXPECT_FALSE(answer->has_value());
      // Nobody else waits for it, and the server's thread sleeps until the next try.
      EXPECT_EQ(heart.read<uint8_t>(other, others[0]), pattern(1000, 3));
      const uint64_t due_ns = heart.store().next_deadline_ns();
      ASSERT_GT(due_ns, heart.clock.now_ns());
      const auto open = heart.store().reports().in_flight();
      EXPECT_TRUE(std::any_of(open.begin(), open.end(), [](const Activity& each) {
        return each.kind == "read" && each.waits_on.find("its next try") != std::string::npos;
      }));
      EXPECT_FALSE(heart.store().reports().find_job("job").value().unreadable_shards.size() > 0);
      heart.clock.advance(due_ns - heart.clock.now_ns());
    }
    ASSERT_TRUE(heart.until([&] { return answer->has_value(); }));
    EXPECT_LT(heart.clock.now_ns() - began_ns, 2'000'000'000u);
    EXPECT_EQ(heart.job(session).lost().count(), 0u) << "an error says nothing about the bytes";
    const auto unreadable = [&] {
      return heart.store().reports().find_job("job").value().unreadable_shards;
    };
    if (failures == 2) {
      EXPECT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
      EXPECT_TRUE(unreadable().empty());
      continue;
    }
    const Status& status = (*answer)->status;
    EXPECT_EQ(status.code(), StatusCode::device);
    EXPECT_EQ(status.error_number(), EIO);
    EXPECT_NE(status.message().find("shard job/a"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("disk at "), std::string::npos) << status.message();
    EXPECT_EQ(unreadable(), std::vector<std::string>{"a"});
    EXPECT_TRUE(heart.shards(job_id)[0].unreadable);
    EXPECT_FALSE(heart.shards(job_id)[1].unreadable);
    EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(1_MiB, 1)) << "the next lease tries";
    EXPECT_TRUE(unreadable().empty());
  }
}

TEST_F(ShardStoreTest, what_could_not_be_read_is_no_matter_once_it_was_written_again) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 1_MiB), bytes_shard("b", 4_MiB)});
  heart.write(session, ids[0], pattern(1_MiB, 1));
  heart.write(session, ids[1], pattern(4_MiB, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());
  heart.faults().add_fault({.io_kind = IoKind::read, .count = 3});
  EXPECT_EQ(heart.lease(session, ids[0]).status.code(), StatusCode::device);
  EXPECT_EQ(heart.store().reports().find_job("job").value().unreadable_shards.size(), 1u);
  heart.write(session, ids[0], pattern(1_MiB, 3));
  ASSERT_TRUE(heart.sync(session).is_ok()) << "nothing stops the job";
  EXPECT_TRUE(heart.store().reports().find_job("job").value().unreadable_shards.empty());
  EXPECT_TRUE(heart.extents().unreadable_places().empty());
}

TEST_F(ShardStoreTest, who_writes_in_a_slot_while_it_is_filled_loses_no_shard) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(
      session, {bytes_shard("a", 1_MiB), parameter("w", 300'000), bytes_shard("room", 4_MiB)});
  heart.write(session, ids[0], pattern(1_MiB, 1));
  heart.write(session, ids[1], numbers(300'000, 2));
  heart.write(session, ids[2], pattern(4_MiB, 3));  // no room for all: the others are spilled
  const Job& job = heart.job(session);
  ASSERT_FALSE(job.shards()[ids[0]].value->is_resident());
  ASSERT_FALSE(job.shards()[ids[1]].value->is_resident());
  const Arena& arena = job.memory()->arena();
  heart.io().after_read = [&](std::span<std::byte> data) {
    const bool is_mapped =
        data.data() >= arena.at(0) && data.data() < arena.at(arena.capacity_bytes());
    if (is_mapped) data[77] ^= std::byte{1};
  };
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(1_MiB, 1));
  EXPECT_EQ(heart.read<float>(session, ids[1]), numbers(300'000, 2));
  EXPECT_TRUE(job.job_info().lost_shards.empty());
  EXPECT_TRUE(heart.sync(session).is_ok());
}

TEST_F(ShardStoreTest, a_live_view_of_a_parameter_is_never_written) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("w", 1000)});
  const auto old = numbers(1000, 1);
  heart.write(session, ids[0], old);
  const Held view = heart.lease(session, ids[0]);
  const Held writer = heart.lease(session, ids[0], LeaseMode::write);
  ASSERT_TRUE(writer.is_ok());
  EXPECT_NE(writer.grant.data, view.grant.data);
  EXPECT_EQ(writer.as<float>()[5], old[5]) << "a writer sees the old bytes";
  writer.as<float>()[5] = 77;
  EXPECT_EQ(view.as<float>()[5], old[5]);
  const auto reader = heart.ask(session, ids[0]);
  heart.turns();
  EXPECT_FALSE(reader->has_value()) << "nobody reads what is half written";
  heart.release(writer);
  ASSERT_TRUE(heart.until([&] { return reader->has_value(); }));
  EXPECT_EQ((*reader)->as<float>()[5], 77);
  EXPECT_EQ(view.as<float>()[5], old[5]);
  heart.release(view);
  heart.release(**reader);
}

TEST_F(ShardStoreTest, readers_of_a_blob_keep_the_old_bytes_until_the_writer_is_done) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {bytes_shard("a", 5000)});
  heart.write(session, ids[0], pattern(5000, 1));
  for (const LeaseMode mode : {LeaseMode::overwrite, LeaseMode::write}) {
    const auto before = heart.read<uint8_t>(session, ids[0]);
    const Held writer = heart.lease(session, ids[0], mode);
    ASSERT_TRUE(writer.is_ok());
    if (mode == LeaseMode::write) EXPECT_EQ(writer.as<uint8_t>()[7], before[7]);
    const auto fresh = pattern(5000, mode == LeaseMode::write ? 3 : 2);
    std::copy(fresh.begin(), fresh.end(), writer.as<uint8_t>().begin());
    EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), before);
    heart.release(writer);
    EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), fresh);
  }
}

TEST_F(ShardStoreTest, a_blob_in_the_middle_of_a_small_arena_can_be_written) {
  for (const bool is_on_disk : {false, true}) {
    SCOPED_TRACE(is_on_disk);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    Heart heart(disk_);
    // The arena holds the large one twice, and not beside the place behind the small one.
    const uint64_t session = heart.attach(heart.open("job", 3));
    const auto ids =
        heart.declare(session, {bytes_shard("small", 1_MiB), bytes_shard("large", 3_MiB)});
    heart.write(session, ids[0], pattern(1_MiB, 1));
    heart.write(session, ids[1], pattern(3_MiB, 2));
    if (is_on_disk) ASSERT_TRUE(heart.sync(session).is_ok());
    const Held writer = heart.lease(session, ids[1], LeaseMode::write);
    ASSERT_TRUE(writer.is_ok()) << writer.status.message();
    writer.as<uint8_t>()[0] = 7;
    heart.release(writer);
    auto expected = pattern(3_MiB, 2);
    expected[0] = 7;
    EXPECT_EQ(heart.read<uint8_t>(session, ids[1]), expected);
    EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(1_MiB, 1));
  }
}

TEST_F(ShardStoreTest, a_blob_that_the_arena_does_not_hold_twice_is_refused_where_it_is_copied) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 3));
  const auto ids = heart.declare(session, {bytes_shard("large", 4_MiB)});
  heart.write(session, ids[0], pattern(4_MiB, 2));
  const Held refused = heart.lease(session, ids[0], LeaseMode::write);
  EXPECT_EQ(refused.status.code(), StatusCode::capacity);
  EXPECT_NE(refused.status.message().find("raise host_bytes"), std::string::npos);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(4_MiB, 2));
}

TEST_F(ShardStoreTest,
       a_blob_first_put_in_write_mode_starts_with_zeros_and_is_readable_afterwards) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {bytes_shard("a", 5000)});
  const Held writer = heart.lease(session, ids[0], LeaseMode::write);
  ASSERT_TRUE(writer.is_ok());
  for (const uint8_t byte : writer.as<uint8_t>()) ASSERT_EQ(byte, 0);
  EXPECT_FALSE(heart.shards(1)[0].written);
  writer.as<uint8_t>()[9] = 9;
  heart.release(writer);
  EXPECT_TRUE(heart.shards(1)[0].written);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0])[9], 9);
}

TEST_F(ShardStoreTest, a_discarded_overwrite_leaves_no_trace) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const auto ids = heart.declare(session, {bytes_shard("a", 5000)});
  heart.write(session, ids[0], pattern(5000, 1));
  const auto answer = heart.ask({.session_id = session,
                                 .shard_id = ids[0],
                                 .part = Part::value,
                                 .mode = LeaseMode::overwrite,
                                 .timeout_ns = 1,
                                 .for_service = true,
                                 .prefetch = false});
  ASSERT_TRUE(answer->has_value());
  ASSERT_TRUE((*answer)->is_ok());
  std::fill_n((*answer)->grant.data, 5000, std::byte{9});
  const uint64_t used = heart.job(session).memory()->arena().used_bytes();
  heart.store().release_service_lease(job_id, (*answer)->grant, true);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(5000, 1));
  EXPECT_LT(heart.job(session).memory()->arena().used_bytes(), used);
}

TEST_F(ShardStoreTest, what_a_dead_session_half_wrote_is_gone) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t dead = heart.attach(job_id);
  const uint64_t alive = heart.attach(job_id);
  const auto ids = heart.declare(
      dead, {bytes_shard("blob", 5000), parameter("w", 300'000), parameter("fresh", 300'000)});
  heart.write(dead, ids[0], pattern(5000, 1));
  heart.write(dead, ids[1], numbers(300'000, 1));
  ASSERT_TRUE(heart.sync(dead).is_ok());
  for (const LeaseMode mode : {LeaseMode::write, LeaseMode::overwrite}) {
    const uint64_t dying = mode == LeaseMode::write ? dead : heart.attach(job_id);
    const Held blob = heart.lease(dying, ids[0], mode);
    const Held value = heart.lease(dying, ids[1], mode);
    const Held fresh = heart.lease(dying, ids[2], mode);
    const Held gradient = heart.lease(dying, ids[1], LeaseMode::overwrite, Part::gradient);
    for (const Held& held : {blob, value, fresh, gradient}) {
      ASSERT_TRUE(held.is_ok()) << held.status.message();
      std::fill_n(held.grant.data, 2000, std::byte{0x55});
    }
    const auto leases = heart.store().detach(dying);
    ASSERT_TRUE(leases.is_ok());
    EXPECT_EQ(leases.value(), 4u);
    EXPECT_EQ(heart.read<uint8_t>(alive, ids[0]), pattern(5000, 1));
    EXPECT_EQ(heart.read<float>(alive, ids[1]), numbers(300'000, 1));
    EXPECT_EQ(heart.lease(alive, ids[2]).status.code(), StatusCode::not_found);
    EXPECT_EQ(heart.lease(alive, ids[1], LeaseMode::read, Part::gradient).status.code(),
              StatusCode::not_found);
  }
  EXPECT_EQ(heart.job(alive).cache().slots().lease_count(), 0u);
}

TEST_F(ShardStoreTest, who_holds_every_pin_is_refused_at_once_with_the_names_of_the_holders) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job", 2);
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));
  const Held a = heart.lease(session, ids[0]);
  ASSERT_TRUE(a.is_ok());
  const Held refused = heart.lease(session, ids[1]);
  EXPECT_EQ(refused.status.code(), StatusCode::capacity);
  EXPECT_NE(refused.status.message().find("job/a"), std::string::npos) << refused.status.message();

  // Another session may give it back: so this one waits, and says on what when its time is over.
  const auto waiting = heart.ask(other, ids[1]);
  heart.turns();
  ASSERT_FALSE(waiting->has_value());
  heart.clock.advance(60'000'000'001);
  ASSERT_TRUE(heart.until([&] { return waiting->has_value(); }));
  EXPECT_EQ((*waiting)->status.code(), StatusCode::deadline);
  EXPECT_NE((*waiting)->status.message().find("room in the arena"), std::string::npos);
  const auto lucky = heart.ask(other, ids[1]);
  heart.turns();
  heart.release(a);
  ASSERT_TRUE(heart.until([&] { return lucky->has_value(); }));
  EXPECT_TRUE((*lucky)->is_ok()) << (*lucky)->status.message();
  heart.release(**lucky);
}

TEST_F(ShardStoreTest, what_a_client_writes_in_its_counters_hides_nobody_elses_pin) {
  for (const bool for_service : {true, false}) {
    SCOPED_TRACE(for_service ? "the daemon's own pin" : "another session's pin");
    Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
    const uint64_t job_id = heart.open("job", 2);
    const uint64_t hostile = heart.attach(job_id);
    const uint64_t other = heart.attach(job_id);
    const auto ids = heart.declare(hostile, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
    heart.write(hostile, ids[0], pattern(3_MiB, 1));
    ASSERT_TRUE(heart.sync(hostile).is_ok());
    const auto answer = heart.ask({.session_id = other,
                                   .shard_id = ids[0],
                                   .part = Part::value,
                                   .mode = LeaseMode::read,
                                   .timeout_ns = 1,
                                   .for_service = for_service,
                                   .prefetch = false});
    ASSERT_TRUE(answer->has_value() && (*answer)->is_ok());
    const LeaseGrant grant = (*answer)->grant;
    heart.store().sessions().at(hostile)->ring.add_pin(grant.slot->pin_first, 0xffff'ffff);
    const Job& job = heart.job(hostile);
    EXPECT_TRUE(job.cache().slots().is_pinned(*grant.slot));
    const auto wants_room = heart.ask(hostile, ids[1], LeaseMode::overwrite);
    heart.turns();
    EXPECT_EQ(job.shards()[ids[0]].value->slot(), grant.slot) << "the slot was freed";
    ASSERT_TRUE(job.shards()[ids[0]].value->is_resident());
    const auto* const bytes = reinterpret_cast<const uint8_t*>(grant.data);
    EXPECT_TRUE(std::equal(bytes, bytes + 3_MiB, pattern(3_MiB, 1).begin()));
    if (for_service) heart.store().release_service_lease(job_id, grant, false);
    ASSERT_TRUE(heart.store().detach(hostile).is_ok());
  }
}

TEST_F(ShardStoreTest, one_reader_too_many_is_refused_and_none_becomes_a_writer) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const auto ids = heart.declare(session, {bytes_shard("a", 5000)});
  heart.write(session, ids[0], pattern(5000, 1));
  const Held held = heart.lease(session, ids[0]);
  ServerRing& ring = heart.store().sessions().at(session)->ring;
  ring.add_pin(held.grant.slot->pin_first, kPinReadersMax - 1);
  const Held refused = heart.lease(session, ids[0]);
  EXPECT_EQ(refused.status.code(), StatusCode::capacity);
  EXPECT_NE(refused.status.message().find("65535"), std::string::npos) << refused.status.message();
  EXPECT_EQ(pin_writers(ring.pins(held.grant.slot->pin_first)), 0u);
  EXPECT_EQ(heart.read<uint8_t>(other, ids[0]), pattern(5000, 1));
  heart.release(held);
  heart.touch(session, ids[0]);
}

TEST_F(ShardStoreTest, the_longest_unused_goes_first) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  std::vector<ShardSpec> specs;
  for (const char* name : {"a", "b", "c", "d"}) specs.push_back(bytes_shard(name, 1_MiB));
  const auto ids = heart.declare(session, specs);
  for (const uint32_t id : ids) heart.write(session, id, pattern(1_MiB, static_cast<uint8_t>(id)));
  ASSERT_TRUE(heart.sync(session).is_ok());
  for (const uint32_t i : {1, 0, 3, 2}) heart.touch(session, ids[i]);
  const auto extra = heart.declare(session, {bytes_shard("e", 1_MiB)});
  heart.write(session, extra[0], pattern(1_MiB, 9));
  const Job& job = heart.job(session);
  EXPECT_FALSE(job.shards()[ids[1]].value->is_resident());
  for (const uint32_t i : {0, 2, 3}) EXPECT_TRUE(job.shards()[ids[i]].value->is_resident()) << i;
}

TEST_F(ShardStoreTest, a_prefetch_brings_up_what_there_is_room_for_and_fails_nobody) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());
  const auto prefetch = [&](uint32_t id) {
    heart.ask({.session_id = session,
               .shard_id = id,
               .part = Part::value,
               .mode = LeaseMode::read,
               .timeout_ns = 0,
               .for_service = false,
               .prefetch = true});
  };
  prefetch(ids[0]);
  const auto lease = heart.ask(session, ids[0]);
  ASSERT_TRUE(heart.until([&] { return lease->has_value(); }));
  ASSERT_TRUE((*lease)->is_ok()) << (*lease)->status.message();
  prefetch(ids[1]);  // no room
  prefetch(12345);   // no such shard
  heart.turns();
  EXPECT_EQ(heart.job(session).cache().slots().lease_count(), 1u);
  heart.release(**lease);
  prefetch(ids[1]);
  EXPECT_TRUE(
      heart.until([&] { return heart.job(session).shards()[ids[1]].value->is_resident(); }));
  EXPECT_EQ(heart.job(session).cache().slots().lease_count(), 0u);
}

TEST_F(ShardStoreTest, leases_that_wait_for_the_disk_are_tried_again_when_it_is_done) {
  constexpr uint64_t kCount = 20;
  Heart heart(disk_);
  heart.tries_sleepers = false;
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  heart.write(session, ids[1], pattern(3_MiB, 2));
  heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  std::vector<std::shared_ptr<std::optional<Held>>> asked;
  for (uint64_t i = 0; i < kCount; ++i)
    asked.push_back(heart.ask(session, ids[0], LeaseMode::read));
  ASSERT_TRUE(heart.until([&] { return heart.faults().has_stalled(); }));
  heart.settle();
  ASSERT_FALSE(asked.back()->has_value());
  const uint64_t tries = heart.job(session).cache().leases().try_count();
  heart.turns();
  EXPECT_EQ(heart.job(session).cache().leases().try_count(), tries);
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return asked.back()->has_value(); }));
  EXPECT_EQ(heart.job(session).cache().leases().try_count(), tries + kCount);
  for (const auto& each : asked) {
    ASSERT_TRUE(each->has_value() && (*each)->is_ok());
    heart.release(**each);
  }
}

TEST_F(ShardStoreTest, who_waits_for_room_goes_before_a_newcomer_that_needs_some) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job", 3);
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const auto ids = heart.declare(
      session,
      {bytes_shard("held", 3_MiB), bytes_shard("large", 4_MiB), bytes_shard("small", 1_MiB)});
  heart.write(session, ids[0], pattern(3_MiB, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  const Held held = heart.lease(other, ids[0]);
  ASSERT_TRUE(held.is_ok());
  const auto large = heart.ask(session, ids[1], LeaseMode::overwrite);
  heart.turns();
  EXPECT_FALSE(large->has_value());
  const auto small = heart.ask(session, ids[2], LeaseMode::overwrite);
  EXPECT_FALSE(small->has_value()) << "there is room for it, and others have waited for room";
  heart.touch(session, ids[0]);
  heart.release(held);
  ASSERT_TRUE(heart.until([&] { return large->has_value() && small->has_value(); }));
  for (const auto& granted : {large, small}) {
    ASSERT_TRUE((*granted)->is_ok()) << (*granted)->status.message();
    heart.release(**granted);
  }
}

TEST_F(ShardStoreTest, a_spill_that_fails_is_told_to_who_waits_for_the_room) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session, {bytes_shard("a", 3_MiB), bytes_shard("b", 3_MiB)});
  heart.limit_state(session, 1_MiB);
  heart.write(session, ids[0], pattern(3_MiB, 1));
  const Held refused = heart.lease(session, ids[1], LeaseMode::overwrite);
  EXPECT_EQ(refused.status.code(), StatusCode::capacity);
  EXPECT_NE(refused.status.message().find("nvme_bytes"), std::string::npos)
      << refused.status.message();
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(3_MiB, 1));
  EXPECT_LE(heart.job(session).space().used_bytes(), 1_MiB);
  // What could not be written is written once there is room.
  heart.limit_state(session, 8_MiB);
  heart.write(session, ids[1], pattern(3_MiB, 2));
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(3_MiB, 1));
}

TEST_F(ShardStoreTest, what_a_failed_spill_left_on_disk_is_not_taken_for_the_whole) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job", 2);
  const uint64_t session = heart.attach(job_id);
  const auto ids = heart.declare(session, {parameter("w", 700'000), bytes_shard("b", 3_MiB)});
  heart.limit_state(session, 1_MiB);
  heart.write(session, ids[0], numbers(700'000, 1));
  EXPECT_EQ(heart.lease(session, ids[1], LeaseMode::overwrite).status.code(), StatusCode::capacity);
  EXPECT_EQ(heart.job(session).space().used_bytes(), 1_MiB) << "one of its three tiles";
  const uint64_t dying = heart.attach(job_id);
  ASSERT_TRUE(heart.lease(dying, ids[0], LeaseMode::write).is_ok());
  ASSERT_TRUE(heart.store().detach(dying).is_ok());
  EXPECT_EQ(heart.lease(session, ids[0]).status.code(), StatusCode::not_found);
}

TEST_F(ShardStoreTest, a_spilled_gradient_comes_back_and_a_write_without_one_adds_to_zeros) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session,
                                 {parameter("w", 300'000),
                                  parameter("a", 1000),
                                  parameter("b", 1000),
                                  bytes_shard("blob", 3_MiB)});
  const auto gradient = numbers(300'000, 3);
  heart.write(session, ids[0], gradient, Part::gradient);
  heart.write(session, ids[1], numbers(1000, 4), Part::gradient);
  heart.write(session, ids[2], numbers(1000, 5), Part::gradient);
  heart.write(session, ids[3], pattern(3_MiB, 1));
  ASSERT_FALSE(heart.job(session).shards().find_entry(ids[0], Part::gradient)->is_resident());
  EXPECT_EQ(heart.read<float>(session, ids[0], Part::gradient), gradient);
  ASSERT_TRUE(heart.store().gradients().drop(session, {ids[1]}).is_ok());
  const Held again = heart.lease(session, ids[1], LeaseMode::write, Part::gradient);
  ASSERT_TRUE(again.is_ok());
  for (const float value : again.as<float>()) ASSERT_EQ(value, 0);
  heart.release(again);
  EXPECT_EQ(heart.read<float>(session, ids[2], Part::gradient), numbers(1000, 5));
}

TEST_F(ShardStoreTest, a_dropped_job_gives_everything_back_and_nobody_attaches_to_it_meanwhile) {
  Heart heart(disk_);
  const uint64_t free_bytes = heart.extents().free_bytes();
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const auto ids = heart.declare(session, {parameter("w", 300'000), bytes_shard("a", 5000)});
  heart.write(session, ids[0], numbers(300'000, 1));
  heart.write(session, ids[0], numbers(300'000, 2), Part::gradient);
  const auto view = heart.lease(session, ids[0]);
  std::optional<Status> synced;
  heart.store().operations().sync(
      session, [&](const Status& status, const StepReport&) { synced = status; });
  std::optional<Status> dropped;
  heart.store().drop_job(job_id, false, [&](const Status& status) { dropped = status; });
  ASSERT_TRUE(dropped);
  EXPECT_EQ(dropped->code(), StatusCode::in_use) << "somebody is attached";
  EXPECT_NE(dropped->message().find("`memd job drop --force`"), std::string::npos);
  dropped.reset();
  heart.store().drop_job(job_id, true, [&](const Status& status) { dropped = status; });
  EXPECT_EQ(heart.store().attach(job_id).status().code(), StatusCode::unavailable);
  ASSERT_TRUE(heart.until([&] { return dropped.has_value(); }));
  EXPECT_TRUE(dropped->is_ok()) << dropped->message();
  EXPECT_TRUE(synced && synced->is_ok()) << "what was begun is finished";
  // The root remains: one block.
  EXPECT_EQ(heart.extents().free_bytes(), free_bytes - kBlockBytes);
  EXPECT_EQ(testing::replace_released(heart.store().memory()), kFloorSegments + 8);
  EXPECT_EQ(heart.store().reports().find_job("job").status().code(), StatusCode::not_found);
}

TEST_F(ShardStoreTest, a_deleted_blobs_id_is_no_other_shards_while_a_session_may_know_it) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const auto remove = [&](const char* name) {
    std::optional<bool> is_gone;
    heart.store().delete_shard(session, name, [&](Result<bool> gone) { is_gone = gone.value(); });
    EXPECT_TRUE(heart.until([&] { return is_gone.has_value(); }));
    EXPECT_TRUE(is_gone.value_or(false));
  };
  const auto put = [&](const char* name, uint8_t value) {
    const uint32_t id = heart.declare(session, {bytes_shard(name, 100)}).at(0);
    heart.write(session, id, pattern(100, value));
    return id;
  };
  const uint32_t first = put("x", 1);
  remove("x");
  EXPECT_EQ(put("y", 2), first) << "nobody else knows it";
  const uint64_t other = heart.attach(job_id);
  EXPECT_EQ(heart.read<uint8_t>(other, first), pattern(100, 2));
  remove("y");
  const uint32_t second = put("z", 3);
  EXPECT_NE(second, first);
  EXPECT_EQ(heart.lease(other, first).status.code(), StatusCode::not_found);
  ASSERT_TRUE(heart.store().detach(other).is_ok());
  EXPECT_EQ(put("w", 4), first);
}

TEST_F(ShardStoreTest, who_waits_for_room_waits_for_whichever_view_of_another_session_is_left) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  std::vector<ShardSpec> specs;
  for (const char* name : {"first", "second", "third"}) {
    specs.push_back(bytes_shard(name, 5_MiB));
    specs.back().tier = Tier::host;  // nothing makes them go
  }
  specs.push_back(bytes_shard("large", 12_MiB));
  const auto ids = heart.declare(session, specs);
  for (size_t i = 0; i < 3; ++i) heart.write(session, ids[i], pattern(5_MiB, 1));
  const Held third = heart.lease(other, ids[2]);
  const auto large = heart.ask(session, ids[3], LeaseMode::overwrite);
  heart.turns();
  EXPECT_FALSE(large->has_value());
  const Held first = heart.lease(other, ids[0]);
  heart.release(third);
  heart.turns();
  ASSERT_FALSE(large->has_value()) << (*large)->status.message();
  heart.release(first);
  ASSERT_TRUE(heart.until([&] { return large->has_value(); }));
  EXPECT_EQ((*large)->status.code(), StatusCode::capacity) << "nobody holds what could go";
}

// ---- Steps

/// A model of small and large shards of both dtypes in two groups, beside its twin in plain memory.
class StepTest : public ShardStoreTest {
 protected:
  static constexpr uint64_t kLarge = 2 * kTileElements + 1000;

  void make(Heart& heart, const std::string& name, uint64_t arena_segments) {
    session_ = heart.attach(heart.open(name, arena_segments));
    specs_ = {parameter("bias", 7),
              parameter("large", kLarge),
              parameter("norm", 1001),
              parameter("half", 70'000, DType::bfloat16),
              parameter("large_half", kTileElements + 64, DType::bfloat16),
              parameter("frozen", 500),
              bytes_shard("blob", 3_MiB),
              bytes_shard("blob2", 3_MiB)};
    ids_ = heart.declare(session_, specs_);
    for (uint32_t i = 0; i < 6; ++i) {
      const uint64_t count = specs_[i].shape[0];
      if (is_half(i)) {
        twins_.push_back(Twin::bf16(halves(count, i + 1)));
        heart.write(session_, ids_[i], twins_[i].half);
      } else {
        twins_.push_back(Twin::fp32(numbers(count, i + 1)));
        heart.write(session_, ids_[i], twins_[i].theta);
      }
    }
    heart.write(session_, ids_[6], pattern(3_MiB, 6));
    heart.write(session_, ids_[7], pattern(3_MiB, 7));
  }
  bool is_half(uint32_t i) const { return specs_[i].dtype == DType::bfloat16; }

  void put_gradients(Heart& heart, uint32_t seed) {
    for (uint32_t i = 0; i < 5; ++i) {
      const uint64_t count = specs_[i].shape[0];
      if (is_half(i)) {
        heart.write(session_, ids_[i], halves(count, seed + i), Part::gradient);
      } else {
        heart.write(session_, ids_[i], numbers(count, seed + i), Part::gradient);
      }
    }
  }
  StepRequest request() const {
    StepRequest request;
    request.session_id = session_;
    request.groups = {{.settings = decayed_, .shard_ids = {ids_[1], ids_[4]}},
                      {.settings = plain_, .shard_ids = {ids_[0], ids_[2], ids_[3]}}};
    return request;
  }
  void step_twins(uint32_t seed) {
    for (uint32_t i = 0; i < 5; ++i) {
      const AdamSettings& settings = i == 1 || i == 4 ? decayed_ : plain_;
      const uint64_t count = specs_[i].shape[0];
      if (is_half(i)) {
        twins_[i].step(settings, halves(count, seed + i));
      } else {
        twins_[i].step(settings, numbers(count, seed + i));
      }
    }
  }
  void expect_twins(Heart& heart) {
    for (uint32_t i = 0; i < 6; ++i) {
      SCOPED_TRACE(specs_[i].name);
      if (is_half(i)) {
        EXPECT_TRUE(heart.read<uint16_t>(session_, ids_[i]) == twins_[i].half);
      } else {
        EXPECT_TRUE(heart.read<float>(session_, ids_[i]) == twins_[i].theta);
      }
      const auto moments = heart.moments(session_, ids_[i]);
      EXPECT_TRUE(moments.first == twins_[i].m);
      EXPECT_TRUE(moments.second == twins_[i].v);
      EXPECT_EQ(heart.job(session_).shards()[ids_[i]].generation, twins_[i].t);
    }
    EXPECT_TRUE(heart.read<uint8_t>(session_, ids_[6]) == pattern(3_MiB, 6));
    EXPECT_TRUE(heart.read<uint8_t>(session_, ids_[7]) == pattern(3_MiB, 7));
  }
  /// Every byte of the quota is in use by what the job's record names, or waits for a commit.
  void expect_nothing_leaked(Heart& heart) {
    const uint64_t free_before = heart.extents().free_bytes();
    ASSERT_TRUE(heart.store().gradients().drop(session_, {}).is_ok());
    heart.turns(5);
    const Held touch = heart.lease(session_, ids_[7], LeaseMode::write);
    ASSERT_TRUE(touch.is_ok()) << touch.status.message();
    heart.release(touch);
    const Status synced = heart.sync(session_);  // releases what was superseded
    ASSERT_TRUE(synced.is_ok()) << synced.message();
    uint64_t named_bytes = 0;
    heart.job(session_).shards().for_each_replica(
        [&](ReplicaPlace replica) { named_bytes += replica->length_bytes(); });
    EXPECT_EQ(heart.job(session_).space().used_bytes(), named_bytes);
    const uint64_t taken = heart.extents().capacity_bytes() - heart.extents().free_bytes();
    EXPECT_LE(taken, named_bytes + 64_KiB)
        << "beside catalogue and root, free before " << free_before;
  }

  uint64_t session_ = 0;
  std::vector<ShardSpec> specs_;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  const AdamSettings plain_{.lr = 1e-2};
  const AdamSettings decayed_{.lr = 3e-2, .weight_decay = 0.1};
};

TEST_F(StepTest, steps_give_the_bits_of_the_reference_whatever_stays_in_memory) {
  // Everything, a part, and next to nothing (gradients spill) stays.
  for (const uint64_t arena_segments : {16, 6, 3}) {
    SCOPED_TRACE(arena_segments);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    twins_.clear();
    Heart heart(disk_, kFloorSegments + 16);
    make(heart, "job", arena_segments);
    expect_twins(heart);
    const Held view = heart.lease(session_, ids_[2]);
    const std::vector<float> old(view.as<float>().begin(), view.as<float>().end());
    for (uint32_t step = 1; step <= 3; ++step) {
      put_gradients(heart, 100 * step);
      if (arena_segments == 3) heart.touch(session_, ids_[6]);
      const auto [status, report] = heart.step(request());
      ASSERT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.committed_step, step);
      step_twins(100 * step);
      expect_twins(heart);
      EXPECT_TRUE(std::equal(old.begin(), old.end(), view.as<float>().begin()));
      EXPECT_EQ(heart.lease(session_, ids_[1], LeaseMode::read, Part::gradient).status.code(),
                StatusCode::not_found);
    }
    heart.release(view);
    if (arena_segments == 3) EXPECT_GT(heart.job(session_).cache().counters().spilled_bytes, 0u);
    expect_nothing_leaked(heart);
  }
}

TEST_F(StepTest, user_values_in_bf16_keep_the_remainder_of_what_they_did_not_touch) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 3);
  put_gradients(heart, 10);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(10);
  {
    const Held held = heart.lease(session_, ids_[3], LeaseMode::write);
    ASSERT_TRUE(held.is_ok());
    held.as<uint16_t>()[100] = 0x3f80;
    twins_[3].half[100] = 0x3f80;
    twins_[3].remainder[100] = 0;
    heart.release(held);
  }
  heart.touch(session_, ids_[6]);  // spills it
  heart.touch(session_, ids_[7]);
  put_gradients(heart, 20);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(20);
  expect_twins(heart);
}

TEST_F(StepTest, an_arena_that_the_client_scribbled_on_is_not_what_is_updated) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  ASSERT_TRUE(heart.sync(session_).is_ok());
  for (const uint32_t i : {0U, 1U}) {
    const Held held = heart.lease(session_, ids_[i]);
    held.as<float>()[3] += 1;  // against the rules
    heart.release(held);
  }
  put_gradients(heart, 10);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(10);
  expect_twins(heart);
}

TEST_F(StepTest, an_error_in_the_middle_leaves_the_job_at_n_and_a_second_try_succeeds) {
  struct Case {
    const char* name;
    StatusCode code;
    MemoryFault fault;
  };
  const std::vector<Case> cases = {
      {"a device that is busy for too long",
       StatusCode::device,
       {.io_kind = IoKind::read, .skip_count = 1, .count = 100'000, .error_number = EAGAIN}},
      {"no memory for a read",
       StatusCode::device,
       {.io_kind = IoKind::read, .skip_count = 3, .count = 100'000, .error_number = ENOMEM}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    twins_.clear();
    Heart heart(disk_, kFloorSegments + 16);
    make(heart, "job", 6);
    put_gradients(heart, 10);
    ASSERT_TRUE(heart.step(request()).first.is_ok());
    step_twins(10);
    // Written after N, and by the time of the failure no longer in memory: not lost with the step.
    heart.write(session_, ids_[6], pattern(3_MiB, 60));
    heart.touch(session_, ids_[7]);
    put_gradients(heart, 20);
    heart.job(session_).tiles().drop_all(heart.job(session_).memory()->private_side());
    heart.faults().add_fault(each.fault);
    const auto [status, report] = heart.step(request());
    EXPECT_EQ(status.code(), each.code) << status.message();
    EXPECT_EQ(report.committed_step, 1u);
    heart.faults().clear_faults();
    EXPECT_TRUE(heart.read<uint8_t>(session_, ids_[6]) == pattern(3_MiB, 60));
    heart.write(session_, ids_[6], pattern(3_MiB, 6));
    expect_twins(heart);
    EXPECT_TRUE(heart.read<float>(session_, ids_[1], Part::gradient) == numbers(kLarge, 21));
    const auto second = heart.step(request());
    ASSERT_TRUE(second.first.is_ok()) << second.first.message();
    EXPECT_EQ(second.second.committed_step, 2u);
    step_twins(20);
    expect_twins(heart);
    expect_nothing_leaked(heart);
  }
}

TEST_F(StepTest, what_is_read_well_at_the_second_attempt_fails_nothing) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 6);
  for (const MemoryFaultKind kind : {MemoryFaultKind::error, MemoryFaultKind::flipped_bit}) {
    for (const uint32_t skip_count : {0U, 2U, 5U}) {
      const uint32_t seed = 10 * static_cast<uint32_t>(kind) + skip_count;
      put_gradients(heart, seed);
      heart.job(session_).tiles().drop_all(heart.job(session_).memory()->private_side());
      heart.faults().add_fault({.kind = kind, .io_kind = IoKind::read, .skip_count = skip_count});
      const auto [status, report] = heart.step(request());
      ASSERT_TRUE(status.is_ok()) << status.message();
      heart.faults().clear_faults();
      step_twins(seed);
      expect_twins(heart);
    }
  }
  EXPECT_TRUE(heart.job(session_).job_info().lost_shards.empty());
}

TEST_F(StepTest, a_job_that_lost_a_shard_stays_at_n_and_what_is_whole_can_be_saved) {
  Heart heart(disk_, 2 * kFloorSegments + 16);
  make(heart, "job", 6);
  put_gradients(heart, 10);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(10);
  put_gradients(heart, 20);
  Job& job = heart.job(session_);
  job.tiles().drop_all(job.memory()->private_side());
  // The moments of the large shard's second tile.
  const Bucket& bucket = job.shards().bucket(job.shards()[ids_[1]].bucket);
  MemoryFault fault{.kind = MemoryFaultKind::flipped_bit};
  fault.io_kind = IoKind::read;
  fault.offset_bytes = bucket.rest[1].extent().address.offset_bytes;
  fault.count = 1000;
  heart.faults().add_fault(fault);
  const auto [status, report] = heart.step(request());
  EXPECT_EQ(status.code(), StatusCode::integrity) << status.message();
  EXPECT_EQ(status.error_number(), 0);
  EXPECT_EQ(report.committed_step, 1u);
  const std::string name = specs_[1].name;
  for (const std::string& part : {std::string("shard job/") + name,
                                  std::string("disk at "),
                                  std::to_string(*fault.offset_bytes)}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  EXPECT_EQ(job.job_info().lost_shards, std::vector{name});
  for (const ShardInfo& info : heart.shards(job.job_id())) {
    EXPECT_EQ(info.lost, info.spec.name == name) << info.spec.name;
  }

  // Nothing more of this job is committed, whether the device recovers or not.
  heart.faults().clear_faults();
  for (const Status& refused : {heart.step(request()).first, heart.sync(session_)}) {
    EXPECT_EQ(refused.code(), StatusCode::integrity);
    const size_t advice = refused.message().find("connect(fresh=True)");
    EXPECT_NE(advice, std::string::npos) << refused.message();
    EXPECT_EQ(refused.message().rfind("connect(fresh=True)"), advice) << refused.message();
    EXPECT_NE(refused.message().find("job job has lost shard " + name), std::string::npos)
        << refused.message();
    EXPECT_NE(refused.message().find("connect(fresh=True)"), std::string::npos);
  }
  expect_twins(heart);  // all of it, since the disk is in order again

  const uint64_t other = heart.attach(heart.open("other", 1, 4_MiB));
  const auto blob = heart.declare(other, {bytes_shard("a", 1000)});
  heart.write(other, blob[0], pattern(1000, 1));
  EXPECT_TRUE(heart.sync(other).is_ok()) << "other jobs go on";
}

TEST_F(StepTest, one_that_meets_bytes_that_cannot_be_read_is_undone_and_made_once_they_can) {
  Heart heart(disk_, 2 * kFloorSegments + 16);
  make(heart, "job", 6);
  put_gradients(heart, 10);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(10);
  put_gradients(heart, 20);
  Job& job = heart.job(session_);
  job.tiles().drop_all(job.memory()->private_side());
  // The moments of the large shard's second tile.
  const ExtentRecord extent = job.shards().bucket(job.shards()[ids_[1]].bucket).rest[1].extent();
  const std::string name = specs_[1].name;
  const auto info = [&] { return heart.store().reports().find_job("job").value(); };
  for (const uint64_t failures : {3u, 3u, 2u}) {
    heart.faults().add_fault(
        {.io_kind = IoKind::read, .offset_bytes = extent.address.offset_bytes, .count = failures});
    const auto [status, report] = heart.step(request());
    heart.faults().clear_faults();
    EXPECT_TRUE(info().lost_shards.empty());
    if (failures == 2) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      break;
    }
    EXPECT_EQ(status.code(), StatusCode::device) << status.message();
    EXPECT_EQ(status.error_number(), EIO);
    EXPECT_EQ(report.committed_step, 1u);
    for (const std::string& part : {std::string("shard job/") + name,
                                    std::string("disk at "),
                                    std::to_string(extent.address.offset_bytes)}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
    EXPECT_EQ(info().unreadable_shards, std::vector{name});
  }
  EXPECT_TRUE(info().unreadable_shards.empty());
  step_twins(20);
  expect_twins(heart);
  expect_nothing_leaked(heart);
}

TEST_F(StepTest, a_step_that_exceeds_the_quota_changes_nothing_and_succeeds_once_there_is_room) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  put_gradients(heart, 10);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(10);
  Job& job = heart.job(session_);
  job.space().set_quota_bytes(job.space().used_bytes() + 5_MiB);
  put_gradients(heart, 20);
  const uint64_t used = job.space().used_bytes();
  const uint64_t free_bytes = heart.extents().free_bytes();
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_EQ(heart.step(request()).first.code(), StatusCode::capacity);
    EXPECT_EQ(job.space().used_bytes(), used);
    EXPECT_EQ(heart.extents().free_bytes(), free_bytes);
  }
  expect_twins(heart);
  job.space().set_quota_bytes(testing::kQuotaBytes);
  ASSERT_TRUE(heart.step(request()).first.is_ok());
  step_twins(20);
  expect_twins(heart);
  expect_nothing_leaked(heart);
}

TEST_F(StepTest, staged_buffers_change_places_with_the_step_or_not_at_all) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  const auto buffers = heart.declare(session_,
                                     {bytes_shard("mean", 100, ShardKind::buffer),
                                      bytes_shard("mean.staged", 100, ShardKind::buffer)});
  heart.write(session_, buffers[0], pattern(100, 1));
  StepRequest with_buffers = request();
  with_buffers.staged_buffers = {{buffers[1], buffers[0]}};
  put_gradients(heart, 10);
  EXPECT_EQ(heart.step(with_buffers).first.code(), StatusCode::invalid_argument) << "not put yet";
  heart.write(session_, buffers[1], pattern(100, 2));
  Job& job = heart.job(session_);
  job.space().set_quota_bytes(job.space().used_bytes() +
                              15_MiB);  // values, but not all of their moments
  EXPECT_EQ(heart.step(with_buffers).first.code(), StatusCode::capacity);
  EXPECT_EQ(heart.read<uint8_t>(session_, buffers[0]), pattern(100, 1));
  EXPECT_EQ(heart.read<uint8_t>(session_, buffers[1]), pattern(100, 2));
  job.space().set_quota_bytes(testing::kQuotaBytes);
  const auto [status, report] = heart.step(with_buffers);
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(heart.read<uint8_t>(session_, buffers[0]), pattern(100, 2));
  EXPECT_EQ(heart.lease(session_, buffers[1]).status.code(), StatusCode::not_found);
  StepRequest twice = with_buffers;
  twice.staged_buffers.push_back(twice.staged_buffers.front());
  put_gradients(heart, 20);
  EXPECT_EQ(heart.step(twice).first.code(), StatusCode::invalid_argument);
  Heart again(std::make_shared<MemoryDisk>(*disk_), kFloorSegments + 16);
  const uint64_t session = again.attach(again.open("job", 16));
  EXPECT_EQ(again.read<uint8_t>(session, buffers[0]), pattern(100, 2));
  EXPECT_EQ(again.lease(session, buffers[1]).status.code(), StatusCode::not_found);
  step_twins(10);
  ASSERT_TRUE(heart.store().gradients().drop(session_, {}).is_ok());
  expect_twins(heart);
}

TEST_F(StepTest, a_staged_buffer_is_read_once_its_step_is_committed_and_not_before) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails ? "the step fails" : "the step is committed");
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    twins_.clear();
    Heart heart(disk_, kFloorSegments + 16);
    make(heart, "job", 16);
    const auto buffers = heart.declare(session_,
                                       {bytes_shard("mean", 100, ShardKind::buffer),
                                        bytes_shard("mean.staged", 100, ShardKind::buffer)});
    heart.write(session_, buffers[0], pattern(100, 1));
    heart.write(session_, buffers[1], pattern(100, 2));
    put_gradients(heart, 10);
    StepRequest with_buffers = request();
    with_buffers.staged_buffers = {{buffers[1], buffers[0]}};
    // The first sync of the commit: all of N + 1 is in place, and nothing of it true.
    heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::sync});
    std::optional<Status> done;
    heart.store().operations().step(
        with_buffers, [&](const Status& status, const StepReport&) { done = status; });
    ASSERT_TRUE(heart.until([&] { return heart.faults().has_stalled(); }));
    const auto reader = heart.ask(session_, buffers[0]);
    const auto staged_reader = heart.ask(session_, buffers[1]);
    heart.turns();
    EXPECT_FALSE(reader->has_value());
    EXPECT_FALSE(staged_reader->has_value());
    if (fails) heart.faults().add_fault({.io_kind = IoKind::write, .count = 1000});
    heart.faults().release_stalled();
    ASSERT_TRUE(heart.until([&] { return done && *reader && *staged_reader; }));
    EXPECT_EQ(done->is_ok(), !fails) << done->message();
    ASSERT_TRUE((*reader)->is_ok()) << (*reader)->status.message();
    EXPECT_EQ((*reader)->as<uint8_t>()[0], pattern(100, fails ? 1 : 2)[0]);
    EXPECT_EQ((*staged_reader)->status.code(), fails ? StatusCode::ok : StatusCode::not_found);
  }
}

TEST_F(StepTest, leases_taken_while_a_step_runs_wait_for_it_and_see_its_result) {
  // Hardly any room: parameters are absent while they are updated, and a fetch of what lies on disk
  // would bring up a mixture of N and N + 1.
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 3);
  for (uint32_t step = 1; step <= 2; ++step) {
    put_gradients(heart, 100 * step);
    heart.touch(session_, ids_[6]);
    heart.touch(session_, ids_[7]);
    std::optional<Status> done;
    heart.store().operations().step(
        request(), [&](const Status& status, const StepReport&) { done = status; });
    std::vector<std::shared_ptr<std::optional<Held>>> readers;
    while (!done) {
      heart.turn();
      if (readers.size() < 20) {
        readers.push_back(heart.ask(session_, ids_[1]));
        readers.push_back(heart.ask(session_, ids_[1], LeaseMode::read, Part::gradient));
      }
    }
    ASSERT_TRUE(done->is_ok()) << done->message();
    step_twins(100 * step);
    ASSERT_TRUE(heart.until([&] {
      return std::all_of(
          readers.begin(), readers.end(), [](const auto& it) { return it->has_value(); });
    }));
    for (const auto& reader : readers) {
      if ((*reader)->is_ok()) heart.release(**reader);
    }
    expect_twins(heart);
  }
}

TEST_F(StepTest, a_sealed_gradient_is_not_written_before_its_step_has_ended) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  put_gradients(heart, 10);
  std::optional<Status> synced;
  heart.store().operations().sync(
      session_, [&](const Status& status, const StepReport&) { synced = status; });
  std::optional<Status> done;
  heart.store().operations().step(request(),
                                  [&](const Status& status, const StepReport&) { done = status; });
  const auto writer = heart.ask(session_, ids_[1], LeaseMode::overwrite, Part::gradient);
  EXPECT_FALSE(writer->has_value());
  ASSERT_TRUE(heart.until([&] { return writer->has_value(); }));
  EXPECT_TRUE(done && done->is_ok());
  heart.release(**writer);
  step_twins(10);
  expect_twins(heart);
}

TEST_F(StepTest, of_two_sessions_that_close_the_same_step_one_does) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  const uint64_t other = heart.attach(heart.job(session_).job_id());
  StepRequest mine = request();
  mine.step = 1;
  put_gradients(heart, 10);
  std::optional<Status> done, others;
  heart.store().operations().step(mine,
                                  [&](const Status& each, const StepReport&) { done = each; });
  heart.store().operations().step(
      {.session_id = other, .groups = {}, .staged_buffers = {}, .step = 1},
      [&](const Status& each, const StepReport&) { others = each; });
  ASSERT_TRUE(heart.until([&] { return done && others; }));
  EXPECT_TRUE(done->is_ok()) << done->message();
  EXPECT_EQ(others->code(), StatusCode::fenced);
  EXPECT_EQ(heart.job(session_).progress().committed_step(), 1u);
  const StepRequest ahead{.session_id = session_, .groups = {}, .staged_buffers = {}, .step = 3};
  EXPECT_EQ(heart.step(ahead).first.code(), StatusCode::fenced);
  step_twins(10);
  expect_twins(heart);
}

TEST_F(StepTest, a_step_asked_for_again_is_joined_and_another_one_of_its_number_is_refused) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  put_gradients(heart, 10);
  // Two optimizers of one session that were not kept one after the other.
  StepRequest one = request(), other = request();
  one.groups.pop_back();
  other.groups.erase(other.groups.begin());
  one.step = other.step = 1;
  one.call = 1;
  other.call = 2;
  // The answer was lost: in another order, and as another call.
  StepRequest again = one;
  again.call = 3;
  std::swap(again.groups[0].shard_ids[0], again.groups[0].shard_ids[1]);
  std::map<uint64_t, Status> answers;
  for (const StepRequest& each : {one, other, again}) {
    heart.store().operations().step(
        each, [&answers, call = each.call](const Status& status, const StepReport&) {
          answers.emplace(call, status);
        });
  }
  ASSERT_TRUE(heart.until([&] { return answers.size() == 3; }));
  EXPECT_TRUE(answers.at(1).is_ok()) << answers.at(1).message();
  EXPECT_TRUE(answers.at(3).is_ok()) << answers.at(3).message();
  EXPECT_EQ(answers.at(2).code(), StatusCode::invalid_argument);
  EXPECT_NE(answers.at(2).message().find("closes step 1 of job job twice"), std::string::npos);
  EXPECT_EQ(heart.job(session_).progress().committed_step(), 1u);
  // Its gradients are there as before.
  other.step = 2;
  other.call = 4;
  EXPECT_TRUE(heart.step(other).first.is_ok());
  step_twins(10);
  expect_twins(heart);
}

TEST_F(StepTest, a_commit_without_gradients_counts_and_takes_staged_buffers) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  const auto buffers = heart.declare(session_,
                                     {bytes_shard("tracked", 100, ShardKind::buffer),
                                      bytes_shard("tracked.staged", 100, ShardKind::buffer)});
  heart.write(session_, buffers[1], pattern(100, 2));
  const StepRequest request{.session_id = session_,
                            .groups = {},
                            .staged_buffers = {{buffers[1], buffers[0]}},
                            .step = 1};
  const auto [status, report] = heart.step(request);
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(report.committed_step, 1u);
  Heart again(std::make_shared<MemoryDisk>(*disk_), kFloorSegments + 16);
  const uint64_t session = again.attach(again.open("job", 16));
  EXPECT_EQ(again.job(session).progress().committed_step(), 1u);
  EXPECT_EQ(again.read<uint8_t>(session, buffers[0]), pattern(100, 2));
}

TEST_F(StepTest, parameters_declared_and_blobs_deleted_while_a_step_runs_do_not_disturb_it) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 6);
  put_gradients(heart, 10);
  const auto spare = heart.declare(session_, {bytes_shard("spare", 5000)});
  heart.write(session_, spare[0], pattern(5000, 1));
  std::optional<Status> done;
  heart.store().operations().step(request(),
                                  [&](const Status& status, const StepReport&) { done = status; });
  int round = 0;
  std::optional<bool> deleted;
  while (!done) {
    heart.turn();
    if (round < 20) heart.declare(session_, {parameter("more" + std::to_string(round++), 300'000)});
    if (round == 3) {
      heart.store().delete_shard(session_, "spare", [&](const Result<bool>& result) {
        deleted = result.is_ok() && result.value();
      });
    }
  }
  ASSERT_TRUE(done->is_ok()) << done->message();
  step_twins(10);
  expect_twins(heart);
  ASSERT_TRUE(heart.until([&] { return deleted.has_value(); }));
  EXPECT_TRUE(*deleted);
  expect_nothing_leaked(heart);
}

TEST_F(StepTest, a_parameter_without_elements_takes_part_in_a_step) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("empty", 0)});
  heart.write(session, ids[0], std::vector<float>{});
  heart.write(session, ids[0], std::vector<float>{}, Part::gradient);
  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = plain_, .shard_ids = ids}};
  const auto [status, report] = heart.step(request);
  EXPECT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(report.committed_step, 1u);
}

TEST_F(StepTest, the_step_of_a_trainer_that_died_is_finished_and_a_failed_one_drops_its_gradients) {
  Heart heart(disk_, kFloorSegments + 16);
  make(heart, "job", 16);
  const uint64_t other = heart.attach(heart.job(session_).job_id());
  put_gradients(heart, 10);
  std::optional<Status> done;
  heart.store().operations().step(request(),
                                  [&](const Status& status, const StepReport&) { done = status; });
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  ASSERT_TRUE(heart.until([&] { return done.has_value(); }));
  EXPECT_TRUE(done->is_ok()) << done->message();
  step_twins(10);
  session_ = other;
  expect_twins(heart);

  const uint64_t third = heart.attach(heart.job(other).job_id());
  put_gradients(heart, 20);
  heart.job(session_).space().set_quota_bytes(heart.job(session_).space().used_bytes());
  done.reset();
  heart.store().operations().step(request(),
                                  [&](const Status& status, const StepReport&) { done = status; });
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  ASSERT_TRUE(heart.until([&] { return done.has_value(); }));
  EXPECT_EQ(done->code(), StatusCode::capacity);
  session_ = third;
  EXPECT_EQ(heart.lease(session_, ids_[1], LeaseMode::read, Part::gradient).status.code(),
            StatusCode::not_found);
  expect_twins(heart);
}

}  // namespace
}  // namespace memd
