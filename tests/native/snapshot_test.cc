#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <tuple>

#include "base/bulk_bytes.h"
#include "store/snapshot/snapshot_contents.h"
#include "store/snapshot/snapshot_readings.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::HeartOptions;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::newest_superblock;
using testing::numbers;
using testing::parameter;
using testing::pattern;

constexpr uint64_t kElements = kTileElements + 100;
constexpr uint64_t kBlobBytes = 1'100'000;
constexpr uint64_t kQuota = 30_MiB;

class SnapshotTest : public ::testing::Test {
 protected:
  void begin(Heart& heart, std::optional<Durability> durability = std::nullopt) {
    session_ = heart.attach(heart.open("job", 8, kQuota, durability));
    ids_ = heart.declare(session_,
                         {parameter("w", kElements),
                          parameter("h", 3000, DType::bfloat16),
                          bytes_shard("blob", kBlobBytes)});
    heart.write(session_, ids_[0], numbers(kElements, 1));
    heart.write(session_, ids_[1], testing::halves(3000, 2));
    heart.write(session_, ids_[2], pattern(kBlobBytes, 3));
  }
  Status train(Heart& heart, uint32_t seed, bool with_blob = true) {
    heart.write(session_, ids_[0], numbers(kElements, seed), Part::gradient);
    heart.write(session_, ids_[1], testing::halves(3000, seed + 1), Part::gradient);
    if (with_blob) heart.write(session_, ids_[2], pattern(kBlobBytes, static_cast<uint8_t>(seed)));
    return heart
        .step({.session_id = session_,
               .groups = {{.settings = {.lr = 1e-2}, .shard_ids = {ids_[0], ids_[1]}}}})
        .first;
  }
  Result<SnapshotInfo> create(Heart& heart, const std::string& name, uint64_t number = 0) {
    std::optional<Result<SnapshotInfo>> answer;
    heart.store().snapshots().create(
        {.job_id = job_id(heart), .name = name, .created_s = 1234, .number = number},
        [&](const Result<SnapshotInfo>& made) { answer = made; });
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  /// Its session ends before, and another one begins.
  Status restore(Heart& heart, const std::string& name) {
    const uint64_t id = job_id(heart);
    for (const auto& session :
         std::vector(heart.store().sessions().begin(), heart.store().sessions().end()))
      EXPECT_TRUE(heart.store().detach(session.first).is_ok());
    const Status status = restore_now(heart, name);
    const auto attached = heart.store().attach(id, {.pid = 1, .start_time = 2, .uid = 3});
    if (!attached.is_ok()) return attached.status();
    session_ = attached.value()->session_id;
    ids_.clear();
    for (const char* const shard : {"w", "h", "blob"})
      ids_.push_back(heart.job(session_).shards().id_of(shard));
    return status;
  }
  Status restore_now(Heart& heart, const std::string& name) {
    std::optional<Status> answer;
    heart.store().snapshots().restore(
        job_id(heart), name, [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  struct State {
    uint64_t step = 0;
    std::vector<float> value;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
    std::vector<uint16_t> half;
    std::vector<uint8_t> blob;
    bool operator==(const State&) const = default;
  };
  State state(Heart& heart) {
    State out{.step = heart.job(session_).progress().committed_step(),
              .value = heart.read<float>(session_, ids_[0]),
              .exp_avg = {},
              .exp_avg_sq = {},
              .half = heart.read<uint16_t>(session_, ids_[1]),
              .blob = heart.read<uint8_t>(session_, ids_[2])};
    std::tie(out.exp_avg, out.exp_avg_sq) = heart.moments(session_, ids_[0]);
    return out;
  }
  Status drop(Heart& heart, const std::string& name) {
    std::optional<Status> answer;
    heart.store().snapshots().drop(
        job_id(heart), name, [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status drop_job(Heart& heart, bool force) {
    std::optional<Status> answer;
    heart.store().drop_job(job_id(heart), force, [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  struct Checked {
    std::vector<CheckFinding> findings;
    CheckReport report;
  };
  /// A whole live check.
  static Checked check(Heart& heart) {
    LiveCheck& check = heart.store().live_check();
    const auto id = check.begin({.job_ids = {}, .whole = true});
    EXPECT_TRUE(id.is_ok());
    Checked out;
    std::optional<CheckReport> report;
    EXPECT_TRUE(heart.until([&] {
      heart.clock.advance(1'000'000);
      const auto progress = check.progress(id.value());
      if (!progress.is_ok()) return true;
      const auto& found = progress.value().findings;
      out.findings.insert(out.findings.end(), found.begin(), found.end());
      report = progress.value().report;
      return report.has_value();
    }));
    EXPECT_TRUE(report.has_value());
    if (report) out.report = *report;
    return out;
  }
  static uint64_t job_id(Heart& heart) {
    const auto info = heart.store().reports().find_job("job");
    EXPECT_TRUE(info.is_ok()) << info.status().message();
    return info.is_ok() ? info.value().job_id : 0;
  }
  static std::vector<SnapshotInfo> listed(Heart& heart) {
    const auto all = heart.store().snapshots().list(job_id(heart));
    EXPECT_TRUE(all.is_ok()) << all.status().message();
    return all.is_ok() ? all.value() : std::vector<SnapshotInfo>{};
  }

  std::vector<std::byte> bytes_of(const ExtentRecord& extent) const {
    const auto part =
        std::span(disk_->bytes()).subspan(extent.address.offset_bytes, extent.length_bytes);
    return {part.begin(), part.end()};
  }
  RootRecord root_on_disk() const {
    const WorkerBytes uncounted;
    const Superblock superblock = newest_superblock(disk_->bytes());
    std::vector<std::byte> bytes = bytes_of(superblock.root);
    bytes.resize(superblock.root_bytes);
    auto root = decode_root(bytes);
    EXPECT_TRUE(root.is_ok()) << root.status().message();
    return root.is_ok() ? std::move(root).value() : RootRecord{};
  }
  JobRecord record_of(const RootEntry& entry) const {
    const WorkerBytes uncounted;
    std::vector<std::byte> bytes;
    for (const ExtentRecord& extent : entry.catalogue) {
      const auto part = bytes_of(extent);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    bytes.resize(entry.catalogue_bytes);
    auto record = decode_job(bytes);
    EXPECT_TRUE(record.is_ok()) << record.status().message();
    return record.is_ok() ? std::move(record).value() : JobRecord{};
  }
  /// The bytes of each extent that the snapshot keeps.
  std::vector<std::vector<std::byte>> kept_bytes(const std::string& name) const {
    const WorkerBytes uncounted;
    for (const SnapshotEntry& entry : root_on_disk().snapshots) {
      if (entry.name != name) continue;
      std::vector<std::vector<std::byte>> all;
      for (const ExtentRecord& extent : all_extents(record_of(entry.job))) {
        all.push_back(bytes_of(extent));
        EXPECT_TRUE(ExtentStore::matches(extent, all.back()));
      }
      return all;
    }
    return {};
  }
  /// Nothing is taken but what jobs, snapshots and the root name.
  void expect_nothing_leaked(Heart& heart) const {
    const WorkerBytes uncounted;
    std::set<std::pair<uint64_t, uint32_t>> named;
    const auto add = [&](const ExtentRecord& extent) {
      named.emplace(extent.address.offset_bytes, extent.length_bytes);
    };
    add(newest_superblock(disk_->bytes()).root);
    const RootRecord root = root_on_disk();
    std::vector<RootEntry> entries = root.jobs;
    for (const SnapshotEntry& snapshot : root.snapshots) entries.push_back(snapshot.job);
    for (const RootEntry& entry : entries) {
      for (const ExtentRecord& extent : entry.catalogue) add(extent);
      for (const ExtentRecord& extent : all_extents(record_of(entry))) add(extent);
    }
    uint64_t bytes = 0;
    for (const auto& [offset, length] : named) bytes += length;
    EXPECT_EQ(heart.extents().capacity_bytes() - heart.extents().free_bytes(), bytes);
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(SnapshotTest, what_it_keeps_stays_while_the_job_trains_on) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const auto made = create(heart, "first");
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_EQ(made.value().step, 1u);
  EXPECT_EQ(made.value().name, "first");
  EXPECT_EQ(made.value().created_s, 1234u);
  EXPECT_GT(made.value().bytes, kElements * 12);
  const auto before = kept_bytes("first");
  ASSERT_EQ(before.size() + 1, made.value().extent_count) << "its catalogue has one extent";
  for (uint32_t step = 2; step <= 4; ++step) ASSERT_TRUE(train(heart, step * 10).is_ok());
  EXPECT_EQ(kept_bytes("first"), before);
  EXPECT_EQ(heart.store().reports().find_job("job").value().committed_step, 4u);
  expect_nothing_leaked(heart);
}

TEST_F(SnapshotTest, nothing_is_copied_to_make_it) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const uint64_t free_bytes = heart.extents().free_bytes();
  heart.io().operations.clear();
  ASSERT_TRUE(create(heart, "first").is_ok());
  uint64_t written_bytes = 0;
  for (const auto& operation : heart.io().operations)
    written_bytes += operation.kind == IoKind::write ? operation.length_bytes : 0;
  EXPECT_LE(written_bytes, 3 * uint64_t{kBlockBytes}) << "the root and a pair of superblocks";
  EXPECT_EQ(heart.extents().free_bytes(), free_bytes);
}

TEST_F(SnapshotTest, what_it_alone_named_is_free_once_it_is_dropped) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const uint64_t free_bytes = heart.extents().free_bytes();
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(create(heart, "twin").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  ASSERT_TRUE(create(heart, "second").is_ok());
  EXPECT_LT(heart.extents().free_bytes(), free_bytes - kElements * 12);
  EXPECT_EQ(heart.store().reports().find_job("job").value().snapshot_count, 3u);
  const auto twin = kept_bytes("twin");
  ASSERT_TRUE(drop(heart, "first").is_ok());
  EXPECT_EQ(kept_bytes("twin"), twin);
  expect_nothing_leaked(heart);
  ASSERT_TRUE(drop(heart, "twin").is_ok());
  EXPECT_EQ(heart.extents().free_bytes(), free_bytes) << "the job holds all that the second names";
  ASSERT_TRUE(drop(heart, "second").is_ok());
  EXPECT_EQ(heart.extents().free_bytes(), free_bytes);
  EXPECT_EQ(heart.store().reports().find_job("job").value().snapshot_bytes, 0u);
  ASSERT_TRUE(train(heart, 30).is_ok());
  expect_nothing_leaked(heart);
}

TEST_F(SnapshotTest, the_next_daemon_has_it_and_drops_it) {
  std::vector<std::vector<std::byte>> before;
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
    ASSERT_TRUE(create(heart, "first", 7).is_ok());
    ASSERT_TRUE(train(heart, 20).is_ok());
    before = kept_bytes("first");
  }
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  ASSERT_EQ(listed(heart).size(), 1u);
  EXPECT_EQ(listed(heart)[0].step, 1u);
  expect_nothing_leaked(heart);
  session_ = heart.attach(heart.open("job", 8, kQuota));
  ASSERT_TRUE(train(heart, 30).is_ok());
  EXPECT_EQ(kept_bytes("first"), before);
  // As a client asks that has heard nothing from the daemon before.
  const auto again = create(heart, "first", 7);
  ASSERT_TRUE(again.is_ok()) << again.status().message();
  EXPECT_EQ(again.value().step, 1u);
  ASSERT_TRUE(drop(heart, "first").is_ok());
  expect_nothing_leaked(heart);
  EXPECT_TRUE(root_on_disk().snapshots.empty());
}

class SnapshotInMemoryTest : public SnapshotTest,
                             public ::testing::WithParamInterface<const char*> {};

TEST_P(SnapshotInMemoryTest, what_is_newer_than_its_extents_is_written_first) {
  Heart heart(disk_);
  begin(heart, Durability::parse(GetParam()).value());
  for (uint32_t step = 1; step <= 3; ++step) ASSERT_TRUE(train(heart, step * 10).is_ok());
  const auto made = create(heart, "third");
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_EQ(made.value().step, 3u);
  const auto before = kept_bytes("third");
  const std::vector<float> value = heart.read<float>(session_, ids_[0]);
  ASSERT_GE(before.size(), 2u);
  for (uint32_t step = 4; step <= 7; ++step) ASSERT_TRUE(train(heart, step * 10).is_ok());
  ASSERT_TRUE(heart.sync(session_).is_ok());
  EXPECT_EQ(kept_bytes("third"), before);
  // The value of its first tile is that of step 3, bit for bit.
  const JobRecord record = record_of(root_on_disk().snapshots[0].job);
  const auto w = std::find_if(record.shards.begin(), record.shards.end(), [](const auto& shard) {
    return shard.name == "w";
  });
  ASSERT_NE(w, record.shards.end());
  const auto tile = bytes_of(record.buckets[w->bucket].tiles[0].parameter);
  EXPECT_EQ(std::memcmp(tile.data(), value.data(), kTileElements * sizeof(float)), 0);
  ASSERT_TRUE(drop(heart, "third").is_ok());
  expect_nothing_leaked(heart);
}

INSTANTIATE_TEST_SUITE_P(Durabilities, SnapshotInMemoryTest, ::testing::Values("every:5", "none"));

TEST_F(SnapshotTest, a_wrong_request_is_refused_and_changes_nothing) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first", 7).is_ok());
  const auto taken = create(heart, "first", 8);
  EXPECT_EQ(taken.status().code(), StatusCode::already_exists);
  EXPECT_NE(taken.status().message().find("of step 1; choose another name"), std::string::npos);
  EXPECT_EQ(create(heart, "first").status().code(), StatusCode::already_exists);
  EXPECT_EQ(create(heart, "").status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(create(heart, std::string(129, 'x')).status().code(), StatusCode::invalid_argument);
  const Status none = drop(heart, "second");
  EXPECT_EQ(none.code(), StatusCode::not_found);
  EXPECT_NE(none.message().find("it has first"), std::string::npos) << none.message();
  std::optional<Status> no_job;
  heart.store().snapshots().drop(99, "first", [&](const Status& status) { no_job = status; });
  EXPECT_EQ(no_job->code(), StatusCode::not_found);
  EXPECT_EQ(listed(heart).size(), 1u);
  ASSERT_TRUE(train(heart, 20).is_ok());
}

TEST_F(SnapshotTest, a_job_has_at_most_so_many) {
  Heart heart(disk_);
  begin(heart);
  heart.job(session_).space().set_quota_bytes(100 * kQuota);
  for (size_t i = 0; i < kSnapshotsOfJobMax; ++i)
    ASSERT_TRUE(create(heart, concat("s", i)).is_ok()) << i;
  EXPECT_EQ(create(heart, "more").status().code(), StatusCode::capacity);
}

TEST_F(SnapshotTest, a_full_quota_refuses_it_with_each_term) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const auto made = create(heart, "first");
  ASSERT_TRUE(made.is_ok());
  Job& job = heart.job(session_);
  const uint64_t needed_bytes = job.admission().space_needed().total();
  job.space().set_quota_bytes(needed_bytes + made.value().bytes - 1);
  const auto refused = create(heart, "second");
  EXPECT_EQ(refused.status().code(), StatusCode::capacity);
  const std::string text = refused.status().message();
  EXPECT_NE(text.find("parameters and their optimizer state"), std::string::npos) << text;
  EXPECT_NE(text.find(concat(2 * made.value().bytes, " (snapshots)")), std::string::npos) << text;
  EXPECT_EQ(job.space().snapshots().count, 1u);
  // What is declared later leaves snapshots their part, too.
  const auto more =
      heart.store().declare(session_, {bytes_shard("more", made.value().bytes)}).status();
  EXPECT_EQ(more.code(), StatusCode::capacity);
  EXPECT_NE(more.message().find("(snapshots)"), std::string::npos) << more.message();
  ASSERT_TRUE(train(heart, 20).is_ok());
  job.space().set_quota_bytes(needed_bytes + made.value().bytes);
  EXPECT_TRUE(create(heart, "second").is_ok());
  for (uint32_t seed = 30; seed < 33; ++seed) {
    const Status trained = train(heart, seed, false);
    ASSERT_TRUE(trained.is_ok()) << "at its quota it trains on: " << trained.message();
  }
}

TEST_F(SnapshotTest, a_commit_that_fails_leaves_none) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  // No room for the root: nothing is written.
  const uint64_t free_bytes = heart.extents().free_bytes();
  std::vector<ExtentRecord> taken;
  for (uint32_t bytes = 1_MiB; bytes >= kBlockBytes; bytes /= 2) {
    for (;;) {
      const auto extent = heart.extents().allocate(bytes);
      if (!extent.is_ok()) break;
      taken.push_back(extent.value());
    }
  }
  const auto refused = create(heart, "first");
  EXPECT_EQ(refused.status().code(), StatusCode::capacity) << refused.status().message();
  for (const ExtentRecord& extent : taken) heart.extents().release(extent);
  EXPECT_EQ(heart.extents().free_bytes(), free_bytes);
  EXPECT_TRUE(listed(heart).empty());
  EXPECT_EQ(heart.job(session_).space().snapshots().count, 0u);
  ASSERT_TRUE(train(heart, 20).is_ok());
  expect_nothing_leaked(heart);
  // And on a device that fails.
  heart.faults().add_fault({.io_kind = IoKind::write, .count = 1, .error_number = EIO});
  EXPECT_EQ(create(heart, "first").status().code(), StatusCode::device);
  EXPECT_TRUE(listed(heart).empty());
}

TEST_F(SnapshotTest, a_job_that_has_some_is_dropped_only_with_force) {
  Heart heart(disk_);
  const uint64_t free_bytes = heart.extents().free_bytes();
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  ASSERT_TRUE(create(heart, "second").is_ok());
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  const Status refused = drop_job(heart, false);
  EXPECT_EQ(refused.code(), StatusCode::in_use);
  EXPECT_NE(refused.message().find("first, second"), std::string::npos) << refused.message();
  // One that comes while a snapshot is made finds it.
  ASSERT_TRUE(drop(heart, "first").is_ok());
  ASSERT_TRUE(drop(heart, "second").is_ok());
  std::optional<Result<SnapshotInfo>> made;
  heart.store().snapshots().create({.job_id = job_id(heart), .name = "third"},
                                   [&](const Result<SnapshotInfo>& answer) { made = answer; });
  ASSERT_TRUE(heart.until([&] {
    const std::vector<Activity> all = heart.store().reports().in_flight();
    return std::any_of(all.begin(), all.end(), [](const Activity& each) {
      return each.kind == "snapshot" && each.what == "commits";
    });
  }));
  EXPECT_EQ(drop_job(heart, false).code(), StatusCode::in_use);
  ASSERT_TRUE(made && made->is_ok());
  session_ = heart.attach(job_id(heart));
  ASSERT_TRUE(train(heart, 30).is_ok());
  ASSERT_TRUE(drop_job(heart, true).is_ok());
  EXPECT_EQ(heart.extents().free_bytes() + kBlockBytes, free_bytes) << "the root";
  EXPECT_TRUE(root_on_disk().snapshots.empty());
}

TEST_F(SnapshotTest, none_is_made_of_a_job_that_is_being_dropped) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(heart.sync(session_).is_ok());
  const uint64_t id = job_id(heart);
  std::optional<Status> dropped;
  heart.store().drop_job(id, true, [&](const Status& status) { dropped = status; });
  std::optional<Result<SnapshotInfo>> made;
  heart.store().snapshots().create({.job_id = id, .name = "late"},
                                   [&](const Result<SnapshotInfo>& answer) { made = answer; });
  ASSERT_TRUE(made.has_value());
  EXPECT_NE(made->status().message().find("being dropped"), std::string::npos);
  ASSERT_TRUE(heart.until([&] { return dropped.has_value(); }));
  EXPECT_TRUE(dropped->is_ok());
}

TEST_F(SnapshotTest, a_damaged_catalogue_loses_the_snapshot_and_nothing_else) {
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
    ASSERT_TRUE(create(heart, "first").is_ok());
    ASSERT_TRUE(train(heart, 20).is_ok());
  }
  const ExtentRecord catalogue = root_on_disk().snapshots.at(0).job.catalogue.at(0);
  disk_->bytes()[catalogue.address.offset_bytes + 99] ^= std::byte{4};
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  ASSERT_EQ(heart.store().load_notes().size(), 1u);
  EXPECT_NE(heart.store().load_notes()[0].find("snapshot first"), std::string::npos);
  ASSERT_EQ(listed(heart).size(), 1u);
  EXPECT_TRUE(listed(heart)[0].is_lost);
  const auto checked = check(heart);
  ASSERT_EQ(checked.findings.size(), 1u);
  EXPECT_TRUE(checked.findings[0].is_lost);
  EXPECT_EQ(checked.findings[0].snapshot, "first");
  ASSERT_EQ(checked.report.jobs.at(0).snapshots.size(), 1u);
  EXPECT_TRUE(checked.report.jobs[0].snapshots[0].is_lost);
  EXPECT_EQ(checked.report.jobs[0].snapshots[0].step, 1u);
  session_ = heart.attach(heart.open("job", 8, kQuota));
  ASSERT_TRUE(train(heart, 30).is_ok());
  ASSERT_TRUE(drop(heart, "first").is_ok());
  expect_nothing_leaked(heart);
}

TEST_F(SnapshotTest, a_job_that_nobody_has_used_since_the_start_keeps_one_too) {
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
  }
  Heart heart(disk_);
  const auto made = create(heart, "first");
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  EXPECT_EQ(made.value().step, 1u);
  expect_nothing_leaked(heart);
}

TEST_F(SnapshotTest, a_catalogue_that_cannot_be_read_now_stops_the_start) {
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
    ASSERT_TRUE(create(heart, "first").is_ok());
    ASSERT_TRUE(train(heart, 20).is_ok());
  }
  const ExtentRecord catalogue = root_on_disk().snapshots.at(0).job.catalogue.at(0);
  HeartOptions options;
  options.before_load = [&](MemoryQueue& queue) {
    queue.add_fault({.io_kind = IoKind::read,
                     .offset_bytes = catalogue.address.offset_bytes,
                     .count = 3,
                     .error_number = EIO});
  };
  Heart heart(disk_, options);
  EXPECT_EQ(heart.loaded.code(), StatusCode::device) << heart.loaded.message();
}

TEST_F(SnapshotTest, a_check_finds_what_it_lost_and_the_job_goes_on) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const JobRecord record = record_of(root_on_disk().snapshots.at(0).job);
  const auto w = std::find_if(record.shards.begin(), record.shards.end(), [](const auto& shard) {
    return shard.name == "w";
  });
  const ExtentRecord lost = record.buckets[w->bucket].tiles[1].rest;
  disk_->bytes()[lost.address.offset_bytes + 5] ^= std::byte{1};
  const auto [findings, report] = check(heart);
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_TRUE(findings[0].is_lost);
  EXPECT_EQ(findings[0].snapshot, "first");
  EXPECT_EQ(findings[0].job, "job");
  EXPECT_EQ(findings[0].shards, std::vector<std::string>{"w"});
  EXPECT_EQ(findings[0].part, "optimizer state of tile 1");
  EXPECT_EQ(findings[0].offset_bytes, lost.address.offset_bytes);
  ASSERT_EQ(report.jobs.size(), 1u);
  EXPECT_TRUE(report.jobs[0].lost_shards.empty());
  ASSERT_EQ(report.jobs[0].snapshots.size(), 1u);
  const CheckedSnapshot& checked = report.jobs[0].snapshots[0];
  EXPECT_EQ(checked.step, 1u);
  EXPECT_FALSE(checked.is_lost);
  EXPECT_EQ(checked.extent_count, all_extents(record).size());
  EXPECT_EQ(checked.lost_shards, std::vector<std::string>{"w"});
  EXPECT_EQ(listed(heart)[0].lost_shards, std::vector<std::string>{"w"});
  ASSERT_TRUE(train(heart, 30).is_ok());
}

class SnapshotRestoreTest : public SnapshotInMemoryTest {};

TEST_P(SnapshotRestoreTest, a_job_that_goes_back_trains_on_as_it_did) {
  Heart heart(disk_);
  begin(heart, Durability::parse(GetParam()).value());
  for (const uint32_t seed : {10, 20}) ASSERT_TRUE(train(heart, seed).is_ok());
  const State second = state(heart);
  ASSERT_TRUE(create(heart, "second").is_ok());
  for (const uint32_t seed : {30, 40}) ASSERT_TRUE(train(heart, seed).is_ok());
  const State fourth = state(heart);
  // Shards that came later are gone with it.
  heart.declare(session_, {bytes_shard("late", 5000)});
  heart.write(session_, heart.job(session_).shards().id_of("late"), pattern(5000, 9));
  ASSERT_TRUE(train(heart, 50).is_ok());
  Status restored = restore(heart, "second");
  ASSERT_TRUE(restored.is_ok()) << restored.message();
  EXPECT_EQ(state(heart), second);
  EXPECT_FALSE(heart.job(session_).shards().find("late").has_value());
  testing::expect_all_bytes_held(heart.job(session_));
  ASSERT_TRUE(heart.sync(session_).is_ok());
  expect_nothing_leaked(heart);
  for (const uint32_t seed : {30, 40}) ASSERT_TRUE(train(heart, seed).is_ok());
  EXPECT_EQ(state(heart), fourth);
  // As often as one likes.
  ASSERT_TRUE(restore(heart, "second").is_ok());
  EXPECT_EQ(state(heart), second);
  ASSERT_TRUE(drop(heart, "second").is_ok());
  EXPECT_EQ(state(heart), second);
  ASSERT_TRUE(train(heart, 30).is_ok());
  ASSERT_TRUE(heart.sync(session_).is_ok());
  expect_nothing_leaked(heart);
}

INSTANTIATE_TEST_SUITE_P(Durabilities,
                         SnapshotRestoreTest,
                         ::testing::Values("step", "every:5", "none"));

TEST_F(SnapshotTest, a_job_whose_memory_is_gone_goes_back_to_its_snapshot) {
  State second;
  {
    Heart heart(disk_);
    begin(heart, Durability::parse("none").value());
    for (const uint32_t seed : {10, 20}) ASSERT_TRUE(train(heart, seed).is_ok());
    second = state(heart);
    ASSERT_TRUE(create(heart, "second").is_ok());
    ASSERT_TRUE(train(heart, 30).is_ok());
    disk_ = std::make_shared<MemoryDisk>(*disk_);
    disk_->crash([](const UnsyncedWrite&) { return false; });
  }
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  EXPECT_EQ(heart.store().attach(job_id(heart)).status().code(), StatusCode::integrity);
  const Status restored = restore(heart, "second");
  ASSERT_TRUE(restored.is_ok()) << restored.message();
  EXPECT_EQ(state(heart), second);
  ASSERT_TRUE(train(heart, 30).is_ok());
}

TEST_F(SnapshotTest, a_restored_job_is_found_by_the_next_daemon) {
  State first;
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
    first = state(heart);
    ASSERT_TRUE(create(heart, "first").is_ok());
    ASSERT_TRUE(train(heart, 20).is_ok());
    ASSERT_TRUE(restore(heart, "first").is_ok());
  }
  Heart heart(disk_);
  ASSERT_TRUE(heart.loaded.is_ok()) << heart.loaded.message();
  session_ = heart.attach(heart.open("job", 8, kQuota));
  EXPECT_EQ(state(heart), first);
  expect_nothing_leaked(heart);
  ASSERT_EQ(listed(heart).size(), 1u);
}

TEST_F(SnapshotTest, a_restore_that_cannot_be_changes_nothing) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const State second = state(heart);
  const Status used = restore_now(heart, "first");
  EXPECT_EQ(used.code(), StatusCode::in_use);
  EXPECT_NE(used.message().find("sessions attached 1"), std::string::npos) << used.message();
  const Status none = restore(heart, "other");
  EXPECT_EQ(none.code(), StatusCode::not_found);
  EXPECT_EQ(state(heart), second);
  // The quota holds less than what was declared then.
  const uint64_t quota_bytes = heart.job(session_).space().quota_bytes();
  heart.job(session_).space().set_quota_bytes(4_MiB);
  EXPECT_EQ(restore(heart, "first").code(), StatusCode::capacity);
  heart.job(session_).space().set_quota_bytes(quota_bytes);
  // A device that fails.
  heart.faults().add_fault({.io_kind = IoKind::write, .count = 1, .error_number = EIO});
  EXPECT_EQ(restore(heart, "first").code(), StatusCode::device);
  EXPECT_EQ(state(heart), second);
}

TEST_P(SnapshotInMemoryTest, a_restore_that_cannot_be_leaves_steps_that_memory_alone_has) {
  Heart heart(disk_);
  begin(heart, Durability::parse(GetParam()).value());
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const State second = state(heart);
  heart.faults().add_fault({.io_kind = IoKind::write, .count = 1, .error_number = EIO});
  EXPECT_EQ(restore(heart, "first").code(), StatusCode::device);
  EXPECT_EQ(state(heart), second);
}

TEST_F(SnapshotTest, nobody_attaches_while_another_drop_waits) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const uint64_t id = job_id(heart);
  Job& job = heart.job(session_);
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  heart.store().snapshots().create({.job_id = id, .name = "first"},
                                   [](const Result<SnapshotInfo>&) {});
  ASSERT_TRUE(heart.until([&] {
    const std::vector<Operations::Open> open = job.operations().open();
    return !open.empty() && std::string_view(open.front().kind) == "snapshot" &&
           std::string_view(open.front().phase) == "commits";
  }));
  std::optional<Status> refused;
  std::optional<Status> dropped;
  std::optional<Status> attached;
  heart.store().drop_job(id, false, [&](const Status& status) { refused = status; });
  heart.store().drop_job(id, true, [&](const Status& status) { dropped = status; });
  // It waits for that, and so its end is a later turn's.
  job.cache().activities().begin();
  ASSERT_TRUE(heart.until([&] { return refused.has_value(); }));
  EXPECT_EQ(refused->code(), StatusCode::in_use);
  EXPECT_FALSE(dropped.has_value());
  EXPECT_EQ(heart.store().attach(id).status().code(), StatusCode::unavailable);
  job.cache().activities().end();
  ASSERT_TRUE(heart.until([&] { return dropped.has_value(); }));
  EXPECT_TRUE(dropped->is_ok());
  EXPECT_EQ(heart.store().attach(id).status().code(), StatusCode::not_found);
}

