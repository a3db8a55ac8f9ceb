// Copies, zeros and checksums that a worker makes: what others may do meanwhile, and what is left
// of them when whoever asked is gone or the daemon dies. Nothing runs on a worker before the test
// says so.
#include "store/cache/slot_fills.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::expect_all_bytes_held;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::TestKeeper;

constexpr uint64_t kElements = 1000;
constexpr uint64_t kBlobBytes = 5_MiB / 2;                           // in three pieces
constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says

using Answer = std::shared_ptr<std::optional<Held>>;

/// Three shards share a bucket, `p`, `q` and `r`, and there is a blob.
class SlotFillsTest : public ::testing::Test {
 protected:
  ~SlotFillsTest() override { workers_stand_still_ = false; }

  void start(TestKeeper* keeper = nullptr) {
    heart_ = std::make_unique<Heart>(
        disk_, testing::HeartOptions{.keeper = keeper, .workers_by_hand = true});
    heart_->when_idle = [this] { return !workers_stand_still_ && work(); };
  }
  void train() {
    start();
    open();
  }
  void open() {
    session_ = heart_->attach(heart_->open("job"));
    other_ = heart_->attach(heart_->job(session_).job_id());
    ids_ = heart_->declare(session_,
                           {parameter("p", kElements),
                            parameter("q", kElements),
                            parameter("r", kElements),
                            bytes_shard("blob", kBlobBytes)});
    heart_->write(session_, ids_[0], numbers(kElements, 1));
    heart_->write(session_, ids_[1], numbers(kElements, 2));
    heart_->write(session_, ids_[3], pattern(kBlobBytes, 3));
  }
  bool work() { return heart_->workers().run_next().has_value(); }
  void stand_still() {
    workers_stand_still_ = true;
    heart_->turns(5);
  }
  void go_on() { workers_stand_still_ = false; }
  Held wait_for(const Answer& answer) {
    EXPECT_TRUE(heart_->until([&] { return answer->has_value(); }));
    EXPECT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
    return **answer;
  }
  void expect_value(const Held& held, uint32_t seed) {
    const auto wanted = numbers(kElements, seed);
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), held.as<float>().begin()));
  }
  /// What workers have not begun.
  size_t open_work() { return heart_->workers().open_count(); }
  void expect_nothing_leaked() {
    ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
    expect_all_bytes_held(heart_->job(session_));
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  std::unique_ptr<Heart> heart_;
  bool workers_stand_still_ = false;
  uint64_t session_ = 0;
  uint64_t other_ = 0;
  std::vector<uint32_t> ids_;
};

