// What happens beside a commit, beside the undoing of a step, and beside a spill.
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>

#include "store/format/catalogue.h"
#include "store_fixture.h"
#include "twin.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::DiskQueue;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::newest_superblock;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::Twin;

constexpr uint64_t kSmall = 1000;
// More than half a tile: each is alone in its bucket.
constexpr uint64_t kLarge = 200'000;
constexpr uint64_t kQuota = 12_MiB;
const AdamSettings kSettings{.lr = 1e-2};

std::vector<ExtentRecord> take_all(ExtentStore& extents) {
  std::vector<ExtentRecord> taken;
  for (;;) {
    const auto extent = extents.allocate(kBlockBytes);
    if (!extent.is_ok()) return taken;
    taken.push_back(extent.value());
  }
}
void give_back(ExtentStore& extents, std::vector<ExtentRecord>& taken, size_t count) {
  for (; count > 0; --count) {
    extents.release(taken.back());
    taken.pop_back();
  }
}

/// Root and catalogues of what survives a power cut now.
std::vector<ExtentRecord> durable_records(std::span<const std::byte> disk) {
  const Superblock superblock = newest_superblock(disk);
  std::vector<ExtentRecord> all{superblock.root};
  const auto root =
      decode_root(disk.subspan(superblock.root.address.offset_bytes, superblock.root_bytes));
  EXPECT_TRUE(root.is_ok()) << root.status().message();
  if (!root.is_ok()) return all;
  for (const RootEntry& entry : root.value().jobs)
    all.insert(all.end(), entry.catalogue.begin(), entry.catalogue.end());
  return all;
}

class BesideTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(BesideTest, while_one_job_commits_another_takes_no_extent_that_the_disk_s_root_names) {
  Heart heart(disk_, 2 * kFloorSegments + 16);
  const uint64_t committing = heart.attach(heart.open("committing", 4, kQuota));
  const uint64_t writing = heart.attach(heart.open("writing", 4, kQuota));
  const auto first = heart.declare(committing, {bytes_shard("first", 4000)});
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 12; ++i) specs.push_back(bytes_shard(concat("blob", i), 4000));
  const auto blobs = heart.declare(writing, specs);
  heart.write(committing, first[0], pattern(4000, 1));
  ASSERT_TRUE(heart.sync(writing).is_ok());
  ASSERT_TRUE(heart.sync(committing).is_ok());
  const std::vector<ExtentRecord> named = durable_records(disk_->durable_bytes());
  ASSERT_EQ(named.size(), 3u);

  // Room for the blob, the catalogue and the root of the one, and for half of the other's blobs.
  std::vector<ExtentRecord> taken = take_all(heart.extents());
  give_back(heart.extents(), taken, 3 + blobs.size() / 2);
  const uint64_t sequence = heart.extents().superblock().sequence;
  uint64_t beside_count = 0;
  bool is_stalled = false;
  heart.io().before_submit = [&](const DiskQueue::Operation& operation) {
    if (operation.kind != IoKind::write || operation.offset_bytes < 2_MiB) return;
    beside_count += is_stalled ? 1 : 0;
    for (const ExtentRecord& extent : named) {
      const uint64_t begin = extent.address.offset_bytes;
      EXPECT_TRUE(operation.offset_bytes >= begin + extent.length_bytes ||
                  operation.offset_bytes + operation.length_bytes <= begin)
          << "written over what the disk's root leads to, at " << operation.offset_bytes;
    }
  };
  for (const uint64_t offset : superblock_pair_offsets(sequence + 1, kDiskBytes)) {
    heart.faults().add_fault(
        {.kind = MemoryFaultKind::stall, .io_kind = IoKind::write, .offset_bytes = offset});
  }
  heart.write(committing, first[0], pattern(4000, 2));
  std::optional<Status> committed;
  heart.store().operations().sync(
      committing, [&](const Status& status, const StepReport&) { committed = status; });
  ASSERT_TRUE(heart.until([&] { return heart.faults().has_stalled(); }));
  is_stalled = true;
  for (size_t i = 0; i < blobs.size(); ++i)
    heart.write(writing, blobs[i], pattern(4000, static_cast<uint8_t>(10 + i)));
  std::optional<Status> written;
  heart.store().operations().sync(
      writing, [&](const Status& status, const StepReport&) { written = status; });
  ASSERT_TRUE(heart.until([&] { return beside_count >= blobs.size() / 2; }));
  heart.turns();
  EXPECT_FALSE(committed.has_value());

  // Power is cut before the superblock: whatever else was written may be there.
  auto cut = std::make_shared<MemoryDisk>(*disk_);
  cut->crash([](const UnsyncedWrite& write) { return write.offset_bytes >= 2_MiB; });
  {
    Heart next(cut, 2 * kFloorSegments + 16);
    EXPECT_TRUE(next.loaded.is_ok()) << next.loaded.message();
    const uint64_t session = next.attach(next.open("committing", 4, kQuota));
    EXPECT_EQ(next.read<uint8_t>(session, first[0]), pattern(4000, 1));
  }
  heart.io().before_submit = nullptr;
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return committed && written; }));
  EXPECT_TRUE(committed->is_ok()) << committed->message();
  EXPECT_EQ(written->code(), StatusCode::capacity);
  give_back(heart.extents(), taken, taken.size());
  EXPECT_TRUE(heart.sync(writing).is_ok());
}