TEST_F(SnapshotTest, nobody_attaches_while_a_job_goes_back) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  const uint64_t id = job_id(heart);
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  std::optional<Status> restored;
  heart.store().snapshots().restore(
      id, "first", [&](const Result<SnapshotInfo>& made) { restored = made.status(); });
  const auto refused = heart.store().attach(id);
  EXPECT_EQ(refused.status().code(), StatusCode::unavailable);
  EXPECT_NE(refused.status().message().find("is being restored"), std::string::npos);
  EXPECT_TRUE(heart.store().admissions().set_weight(id, JobWeight::of(3).value()).is_ok());
  ASSERT_TRUE(heart.until([&] { return restored.has_value(); }));
  EXPECT_TRUE(restored->is_ok());
  const auto attached = heart.store().attach(id);
  ASSERT_TRUE(attached.is_ok());
  const JobWeight kept = heart.job(attached.value()->session_id).admission().weight();
  EXPECT_EQ(kept, JobWeight::of(3).value());
}

TEST_F(SnapshotTest, a_job_that_is_streamed_goes_back_when_that_has_ended) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  const uint64_t id = job_id(heart);
  const auto streamed = heart.ask({.session_id = session_,
                                   .shard_id = ids_[2],
                                   .part = Part::value,
                                   .mode = LeaseMode::read,
                                   .timeout_ns = 1'000'000'000,
                                   .for_service = true,
                                   .prefetch = false});
  ASSERT_TRUE(heart.until([&] { return streamed->has_value(); }));
  ASSERT_TRUE((*streamed)->is_ok());
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  const Status refused = restore_now(heart, "first");
  EXPECT_EQ(refused.code(), StatusCode::in_use);
  EXPECT_EQ(refused.message(),
            "job job is being streamed over gRPC; try again when that has ended");
  EXPECT_EQ(drop_job(heart, true).message(), refused.message());
  heart.store().release_service_lease(id, (*streamed)->grant, false);
  const Status restored = restore_now(heart, "first");
  EXPECT_TRUE(restored.is_ok()) << restored.message();
}

