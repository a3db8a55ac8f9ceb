// Commits that take many turns to encode: others go on meanwhile, and one that fails before it
// writes leaves everything as it was.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

using Blobs = std::map<std::string, std::vector<uint8_t>>;

constexpr uint32_t kBlobCount = 150;  // some 11 pieces of a catalogue
constexpr uint64_t kBlobBytes = 3000;
constexpr uint64_t kElements = 1000;
constexpr uint64_t kJobQuota = 20_MiB;
constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says

std::string blob_name(uint32_t number) { return "blob " + std::to_string(number); }

Blobs blobs_of(uint8_t seed) {
  Blobs all;
  for (uint32_t i = 0; i < kBlobCount; ++i) all[blob_name(i)] = pattern(kBlobBytes, seed);
  return all;
}

/// All that were written.
Blobs read_blobs(Heart& heart, uint64_t session) {
  Blobs found;
  for (const ShardInfo& shard : heart.shards(heart.job(session).job_id())) {
    if (shard.spec.kind != ShardKind::blob || !shard.written) continue;
    found[shard.spec.name] = heart.read<uint8_t>(session, shard.shard_id);
  }
  return found;
}

class LongCommitTest : public ::testing::Test {
 protected:
  LongCommitTest() { start(); }

  void start() {
    heart_ = std::make_unique<Heart>(
        disk_,
        HeartOptions{
            .segment_count = 3 * (kFloorSegments + 4), .keeper = &keeper_, .pieces_a_turn = 1});
    EXPECT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  /// kill -9, and the next daemon.
  void restart() {
    heart_->kill();
    // Its memory stays mapped, as nothing of it may run any more.
    static auto* const dead = new std::vector<Heart*>;
    dead->push_back(heart_.release());
    start();
  }
  uint64_t open(const std::string& name) {
    return heart_->attach(heart_->open(name, 4, kJobQuota));
  }
  void put(uint64_t session, const std::string& name, uint8_t seed) {
    const auto ids = heart_->declare(session, {bytes_shard(name, kBlobBytes)});
    heart_->write(session, ids[0], pattern(kBlobBytes, seed));
  }
  void put_blobs(uint64_t session, uint8_t seed) {
    for (uint32_t i = 0; i < kBlobCount; ++i) put(session, blob_name(i), seed);
    ASSERT_TRUE(heart_->sync(session).is_ok());
  }
  void remove(uint64_t session, const std::string& name) {
    heart_->store().delete_shard(
        session, name, [](const Result<bool>& result) { EXPECT_TRUE(result.value()); });
  }
  std::shared_ptr<std::optional<Status>> begin_sync(uint64_t session) {
    auto answer = std::make_shared<std::optional<Status>>();
    heart_->store().operations().sync(
        session, [answer](const Status& status, const StepReport&) { *answer = status; });
    return answer;
  }
  /// The job's commit is begun, and has not written anything.
  void until_encoding(const std::string& job) {
    const auto is_running = [&] {
      for (const Activity& each : heart_->store().reports().in_flight()) {
        if (each.kind == "commit" && each.job == job && each.waits_on.empty()) return true;
      }
      return false;
    };
    ASSERT_TRUE(heart_->until(is_running));
    const uint64_t started_count = heart_->faults().started_count();
    for (int i = 0; i < 3; ++i) heart_->turn();
    ASSERT_TRUE(is_running());
    ASSERT_EQ(heart_->faults().started_count(), started_count) << "it writes already";
  }
  /// A daemon that starts after a power cut reads these; nothing where it does not know the job.
  std::optional<Blobs> blobs_on_disk(const std::string& job) {
    auto copy = std::make_shared<MemoryDisk>(*disk_);
    copy->crash([](const UnsyncedWrite&) { return false; });
    Heart next(copy, 3 * (kFloorSegments + 4));
    const auto info = next.store().reports().find_job(job);
    if (!info.is_ok()) return std::nullopt;
    return read_blobs(next, next.attach(info.value().job_id));
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  TestKeeper keeper_;
  std::unique_ptr<Heart> heart_;
};

TEST_F(LongCommitTest, others_commit_after_it_and_what_came_meanwhile_is_of_the_next_one) {
  const uint64_t first = open("first");
  const uint64_t second = open("second");
  const uint64_t dropped = open("dropped");
  for (const uint64_t session : {first, second, dropped}) put_blobs(session, 1);
  const uint64_t dropped_id = heart_->job(dropped).job_id();
  ASSERT_TRUE(heart_->store().detach(dropped).is_ok());

  heart_->job(first).durable().note_change();
  const auto first_synced = begin_sync(first);
  until_encoding("first");
  put(first, blob_name(1), 2);
  put(first, "new", 2);
  remove(first, blob_name(2));
  for (uint32_t i = 0; i < kBlobCount; ++i) put(second, blob_name(i), 3);
  const auto second_synced = begin_sync(second);
  std::optional<Status> is_dropped;
  heart_->store().drop_job(dropped_id, false, [&](const Status& each) { is_dropped = each; });
  ASSERT_TRUE(heart_->until([&] { return *first_synced && *second_synced && is_dropped; }));
  for (const Status& status : {**first_synced, **second_synced, *is_dropped})
    EXPECT_TRUE(status.is_ok()) << status.message();

  EXPECT_TRUE(blobs_on_disk("first") == blobs_of(1))
      << "its catalogue is of the moment of its begin";
  EXPECT_TRUE(blobs_on_disk("second") == blobs_of(3));
  EXPECT_TRUE(blobs_on_disk("dropped") == std::nullopt);
  Blobs expected = blobs_of(1);
  expected[blob_name(1)] = expected["new"] = pattern(kBlobBytes, 2);
  expected.erase(blob_name(2));
  EXPECT_TRUE(read_blobs(*heart_, first) == expected);
  ASSERT_TRUE(heart_->sync(first).is_ok());
  EXPECT_TRUE(blobs_on_disk("first") == expected);
}

/// A step whose commit fails while it is encoded.
class FailedCommitTest : public LongCommitTest {
 protected:
  FailedCommitTest() {
    session_ = open("job");
    parameter_ = heart_->declare(session_, {parameter("w", kElements)})[0];
    heart_->write(session_, parameter_, twin_.theta);
    put_blobs(session_, 1);
    write_gradient();
    const auto [status, report] = heart_->step(request());
    EXPECT_TRUE(status.is_ok()) << status.message();
    twin_.step(settings_, numbers(kElements, 7));
  }

  void write_gradient() {
    heart_->write(session_, parameter_, numbers(kElements, 7), Part::gradient);
  }
  StepRequest request() const {
    return {.session_id = session_,
            .groups = {{.settings = settings_, .shard_ids = {parameter_}}},
            .staged_buffers = {}};
  }
  /// Begins step 2 and lets blobs come and go while its commit is encoded. `fail` makes it fail.
  Status fail_step(const std::function<void()>& fail) {
    write_gradient();
    std::optional<Status> answer;
    heart_->store().operations().step(
        request(), [&](const Status& status, const StepReport&) { answer = status; });
    until_encoding("job");
    put(session_, blob_name(3), 2);
    put(session_, "new", 2);
    for (const uint32_t i : {5, 6, 149}) remove(session_, blob_name(i));
    heart_->declare(session_, {bytes_shard(blob_name(6), kBlobBytes)});
    put(session_, blob_name(149), 4);
    fail();
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(Status::ok());
  }
  void take_all_space() {
    for (uint32_t bytes = 1_MiB; bytes >= kBlockBytes; bytes /= 2) {
      for (auto taken = heart_->extents().allocate(bytes); taken.is_ok();
           taken = heart_->extents().allocate(bytes)) {
        taken_.push_back(taken.value());
      }
    }
  }
  void give_space_back() {
    for (const ExtentRecord& extent : std::exchange(taken_, {})) heart_->extents().release(extent);
  }
  /// As somebody else's write would that fails.
  void fence_volumes() {
    const auto extent = heart_->extents().allocate(kBlockBytes);
    ASSERT_TRUE(extent.is_ok());
    const BlockBytes bytes(uint64_t{kBlockBytes});
    heart_->faults().add_fault({.kind = MemoryFaultKind::error,
                                .io_kind = IoKind::write,
                                .offset_bytes = extent.value().address.offset_bytes});
    std::optional<Status> written;
    heart_->extents().write(
        kDaemonJob, extent.value(), bytes.span(), [&](const Status& status) { written = status; });
    while (!written) heart_->io().reap();
    ASSERT_FALSE(heart_->extents().check_writable().is_ok());
  }
  void expect_blobs_that_came() {
    Blobs expected = blobs_of(1);
    expected[blob_name(3)] = expected["new"] = pattern(kBlobBytes, 2);
    expected[blob_name(149)] = pattern(kBlobBytes, 4);
    for (const uint32_t i : {5, 6}) expected.erase(blob_name(i));
    EXPECT_TRUE(read_blobs(*heart_, session_) == expected);
  }
  void expect_twin(uint64_t step) {
    EXPECT_EQ(heart_->job(session_).progress().committed_step(), step);
    EXPECT_EQ(heart_->read<float>(session_, parameter_), twin_.theta);
    const auto [m, v] = heart_->moments(session_, parameter_);
    EXPECT_EQ(m, twin_.m);
    EXPECT_EQ(v, twin_.v);
  }
  void expect_step_2() {
    const auto [status, report] = heart_->step(request());
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_EQ(report.committed_step, 2U);
    twin_.step(settings_, numbers(kElements, 7));
    expect_twin(2);
    ASSERT_TRUE(heart_->sync(session_).is_ok());
    EXPECT_TRUE(blobs_on_disk("job") == read_blobs(*heart_, session_));
  }
  void resume() {
    const auto resumed = heart_->store().resume_session(session_, kOwner);
    ASSERT_TRUE(resumed.is_ok()) << resumed.status().message();
  }

  const AdamSettings settings_{.lr = 1e-2, .weight_decay = 0.1};
  Twin twin_ = Twin::fp32(numbers(kElements, 1));
  uint64_t session_ = 0;
  uint32_t parameter_ = 0;
  std::vector<ExtentRecord> taken_;
};

TEST_F(FailedCommitTest, without_room_for_its_catalogue_it_can_be_made_again) {
  const Status failed = fail_step([&] { take_all_space(); });
  EXPECT_EQ(failed.code(), StatusCode::capacity) << failed.message();
  expect_twin(1);
  expect_blobs_that_came();
  EXPECT_TRUE(blobs_on_disk("job") == blobs_of(1));
  give_space_back();
  expect_step_2();
  expect_blobs_that_came();
}

TEST_F(FailedCommitTest, the_next_daemon_finds_what_the_failed_one_left_in_memory) {
  const Status failed = fail_step([&] { take_all_space(); });
  EXPECT_EQ(failed.code(), StatusCode::capacity) << failed.message();
  taken_.clear();
  restart();
  resume();
  expect_twin(1);
  expect_blobs_that_came();
  expect_step_2();
  expect_blobs_that_came();
}

TEST_F(FailedCommitTest, on_volumes_that_were_fenced_meanwhile_it_writes_nothing) {
  const uint64_t sequence = heart_->extents().superblock().sequence;
  const Status failed = fail_step([&] { fence_volumes(); });
  EXPECT_EQ(failed.code(), StatusCode::device) << failed.message();
  EXPECT_EQ(heart_->extents().superblock().sequence, sequence);
  expect_twin(1);
  expect_blobs_that_came();
  EXPECT_TRUE(blobs_on_disk("job") == blobs_of(1));
  heart_->faults().clear_faults();
  restart();
  resume();
  expect_twin(1);
  expect_blobs_that_came();
  expect_step_2();
}

TEST_F(FailedCommitTest, that_the_disk_may_have_is_found_out_by_the_next_daemon) {
  // A commit syncs twice; the second sync fails.
  const Status failed = fail_step([&] {
    heart_->faults().add_fault(
        {.kind = MemoryFaultKind::error, .io_kind = IoKind::sync, .skip_count = 1});
  });
  EXPECT_EQ(failed.code(), StatusCode::device) << failed.message();
  expect_twin(1);
  restart();
  EXPECT_FALSE(heart_->store().resume_session(session_, kOwner).is_ok());
  session_ = heart_->attach(heart_->store().reports().find_job("job").value().job_id);
  parameter_ = *heart_->job(session_).shards().find("w");
  twin_.step(settings_, numbers(kElements, 7));
  expect_twin(2);
  EXPECT_TRUE(read_blobs(*heart_, session_) == blobs_of(1));
}

}  // namespace
}  // namespace memd::testing