TEST_F(BesideTest, who_commits_waits_for_no_more_than_the_commits_that_were_there) {
  Heart heart(disk_, 3 * kFloorSegments + 16);
  // Two of them: one alone never waits with its next commit when the last one ends.
  const std::vector<uint64_t> flooding_ids{heart.open("flooding", 4, kQuota),
                                           heart.open("flooding too", 4, kQuota)};
  const uint64_t other = heart.attach(heart.open("other", 4, kQuota));
  uint64_t flood_count = 0;
  uint64_t flood_end = 0;
  std::function<void(uint64_t)> flood = [&](uint64_t session) {
    if (flood_count == flood_end) return;
    heart.declare(session, {bytes_shard(concat("blob", flood_count++), 0)});
    heart.store().operations().sync(session,
                                    [&flood, session](const Status& status, const StepReport&) {
                                      EXPECT_TRUE(status.is_ok()) << status.message();
                                      flood(session);
                                    });
  };
  std::vector<uint64_t> flooding;
  for (int i = 0; i < 4; ++i) {
    for (const uint64_t job_id : flooding_ids) flooding.push_back(heart.attach(job_id));
  }
  for (int round = 0; round < 20; ++round) {
    // As many commits as would hide the one that waits, were they first.
    flood_end = flood_count + 40;
    for (const uint64_t session : flooding) flood(session);
    ASSERT_TRUE(heart.until([&] { return flood_count + 30 > flood_end; }));
    const uint64_t before = heart.extents().superblock().sequence;
    heart.declare(other, {bytes_shard(concat("blob", round), 0)});
    ASSERT_TRUE(heart.sync(other).is_ok());
    EXPECT_LE(heart.extents().superblock().sequence - before, 4u)
        << "the one that runs, each flooding job's next, and its own";
    ASSERT_TRUE(heart.until([&] { return heart.store().is_idle(); }));
  }
}

TEST_F(BesideTest, a_job_that_is_opened_while_another_commits_keeps_its_number_for_itself) {
  Heart heart(disk_, 3 * kFloorSegments + 16);
  const uint64_t session = heart.attach(heart.open("committing", 4, kQuota));
  const auto ids = heart.declare(session, {bytes_shard("x", 4000)});
  heart.write(session, ids[0], pattern(4000, 1));
  const uint64_t sequence = heart.extents().superblock().sequence;
  for (const uint64_t offset : superblock_pair_offsets(sequence + 1, kDiskBytes)) {
    heart.faults().add_fault(
        {.kind = MemoryFaultKind::stall, .io_kind = IoKind::write, .offset_bytes = offset});
  }
  std::optional<Status> committed;
  heart.store().operations().sync(
      session, [&](const Status& status, const StepReport&) { committed = status; });
  ASSERT_TRUE(heart.until([&] { return heart.faults().has_stalled(); }));
  const uint64_t meanwhile = heart.open("meanwhile", 4, kQuota);
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return committed.has_value(); }));
  EXPECT_TRUE(committed->is_ok()) << committed->message();
  EXPECT_GT(heart.open("later", 4, kQuota), meanwhile);
}