TEST_F(SnapshotTest, a_restore_builds_on_workers_and_exchanges_extents_over_turns) {
  constexpr size_t kBlobs = 200;
  constexpr uint64_t kEachBytes = 4096;
  HeartOptions options;
  options.workers_by_hand = true;
  options.pieces_a_turn = 1;
  Heart heart(disk_, options);
  std::vector<uint64_t> orders;
  heart.when_idle = [&] {
    const auto order = heart.workers().run_next();
    if (order) orders.push_back(order->bytes);
    return order.has_value();
  };
  session_ = heart.attach(heart.open("job"));
  std::vector<ShardSpec> specs;
  for (size_t i = 0; i < kBlobs; ++i) specs.push_back(bytes_shard(concat("b", i), kEachBytes));
  const std::vector<uint32_t> ids = heart.declare(session_, specs);
  const auto write_all = [&](uint8_t seed) {
    for (const uint32_t id : ids) heart.write(session_, id, pattern(kEachBytes, seed));
    ASSERT_TRUE(heart.sync(session_).is_ok());
  };
  write_all(1);
  ASSERT_TRUE(create(heart, "first").is_ok());
  write_all(2);
  const uint64_t record_bytes = heart.job(session_).space().snapshots().memory_bytes;
  const uint64_t id = job_id(heart);
  ASSERT_TRUE(heart.store().detach(session_).is_ok());
  orders.clear();
  std::optional<Status> restored;
  heart.store().snapshots().restore(
      id, "first", [&](const Result<SnapshotInfo>& made) { restored = made.status(); });
  size_t turns = 0;
  ASSERT_TRUE(heart.until([&] {
    for (const Activity& each : heart.store().reports().in_flight())
      turns += each.kind == "restore" && each.what == "exchanges extents" ? 1 : 0;
    return restored.has_value();
  }));
  EXPECT_TRUE(restored->is_ok()) << restored->message();
  EXPECT_GE(turns, 2 * kBlobs / 64);
  while (heart.turn()) {
  }
  EXPECT_EQ(std::count(orders.begin(), orders.end(), record_bytes), 3)
      << "the job of then, what differs, the end of the job of now";
  session_ = heart.attach(id);
  EXPECT_EQ(heart.read<uint8_t>(session_, heart.job(session_).shards().id_of("b7")),
            pattern(kEachBytes, 1));
  ASSERT_TRUE(heart.sync(session_).is_ok());
  expect_nothing_leaked(heart);
}

