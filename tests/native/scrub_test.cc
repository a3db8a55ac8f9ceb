#include "store/verify/scrub.h"

#include <gtest/gtest.h>

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

constexpr uint64_t kFast = 1ull << 40;
constexpr uint64_t kElements = 2 * kTileElements;
constexpr uint64_t kBlobBytes = 3_MiB;
constexpr uint64_t kHourNs = 3600ull * 1'000'000'000;

class ScrubTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // The state stays in memory beside all that is written back, whatever the order.
    session_ = heart_.attach(heart_.open("job", kFloorSegments + 16));
    ids_ = heart_.declare(session_, {parameter("w", kElements), bytes_shard("blob", kBlobBytes)});
    heart_.write(session_, ids_[0], numbers(kElements, 1));
    heart_.write(session_, ids_[1], pattern(kBlobBytes, 2));
    step(3);
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
  ScrubStatistics scrub() { return heart_.store().reports().statistics().scrub; }
  /// One pass that begins now.
  void run_pass() {
    const uint64_t passes = scrub().pass_count;
    heart_.clock.advance(kHourNs);
    heart_.store().set_scrub_rate(kFast);
    ASSERT_TRUE(heart_.until([&] {
      heart_.clock.advance(1'000'000);
      return scrub().pass_count > passes;
    }));
    heart_.store().set_scrub_rate(0);
  }
  void flip(const ExtentRecord& extent, uint64_t at = 77) {
    disk_->bytes()[extent.address.offset_bytes + at] ^= std::byte{1};
  }
  /// Until a read of the scrub is held up by the device, wherever it reads.
  void stall_a_read() {
    heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read});
    heart_.clock.advance(kHourNs);
    heart_.store().set_scrub_rate(kFast);
    ASSERT_TRUE(heart_.until([this] { return heart_.faults().has_stalled(); }));
  }
  void stall_the_read_of(const ExtentRecord& extent) {
    heart_.faults().add_fault({.kind = MemoryFaultKind::stall,
                               .io_kind = IoKind::read,
                               .offset_bytes = extent.address.offset_bytes});
    heart_.clock.advance(kHourNs);
    heart_.store().set_scrub_rate(kFast);
    ASSERT_TRUE(heart_.until([this] {
      heart_.clock.advance(1'000'000);
      return heart_.faults().has_stalled();
    }));
  }
  void finish_pass() {
    heart_.faults().release_stalled();
    ASSERT_TRUE(heart_.until([&] {
      heart_.clock.advance(1'000'000);
      return scrub().pass_count > 0;
    }));
    heart_.store().set_scrub_rate(0);
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  Heart heart_{disk_, 3 * kFloorSegments + 24};
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(ScrubTest, a_pass_reads_all_that_a_catalogue_names_and_finds_nothing_wrong) {
  run_pass();
  const ScrubStatistics found = scrub();
  EXPECT_EQ(found.errors, 0u);
  // Two tiles with their moments, and the blob.
  EXPECT_EQ(found.pass_bytes, 2 * (1_MiB + 2_MiB) + kBlobBytes);
  EXPECT_EQ(found.pass_bytes_all, found.pass_bytes);
  EXPECT_GT(found.bytes, found.pass_bytes) << "the catalogue and the root";
  EXPECT_EQ(heart_.extents().checksum_failure_count(0), 0u);
}

TEST_F(ScrubTest, a_flipped_bit_is_found_named_and_stops_the_job) {
  struct Case {
    const char* name;
    std::function<ExtentRecord()> extent;
    const char* shard;
  };
  const Bucket& bucket = job().shards().bucket(0);
  const Case cases[] = {
      {"rest", [&] { return bucket.rest[1].extent(); }, "w"},
      {"parameter", [&] { return bucket.value->replicas()[0].extent(); }, "w"},
      {"blob",
       [&] { return job().shards().find_entry(ids_[1], Part::value)->replicas()[2].extent(); },
       "blob"}};
  uint64_t errors = 0;
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const ExtentRecord extent = each.extent();
    flip(extent);
    run_pass();
    EXPECT_EQ(scrub().errors, ++errors);
    for (const std::string& part : {concat("shard job/", each.shard),
                                    std::string("disk at "),
                                    std::to_string(extent.address.offset_bytes)}) {
      EXPECT_NE(scrub().last_error.find(part), std::string::npos) << scrub().last_error;
    }
    const auto lost = job().job_info().lost_shards;
    EXPECT_NE(std::find(lost.begin(), lost.end(), each.shard), lost.end());
    flip(extent);  // whole again
  }
  put_gradients(9);
  EXPECT_EQ(heart_.step(request()).first.code(), StatusCode::integrity);
}

