#include "store/verify/live_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;
using testing::pattern;

constexpr uint64_t kElements = 2 * kTileElements;
constexpr uint64_t kBlobBytes = 3_MiB;
constexpr uint64_t kStateBytes = 2 * (1_MiB + 2_MiB) + kBlobBytes;
constexpr uint64_t kStateExtents = 2 * 2 + 3;

struct Found {
  Status status;
  std::vector<CheckFinding> findings;
  CheckReport report;
};

class LiveCheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    session_ = heart_.attach(heart_.open("job", 8, 25_MiB));
    ids_ = heart_.declare(session_, {parameter("w", kElements), bytes_shard("blob", kBlobBytes)});
    heart_.write(session_, ids_[0], numbers(kElements, 1));
    heart_.write(session_, ids_[1], pattern(kBlobBytes, 2));
    // Both pairs of superblocks are written.
    step(3);
    step(4);
  }

  void put_gradients(uint32_t seed) {
    heart_.write(session_, ids_[0], numbers(kElements, seed), Part::gradient);
  }
  StepRequest request() const {
    return {.session_id = session_, .groups = {{.settings = {}, .shard_ids = {ids_[0]}}}};
  }
  void step(uint32_t seed) {
    put_gradients(seed);
    const auto [status, report] = heart_.step(request());
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  Job& job() { return heart_.job(session_); }
  LiveCheck& check() { return heart_.store().live_check(); }
  void flip(const ExtentRecord& extent, uint64_t at = 77) {
    disk_->bytes()[extent.address.offset_bytes + at] ^= std::byte{1};
  }
  uint64_t begin(LiveCheckRequest request = {.job_ids = {}, .whole = true}) {
    const auto id = check().begin(std::move(request));
    EXPECT_TRUE(id.is_ok()) << id.status().message();
    return id.is_ok() ? id.value() : 0;
  }
  Found finish(uint64_t id) {
    Found found;
    EXPECT_TRUE(heart_.until([&] {
      heart_.clock.advance(1'000'000);
      auto progress = check().progress(id);
      found.status = progress.status();
      if (!progress.is_ok()) return true;
      for (CheckFinding& each : progress.value().findings) found.findings.push_back(each);
      if (progress.value().report) found.report = *progress.value().report;
      return progress.value().report.has_value();
    }));
    return found;
  }
  Found run(LiveCheckRequest request = {.job_ids = {}, .whole = true}) {
    return finish(begin(std::move(request)));
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  Heart heart_{disk_, 2 * kFloorSegments + 16};
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(LiveCheckTest, all_that_the_last_commits_name_is_read_and_told) {
  const Found found = run();
  ASSERT_TRUE(found.status.is_ok()) << found.status.message();
  EXPECT_TRUE(found.findings.empty());
  ASSERT_EQ(found.report.jobs.size(), 1u);
  const CheckedJob& told = found.report.jobs[0];
  EXPECT_EQ(told.name, "job");
  EXPECT_EQ(told.step, 2u);
  EXPECT_EQ(told.shard_count, 2u);
  EXPECT_EQ(told.extent_count, kStateExtents);
  EXPECT_EQ(told.bytes, kStateBytes);
  EXPECT_TRUE(told.lost_shards.empty());
  EXPECT_GT(found.report.bytes, kStateBytes) << "catalogue and root";
  ASSERT_EQ(found.report.volumes.size(), 1u);
  EXPECT_EQ(found.report.volumes[0].superblock.sequence, heart_.extents().superblock().sequence);
  for (const SuperblockCopy& copy : found.report.volumes[0].copies) {
    EXPECT_EQ(copy.state, CopyState::valid) << copy.offset_bytes;
  }
}

TEST_F(LiveCheckTest, a_flipped_bit_is_found_named_and_stops_the_job) {
  struct Case {
    ExtentRecord extent;
    const char* part;
    const char* shard;
  };
  const Bucket& bucket = job().shards().bucket(0);
  const Case cases[] = {{bucket.rest[1].extent(), "optimizer state of tile 1", "w"},
                        {bucket.value->replicas()[0].extent(), "parameter of tile 0", "w"},
                        {job().shards().find_entry(ids_[1], Part::value)->replicas()[2].extent(),
                         "bytes from 2097152",
                         "blob"}};
  for (const Case& each : cases) flip(each.extent);
  Found found = run();
  ASSERT_EQ(found.findings.size(), std::size(cases));
  for (const Case& each : cases) {
    SCOPED_TRACE(each.part);
    const auto finding = std::find_if(found.findings.begin(), found.findings.end(), [&](auto& it) {
      return it.offset_bytes == each.extent.address.offset_bytes;
    });
    ASSERT_NE(finding, found.findings.end());
    EXPECT_TRUE(finding->is_lost);
    EXPECT_EQ(finding->path, "disk");
    EXPECT_EQ(finding->length_bytes, each.extent.length_bytes);
    EXPECT_EQ(finding->job, "job");
    EXPECT_EQ(finding->shards, std::vector<std::string>{each.shard});
    EXPECT_EQ(finding->part, each.part);
    EXPECT_NE(finding->reason.find("not those that were written"), std::string::npos);
  }
  EXPECT_EQ(found.report.jobs[0].lost_shards, (std::vector<std::string>{"w", "blob"}));
  put_gradients(9);
  EXPECT_EQ(heart_.step(request()).first.code(), StatusCode::integrity);
}

TEST_F(LiveCheckTest, a_job_alone_is_checked_alone) {
  const uint64_t other = heart_.open("other", 2, 10_MiB);
  const uint64_t session = heart_.attach(other);
  const auto ids = heart_.declare(session, {bytes_shard("b", 1_MiB)});
  heart_.write(session, ids[0], pattern(1_MiB, 7));
  ASSERT_TRUE(heart_.sync(session).is_ok());
  flip(job().shards().bucket(0).rest[0].extent());
  const Found found = run({.job_ids = {other}, .whole = false});
  EXPECT_TRUE(found.findings.empty()) << "they are of the other job";
  ASSERT_EQ(found.report.jobs.size(), 1u);
  EXPECT_EQ(found.report.jobs[0].name, "other");
  EXPECT_EQ(found.report.jobs[0].bytes, 1_MiB);
  EXPECT_TRUE(found.report.volumes.empty());
}

TEST_F(LiveCheckTest, damaged_superblocks_catalogue_and_root_are_warnings) {
  // One after the other: what is found first is written anew at once, and the rest with it.
  for (const std::string part : {"the list of jobs", "the catalogue of job 1", "a superblock"}) {
    const Superblock superblock = heart_.extents().superblock();
    const auto older = superblock_pair_offsets(superblock.sequence + 1, kDiskBytes);
    const auto root =
        disk_->bytes().subspan(superblock.root.address.offset_bytes, superblock.root_bytes);
    const auto list = decode_root(root);
    ASSERT_TRUE(list.is_ok());
    if (part == "the list of jobs") flip(superblock.root, 20);
    if (part == "the catalogue of job 1") flip(list.value().jobs[0].catalogue[0], 20);
    if (part == "a superblock") disk_->bytes()[older[1] + 40] ^= std::byte{1};
    const Found found = run();
    ASSERT_EQ(found.findings.size(), 1u) << part;
    const CheckFinding& finding = found.findings[0];
    EXPECT_EQ(finding.part, part);
    EXPECT_FALSE(finding.is_lost) << part;
    if (part == "a superblock") {
      EXPECT_EQ(finding.offset_bytes, older[1]);
    } else {
      EXPECT_NE(finding.reason.find("written anew"), std::string::npos) << finding.reason;
    }
    ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
  }
  // A commit mends them: also that of the check itself.
  step(5);
  step(6);
  EXPECT_TRUE(run().findings.empty());
}

TEST_F(LiveCheckTest, steps_beside_it_take_no_place_from_it_and_lead_to_no_false_finding) {
  for (uint32_t seed = 10; seed < 20; ++seed) {
    const uint64_t id = begin();
    put_gradients(seed);
    bool done = false;
    heart_.store().operations().step(request(), [&](const Status& status, const StepReport&) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      done = true;
    });
    const Found found = finish(id);
    EXPECT_TRUE(found.findings.empty());
    ASSERT_EQ(found.report.jobs.size(), 1u);
    EXPECT_EQ(found.report.jobs[0].extent_count, kStateExtents) << "each place is met once";
    ASSERT_TRUE(heart_.until([&] { return done; }));
  }
  EXPECT_EQ(heart_.extents().checksum_failure_count(0), 0u);
}

TEST_F(LiveCheckTest, an_extent_that_a_step_replaces_while_it_is_read_is_not_lost) {
  const ExtentRecord old = job().shards().bucket(0).rest[0].extent();
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall,
                             .io_kind = IoKind::read,
                             .offset_bytes = old.address.offset_bytes});
  const uint64_t id = begin();
  ASSERT_TRUE(heart_.until([this] { return heart_.faults().has_stalled(); }));
  EXPECT_FALSE(heart_.store().is_idle());
  step(5);
  // Released with the step's commit: whatever lies there now is somebody else's.
  flip(old);
  heart_.faults().release_stalled();
  EXPECT_TRUE(finish(id).findings.empty());
  EXPECT_EQ(job().lost().count(), 0u);
}