TEST_F(SlotFillsTest, readers_read_on_while_a_slot_is_copied_and_writers_of_its_bucket_wait) {
  train();
  const Held reader = heart_->lease(other_, ids_[0]);
  stand_still();
  const Answer writer = heart_->ask(session_, ids_[0], LeaseMode::write);
  heart_->turns(5);
  EXPECT_FALSE(writer->has_value());
  EXPECT_EQ(open_work(), 1U) << "the copy is asked for once";
  const Answer beside = heart_->ask(other_, ids_[1]);
  ASSERT_TRUE(beside->has_value()) << "nobody writes there";
  expect_value(**beside, 2);
  const Answer second_writer = heart_->ask(session_, ids_[2], LeaseMode::overwrite);
  heart_->turns(5);
  EXPECT_FALSE(second_writer->has_value()) << "the copy would miss its bytes";
  go_on();
  const Held written = wait_for(writer);
  EXPECT_NE(written.grant.slot, reader.grant.slot);
  expect_value(written, 1);
  std::fill_n(written.grant.data, 100, std::byte{0x55});
  expect_value(reader, 1);
  heart_->release(wait_for(second_writer));
  for (const Held& held : {written, reader, **beside}) heart_->release(held);
  EXPECT_EQ(heart_->read<float>(other_, ids_[1]), numbers(kElements, 2));
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_reader_that_comes_with_the_copy_does_not_take_the_writers_turn) {
  train();
  const Held reader = heart_->lease(other_, ids_[0]);
  stand_still();
  const Answer writer = heart_->ask(session_, ids_[0], LeaseMode::write);
  ASSERT_TRUE(work());
  heart_->workers().reap();
  const Answer newcomer = heart_->ask(other_, ids_[0]);
  EXPECT_FALSE(newcomer->has_value());
  heart_->store().advance();
  ASSERT_TRUE(writer->has_value()) << "in the same turn";
  heart_->turns(5);
  EXPECT_FALSE(newcomer->has_value()) << "it waits for the writer";
  EXPECT_EQ(open_work(), 0U);
  heart_->release(**writer);
  heart_->release(wait_for(newcomer));
  heart_->release(reader);
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_writer_that_goes_while_its_copy_is_made_leaves_nothing_behind) {
  train();
  const uint64_t going = heart_->attach(heart_->job(session_).job_id());
  const Held reader = heart_->lease(other_, ids_[0]);
  const Held blob_reader = heart_->lease(other_, ids_[3]);
  stand_still();
  const Answer writer = heart_->ask(going, ids_[0], LeaseMode::write);
  const Answer blob_writer = heart_->ask(going, ids_[3], LeaseMode::write);
  ASSERT_TRUE(heart_->store().detach(going).is_ok());
  for (const Answer& answer : {writer, blob_writer}) {
    ASSERT_TRUE(answer->has_value());
    EXPECT_EQ((*answer)->status.code(), StatusCode::fenced);
  }
  go_on();
  ASSERT_TRUE(heart_->until([this] { return open_work() == 0; }));
  EXPECT_EQ(heart_->read<float>(session_, ids_[0]), numbers(kElements, 1));
  EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[3]), pattern(kBlobBytes, 3));
  expect_value(reader, 1);
  heart_->release(reader);
  heart_->release(blob_reader);
  heart_->write(session_, ids_[0], numbers(kElements, 4));
  EXPECT_EQ(heart_->read<float>(session_, ids_[0]), numbers(kElements, 4));
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_blob_is_copied_for_its_writer_in_pieces) {
  train();
  stand_still();
  const Answer writer = heart_->ask(session_, ids_[3], LeaseMode::write);
  const Answer reader = heart_->ask(other_, ids_[3]);
  ASSERT_TRUE(reader->has_value()) << "the old bytes are there";
  for (int piece = 0; piece < 3; ++piece) {
    heart_->turns(5);
    EXPECT_FALSE(writer->has_value()) << piece;
    ASSERT_TRUE(work()) << piece;
  }
  EXPECT_FALSE(work());
  const Held written = wait_for(writer);
  const auto wanted = pattern(kBlobBytes, 3);
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), written.as<uint8_t>().begin()));
  heart_->release(**reader);
  heart_->release(written);
  go_on();
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_gradient_that_is_added_to_begins_with_zeros_and_others_keep_theirs) {
  train();
  heart_->write(session_, ids_[0], numbers(kElements, 5), Part::gradient);
  heart_->write(session_, ids_[1], numbers(kElements, 6), Part::gradient);
  ASSERT_TRUE(heart_->store().gradients().drop(session_, {ids_[1]}).is_ok());
  stand_still();
  const Answer adder = heart_->ask(session_, ids_[1], LeaseMode::write, Part::gradient);
  heart_->turns(5);
  EXPECT_FALSE(adder->has_value());
  const Answer reader = heart_->ask(session_, ids_[0], LeaseMode::read, Part::gradient);
  ASSERT_TRUE(reader->has_value());
  expect_value(**reader, 5);
  heart_->release(**reader);
  go_on();
  const Held held = wait_for(adder);
  const auto bytes = held.as<float>();
  EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](float value) { return value == 0; }));
  heart_->release(held);
  EXPECT_EQ(heart_->read<float>(session_, ids_[0], Part::gradient), numbers(kElements, 5));
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_new_slot_is_filling_while_it_is_zeroed) {
  train();
  stand_still();
  const Answer writer = heart_->ask(session_, ids_[0], LeaseMode::overwrite, Part::gradient);
  heart_->turns(5);
  EXPECT_FALSE(writer->has_value()) << "its neighbours' bytes are not zeros yet";
  const Entry& entry = *heart_->job(session_).shards().find_entry(ids_[0], Part::gradient);
  EXPECT_EQ(entry.residency(), Residency::filling);
  go_on();
  heart_->release(wait_for(writer));
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_torn_shard_without_a_copy_is_zeroed_beside_what_others_wrote) {
  train();
  const Held torn = heart_->lease(other_, ids_[2], LeaseMode::overwrite);
  std::fill_n(torn.grant.data, 100, std::byte{0x55});
  stand_still();
  ASSERT_TRUE(heart_->store().detach(other_).is_ok());
  const Answer reader = heart_->ask(session_, ids_[0]);
  EXPECT_FALSE(reader->has_value()) << "the bucket is being repaired";
  EXPECT_EQ(open_work(), 1U);
  go_on();
  const Held held = wait_for(reader);
  expect_value(held, 1);
  heart_->release(held);
  EXPECT_EQ(heart_->lease(session_, ids_[2]).status.code(), StatusCode::not_found);
  const Held again = heart_->lease(session_, ids_[2], LeaseMode::write);
  const auto bytes = again.as<float>();
  EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(), [](float value) { return value == 0; }));
  heart_->release(again);
  expect_nothing_leaked();
}

TEST_F(SlotFillsTest, a_lease_is_granted_when_a_worker_has_found_its_bytes_right) {
  train();
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  heart_.reset();
  start();
  session_ = heart_->attach(heart_->open("job"));
  stand_still();
  const uint64_t read_before = heart_->io().device_statistics(0).read.bytes;
  const Answer reader = heart_->ask(session_, ids_[0]);
  heart_->turns(20);
  EXPECT_GT(heart_->io().device_statistics(0).read.bytes, read_before);
  EXPECT_FALSE(reader->has_value());
  go_on();
  const Held held = wait_for(reader);
  expect_value(held, 1);
  heart_->release(held);
}

TEST_F(SlotFillsTest, a_daemon_that_dies_in_a_copy_leaves_what_was_there_and_frees_the_copy) {
  for (const uint32_t which : {0, 3}) {
    SCOPED_TRACE(which);
    disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
    TestKeeper keeper;
    go_on();
    start(&keeper);
    open();
    ASSERT_TRUE(heart_->sync(session_).is_ok());
    const Held reader = heart_->lease(other_, ids_[which]);
    stand_still();
    const Answer writer = heart_->ask(session_, ids_[which], LeaseMode::write);
    heart_->turns(5);
    EXPECT_FALSE(writer->has_value());
    EXPECT_GT(open_work(), 0U);
    heart_->kill();
    static std::vector<Heart*> dead;
    dead.push_back(heart_.release());
    go_on();
    start(&keeper);
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
    for (const uint64_t session : {session_, other_}) {
      const auto resumed = heart_->store().resume_session(session, kOwner);
      ASSERT_TRUE(resumed.is_ok()) << resumed.status().message();
    }
    EXPECT_EQ(heart_->read<float>(session_, ids_[0]), numbers(kElements, 1));
    EXPECT_EQ(heart_->read<float>(session_, ids_[1]), numbers(kElements, 2));
    EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[3]), pattern(kBlobBytes, 3));
    heart_->release(reader);
    expect_nothing_leaked();
    heart_.reset();
  }
}

}  // namespace
}  // namespace memd