TEST_F(ScrubTest, a_bit_that_the_bus_flipped_is_read_again_and_nothing_is_lost) {
  heart_.faults().add_fault({.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::read});
  run_pass();
  EXPECT_EQ(heart_.faults().fault_hit_count(), 1u);
  EXPECT_EQ(scrub().errors, 0u);
  EXPECT_EQ(heart_.extents().checksum_failure_count(0), 1u);
  EXPECT_EQ(job().lost().count(), 0u);
}

TEST_F(ScrubTest, what_the_device_cannot_read_is_unreadable_until_it_can_and_not_lost) {
  heart_.faults().add_fault(
      {.kind = MemoryFaultKind::error,
       .io_kind = IoKind::read,
       .offset_bytes = job().shards().bucket(0).rest[0].extent().address.offset_bytes,
       .count = 3});
  run_pass();
  EXPECT_EQ(scrub().errors, 1u);
  EXPECT_NE(scrub().last_error.find("shard job/w"), std::string::npos) << scrub().last_error;
  EXPECT_EQ(job().lost().count(), 0u);
  const auto unreadable = [this] {
    return heart_.store().reports().find_job("job").value().unreadable_shards;
  };
  EXPECT_EQ(unreadable(), std::vector<std::string>{"w"});
  run_pass();
  EXPECT_EQ(scrub().errors, 1u);
  EXPECT_TRUE(unreadable().empty());
}

TEST_F(ScrubTest, a_damaged_catalogue_and_root_are_written_anew_from_memory) {
  for (const bool root : {false, true}) {
    SCOPED_TRACE(root ? "root" : "catalogue");
    const ExtentRecord before = heart_.extents().superblock().root;
    const auto bytes = disk_->bytes().subspan(before.address.offset_bytes, before.length_bytes);
    const auto list = decode_root(bytes.first(heart_.extents().superblock().root_bytes));
    ASSERT_TRUE(list.is_ok());
    flip(root ? before : list.value().jobs[0].catalogue[0], 20);
    run_pass();
    EXPECT_EQ(scrub().errors, root ? 2u : 1u);
    ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
    EXPECT_NE(heart_.extents().superblock().root.address.offset_bytes, before.address.offset_bytes);
    EXPECT_EQ(job().lost().count(), 0u);
    run_pass();
    EXPECT_EQ(scrub().errors, root ? 2u : 1u) << "the new ones are whole";
  }
}

TEST_F(ScrubTest, a_damaged_root_is_written_anew_by_a_job_that_can_commit) {
  const uint64_t other = heart_.open("other", 2, 5_MiB);
  const uint64_t session = heart_.attach(other);
  ASSERT_TRUE(heart_.sync(session).is_ok());
  uint64_t errors = 0;
  for (const uint64_t unable : {session_, session}) {
    Job& lost = heart_.job(unable);
    const Status gone = error(StatusCode::integrity, "its bytes are gone");
    lost.lost().add(0, "gone", gone);
    const ExtentRecord before = heart_.extents().superblock().root;
    flip(before, 20);
    run_pass();
    EXPECT_EQ(scrub().errors, ++errors);
    ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
    EXPECT_NE(heart_.extents().superblock().root.address.offset_bytes, before.address.offset_bytes);
    lost.lost().remove(0);
  }
}