TEST_F(LiveCheckTest, newer_bytes_in_memory_take_the_place_of_damaged_ones_and_nothing_is_lost) {
  heart_.write(session_, ids_[1], pattern(kBlobBytes, 9));
  EXPECT_EQ(heart_.read<uint8_t>(session_, ids_[1]), pattern(kBlobBytes, 9));
  flip(job().shards().find_entry(ids_[1], Part::value)->replicas()[0].extent());
  const Found found = run();
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_FALSE(found.findings[0].is_lost);
  EXPECT_NE(found.findings[0].reason.find("newer bytes"), std::string::npos);
  EXPECT_EQ(job().lost().count(), 0u);
  ASSERT_TRUE(heart_.sync(session_).is_ok());
  EXPECT_TRUE(run().findings.empty());
}

TEST_F(LiveCheckTest, of_a_job_without_durability_the_disk_holds_nothing_to_check) {
  const uint64_t other = heart_.open("other", 6, 20_MiB, Durability::of_code(Durability::kNone));
  const uint64_t session = heart_.attach(other);
  const auto ids = heart_.declare(session, {parameter("v", kTileElements)});
  heart_.write(session, ids[0], numbers(kTileElements, 1));
  // The first step is on disk, since the job was not there at all; the second is not.
  for (const uint64_t bytes_on_disk : {uint64_t{3_MiB}, uint64_t{0}}) {
    heart_.write(session, ids[0], numbers(kTileElements, 2), Part::gradient);
    const auto [status, report] =
        heart_.step({.session_id = session, .groups = {{.settings = {}, .shard_ids = {ids[0]}}}});
    ASSERT_TRUE(status.is_ok()) << status.message();
    const Found found = run({.job_ids = {other}, .whole = false});
    EXPECT_TRUE(found.findings.empty());
    ASSERT_EQ(found.report.jobs.size(), 1u);
    EXPECT_EQ(found.report.jobs[0].bytes, bytes_on_disk);
  }
}