TEST_F(SnapshotTest, what_has_ended_is_freed_on_a_worker) {
  HeartOptions options;
  options.workers_by_hand = true;
  Heart heart(disk_, options);
  heart.when_idle = [&] { return heart.workers().run_next().has_value(); };
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  for (const char* const name : {"first", "second"}) {
    ASSERT_TRUE(create(heart, name).is_ok());
    ASSERT_TRUE(train(heart, 20).is_ok());
  }
  const SnapshotSpace both = heart.job(session_).space().snapshots();
  ASSERT_TRUE(drop(heart, "first").is_ok());
  const uint64_t left = heart.job(session_).space().snapshots().memory_bytes;
  const auto of_first = heart.workers().run_next();
  ASSERT_TRUE(of_first.has_value());
  EXPECT_EQ(of_first->bytes, both.memory_bytes - left);
  const uint64_t of_job = heart.job(session_).shards().declared().memory_bytes();
  std::vector<uint64_t> freed;
  std::optional<Status> dropped;
  heart.store().drop_job(job_id(heart), true, [&](const Status& status) { dropped = status; });
  heart.when_idle = [&] {
    const auto order = heart.workers().run_next();
    if (order) freed.push_back(order->bytes);
    return order.has_value();
  };
  ASSERT_TRUE(heart.until([&] { return dropped.has_value(); }));
  const auto each = left == of_job ? 2 : 1;
  EXPECT_EQ(std::count(freed.begin(), freed.end(), of_job), each);
  EXPECT_EQ(std::count(freed.begin(), freed.end(), left), each);
}

