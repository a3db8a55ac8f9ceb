// Blobs that no commit knows, and that end with their session.
#include <gtest/gtest.h>

#include "store/cache/scratch_names.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::pattern;
using testing::TestKeeper;

constexpr uint64_t kBlobBytes = 3_MiB;

TEST(ScratchNamesTest, a_name_says_that_it_is_scratch_and_of_which_session) {
  EXPECT_EQ(scratch_session("@scratch/17/3"), 17u);
  EXPECT_EQ(scratch_session("@scratch/17/"), 17u);
  for (const char* const name : {"scratch/17/3", "@scratch", "17"}) {
    EXPECT_FALSE(is_scratch_name(name)) << name;
    EXPECT_FALSE(scratch_session(name)) << name;
  }
  for (const char* const name : {"@scratch/",
                                 "@scratch/17",
                                 "@scratch/x/1",
                                 "@scratch//1",
                                 "@scratch/-1/1",
                                 "@scratch/99999999999999999999/1"}) {
    EXPECT_TRUE(is_scratch_name(name)) << name;
    EXPECT_FALSE(scratch_session(name)) << name;
  }
}

class ScratchTest : public ::testing::Test {
 protected:
  ScratchTest() { start(nullptr); }
  void start(TestKeeper* keeper) {
    heart_ = std::make_unique<Heart>(disk_, 2 * kFloorSegments + 24, keeper);
    job_id_ = heart_->open("job", 8);
    session_ = heart_->attach(job_id_);
  }
  /// As a client names them.
  std::vector<uint32_t> declare(uint64_t session_id, size_t count, Tier tier = Tier::nvme) {
    std::vector<ShardSpec> specs;
    for (size_t i = 0; i < count; ++i) {
      specs.push_back(
          bytes_shard(concat(kScratchPrefix, session_id, "/", next_name_++), kBlobBytes));
      specs.back().tier = tier;
    }
    return heart_->declare(session_id, specs);
  }
  void write(uint32_t shard_id, uint8_t seed) {
    heart_->write(session_, shard_id, pattern(kBlobBytes, seed));
  }
  void expect_bytes(uint32_t shard_id, uint8_t seed) {
    EXPECT_EQ(heart_->read<uint8_t>(session_, shard_id), pattern(kBlobBytes, seed));
  }
  void end(uint32_t shard_id) { heart_->store().gradients().scratch().end(session_, shard_id); }
  StatusCode read_code(uint32_t shard_id) {
    const Held held = heart_->lease(session_, shard_id);
    if (held.is_ok()) heart_->release(held);
    return held.status.code();
  }
  Job& job() { return heart_->job(session_); }
  const Entry& entry(uint32_t shard_id) { return *job().shards()[shard_id].value; }
  uint64_t spilled_bytes() { return job().cache().counters().spilled_bytes; }
  uint64_t disk_bytes() { return job().space().used_bytes(); }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  uint64_t next_name_ = 0;
};

TEST_F(ScratchTest, no_commit_writes_it_or_names_it) {
  const auto blob = heart_->declare(session_, {bytes_shard("blob", kBlobBytes)});
  write(blob[0], 1);
  const auto ids = declare(session_, 1);
  write(ids[0], 2);
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  EXPECT_TRUE(entry(blob[0]).has_replica());
  EXPECT_FALSE(entry(ids[0]).has_replica());
  EXPECT_EQ(entry(ids[0]).residency(), Residency::dirty);
  expect_bytes(ids[0], 2);
  for (const ShardRecord& shard : job().record().shards) {
    EXPECT_EQ(shard.written, !is_scratch_name(shard.name)) << shard.name;
    EXPECT_EQ(shard.extents.empty(), is_scratch_name(shard.name)) << shard.name;
  }
}

TEST_F(ScratchTest, it_spills_comes_back_and_leaves_the_disk_when_it_is_ended) {
  const auto ids = declare(session_, 10);
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  const uint64_t disk_bytes_before = disk_bytes();
  for (size_t i = 0; i < ids.size(); ++i) write(ids[i], static_cast<uint8_t>(i));
  EXPECT_GE(spilled_bytes(), 10 * kBlobBytes - 16_MiB);
  // Spilled bytes are in no catalogue either.
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  for (const ShardRecord& shard : job().record().shards) EXPECT_TRUE(shard.extents.empty());
  for (size_t i = ids.size(); i-- > 0;) {
    expect_bytes(ids[i], static_cast<uint8_t>(i));
    end(ids[i]);
    EXPECT_EQ(read_code(ids[i]), StatusCode::not_found);
  }
  heart_->settle();
  for (const uint32_t id : ids) {
    EXPECT_EQ(entry(id).residency(), Residency::absent);
    EXPECT_EQ(entry(id).slot(), nullptr);
  }
  EXPECT_EQ(disk_bytes(), disk_bytes_before) << "before any other commit";
}