TEST_F(LiveCheckTest, what_the_device_cannot_read_is_a_finding_and_stops_no_job) {
  heart_.faults().add_fault(
      {.kind = MemoryFaultKind::error,
       .io_kind = IoKind::read,
       .offset_bytes = job().shards().bucket(0).rest[0].extent().address.offset_bytes,
       .count = 3,
       .error_number = EIO});
  const Found found = run();
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_TRUE(found.findings[0].is_lost) << "no clean bill";
  EXPECT_NE(found.findings[0].reason.find("can't be read now"), std::string::npos)
      << found.findings[0].reason;
  EXPECT_EQ(job().lost().count(), 0u);
  EXPECT_TRUE(run().findings.empty());
}

TEST_F(LiveCheckTest, one_runs_at_a_time_and_a_forgotten_one_makes_way) {
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  const uint64_t first = begin();
  ASSERT_TRUE(heart_.until([this] { return heart_.faults().has_stalled(); }));
  heart_.clock.advance(29'000'000'000);
  const auto second = check().begin({.job_ids = {}, .whole = true});
  EXPECT_EQ(second.status().code(), StatusCode::already_exists);
  EXPECT_NE(second.status().message().find("since 29 s"), std::string::npos);
  heart_.clock.advance(1'000'000'000);
  const uint64_t third = begin();
  EXPECT_EQ(check().progress(first).status().code(), StatusCode::not_found);
  check().end(first);  // not its own any more
  heart_.faults().release_stalled();
  const Found found = finish(third);
  EXPECT_TRUE(found.findings.empty());
  EXPECT_EQ(found.report.jobs[0].extent_count, kStateExtents) << "nothing of the first is counted";

  const uint64_t ended = begin();
  check().end(ended);
  EXPECT_EQ(check().progress(ended).status().code(), StatusCode::not_found);
  ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
}

TEST_F(LiveCheckTest, findings_that_nobody_fetches_hold_it_up) {
  constexpr uint32_t kBlobs = 600;
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < kBlobs; ++i) specs.push_back(bytes_shard(concat("b", i), 100));
  const auto ids = heart_.declare(session_, specs);
  for (const uint32_t id : ids) heart_.write(session_, id, pattern(100, id));
  ASSERT_TRUE(heart_.sync(session_).is_ok());
  for (const uint32_t id : ids)
    flip(job().shards().find_entry(id, Part::value)->replicas()[0].extent(), 5);
  const uint64_t id = begin();
  ASSERT_TRUE(heart_.until([this] {
    const auto activity = check().activity();
    return activity && !activity->waits_on.empty() && check().is_idle();
  }));
  EXPECT_NE(check().activity()->waits_on.find("findings"), std::string::npos);
  const auto progress = check().progress(id);
  ASSERT_TRUE(progress.is_ok());
  EXPECT_GE(progress.value().findings.size(), 256u);
  EXPECT_LT(progress.value().findings.size(), 280u);
  const Found rest = finish(id);
  EXPECT_EQ(progress.value().findings.size() + rest.findings.size(), kBlobs);
}

TEST_F(LiveCheckTest, a_daemon_that_stops_says_so) {
  heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
  const uint64_t id = begin();
  ASSERT_TRUE(heart_.until([this] { return heart_.faults().has_stalled(); }));
  heart_.store().give_up_waiting();
  EXPECT_EQ(check().progress(id).status().code(), StatusCode::unavailable);
  EXPECT_FALSE(heart_.store().is_idle()) << "the device still writes to its memory";
  heart_.faults().release_stalled();
  ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
}

}  // namespace
}  // namespace memd
