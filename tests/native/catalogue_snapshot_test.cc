// A catalogue that is encoded over many turns, while the job goes on.
#include "store/state/catalogue_snapshot.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "store_fixture.h"

namespace memd::testing {
namespace {

std::vector<std::byte> encoded_by_name(JobRecord record) {
  std::sort(record.shards.begin(), record.shards.end(), [](const auto& a, const auto& b) {
    return a.name < b.name;
  });
  return encode(record);
}

/// A job with parameters and blobs, most of which are written.
class CatalogueSnapshotTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlobs = 60;
  static constexpr uint64_t kBlobBytes = 100;

  CatalogueSnapshotTest() {
    std::vector<ShardSpec> specs{parameter("small a", 1000),
                                 parameter("small b", 33),
                                 parameter("large", 2 * kTileElements + 5),
                                 bytes_shard("pieces", 3 * kBlobExtentBytes + 1)};
    for (uint32_t i = 0; i < kBlobs; ++i)
      specs.push_back(bytes_shard("blob " + std::to_string(i), kBlobBytes));
    const auto ids = heart_.declare(session_, specs);
    heart_.write(session_, ids[0], std::vector<float>(1000, 1.0F));
    heart_.write(session_, ids[2], std::vector<float>(2 * kTileElements + 5, 2.0F));
    heart_.write(session_, ids[3], pattern(3 * kBlobExtentBytes + 1, 3));
    for (uint32_t i = 0; i < kBlobs; i += 2)
      heart_.write(session_, ids[4 + i], pattern(kBlobBytes, 4));
    EXPECT_TRUE(heart_.sync(session_).is_ok());
  }

  Job& job() { return heart_.job(session_); }
  void remove(const std::string& name) {
    heart_.store().delete_shard(session_, name, [](const Result<bool>&) {});
  }
  /// Some shard comes, goes, or is written for the first time.
  void change(std::mt19937& random) {
    const std::string name = "blob " + std::to_string(random() % (kBlobs + 10));
    switch (random() % 4) {
      case 0:
        remove(name);
        return;
      case 1:
        remove("pieces");
        return;
      default:
        break;
    }
    const auto ids = heart_.declare(session_, {bytes_shard(name, kBlobBytes)});
    if (random() % 2 == 0) heart_.write(session_, ids[0], pattern(kBlobBytes, 5));
  }
  std::vector<std::byte> take() {
    std::vector<std::byte> encoded = job().durable().take_encoded();
    JobEncoder::seal(encoded);
    return encoded;
  }
  /// As if it were on disk.
  void end() {
    job().durable().committed(1);
    EXPECT_TRUE(job().durable().release_superseded(heart_.extents(), 1000));
  }

  Heart heart_{std::make_shared<MemoryDisk>(kDiskBytes)};
  const uint64_t session_ = heart_.attach(heart_.open("job"));
};

TEST_F(CatalogueSnapshotTest, says_what_a_walk_over_the_job_says_in_parts_of_any_size) {
  const std::vector<std::byte> whole = encode(job().record());
  for (const size_t bytes_max : {1, 100, 1'000'000}) {
    DurableState& durable = job().durable();
    durable.begin_commit();
    size_t turns = 1;
    while (!durable.encode(bytes_max)) ++turns;
    EXPECT_TRUE(take() == whole);
    durable.abandon_commit();
    EXPECT_GE(turns * (bytes_max + 1100), whole.size())
        << "no turn writes much more than asked for";
  }
}

TEST_F(CatalogueSnapshotTest, is_of_the_moment_in_which_it_began_whatever_the_job_does_meanwhile) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    if (seed % 8 == 0 && !job().shards().find("pieces"))
      heart_.write(session_,
                   heart_.declare(session_, {bytes_shard("pieces", 3 * kBlobExtentBytes + 1)})[0],
                   pattern(3 * kBlobExtentBytes + 1, 3));
    EXPECT_TRUE(heart_.sync(session_).is_ok());
    const JobRecord said = job().record();
    DurableState& durable = job().durable();
    durable.begin_commit();
    while (!durable.encode(1 + random() % 600)) {
      for (uint32_t i = random() % 3; i > 0; --i) change(random);
    }
    EXPECT_TRUE(take() == encode(said));
    // The write lasts, too.
    for (uint32_t i = random() % 5; i > 0; --i) change(random);
    if (seed % 2 == 0) {
      durable.abandon_commit();
      EXPECT_TRUE(durable.is_changed());
      continue;
    }
    end();
    EXPECT_TRUE(encoded_by_name(durable.record()) == encoded_by_name(said));
    durable.note_change();
  }
}

TEST_F(CatalogueSnapshotTest, does_not_say_of_a_parameter_that_it_was_written_meanwhile) {
  const JobRecord said = job().record();
  DurableState& durable = job().durable();
  durable.begin_commit();
  heart_.write(session_, *job().shards().find("small b"), std::vector<float>(33, 1.0F));
  EXPECT_FALSE(encode(job().record()) == encode(said)) << "its bucket has extents";
  while (!durable.encode(100)) {
  }
  EXPECT_TRUE(take() == encode(said));
  durable.abandon_commit();
}

TEST_F(CatalogueSnapshotTest, what_it_names_is_free_only_after_the_next_commit) {
  DurableState& durable = job().durable();
  const uint32_t blob = *job().shards().find("blob 0");
  const ExtentRecord extent = job().shards()[blob].value->replicas()[0].extent();
  durable.begin_commit();
  remove("blob 0");
  while (!durable.encode(1000)) {
  }
  take();
  end();
  EXPECT_FALSE(heart_.extents().reserve(extent).is_ok()) << "the catalogue names it";
  EXPECT_TRUE(heart_.sync(session_).is_ok());
  EXPECT_TRUE(heart_.extents().reserve(extent).is_ok());
  heart_.extents().release(extent);
}

// bulk_bytes.h aborts where a turn moves more than it may.
TEST(CommitTurnsTest, of_a_job_with_20000_blobs_move_no_more_than_others) {
  constexpr uint32_t kBlobs = 20'000;
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), kFloorSegments + 40);
  const uint64_t session = heart.attach(heart.open("job", 32));
  std::vector<ShardSpec> specs;
  for (uint32_t i = 0; i < kBlobs; ++i) {
    specs.push_back(bytes_shard("a blob with a name as long as names are " + std::to_string(i), 8));
    if (specs.size() < 2000) continue;
    heart.declare(session, specs);
    specs.clear();
  }
  ASSERT_TRUE(heart.sync(session).is_ok());
  std::optional<Status> answer;
  heart.job(session).durable().note_change();
  heart.store().operations().sync(
      session, [&](const Status& status, const StepReport&) { answer = status; });
  int turns = 0;
  while (!answer) {
    heart.turn();
    ++turns;
  }
  EXPECT_TRUE(answer->is_ok());
  EXPECT_GT(static_cast<uint64_t>(turns) * kTurnBytesMax, uint64_t{kBlobs} * 60)
      << "it takes as many turns as it needs";
  const WorkerBytes not_the_turns;
  EXPECT_EQ(encode(heart.job(session).durable().record()), encode(heart.job(session).record()));
}

}  // namespace
}  // namespace memd::testing