TEST_F(ScratchTest, it_does_not_spill_in_tier_host) {
  const auto ids = declare(session_, 6, Tier::host);
  for (size_t i = 0; i < 5; ++i) write(ids[i], static_cast<uint8_t>(i));
  EXPECT_EQ(heart_->lease(session_, ids[5], LeaseMode::overwrite).status.code(),
            StatusCode::capacity);
  EXPECT_EQ(spilled_bytes(), 0u);
  end(ids[3]);
  write(ids[5], 5);
  for (const size_t i : {0, 1, 2, 4, 5}) expect_bytes(ids[i], static_cast<uint8_t>(i));
}

TEST_F(ScratchTest, a_lease_that_lives_keeps_what_it_shows) {
  const auto ids = declare(session_, 1);
  write(ids[0], 1);
  const Held held = heart_->lease(session_, ids[0]);
  ASSERT_TRUE(held.is_ok());
  end(ids[0]);
  write(ids[0], 2);
  expect_bytes(ids[0], 2);
  const auto shown = held.as<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(shown.begin(), shown.end()), pattern(kBlobBytes, 1));
  heart_->release(held);
}

TEST_F(ScratchTest, bytes_that_were_written_since_are_not_ended) {
  const auto ids = declare(session_, 8);
  write(ids[0], 1);
  ASSERT_TRUE(entry(ids[0]).pending() != nullptr || entry(ids[0]).is_resident());
  // On its way to the disk: its end has to wait.
  heart_->faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
  for (size_t i = 1; i < 6 && entry(ids[0]).residency() != Residency::draining; ++i) {
    const auto asked = heart_->ask(session_, ids[i], LeaseMode::overwrite);
    heart_->turns();
    if (asked->has_value() && (*asked)->is_ok()) heart_->release(**asked);
  }
  ASSERT_EQ(entry(ids[0]).residency(), Residency::draining);
  end(ids[0]);
  const auto writing = heart_->ask(session_, ids[0], LeaseMode::overwrite);
  heart_->turns();
  heart_->faults().release_stalled();
  ASSERT_TRUE(heart_->until([&] { return writing->has_value(); }));
  ASSERT_TRUE((*writing)->is_ok()) << (*writing)->status.message();
  const auto bytes = pattern(kBlobBytes, 7);
  std::copy(bytes.begin(), bytes.end(), (*writing)->as<uint8_t>().begin());
  heart_->release(**writing);
  heart_->settle();
  expect_bytes(ids[0], 7);
}

TEST_F(ScratchTest, only_scratch_of_the_session_itself_is_ended) {
  const uint64_t other = heart_->attach(job_id_);
  const auto blob = heart_->declare(session_, {bytes_shard("blob", kBlobBytes)});
  write(blob[0], 1);
  const auto ids = declare(other, 1);
  write(ids[0], 2);
  for (const uint32_t id : {blob[0], ids[0], 77u}) end(id);
  expect_bytes(blob[0], 1);
  expect_bytes(ids[0], 2);
}

TEST_F(ScratchTest, it_goes_with_its_session) {
  const uint64_t other = heart_->attach(job_id_);
  const auto ids = declare(session_, 8);
  for (size_t i = 0; i < ids.size(); ++i) write(ids[i], static_cast<uint8_t>(i));
  const auto others = declare(other, 1);
  heart_->write(other, others[0], pattern(kBlobBytes, 9));
  // A session of the daemon before has left it; only its name is known.
  heart_->declare(other, {bytes_shard("@scratch/123456/0", 10), bytes_shard("@scratch/", 10)});
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  heart_->settle();
  const auto left = heart_->shards(job_id_);
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0].shard_id, others[0]);
  EXPECT_EQ(heart_->read<uint8_t>(other, others[0]), pattern(kBlobBytes, 9));
  session_ = other;
}

TEST_F(ScratchTest, the_next_daemon_has_what_was_resident_and_what_had_spilled) {
  TestKeeper keeper;
  heart_.reset();
  start(&keeper);
  const auto ids = declare(session_, 8);
  // The next daemon looks for the memory of jobs that are on disk.
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  for (size_t i = 0; i < ids.size(); ++i) write(ids[i], static_cast<uint8_t>(i));
  end(ids[2]);
  heart_->settle();
  EXPECT_GT(spilled_bytes(), 0u);
  const uint64_t session = session_;
  heart_->kill();
  static auto* const dead = new std::vector<const Heart*>;  // refers to it: it is no leak
  dead->push_back(heart_.release());
  heart_ = std::make_unique<Heart>(disk_, 2 * kFloorSegments + 24, &keeper);
  ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  for (const std::string& note : heart_->store().load_notes()) ADD_FAILURE() << note;
  const auto resumed =
      heart_->store().resume_session(session, {.pid = 1, .start_time = 2, .uid = 3});
  ASSERT_TRUE(resumed.is_ok()) << resumed.status().message();
  EXPECT_EQ(read_code(ids[2]), StatusCode::not_found);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i != 2) expect_bytes(ids[i], static_cast<uint8_t>(i));
  }
  // It is scratch to this one too.
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  for (const ShardRecord& shard : job().record().shards) EXPECT_TRUE(shard.extents.empty());
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  heart_->settle();
  EXPECT_TRUE(heart_->shards(job_id_).empty());
  heart_.reset();  // before its keeper
}

}  // namespace
}  // namespace memd