TEST_F(ScrubTest, what_a_step_replaces_is_not_lost_where_its_disk_copy_is_damaged) {
  const auto buffers = heart_.declare(session_,
                                      {bytes_shard("mean", 5000, ShardKind::buffer),
                                       bytes_shard("mean.staged", 5000, ShardKind::buffer)});
  struct Case {
    const char* name;
    std::function<ExtentRecord()> extent;
  };
  const Bucket& bucket = job().shards().bucket(0);
  const Case cases[] = {
      {"parameter", [&] { return bucket.value->replicas()[0].extent(); }},
      {"rest", [&] { return bucket.rest[1].extent(); }},
      {"staged", [&] { return job().shards()[buffers[1]].value->replicas()[0].extent(); }}};
  uint64_t errors = 0;
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    heart_.write(session_, buffers[0], pattern(5000, 1));
    heart_.write(session_, buffers[1], pattern(5000, 2));
    ASSERT_TRUE(heart_.sync(session_).is_ok());
    put_gradients(6);
    heart_.write(session_, ids_[1], pattern(kBlobBytes, 3));
    const ExtentRecord extent = each.extent();
    flip(extent);
    const uint64_t hits = heart_.faults().fault_hit_count();
    // The scrub's second read, and then the step where it has taken what it replaces, and written
    // nothing of it: it writes the blob first.
    heart_.faults().add_fault({.kind = MemoryFaultKind::stall,
                               .io_kind = IoKind::read,
                               .offset_bytes = extent.address.offset_bytes,
                               .skip_count = 1});
    heart_.clock.advance(kHourNs);
    heart_.store().set_scrub_rate(kFast);
    ASSERT_TRUE(heart_.until([this] {
      heart_.clock.advance(1'000'000);
      return heart_.faults().has_stalled();
    }));
    heart_.store().set_scrub_rate(0);
    heart_.faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
    StepRequest with_buffers = request();
    with_buffers.staged_buffers = {{buffers[1], buffers[0]}};
    std::optional<Status> done;
    heart_.store().operations().step(
        with_buffers, [&](const Status& status, const StepReport&) { done = status; });
    ASSERT_TRUE(heart_.until([&] { return heart_.faults().fault_hit_count() == hits + 2; }));
    heart_.faults().release_stalled();
    ASSERT_TRUE(heart_.until([&] { return done && heart_.store().is_idle(); }));
    EXPECT_TRUE(done->is_ok()) << done->message();
    EXPECT_EQ(scrub().errors, ++errors) << "it is told, as damaged";
    EXPECT_EQ(job().lost().names(), std::vector<std::string>{});
    heart_.faults().clear_faults();
  }
  step(7);
}

TEST_F(ScrubTest, an_extent_that_is_superseded_and_overwritten_while_it_is_read_is_not_lost) {
  const ExtentRecord old = job().shards().bucket(0).rest[0].extent();
  stall_the_read_of(old);
  step(4);
  // Released with the step's commit: whatever lies there now is somebody else's.
  flip(old);
  finish_pass();
  EXPECT_EQ(scrub().errors, 0u);
  EXPECT_EQ(job().lost().count(), 0u);
  step(5);
}

TEST_F(ScrubTest, a_job_that_is_dropped_while_its_extent_is_read_leaves_nothing_behind) {
  const uint64_t other = heart_.open("other", 2, 5_MiB);
  const uint64_t session = heart_.attach(other);
  const auto ids = heart_.declare(session, {bytes_shard("b", kBlobBytes)});
  heart_.write(session, ids[0], pattern(kBlobBytes, 7));
  ASSERT_TRUE(heart_.sync(session).is_ok());
  const ExtentRecord extent =
      heart_.job(session).shards().find_entry(ids[0], Part::value)->replicas()[1].extent();
  stall_the_read_of(extent);
  flip(extent);
  bool dropped = false;
  heart_.store().drop_job(other, true, [&](const Status& status) {
    EXPECT_TRUE(status.is_ok()) << status.message();
    dropped = true;
  });
  ASSERT_TRUE(heart_.until([&] { return dropped; }));
  EXPECT_FALSE(heart_.store().is_idle()) << "the device still writes to the scrub's memory";
  finish_pass();
  EXPECT_EQ(scrub().errors, 0u);
}