TEST_F(SnapshotTest, what_is_being_dropped_is_not_verified) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const JobRecord record = record_of(root_on_disk().snapshots.at(0).job);
  const ExtentRecord gone = record.buckets[0].tiles[0].parameter;
  std::optional<Status> dropped;
  heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write, .count = 1});
  heart.store().snapshots().drop(
      job_id(heart), "first", [&](const Status& status) { dropped = status; });
  // Its extents may be another job's before the commit has ended.
  disk_->bytes()[gone.address.offset_bytes + 5] ^= std::byte{1};
  LiveCheck& check = heart.store().live_check();
  const auto id = check.begin({.job_ids = {job_id(heart)}});
  ASSERT_TRUE(id.is_ok());
  std::optional<CheckReport> report;
  ASSERT_TRUE(heart.until([&] {
    heart.clock.advance(1'000'000);
    const auto progress = check.progress(id.value());
    EXPECT_TRUE(progress.is_ok());
    if (!progress.is_ok()) return true;
    EXPECT_TRUE(progress.value().findings.empty());
    report = progress.value().report;
    return report.has_value();
  }));
  EXPECT_FALSE(dropped.has_value());
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return dropped.has_value(); }));
  EXPECT_TRUE(dropped->is_ok());
}

TEST(JobSpaceTest, what_snapshots_keep_is_no_room_for_the_job) {
  JobSpace space;
  space.set_quota_bytes(100'000);
  space.set_metadata_bytes(10'000);
  space.add_snapshots({.count = 2, .bytes = 50'000, .memory_bytes = 100});
  EXPECT_TRUE(space.has_room(SpaceUse::state, 40'000));
  EXPECT_FALSE(space.has_room(SpaceUse::state, 40'001));
  space.promise(30'000);
  EXPECT_TRUE(space.keeps_promise(10'000));
  EXPECT_FALSE(space.keeps_promise(10'001));
}

TEST_F(SnapshotTest, what_many_name_is_read_once_and_its_damage_is_told_to_each) {
  // Workers hash what was read when nothing else is left to do: as many reads overlap as ever do.
  HeartOptions options;
  options.workers_by_hand = true;
  Heart heart(disk_, options);
  heart.when_idle = [&] { return heart.workers().run_next().has_value(); };
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20, false).is_ok());
  ASSERT_TRUE(create(heart, "second").is_ok());
  ASSERT_TRUE(train(heart, 30, false).is_ok());
  const RootRecord root = root_on_disk();
  std::set<ExtentRecord> named{newest_superblock(disk_->bytes()).root};
  std::vector<size_t> counts;
  std::vector<RootEntry> entries{root.jobs.at(0)};
  for (const SnapshotEntry& each : root.snapshots) entries.push_back(each.job);
  for (const RootEntry& entry : entries) {
    const std::vector<ExtentRecord> extents = all_extents(record_of(entry));
    named.insert(extents.begin(), extents.end());
    named.insert(entry.catalogue.begin(), entry.catalogue.end());
    counts.push_back(extents.size());
  }
  uint64_t bytes = 0;
  for (const ExtentRecord& extent : named) bytes += extent.length_bytes;
  for (int pass = 0; pass < 2; ++pass) {
    const Checked whole = check(heart);
    EXPECT_TRUE(whole.findings.empty());
    EXPECT_EQ(whole.report.bytes, bytes);
    EXPECT_EQ(whole.report.jobs.at(0).extent_count, counts[0]);
    EXPECT_EQ(whole.report.jobs[0].snapshots.at(0).extent_count, counts[1]);
    EXPECT_EQ(whole.report.jobs[0].snapshots.at(1).extent_count, counts[2]);
  }
  const JobRecord record = record_of(entries[1]);
  const auto blob = std::find_if(record.shards.begin(),
                                 record.shards.end(),
                                 [](const ShardRecord& each) { return each.name == "blob"; });
  disk_->bytes()[blob->extents.at(1).address.offset_bytes + 7] ^= std::byte{1};
  const Checked damaged = check(heart);
  std::vector<std::string> told;
  for (const CheckFinding& each : damaged.findings) {
    EXPECT_TRUE(each.is_lost);
    EXPECT_EQ(each.shards, std::vector<std::string>{"blob"});
    told.push_back(each.snapshot);
  }
  EXPECT_EQ(told, (std::vector<std::string>{"", "first", "second"}));
}

TEST_F(SnapshotTest, the_scrub_reads_snapshots_too) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const JobRecord record = record_of(root_on_disk().snapshots.at(0).job);
  const ExtentRecord lost = record.buckets[0].tiles[0].parameter;
  disk_->bytes()[lost.address.offset_bytes + 5] ^= std::byte{1};
  heart.store().set_scrub_rate(uint64_t{1} << 40);
  ASSERT_TRUE(heart.until([&] {
    heart.clock.advance(1'000'000'000);
    return heart.store().reports().statistics().scrub.pass_count > 0;
  }));
  EXPECT_EQ(heart.store().reports().statistics().scrub.errors, 1u);
  EXPECT_EQ(listed(heart)[0].lost_shards.size(), 1u);
  EXPECT_TRUE(heart.store().reports().find_job("job").value().lost_shards.empty());
  heart.store().set_scrub_rate(0);
}

class SnapshotReadingTest : public SnapshotTest {
 protected:
  /// All that a reading gives of one shard.
  struct Read {
    std::vector<std::byte> value;
    std::vector<std::byte> exp_avg;
    std::vector<std::byte> exp_avg_sq;
    std::vector<std::byte> master;
  };

  static SnapshotReadings& readings(Heart& heart) { return heart.store().snapshot_readings(); }
  static Result<SnapshotReading> begin_reading(Heart& heart,
                                               const std::string& name,
                                               uint64_t piece_first = 0,
                                               uint64_t identity = 0) {
    return readings(heart).begin({.job_id = job_id(heart),
                                  .name = name,
                                  .owner = "user 1000",
                                  .uid = 1000,
                                  .pid = 7,
                                  .piece_first = piece_first,
                                  .identity = identity});
  }
  /// Behind bytes that are another piece's.
  static PieceMemory memory(uint64_t bytes = 8_MiB) {
    auto made = SharedMemory::create_for_readers("export", bytes);
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    return {.memory = std::make_shared<SharedMemory>(std::move(made).value()),
            .offset_bytes = kBlockBytes};
  }
  static Result<SnapshotReadings::Piece> piece(Heart& heart,
                                               uint64_t reading_id,
                                               const SnapshotPlace& place) {
    std::optional<Result<SnapshotReadings::Piece>> answer;
    readings(heart).read(reading_id, place, memory(), [&](Result<SnapshotReadings::Piece> read) {
      answer = std::move(read);
    });
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  static void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
    to.insert(to.end(), bytes.begin(), bytes.end());
  }
  static void append_run(std::vector<std::byte>& to,
                         std::span<const std::byte> bytes,
                         const SnapshotRun& run,
                         uint64_t element_bytes) {
    if (bytes.empty()) return;
    EXPECT_EQ(to.size(), run.element_in_shard * element_bytes);
    append(to,
           bytes.subspan(run.element_in_tile * element_bytes, run.element_count * element_bytes));
  }
  /// By names. Pieces that fail are missed.
  static std::map<std::string, Read> read_all(Heart& heart, const SnapshotReading& reading) {
    const SnapshotContents contents(reading.record);
    std::map<std::string, Read> all;
    for (uint64_t i = reading.piece_first; i < contents.piece_count(); ++i) {
      const SnapshotPlace place = *contents.place(i);
      const auto read = piece(heart, reading.reading_id, place);
      EXPECT_TRUE(read.is_ok()) << read.status().message();
      if (!read.is_ok()) continue;
      const SnapshotPiece& bytes = *read.value();
      if (!place.is_tile) {
        append(all[contents.shard(place.owner).spec.name].value, bytes.value());
        continue;
      }
      for (const SnapshotRun& run : contents.runs(place.owner, place.index)) {
        const ShardSpec spec = contents.shard(run.shard).spec;
        Read& of_shard = all[spec.name];
        append_run(of_shard.value, bytes.value(), run, dtype_bytes(spec.dtype));
        append_run(of_shard.exp_avg, bytes.exp_avg(), run, sizeof(float));
        append_run(of_shard.exp_avg_sq, bytes.exp_avg_sq(), run, sizeof(float));
        append_run(of_shard.master, bytes.master(), run, sizeof(float));
      }
    }
    return all;
  }
  template <typename T>
  static std::vector<T> as(const std::vector<std::byte>& bytes) {
    std::vector<T> values(bytes.size() / sizeof(T));
    copy_bytes(values.data(), bytes.data(), bytes.size());
    return values;
  }
  /// The extent of w's optimizer state in its second tile.
  ExtentRecord rest_of_w() const {
    const JobRecord record = record_of(root_on_disk().snapshots.at(0).job);
    const auto w = std::find_if(record.shards.begin(), record.shards.end(), [](const auto& shard) {
      return shard.name == "w";
    });
    return record.buckets[w->bucket].tiles[1].rest;
  }
};

TEST_F(SnapshotReadingTest, its_bytes_are_those_of_the_step_while_the_job_trains_on) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  const State then = state(heart);
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok()) << reading.status().message();
  EXPECT_EQ(reading.value().snapshot.step, 1u);
  ASSERT_TRUE(train(heart, 30).is_ok());
  std::map<std::string, Read> all = read_all(heart, reading.value());
  const WorkerBytes uncounted;
  EXPECT_EQ(as<float>(all["w"].value), then.value);
  EXPECT_EQ(as<float>(all["w"].exp_avg), then.exp_avg);
  EXPECT_EQ(as<float>(all["w"].exp_avg_sq), then.exp_avg_sq);
  EXPECT_TRUE(all["w"].master.empty());
  EXPECT_EQ(as<uint16_t>(all["h"].value), then.half);
  EXPECT_EQ(as<uint8_t>(all["blob"].value), then.blob);
  // The published half is the master, rounded; an update leaves a remainder.
  const std::vector<uint32_t> masters = as<uint32_t>(all["h"].master);
  ASSERT_EQ(masters.size(), then.half.size());
  size_t remainders = 0;
  for (size_t i = 0; i < masters.size(); ++i) {
    ASSERT_EQ((masters[i] + 0x8000) >> 16, then.half[i]) << i;
    if ((masters[i] & 0xFFFF) != 0) ++remainders;
  }
  EXPECT_GT(remainders, masters.size() / 2);
  EXPECT_GT(heart.store().reports().statistics().exports.bytes, kElements * 12);
}

TEST_F(SnapshotReadingTest, a_snapshot_that_is_read_is_not_dropped) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(create(heart, "second").is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok());
  const Status refused = drop(heart, "first");
  ASSERT_EQ(refused.code(), StatusCode::in_use);
  EXPECT_NE(refused.message().find("process 7"), std::string::npos) << refused.message();
  EXPECT_TRUE(drop(heart, "second").is_ok()) << "nobody reads that one";
  EXPECT_TRUE(listed(heart)[0].is_exported);
  readings(heart).end(reading.value().reading_id);
  EXPECT_FALSE(listed(heart)[0].is_exported);
  EXPECT_EQ(piece(heart, reading.value().reading_id, {}).status().code(), StatusCode::not_found);
  EXPECT_TRUE(drop(heart, "first").is_ok());
}

TEST_F(SnapshotReadingTest, a_piece_that_has_no_room_in_its_memory_is_refused) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok());
  const SnapshotContents contents(reading.value().record);
  const SnapshotPlace last = *contents.place(contents.piece_count() - 1);
  const PieceMemory all = memory(kBlockBytes + contents.memory_bytes(last));
  const auto code_at = [&](uint64_t offset_bytes) {
    std::optional<StatusCode> code;
    readings(heart).read(
        reading.value().reading_id,
        last,
        {.memory = all.memory, .offset_bytes = offset_bytes},
        [&](const Result<SnapshotReadings::Piece>& piece) { code = piece.status().code(); });
    EXPECT_TRUE(heart.until([&] { return code.has_value(); }));
    return code.value_or(StatusCode::deadline);
  };
  EXPECT_EQ(code_at(kBlockBytes), StatusCode::ok);
  EXPECT_EQ(code_at(2 * kBlockBytes), StatusCode::invalid_argument);
  EXPECT_EQ(code_at(1), StatusCode::invalid_argument) << "the disk fills whole blocks";
  EXPECT_EQ(code_at(UINT64_MAX - kBlockBytes + 1), StatusCode::invalid_argument);
}

TEST_F(SnapshotReadingTest, a_job_has_one_reading_and_an_owner_four) {
  Heart heart(disk_, 5 * (kFloorSegments + 1) + 2 * kFloorSegments + 8);
  begin(heart);
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(create(heart, "second").is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok());
  EXPECT_EQ(begin_reading(heart, "second").status().code(), StatusCode::in_use);
  EXPECT_EQ(begin_reading(heart, "third").status().code(), StatusCode::not_found);
  readings(heart).end(reading.value().reading_id);
  std::vector<uint64_t> ids;
  for (int i = 0; i < 5; ++i) {
    const uint64_t other = heart.open(concat("other", i), 1, 1_MiB);
    std::optional<Status> made;
    heart.store().snapshots().create(
        {.job_id = other, .name = "s"},
        [&](const Result<SnapshotInfo>& answer) { made = answer.status(); });
    ASSERT_TRUE(heart.until([&] { return made.has_value(); }));
    ASSERT_TRUE(made->is_ok()) << made->message();
    // Pods are root all of them.
    const auto begin_of = [&](const std::string& owner) {
      return readings(heart).begin({.job_id = other, .name = "s", .owner = owner, .uid = 0});
    };
    const auto begun = begin_of("team-a:trainer");
    ASSERT_EQ(begun.is_ok(), i < 4) << begun.status().message();
    if (i < 4) continue;
    EXPECT_EQ(begun.status().code(), StatusCode::capacity);
    EXPECT_EQ(
        begun.status().message(),
        "team-a:trainer exports as many snapshots as it may at a time; wait for one to end: 4");
    EXPECT_TRUE(begin_of("team-b:trainer").is_ok());
  }
}

TEST_F(SnapshotReadingTest, damage_names_the_shard_and_loses_the_snapshot_alone) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  ASSERT_TRUE(train(heart, 20).is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok());
  // A bit that the bus flipped is read again.
  heart.faults().add_fault(
      {.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::read, .count = 1});
  read_all(heart, reading.value());
  EXPECT_TRUE(listed(heart)[0].lost_shards.empty());
  disk_->bytes()[rest_of_w().address.offset_bytes + 5] ^= std::byte{1};
  const SnapshotContents contents(reading.value().record);
  std::optional<Status> failed;
  for (uint64_t i = 0; i < contents.piece_count(); ++i) {
    const auto read = piece(heart, reading.value().reading_id, *contents.place(i));
    if (!read.is_ok()) failed = read.status();
  }
  ASSERT_TRUE(failed.has_value());
  EXPECT_EQ(failed->code(), StatusCode::integrity);
  EXPECT_NE(failed->message().find("stops at shard w: "), std::string::npos) << failed->message();
  EXPECT_EQ(listed(heart)[0].lost_shards, std::vector<std::string>{"w"});
  EXPECT_EQ(heart.store().reports().statistics().exports.errors, 1u);
  readings(heart).end(reading.value().reading_id);
  EXPECT_EQ(begin_reading(heart, "first").status().code(), StatusCode::integrity);
  EXPECT_TRUE(train(heart, 30).is_ok());
}

TEST_F(SnapshotReadingTest, a_job_that_is_dropped_with_force_ends_its_readings) {
  Heart heart(disk_);
  begin(heart);
  ASSERT_TRUE(train(heart, 10).is_ok());
  ASSERT_TRUE(create(heart, "first").is_ok());
  const auto reading = begin_reading(heart, "first");
  ASSERT_TRUE(reading.is_ok());
  const SnapshotContents contents(reading.value().record);
  std::optional<Status> read;
  heart.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read, .count = 1});
  readings(heart).read(
      reading.value().reading_id,
      *contents.place(0),
      memory(),
      [&](const Result<SnapshotReadings::Piece>& piece) { read = piece.status(); });
  ASSERT_TRUE(drop_job(heart, true).is_ok());
  EXPECT_FALSE(read.has_value());
  heart.faults().release_stalled();
  ASSERT_TRUE(heart.until([&] { return read.has_value(); }));
  EXPECT_EQ(read->code(), StatusCode::fenced) << "its place may hold anything by now";
  EXPECT_NE(read->message().find("dropped with its job"), std::string::npos) << read->message();
}

TEST_F(SnapshotReadingTest, the_next_daemon_goes_on_behind_a_piece_of_the_same_snapshot) {
  uint64_t identity = 0;
  {
    Heart heart(disk_);
    begin(heart);
    ASSERT_TRUE(train(heart, 10).is_ok());
    ASSERT_TRUE(create(heart, "first").is_ok());
    const auto reading = begin_reading(heart, "first");
    ASSERT_TRUE(reading.is_ok());
    identity = reading.value().identity;
  }
  Heart heart(disk_);
  const auto again = begin_reading(heart, "first", 2, identity);
  ASSERT_TRUE(again.is_ok()) << again.status().message();
  EXPECT_EQ(again.value().identity, identity);
  EXPECT_EQ(again.value().piece_first, 2u);
  EXPECT_GT(*readings(heart).part_read(1), 0.0);
  readings(heart).end(again.value().reading_id);
  // One that was made anew under the same name is another one.
  ASSERT_TRUE(drop(heart, "first").is_ok());
  ASSERT_TRUE(create(heart, "first", 5).is_ok());
  const auto other = begin_reading(heart, "first", 2, identity);
  ASSERT_TRUE(other.is_ok());
  EXPECT_NE(other.value().identity, identity);
  EXPECT_EQ(other.value().piece_first, 0u);
}

TEST(SnapshotContentsTest, pieces_and_runs_are_found_in_any_order_of_shards) {
  auto record = std::make_shared<JobRecord>();
  record->buckets = {{.element_count = kTileElements + 64, .tiles = std::vector<TileRecord>(2)},
                     {.element_count = 32, .tiles = std::vector<TileRecord>(1)}};
  const auto add = [&](const std::string& name, uint64_t size, uint64_t offset, uint32_t bucket) {
    record->shards.push_back({.name = name,
                              .kind = ShardKind::parameter,
                              .dtype = DType::float32,
                              .shape = {size},
                              .bucket = bucket,
                              .element_offset = offset});
  };
  add("behind", 64, kTileElements, 0);
  add("none", 0, kTileElements, 0);
  record->shards.push_back({.name = "empty", .kind = ShardKind::blob, .shape = {0}});
  record->shards.push_back({.name = "bytes",
                            .kind = ShardKind::blob,
                            .dtype = DType::uint8,
                            .shape = {kBlobExtentBytes + 1},
                            .extents = std::vector<ExtentRecord>(2)});
  add("across", kTileElements - 32, 32, 0);
  add("first", 32, 0, 0);
  add("other", 32, 0, 1);
  const SnapshotContents contents(record);
  ASSERT_EQ(contents.piece_count(), 5u);
  std::vector<std::tuple<bool, size_t, size_t>> places;
  for (uint64_t i = 0; i < 5; ++i) {
    const SnapshotPlace place = *contents.place(i);
    places.emplace_back(place.is_tile, place.owner, place.index);
  }
  const std::vector<std::tuple<bool, size_t, size_t>> wanted = {
      {false, 3, 0}, {false, 3, 1}, {true, 0, 0}, {true, 0, 1}, {true, 1, 0}};
  EXPECT_EQ(places, wanted);
  EXPECT_FALSE(contents.place(5).has_value());
  const auto first = contents.runs(0, 0);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(first[0].shard, 5u);
  EXPECT_EQ(first[1].shard, 4u);
  EXPECT_EQ(first[1].element_in_tile, 32u);
  EXPECT_EQ(first[1].element_count, kTileElements - 32);
  const auto second = contents.runs(0, 1);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].shard, 0u);
  EXPECT_EQ(second[0].element_in_shard, 0u);
  EXPECT_FALSE(contents.shard(0).has_moments);
  EXPECT_TRUE(contents.shard(2).written) << "it has no bytes to be written";
}

}  // namespace
}  // namespace memd