TEST_F(BesideTest,
       a_step_whose_catalogue_finds_no_room_did_not_count_and_is_made_with_the_same_bits) {
  Heart heart(disk_, kFloorSegments + 16);
  const uint64_t session = heart.attach(heart.open("job", 8));
  const auto ids = heart.declare(session, {parameter("w", kSmall), parameter("h", 77)});
  std::vector<Twin> twins{Twin::fp32(numbers(kSmall, 1)), Twin::fp32(numbers(77, 2))};
  for (size_t i = 0; i < ids.size(); ++i) heart.write(session, ids[i], twins[i].theta);
  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = kSettings, .shard_ids = ids}};
  const Job& job = heart.job(session);
  for (uint32_t step = 1; step <= 3; ++step) {
    for (size_t i = 0; i < ids.size(); ++i)
      heart.write(session, ids[i], numbers(twins[i].theta.size(), 10 * step + i), Part::gradient);
    if (step == 2) {
      // When the step's own extents are reserved and being written, all the rest goes.
      std::vector<ExtentRecord> taken;
      heart.io().before_submit = [&](const DiskQueue::Operation& operation) {
        if (operation.kind == IoKind::write && taken.empty()) taken = take_all(heart.extents());
      };
      for (int attempt = 0; attempt < 2; ++attempt) {
        const Status status = heart.step(request).first;
        EXPECT_EQ(status.code(), StatusCode::capacity) << status.message();
        EXPECT_TRUE(heart.extents().check_writable().is_ok()) << "nothing is fenced";
        EXPECT_EQ(job.progress().committed_step(), 1u);
        for (const uint32_t id : ids) EXPECT_EQ(job.shards()[id].generation, 1u);
        give_back(heart.extents(), taken, taken.size());
      }
      heart.io().before_submit = nullptr;
    }
    const Status status = heart.step(request).first;
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_EQ(job.progress().committed_step(), step);
    for (size_t i = 0; i < ids.size(); ++i) {
      twins[i].step(kSettings, numbers(twins[i].theta.size(), 10 * step + i));
      EXPECT_EQ(job.shards()[ids[i]].generation, step);
      EXPECT_EQ(heart.read<float>(session, ids[i]), twins[i].theta);
      EXPECT_EQ(heart.moments(session, ids[i]).first, twins[i].m);
      EXPECT_EQ(heart.moments(session, ids[i]).second, twins[i].v);
    }
  }
}

TEST_F(BesideTest, what_a_writer_adds_while_others_spill_is_there_after_a_fetch) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(session,
                                 {parameter("w", kLarge),
                                  bytes_shard("a", 1_MiB),
                                  bytes_shard("b", 3_MiB),
                                  bytes_shard("c", 4_MiB)});
  const Entry& w = *heart.job(session).shards().find_entry(ids[0], Part::value);
  heart.write(session, ids[0], numbers(kLarge, 1));
  const Held writer = heart.lease(session, ids[0], LeaseMode::write);
  ASSERT_TRUE(writer.is_ok()) << writer.status.message();
  heart.write(session, ids[1], pattern(1_MiB, 1));
  heart.write(session, ids[2], pattern(3_MiB, 2));  // no room for both beside w
  EXPECT_GT(heart.job(session).cache().counters().spilled_bytes, 0u);
  EXPECT_EQ(w.residency(), Residency::dirty) << "a writer holds it";
  const std::vector<float> late = numbers(kLarge, 9);
  std::copy(late.begin(), late.end(), writer.as<float>().begin());
  heart.release(writer);
  heart.write(session, ids[3], pattern(4_MiB, 3));  // takes the whole arena
  ASSERT_EQ(w.residency(), Residency::absent);
  EXPECT_EQ(heart.read<float>(session, ids[0]), late);
}

TEST_F(BesideTest, room_for_the_next_overwrite_is_written_back_while_a_client_fills_this_one) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto ids = heart.declare(
      session, {bytes_shard("a", 2_MiB), bytes_shard("b", 2_MiB), bytes_shard("c", 2_MiB)});
  heart.write(session, ids[0], pattern(2_MiB, 1));
  heart.write(session, ids[1], pattern(2_MiB, 2));
  const Entry& b = *heart.job(session).shards().find_entry(ids[1], Part::value);
  const Held filled = heart.lease(session, ids[2], LeaseMode::overwrite);  // a makes room
  ASSERT_TRUE(filled.is_ok()) << filled.status.message();
  EXPECT_TRUE(heart.until([&] { return b.residency() == Residency::clean; }));
  EXPECT_EQ(heart.job(session).cache().counters().spilled_bytes, 4_MiB);
  const auto last = pattern(2_MiB, 3);
  std::copy(last.begin(), last.end(), filled.as<uint8_t>().begin());
  heart.release(filled);
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(2_MiB, 1));
  EXPECT_EQ(heart.read<uint8_t>(session, ids[1]), pattern(2_MiB, 2));
  EXPECT_EQ(heart.read<uint8_t>(session, ids[2]), last);
}

TEST_F(BesideTest, nothing_is_written_back_ahead_while_there_is_room_for_the_next_overwrite) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 4));
  const auto ids = heart.declare(session, {bytes_shard("a", 2_MiB), bytes_shard("b", 2_MiB)});
  heart.write(session, ids[0], pattern(2_MiB, 1));
  heart.write(session, ids[1], pattern(2_MiB, 2));
  heart.write(session, ids[0], pattern(2_MiB, 3));
  EXPECT_EQ(heart.job(session).cache().counters().spilled_bytes, 0u);
}

