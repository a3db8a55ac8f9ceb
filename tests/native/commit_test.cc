#include "store/space/commit.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <map>
#include <random>

#include "base/bulk_bytes.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::DiskQueue;
using testing::Heart;
using testing::HeartOptions;
using testing::Held;
using testing::kFloorSegments;
using testing::newest_superblock;
using testing::numbers;
using testing::parameter;
using testing::pattern;

constexpr uint64_t kSmallDiskBytes = 32_MiB;
constexpr uint64_t kQuota = 20_MiB;
constexpr uint64_t kElements = kTileElements + 100;

/// The bytes that are there after a power cut that loses what no sync covered.
std::shared_ptr<MemoryDisk> after_power_cut(const MemoryDisk& disk) {
  auto copy = std::make_shared<MemoryDisk>(disk);
  copy->crash([](const UnsyncedWrite&) { return false; });
  return copy;
}

/// Extents that the newest superblock leads to.
std::vector<ExtentRecord> durable_extents(std::span<const std::byte> disk) {
  std::vector<ExtentRecord> all;
  const Superblock superblock = newest_superblock(disk);
  if (superblock.root_bytes == 0) return all;
  const auto bytes_of = [&](const std::vector<ExtentRecord>& extents, uint64_t length_bytes) {
    std::vector<std::byte> bytes;
    for (const ExtentRecord& extent : extents) {
      const auto part = disk.subspan(extent.address.offset_bytes, extent.length_bytes);
      EXPECT_TRUE(ExtentStore::matches(extent, part));
      bytes.insert(bytes.end(), part.begin(), part.end());
      all.push_back(extent);
    }
    bytes.resize(length_bytes);
    return bytes;
  };
  const auto root = decode_root(bytes_of({superblock.root}, superblock.root_bytes));
  EXPECT_TRUE(root.is_ok()) << root.status().message();
  for (const RootEntry& entry : root.value().jobs) {
    const auto job = decode_job(bytes_of(entry.catalogue, entry.catalogue_bytes));
    EXPECT_TRUE(job.is_ok()) << job.status().message();
    for (const ShardRecord& shard : job.value().shards) {
      all.insert(all.end(), shard.extents.begin(), shard.extents.end());
    }
    for (const BucketRecord& bucket : job.value().buckets) {
      for (const TileRecord& tile : bucket.tiles) {
        if (tile.parameter.exists()) all.push_back(tile.parameter);
        if (tile.rest.exists()) all.push_back(tile.rest);
      }
    }
  }
  return all;
}

struct State {
  uint64_t step = 0;
  std::vector<std::vector<float>> values;
  std::vector<uint8_t> blob;
  bool operator==(const State&) const = default;
};