TEST_F(ScrubTest, a_shard_that_is_deleted_while_it_is_read_is_not_lost) {
  const ExtentRecord extent =
      job().shards().find_entry(ids_[1], Part::value)->replicas()[0].extent();
  stall_the_read_of(extent);
  bool deleted = false;
  heart_.store().delete_shard(session_, "blob", [&](const Result<bool>& result) {
    EXPECT_TRUE(result.is_ok() && result.value());
    deleted = true;
  });
  ASSERT_TRUE(heart_.until([&] { return deleted; }));
  flip(extent);
  finish_pass();
  EXPECT_EQ(scrub().errors, 0u);
  EXPECT_EQ(job().lost().count(), 0u);
}

TEST_F(ScrubTest, newer_bytes_in_memory_take_the_place_of_damaged_ones_and_nothing_is_lost) {
  heart_.write(session_, ids_[1], pattern(kBlobBytes, 9));
  EXPECT_EQ(heart_.read<uint8_t>(session_, ids_[1]), pattern(kBlobBytes, 9));
  flip(job().shards().find_entry(ids_[1], Part::value)->replicas()[0].extent());
  run_pass();
  EXPECT_EQ(scrub().errors, 1u);
  EXPECT_EQ(job().lost().count(), 0u);
  ASSERT_TRUE(heart_.sync(session_).is_ok());
  run_pass();
  EXPECT_EQ(scrub().errors, 1u);
}

TEST_F(ScrubTest, nothing_false_is_found_while_steps_run) {
  heart_.store().set_scrub_rate(kFast);
  for (uint32_t seed = 10; seed < 30; ++seed) {
    put_gradients(seed);
    bool done = false;
    heart_.store().operations().step(request(), [&](const Status& status, const StepReport&) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      done = true;
    });
    ASSERT_TRUE(heart_.until([&] {
      heart_.clock.advance(kHourNs);
      return done;
    }));
  }
  EXPECT_GT(scrub().bytes, 10_MiB);
  EXPECT_EQ(scrub().errors, 0u);
  EXPECT_EQ(job().lost().count(), 0u);
}

TEST_F(ScrubTest, it_reads_no_faster_than_it_may) {
  heart_.store().set_scrub_rate(1_MiB);
  const auto in_flight = [this] { return heart_.io().statistics().in_flight_count; };
  uint64_t last = 0;
  for (int second = 0; second < 20; ++second) {
    heart_.turns(5);
    ASSERT_TRUE(heart_.until([&] { return in_flight() == 0 && heart_.store().is_idle(); }));
    heart_.turns(5);
    const uint64_t bytes = scrub().bytes;
    // One extent ahead, of which the largest here has 2 MiB.
    EXPECT_LE(bytes, static_cast<uint64_t>(second) * 1_MiB + 2_MiB) << second;
    EXPECT_GE(bytes, last);
    last = bytes;
    const uint64_t next_ns = heart_.store().next_deadline_ns();
    EXPECT_GT(next_ns, heart_.clock.now_ns());
    heart_.clock.advance(1'000'000'000);
  }
  EXPECT_GT(last, 5_MiB);
}

TEST_F(ScrubTest, off_is_off_and_a_small_volume_is_left_alone_until_the_hour_is_over) {
  heart_.clock.advance(10 * kHourNs);
  heart_.turns();
  EXPECT_EQ(scrub().bytes, 0u);
  EXPECT_EQ(heart_.store().next_deadline_ns(), 0u);
  run_pass();
  const uint64_t bytes = scrub().bytes;
  heart_.store().set_scrub_rate(kFast);
  heart_.clock.advance(kHourNs / 2);
  heart_.turns();
  EXPECT_EQ(scrub().bytes, bytes);
}

TEST_F(ScrubTest, what_is_in_flight_when_it_is_turned_off_is_finished) {
  stall_a_read();
  heart_.store().set_scrub_rate(0);
  EXPECT_FALSE(heart_.store().is_idle());
  heart_.faults().release_stalled();
  ASSERT_TRUE(heart_.until([this] { return heart_.store().is_idle(); }));
  const uint64_t bytes = scrub().bytes;
  heart_.clock.advance(kHourNs);
  heart_.turns();
  EXPECT_EQ(scrub().bytes, bytes);
}

}  // namespace
}  // namespace memd