class UndoTest : public BesideTest {
 protected:
  UndoTest() {
    session_ = heart_.attach(heart_.open("job", 4));
    ids_ = heart_.declare(session_,
                          {parameter("a", kLarge),
                           parameter("b", kLarge),
                           parameter("z", kLarge),
                           bytes_shard("ballast", 3_MiB),
                           bytes_shard("mean", 100, ShardKind::buffer),
                           bytes_shard("mean.staged", 100, ShardKind::buffer)});
    for (uint32_t i = 0; i < 3; ++i) heart_.write(session_, ids_[i], numbers(kLarge, i + 1));
    heart_.write(session_, ids_[3], pattern(3_MiB, 4));
    step(10);
    put_gradients(20);
    job().tiles().drop_all(job().memory()->private_side());
  }

  Job& job() { return heart_.job(session_); }
  StepRequest request() const {
    StepRequest out;
    out.session_id = session_;
    out.groups = {{.settings = kSettings, .shard_ids = {ids_[0], ids_[1], ids_[2]}}};
    return out;
  }
  void put_gradients(uint32_t seed) {
    for (uint32_t i = 0; i < 3; ++i)
      heart_.write(session_, ids_[i], numbers(kLarge, seed + i), Part::gradient);
  }
  void step(uint32_t seed) {
    put_gradients(seed);
    const Status status = heart_.step(request()).first;
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  /// The device fails `z`'s moments, so that a step over all of them is undone.
  void fail_reads_of_z() {
    const Bucket& bucket = job().shards().bucket(job().shards()[ids_[2]].bucket);
    heart_.faults().add_fault({.io_kind = IoKind::read,
                               .offset_bytes = bucket.rest[0].extent().address.offset_bytes,
                               .count = 3});
  }

  Heart heart_{disk_, kFloorSegments + 16};
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(UndoTest, no_read_is_granted_while_its_step_is_undone) {
  const std::vector<float> before = heart_.read<float>(session_, ids_[0]);
  // With its old view leased, and the rest of the arena too, b is published nowhere.
  const Held ballast = heart_.lease(session_, ids_[3]);
  const Held old_view = heart_.lease(session_, ids_[1]);
  ASSERT_TRUE(ballast.is_ok() && old_view.is_ok());
  const Entry& a = *job().shards().find_entry(ids_[0], Part::value);
  const Entry& b = *job().shards().find_entry(ids_[1], Part::value);
  fail_reads_of_z();
  heart_.holds_tries_up = true;
  std::optional<Status> done;
  heart_.store().operations().step(request(),
                                   [&](const Status& status, const StepReport&) { done = status; });
  ASSERT_TRUE(heart_.until([&] { return a.is_uncommitted() && b.is_uncommitted(); }));
  ASSERT_FALSE(b.is_resident());
  heart_.release(old_view);
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall,
                             .io_kind = IoKind::read,
                             .offset_bytes = b.replicas()[0].extent().address.offset_bytes});
  const auto fetching = heart_.ask(session_, ids_[1]);
  ASSERT_TRUE(heart_.until([&] { return heart_.faults().has_stalled(); }));

  // The last of them fails: the step is undone as soon as b's fetch is over.
  heart_.holds_tries_up = false;
  ASSERT_TRUE(heart_.until([&] { return !heart_.extents().unreadable_places().empty(); }));
  heart_.turns();
  ASSERT_FALSE(done.has_value());
  const auto reading = heart_.ask(session_, ids_[0]);
  heart_.turns();
  EXPECT_FALSE(reading->has_value()) << "bytes of a step that is no more";
  heart_.faults().release_stalled();
  ASSERT_TRUE(heart_.until([&] { return done && *reading && *fetching; }));
  EXPECT_EQ(done->code(), StatusCode::device) << done->message();
  ASSERT_TRUE((*reading)->is_ok()) << (*reading)->status.message();
  const auto bytes = (*reading)->as<float>();
  EXPECT_TRUE(std::equal(before.begin(), before.end(), bytes.begin()));
}

TEST_F(UndoTest, a_buffer_that_was_staged_for_the_first_time_is_unwritten_again) {
  const uint32_t buffer = ids_[4];
  const uint32_t staged = ids_[5];
  heart_.write(session_, staged, pattern(100, 7));
  StepRequest with_buffers = request();
  with_buffers.staged_buffers = {{staged, buffer}};
  fail_reads_of_z();
  EXPECT_EQ(heart_.step(with_buffers).first.code(), StatusCode::device);
  EXPECT_FALSE(job().shards()[buffer].written);
  EXPECT_EQ(heart_.lease(session_, buffer).status.code(), StatusCode::not_found);
  EXPECT_EQ(heart_.read<uint8_t>(session_, staged), pattern(100, 7));
  const Status status = heart_.step(with_buffers).first;
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(heart_.read<uint8_t>(session_, buffer), pattern(100, 7));
}

}  // namespace
}  // namespace memd