class CommitTest : public ::testing::Test {
 protected:
  std::vector<uint32_t> make(Heart& heart, uint64_t session) {
    const auto ids = heart.declare(session,
                                   {parameter("large", kElements),
                                    parameter("a", 1000),
                                    parameter("b", 3000),
                                    bytes_shard("blob", 10'000)});
    for (uint32_t i = 0; i < 3; ++i) {
      heart.write(session, ids[i], numbers(heart.job(session).shards()[ids[i]].element_count(), i));
    }
    heart.write(session, ids[3], pattern(10'000, 0));
    return ids;
  }
  StepRequest next_step(Heart& heart, uint64_t session, const std::vector<uint32_t>& ids) {
    const auto seed = static_cast<uint32_t>(heart.job(session).progress().committed_step()) + 50;
    for (uint32_t i = 0; i < 3; ++i) {
      const uint64_t count = heart.job(session).shards()[ids[i]].element_count();
      heart.write(session, ids[i], numbers(count, seed + i), Part::gradient);
    }
    heart.write(session, ids[3], pattern(10'000, static_cast<uint8_t>(seed)));
    StepRequest request;
    request.session_id = session;
    request.groups = {{.settings = {.lr = 1e-2}, .shard_ids = {ids[0], ids[1], ids[2]}}};
    return request;
  }
  State state(Heart& heart, uint64_t session, const std::vector<uint32_t>& ids) {
    State out;
    out.step = heart.job(session).progress().committed_step();
    for (uint32_t i = 0; i < 3; ++i) {
      out.values.push_back(heart.read<float>(session, ids[i]));
      auto moments = heart.moments(session, ids[i]);
      out.values.push_back(std::move(moments.first));
      out.values.push_back(std::move(moments.second));
    }
    out.blob = heart.read<uint8_t>(session, ids[3]);
    return out;
  }
  /// What a daemon that starts on `disk` finds.
  State found_on(std::shared_ptr<MemoryDisk> disk, const std::string& name = "job") {
    Heart heart(std::move(disk));
    EXPECT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
    const auto info = heart.store().reports().find_job(name);
    if (!info.is_ok()) return {};
    const uint64_t session = heart.attach(info.value().job_id);
    std::map<std::string, uint32_t> by_name;
    for (const ShardInfo& shard : heart.shards(info.value().job_id)) {
      by_name[shard.spec.name] = shard.shard_id;
    }
    return state(heart, session, {by_name["large"], by_name["a"], by_name["b"], by_name["blob"]});
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
};

TEST_F(CommitTest, a_start_tries_three_times_to_read_root_and_catalogue) {
  State before;
  {
    Heart heart(disk_);
    const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
    const auto ids = make(heart, session);
    ASSERT_TRUE(heart.step(next_step(heart, session, ids)).first.is_ok());
    before = state(heart, session, ids);
  }
  const ExtentRecord root = newest_superblock(disk_->bytes()).root;
  for (const uint64_t failures : {2u, 3u}) {
    HeartOptions options;
    options.before_load = [&](MemoryQueue& queue) {
      queue.add_fault(
          {.io_kind = IoKind::read, .offset_bytes = root.address.offset_bytes, .count = failures});
    };
    Heart heart(disk_, options);
    if (failures == 2) {
      ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
      const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
      EXPECT_TRUE(state(heart, session, {0, 1, 2, 3}) == before);
      continue;
    }
    EXPECT_EQ(heart.loaded.code(), StatusCode::device) << heart.loaded.message();
    EXPECT_NE(heart.loaded.message().find("look at the device"), std::string::npos);
  }
}

TEST_F(CommitTest, after_every_step_a_power_cut_loses_nothing) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
  const auto ids = make(heart, session);
  ASSERT_TRUE(heart.sync(session).is_ok());
  EXPECT_EQ(found_on(after_power_cut(*disk_)), state(heart, session, ids)) << "step 0";
  for (int step = 1; step <= 3; ++step) {
    const auto [status, report] = heart.step(next_step(heart, session, ids));
    ASSERT_TRUE(status.is_ok()) << status.message();
    const State before = state(heart, session, ids);
    EXPECT_EQ(before.step, static_cast<uint64_t>(step));
    EXPECT_TRUE(found_on(after_power_cut(*disk_)) == before) << step;
  }
}

TEST_F(CommitTest, what_the_durable_catalogue_names_is_never_written) {
  Heart heart(disk_);
  std::vector<ExtentRecord> named;
  uint64_t sequence = ~uint64_t{0};
  uint64_t checked_count = 0;
  heart.io().before_submit = [&](const DiskQueue::Operation& operation) {
    if (operation.kind != IoKind::write) return;
    const WorkerBytes uncounted;
    const uint64_t newest = newest_superblock(disk_->durable_bytes()).sequence;
    if (newest != sequence) named = durable_extents(disk_->durable_bytes());
    sequence = newest;
    for (const ExtentRecord& extent : named) {
      const uint64_t begin = extent.address.offset_bytes;
      ASSERT_TRUE(operation.offset_bytes >= begin + extent.length_bytes ||
                  operation.offset_bytes + operation.length_bytes <= begin)
          << operation.offset_bytes;
      ++checked_count;
    }
  };
  const uint64_t session = heart.attach(heart.open("job", 5, kQuota));
  const auto ids = make(heart, session);
  ASSERT_TRUE(heart.sync(session).is_ok());
  for (int step = 1; step <= 5; ++step) {
    const StepRequest request = next_step(heart, session, ids);
    if (step == 3) {
      heart.faults().add_fault(
          {.io_kind = IoKind::read, .skip_count = 2, .count = 1000, .error_number = EAGAIN});
      heart.job(session).tiles().drop_all(heart.job(session).memory()->private_side());
      EXPECT_FALSE(heart.step(request).first.is_ok());
      heart.faults().clear_faults();
    }
    ASSERT_TRUE(heart.step(request).first.is_ok());
  }
  EXPECT_GT(checked_count, 100u);
}

TEST_F(CommitTest, a_superblock_is_written_only_after_a_sync_of_everything_before_it) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
  const auto ids = make(heart, session);
  for (uint64_t step = 1; step <= 2; ++step) {
    const StepRequest request = next_step(heart, session, ids);
    heart.io().operations.clear();
    ASSERT_TRUE(heart.step(request).first.is_ok());
    std::vector<DiskQueue::Operation> rest;
    for (const auto& operation : heart.io().operations) {
      if (operation.kind != IoKind::read) rest.push_back(operation);
    }
    ASSERT_GT(rest.size(), 4u);
    const auto last = std::vector(rest.end() - 4, rest.end());
    EXPECT_EQ(last[0].kind, IoKind::sync);
    const auto pair = superblock_pair_offsets(step, kSmallDiskBytes);
    for (size_t copy = 0; copy < 2; ++copy) {
      EXPECT_EQ(last[1 + copy].kind, IoKind::write);
      EXPECT_EQ(last[1 + copy].offset_bytes, pair[copy]);
    }
    EXPECT_EQ(last[3].kind, IoKind::sync);
    rest.resize(rest.size() - 4);
    for (const auto& operation : rest) EXPECT_EQ(operation.kind, IoKind::write);
  }
}

TEST_F(CommitTest, a_power_cut_at_any_moment_of_a_step_leaves_n_or_n_plus_1) {
  State n;
  uint64_t operation_count = 0;
  {
    Heart heart(disk_);
    const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
    const auto ids = make(heart, session);
    ASSERT_TRUE(heart.step(next_step(heart, session, ids)).first.is_ok());
    n = state(heart, session, ids);
  }
  State n1;
  {
    Heart heart(std::make_shared<MemoryDisk>(*disk_));
    const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
    std::vector<uint32_t> ids;
    for (const ShardInfo& shard : heart.shards(1)) ids.push_back(shard.shard_id);
    const StepRequest request = next_step(heart, session, ids);
    heart.io().operations.clear();
    ASSERT_TRUE(heart.step(request).first.is_ok());
    operation_count = heart.io().operations.size();
    n1 = state(heart, session, ids);
  }
  ASSERT_NE(n, n1);
  uint64_t n_count = 0;
  uint64_t n1_count = 0;
  for (uint64_t cut = 0; cut <= operation_count; cut += cut + 6 < operation_count ? 2 : 1) {
    SCOPED_TRACE(cut);
    std::mt19937_64 random(cut);
    const auto copy = std::make_shared<MemoryDisk>(*disk_);
    Heart heart(copy);
    const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
    std::vector<uint32_t> ids;
    for (const ShardInfo& shard : heart.shards(1)) ids.push_back(shard.shard_id);
    const StepRequest request = next_step(heart, session, ids);
    heart.io().operations.clear();
    bool done = false;
    heart.store().operations().step(request,
                                    [&](const Status&, const StepReport&) { done = true; });
    while (!done && heart.io().operations.size() < cut) heart.turn();
    const bool acknowledged = done;
    heart.faults().crash([&](uint16_t, const UnsyncedWrite&) { return random() % 2 == 0; });
    const auto left = std::make_shared<MemoryDisk>(*copy);
    ASSERT_TRUE(heart.until([&] { return done; }));
    const State found = found_on(left);
    if (acknowledged) EXPECT_EQ(found.step, n1.step);
    EXPECT_TRUE(found == n || found == n1);
    ++(found == n ? n_count : n1_count);
  }
  EXPECT_GT(n_count, 0u);
  EXPECT_GT(n1_count, 0u);
}

TEST_F(CommitTest, after_a_failed_write_or_sync_nothing_is_acknowledged_and_memory_shows_n) {
  struct Case {
    const char* name;
    IoKind kind;
    std::optional<uint64_t> offset_bytes;
    uint64_t skip_count;
    bool may_be_n1;
  };
  const auto superblock = superblock_pair_offsets(2, kSmallDiskBytes)[0];
  for (const Case& each : {Case{"state", IoKind::write, {}, 0, false},
                           Case{"first sync", IoKind::sync, {}, 0, false},
                           Case{"superblock", IoKind::write, superblock, 0, true},
                           Case{"last sync", IoKind::sync, {}, 1, true}}) {
    SCOPED_TRACE(each.name);
    disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
    Heart heart(disk_);
    const uint64_t session = heart.attach(heart.open("job", 8, kQuota));
    const auto ids = make(heart, session);
    ASSERT_TRUE(heart.step(next_step(heart, session, ids)).first.is_ok());
    const State n = state(heart, session, ids);
    const StepRequest request = next_step(heart, session, ids);
    heart.faults().add_fault({.kind = MemoryFaultKind::error,
                              .io_kind = each.kind,
                              .offset_bytes = each.offset_bytes,
                              .skip_count = each.skip_count});
    const auto [failed, report] = heart.step(request);
    EXPECT_EQ(failed.code(), StatusCode::device) << failed.message();
    EXPECT_EQ(report.committed_step, 1u);
    const uint64_t free_bytes = heart.extents().free_bytes();
    for (int attempt = 0; attempt < 3; ++attempt) {
      EXPECT_EQ(heart.step(request).first.code(), StatusCode::device);
      EXPECT_EQ(heart.sync(session).code(), StatusCode::device);
    }
    EXPECT_EQ(heart.extents().free_bytes(), free_bytes);
    State seen = state(heart, session, ids);
    seen.blob = n.blob;  // the new one was put; it is not committed
    EXPECT_TRUE(seen == n);
    const State found = found_on(after_power_cut(*disk_));
    EXPECT_TRUE(found == n || (each.may_be_n1 && found.step == 2));
    const State restarted = found_on(std::make_shared<MemoryDisk>(*disk_));
    EXPECT_TRUE(restarted == n || (each.may_be_n1 && restarted.step == 2));
  }
}

TEST_F(CommitTest, jobs_that_commit_at_once_are_both_durable) {
  Heart heart(disk_, 2 * (kFloorSegments + 4));
  std::vector<uint64_t> sessions;
  std::vector<std::vector<uint32_t>> ids;
  for (const char* name : {"one", "two"}) {
    sessions.push_back(heart.attach(heart.open(name, 4, 11_MiB)));
    ids.push_back(make(heart, sessions.back()));
  }
  int done = 0;
  for (size_t i = 0; i < 2; ++i) {
    heart.store().operations().step(next_step(heart, sessions[i], ids[i]),
                                    [&](const Status& status, const StepReport&) {
                                      EXPECT_TRUE(status.is_ok()) << status.message();
                                      ++done;
                                    });
  }
  ASSERT_TRUE(heart.until([&] { return done == 2; }));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(found_on(after_power_cut(*disk_), i == 0 ? "one" : "two") ==
                state(heart, sessions[i], ids[i]));
  }
}

TEST_F(CommitTest, fifty_random_operations_leak_no_extent) {
  const uint64_t seed = 20240607;
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 6, kQuota));
  const auto ids = make(heart, session);
  ASSERT_TRUE(heart.sync(session).is_ok());
  for (int i = 0; i < 50; ++i) {
    const std::string name = "blob" + std::to_string(random() % 4);
    switch (random() % 6) {
      case 0: {
        const StepRequest request = next_step(heart, session, ids);
        const bool fails = random() % 2 == 0;
        Job& job = heart.job(session);
        if (fails) job.space().set_quota_bytes(job.space().used_bytes() + random() % 4_MiB);
        const Status status = heart.step(request).first;
        job.space().set_quota_bytes(kQuota);
        if (!fails) ASSERT_TRUE(status.is_ok()) << status.message();
        break;
      }
      case 1:
        ASSERT_TRUE(heart.sync(session).is_ok());
        break;
      case 2:
      case 3: {
        const auto id = heart.declare(session, {bytes_shard(name, 1'500'000)});
        heart.write(session, id[0], pattern(1'500'000, static_cast<uint8_t>(i)));
        break;
      }
      case 4: {
        bool answered = false;
        heart.store().delete_shard(session, name, [&](const Result<bool>&) { answered = true; });
        ASSERT_TRUE(heart.until([&] { return answered; }));
        break;
      }
      case 5:
        heart.touch(session, ids[random() % 4]);
        break;
    }
  }
  ASSERT_TRUE(heart.store().gradients().drop(session, {}).is_ok());
  heart.turns(5);
  heart.write(session, ids[3], pattern(10'000, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  heart.write(session, ids[3], pattern(10'000, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());  // the last commit's superseded blobs as well
  uint64_t durable_bytes = 0;
  for (const ExtentRecord& extent : durable_extents(disk_->durable_bytes())) {
    durable_bytes += extent.length_bytes;
  }
  uint64_t state_bytes = 0;
  heart.job(session).shards().for_each_replica(
      [&](ReplicaPlace replica) { state_bytes += replica->length_bytes(); });
  EXPECT_EQ(heart.job(session).space().used_bytes(), state_bytes);
  EXPECT_EQ(heart.extents().capacity_bytes() - heart.extents().free_bytes(), durable_bytes);
  Heart again(after_power_cut(*disk_));
  EXPECT_EQ(again.extents().free_bytes(), heart.extents().free_bytes());
}

}  // namespace
}  // namespace memd
