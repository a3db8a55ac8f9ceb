#include "store/job/job.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::kDiskBytes;
using testing::numbers;
using testing::parameter;
using testing::pattern;

std::unique_ptr<Job> new_job() {
  return Job::create({.job_id = 1, .name = "job", .uid = 1000}).value();
}

Status refusal(Job& job, const ShardSpec& spec) { return job.declare({spec}).status(); }

TEST(JobDeclare, small_parameters_share_buckets_of_one_dtype_and_large_ones_are_alone) {
  const auto job = new_job();
  const auto infos = job->declare({parameter("a", 100),
                                   parameter("half", 33, DType::bfloat16),
                                   parameter("large", kTileElements),
                                   parameter("b", 1),
                                   parameter("scalarless", 0),
                                   parameter("c", kTileElements - 100),
                                   parameter("d", 5)});
  ASSERT_TRUE(infos.is_ok()) << infos.status().message();
  const auto shard = [&](const char* name) -> const Shard& {
    return job->shards()[job->shards().id_of(name)];
  };
  EXPECT_EQ(shard("a").bucket, shard("b").bucket);
  EXPECT_EQ(shard("b").element_offset, 128u) << "a bucket's shards start on 64 bytes in bf16";
  EXPECT_EQ(shard("scalarless").bytes, 0u);
  EXPECT_NE(shard("c").bucket, shard("a").bucket) << "it would not fit into a tile with them";
  EXPECT_EQ(shard("d").bucket, shard("c").bucket);
  EXPECT_NE(shard("half").bucket, shard("a").bucket);
  EXPECT_EQ(job->shards().bucket(shard("large").bucket).shards.size(), 1u);
  for (const Bucket& bucket : job->shards().buckets()) {
    EXPECT_EQ(bucket.element_count % 32, 0u);
    if (bucket.shards.size() > 1) EXPECT_LE(bucket.element_count, kTileElements);
    uint64_t end = 0;
    for (const uint32_t id : bucket.shards) {
      EXPECT_EQ(job->shards()[id].element_offset % 32, 0u);
      EXPECT_GE(job->shards()[id].element_offset, end);
      end = job->shards()[id].element_offset + job->shards()[id].element_count();
    }
    EXPECT_LE(end, bucket.element_count);
  }
  const auto again = job->declare({parameter("d", 5), parameter("a", 100)});
  ASSERT_TRUE(again.is_ok());
  EXPECT_EQ(again.value()[1].shard_id, infos.value()[0].shard_id) << "known by its name";
  EXPECT_EQ(job->shards().size(), 7u);
}

/// What Job::expect_memory() counted anew for each shard.
uint64_t sum_of_entries(const Job& job) {
  uint64_t bytes = 0;
  for (Entry* const entry : job.shards().entries()) {
    if (entry != nullptr) bytes += align_up(entry->bytes(), kBlockBytes);
  }
  return bytes;
}

TEST(JobDeclare, what_all_entries_take_is_known_without_a_look_at_them) {
  const auto job = new_job();
  EXPECT_EQ(job->shards().sums().entry_bytes(), 0u);
  ASSERT_TRUE(job->declare({parameter("a", 100), parameter("b", kTileElements + 1)}).is_ok());
  ASSERT_TRUE(job->declare({bytes_shard("blob", 5000)}).is_ok());
  EXPECT_EQ(job->shards().sums().entry_bytes(), sum_of_entries(*job));
  ASSERT_TRUE(job->declare({bytes_shard("blob", 5000)}).is_ok());
  EXPECT_EQ(job->shards().sums().entry_bytes(), sum_of_entries(*job)) << "known already";
  const auto again = Job::restore(job->record());
  ASSERT_TRUE(again.is_ok()) << again.status().message();
  EXPECT_EQ(again.value()->shards().sums().entry_bytes(), job->shards().sums().entry_bytes());
}

TEST(JobDeclare, a_model_takes_the_room_that_it_needs) {
  constexpr size_t kCount = 5000;
  std::vector<ShardSpec> specs;
  for (size_t i = 0; i < kCount; ++i) specs.push_back(parameter(concat("p", i), 16));
  const auto job = new_job();
  ASSERT_TRUE(job->declare(specs).is_ok());
  EXPECT_EQ(job->record().shards.capacity(), kCount);
  EXPECT_EQ(job->record().buckets.capacity(), job->shards().buckets().size());
  const Shard* const first = &job->shards()[0];
  ASSERT_TRUE(job->declare({parameter("one more", 16)}).is_ok());
  EXPECT_NE(first, &job->shards()[0]) << "there was room for more than was declared";
}

TEST(JobDeclare, there_are_pin_counters_for_every_slot_of_every_shard) {
  std::vector<ShardSpec> specs;
  for (size_t i = 0; i < kShardCountMax; ++i) specs.push_back(parameter(concat("p", i), 1));
  const auto job = new_job();
  const auto declared = job->declare(specs);
  ASSERT_TRUE(declared.is_ok()) << declared.status().message();
  EXPECT_EQ(declared.value().back().shard_id, kShardCountMax - 1);
  const Status refused = job->declare({bytes_shard("one more", 1)}).status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("make fewer and larger ones: 262145, at most 262144"),
            std::string::npos)
      << refused.message();
  EXPECT_TRUE(job->declare({specs.front()}).is_ok()) << "known already";
}

TEST(JobDeclare, shards_that_come_one_by_one_are_seldom_moved) {
  const auto job = new_job();
  size_t moves = 0;
  const Shard* first = nullptr;
  for (size_t i = 0; i < 5000; ++i) {
    ASSERT_TRUE(job->declare({bytes_shard(concat("b", i), 16)}).is_ok());
    moves += std::exchange(first, &job->shards()[0]) != &job->shards()[0];
  }
  EXPECT_LT(moves, 60u) << "a quarter more each time: log(5000) / log(1.25) and the first few";
}

TEST(JobDeclare, where_one_shard_is_refused_nothing_changes) {
  const auto job = new_job();
  ASSERT_TRUE(job->declare({parameter("w", 10), bytes_shard("blob", 10)}).is_ok());
  struct Case {
    ShardSpec spec;
    StatusCode code;
    const char* named;
  };
  ShardSpec integer = parameter("new", 4, DType::int32);
  ShardSpec half = parameter("new", 4, DType::float16);
  ShardSpec host = parameter("w", 10);
  host.tier = Tier::host;
  ShardSpec no_kind = parameter("new", 4);
  no_kind.kind = ShardKind::unspecified;
  ShardSpec no_tier = parameter("new", 4);
  no_tier.tier = static_cast<Tier>(9);
  ShardSpec overflow = parameter("new", 1);
  overflow.shape = {uint64_t{1} << 40, uint64_t{1} << 40};
  ShardSpec deep = parameter("new", 1);
  deep.shape.assign(33, 1);
  ShardSpec no_dtype = parameter("new", 1, static_cast<DType>(200));
  for (const Case& each :
       {Case{parameter("", 4), StatusCode::invalid_argument, "1 to 1024"},
        Case{parameter(std::string(1025, 'x'), 4), StatusCode::invalid_argument, "1025"},
        Case{integer, StatusCode::invalid_argument, "int32"},
        Case{half, StatusCode::not_yet, "float16"},
        Case{host, StatusCode::already_exists, "in tier \"nvme\""},
        Case{no_kind, StatusCode::invalid_argument, "kind"},
        Case{no_tier, StatusCode::invalid_argument, "tier"},
        Case{overflow, StatusCode::invalid_argument, "overflows"},
        Case{deep, StatusCode::invalid_argument, "33 dimensions"},
        Case{no_dtype, StatusCode::invalid_argument, "200"},
        Case{parameter("w", 11), StatusCode::already_exists, "[11]"},
        Case{parameter("w", 10, DType::bfloat16), StatusCode::already_exists, "bfloat16"},
        Case{bytes_shard("w", 40), StatusCode::already_exists, "job/w"}}) {
    SCOPED_TRACE(each.named);
    const auto refused = job->declare({parameter("fine", 3), each.spec});
    EXPECT_EQ(refused.status().code(), each.code) << refused.status().message();
    EXPECT_NE(refused.status().message().find(each.named), std::string::npos)
        << refused.status().message();
    EXPECT_EQ(job->shards().size(), 2u);
    EXPECT_EQ(job->shards().buckets().size(), 1u);
    EXPECT_FALSE(job->shards().find("fine").has_value());
  }
  const auto twice = job->declare({parameter("x", 3), parameter("x", 3)});
  EXPECT_EQ(twice.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(twice.status().message().find("twice"), std::string::npos);
  EXPECT_EQ(job->shards().size(), 2u);
}

TEST(JobDeclare, a_tensor_larger_than_the_jobs_memory_is_refused_with_both_sizes) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto fits = heart.store().declare(session, {bytes_shard("fits", 4_MiB)});
  EXPECT_TRUE(fits.is_ok()) << fits.status().message();
  const auto refused = heart.store().declare(session, {bytes_shard("large", 4_MiB + 1)});
  EXPECT_EQ(refused.status().code(), StatusCode::capacity);
  EXPECT_NE(refused.status().message().find("4194305"), std::string::npos);
  EXPECT_NE(refused.status().message().find("host_bytes"), std::string::npos);
}

TEST(JobDeclare, whether_the_gradients_fit_is_told) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job", 2));
  const auto one = heart.store().declare(session, {parameter("a", 400'000)});
  EXPECT_TRUE(one.value().second);
  const auto two = heart.store().declare(session, {parameter("b", 400'000)});
  EXPECT_FALSE(two.value().second);
}

TEST(JobShards, a_deleted_shards_place_is_used_again_and_its_bytes_are_free) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job"));
  const uint64_t free_bytes = heart.extents().free_bytes();
  for (int round = 0; round < 20; ++round) {
    const auto ids = heart.declare(session, {bytes_shard("x" + std::to_string(round), 100'000)});
    EXPECT_EQ(ids[0], 0u);
    heart.write(session, ids[0], pattern(100'000, 1));
    ASSERT_TRUE(heart.sync(session).is_ok());
    bool removed = false;
    heart.store().delete_shard(session, "x" + std::to_string(round), [&](Result<bool> result) {
      removed = result.is_ok() && result.value();
    });
    ASSERT_TRUE(removed);
  }
  EXPECT_EQ(heart.job(session).shards().entries().size(), 1u);
  EXPECT_EQ(heart.job(session).shards().sums().entry_bytes(), 0u);
  EXPECT_EQ(heart.lease(session, 0).status.code(), StatusCode::not_found);
  ASSERT_TRUE(heart.sync(session).is_ok());
  EXPECT_EQ(heart.job(session).space().used_bytes(), 0u);
  EXPECT_GE(heart.extents().free_bytes() + 3 * kBlockBytes, free_bytes);
  EXPECT_EQ(heart.job(session).memory()->arena().used_bytes(), 0u);
}

TEST(JobShards, a_lost_shard_that_is_deleted_is_not_missed_any_more) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {bytes_shard("other", 5000), bytes_shard("blob", 5000)});
  heart.write(session, ids[0], pattern(5000, 1));
  heart.write(session, ids[1], pattern(5000, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());
  Job& job = heart.job(session);
  const Status gone = error(StatusCode::integrity, "its bytes are gone");
  job.lose(*job.shards()[ids[1]].value, 0, gone);
  EXPECT_EQ(heart.sync(session).code(), StatusCode::integrity);
  heart.store().delete_shard(
      session, "blob", [](const Result<bool>& result) { EXPECT_TRUE(result.is_ok()); });
  EXPECT_TRUE(heart.sync(session).is_ok());
  const auto fresh = heart.declare(session, {bytes_shard("fresh", 5000)});
  ASSERT_EQ(fresh[0], ids[1]);
  EXPECT_FALSE(job.info(fresh[0]).lost);
}

TEST(JobPins, counters_are_used_again_and_end_where_the_session_memory_ends) {
  PinIndexes pins;
  const auto first = pins.take(3);
  EXPECT_EQ(first, 0u);
  EXPECT_EQ(pins.take(2), 3u);
  pins.give_back(*first, 3);
  EXPECT_EQ(pins.take(3), 0u);
  EXPECT_EQ(pins.take(kPinCount), std::nullopt);
  EXPECT_EQ(pins.take(kPinCount - 5), 5u);
  EXPECT_EQ(pins.take(1), std::nullopt);
}

TEST(JobResidency, only_edges_of_the_state_machine_can_be_taken) {
  Entry entry({.id = 0, .kind = EntryKind::bytes, .bytes = 10, .stride_bytes = 4096});
  entry.move(Residency::absent, Residency::filling);
  entry.move(Residency::filling, Residency::clean);
  entry.move(Residency::clean, Residency::dirty);
  EXPECT_DEATH(entry.move(Residency::dirty, Residency::filling), "CHECK");
  EXPECT_DEATH(entry.move(Residency::clean, Residency::absent), "dirty against clean");
}

TEST(JobRecordTest, a_restored_job_is_the_one_that_was_written_down) {
  const auto job = new_job();
  ASSERT_TRUE(job->declare({parameter("a", 100),
                            parameter("b", 200),
                            parameter("large", kTileElements + 1),
                            bytes_shard("blob", 10)})
                  .is_ok());
  const auto again = Job::restore(job->record());
  ASSERT_TRUE(again.is_ok()) << again.status().message();
  for (const char* name : {"a", "b", "large", "blob"}) {
    const Shard& before = job->shards()[job->shards().id_of(name)];
    const Shard& after = again.value()->shards()[again.value()->shards().id_of(name)];
    EXPECT_EQ(after.element_offset, before.element_offset) << name;
    EXPECT_EQ(after.bucket, before.bucket) << name;
    EXPECT_FALSE(after.written) << name;
  }
  EXPECT_EQ(again.value()->shards().sums().element_count(), job->shards().sums().element_count());
  EXPECT_FALSE(again.value()->durable().is_changed());
}

TEST(JobRecordTest, a_parameter_that_was_never_written_stays_so_beside_one_that_was) {
  const auto disk = std::make_shared<MemoryDisk>(kDiskBytes);
  {
    Heart heart(disk);
    const uint64_t session = heart.attach(heart.open("job"));
    const auto ids = heart.declare(session, {parameter("put", 100), parameter("not put", 100)});
    heart.write(session, ids[0], numbers(100, 1));
    ASSERT_TRUE(heart.sync(session).is_ok());
  }
  Heart heart(disk);
  for (const ShardInfo& shard : heart.shards(1)) {
    EXPECT_EQ(shard.written, shard.spec.name == "put") << shard.spec.name;
  }
}

ExtentRecord extent_at(uint64_t offset_bytes, uint32_t length_bytes) {
  ExtentRecord extent;
  extent.address.device = 1;
  extent.address.offset_bytes = offset_bytes;
  extent.length_bytes = length_bytes;
  extent.checksum = offset_bytes ^ 0x55;
  return extent;
}

/// Two tiles, one of them without a rest; a bucket of two small ones; a written blob of two
/// extents, and one that was never written.
JobRecord written_record() {
  const auto job = new_job();
  EXPECT_TRUE(job->declare({parameter("large", kTileElements + 32),
                            parameter("a", 100),
                            bytes_shard("blob", kBlobExtentBytes + 1),
                            bytes_shard("empty blob", 10),
                            parameter("b", 200)})
                  .is_ok());
  JobRecord record = job->record();
  record.step = 42;
  record.host_bytes = 64_MiB;
  record.nvme_bytes = 1_GiB;
  uint64_t offset_bytes = 1_MiB;
  for (BucketRecord& bucket : record.buckets) {
    for (TileRecord& tile : bucket.tiles) {
      tile.parameter = extent_at(offset_bytes += 4_MiB, 1_MiB);
      if (&tile == &bucket.tiles.front()) tile.rest = extent_at(offset_bytes += 4_MiB, 2_MiB);
    }
  }
  for (ShardRecord& shard : record.shards) {
    shard.written = shard.kind == ShardKind::parameter && shard.name != "b";
    shard.generation = shard.name.size();
    if (shard.name == "blob") {
      shard.extents = {extent_at(512_MiB, kBlobExtentBytes), extent_at(600_MiB, 4096)};
    }
  }
  return record;
}

std::string encoded(const JobRecord& record) {
  const auto bytes = encode(record);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(JobDurable, is_what_the_catalogue_says_whatever_the_job_did_since) {
  JobRecord disk = written_record();
  for (const uint64_t undurable_since : {0, 41}) {
    SCOPED_TRACE(undurable_since);
    disk.undurable_since = undurable_since;
    const JobRecord said = undurable_since == 0 ? disk : disk.without_extents();
    const auto restored = Job::restore(disk);
    ASSERT_TRUE(restored.is_ok()) << restored.status().message();
    Job& job = *restored.value();
    EXPECT_EQ(job.durable().catalogue().step(), 42u);
    EXPECT_EQ(job.durable().catalogue().undurable_since(), undurable_since);
    ASSERT_EQ(job.durable().catalogue().bucket_count(), said.buckets.size());
    for (size_t bucket = 0; bucket < said.buckets.size(); ++bucket) {
      ASSERT_EQ(job.durable().catalogue().tile_count(bucket), said.buckets[bucket].tiles.size());
      for (size_t index = 0; index < said.buckets[bucket].tiles.size(); ++index) {
        const TileRecord& tile = said.buckets[bucket].tiles[index];
        const TileRecord found = job.durable().catalogue().tile(bucket, index);
        for (const auto& [a, b] :
             {std::pair(found.parameter, tile.parameter), std::pair(found.rest, tile.rest)}) {
          EXPECT_EQ(a.address.device, b.address.device);
          EXPECT_EQ(a.address.offset_bytes, b.address.offset_bytes);
          EXPECT_EQ(a.length_bytes, b.length_bytes);
          EXPECT_EQ(a.checksum, b.checksum);
        }
      }
    }
    EXPECT_EQ(encoded(job.durable().record()), encoded(said));

    job.progress().restore(50, 0, 0);
    job.admission().set_host_bytes(1);
    job.shards()[job.shards().id_of("a")].generation = 99;
    job.shards()[job.shards().id_of("b")].written = true;
    ASSERT_TRUE(job.declare({parameter("later", 10), bytes_shard("blob later", 4)}).is_ok());
    EXPECT_EQ(encoded(job.durable().record()), encoded(said));
  }
}

TEST(JobDurable, a_removed_blob_is_on_disk_until_the_next_commit_and_its_name_and_id_are_others) {
  const auto disk = std::make_shared<MemoryDisk>(kDiskBytes);
  Heart heart(disk);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(
      session, {bytes_shard("kept", 100), bytes_shard("removed", kBlobExtentBytes + 5)});
  heart.write(session, ids[0], pattern(100, 1));
  heart.write(session, ids[1], pattern(kBlobExtentBytes + 5, 2));
  ASSERT_TRUE(heart.sync(session).is_ok());
  Job& job = heart.job(session);
  const JobRecord said = job.record();
  ASSERT_EQ(said.shards[1].name, "removed");
  ASSERT_EQ(said.shards[1].extents.size(), 2u);

  bool removed = false;
  heart.store().delete_shard(
      session, "removed", [&](Result<bool> result) { removed = result.is_ok() && result.value(); });
  ASSERT_TRUE(removed);
  const auto same_id = heart.declare(session, {bytes_shard("removed", 7)});
  ASSERT_EQ(same_id[0], ids[1]);
  EXPECT_EQ(encoded(job.durable().record()), encoded(said));

  ASSERT_TRUE(heart.sync(session).is_ok());
  EXPECT_EQ(encoded(job.durable().record()), encoded(job.record()));
  EXPECT_NE(encoded(job.durable().record()), encoded(said));
}

}  // namespace
}  // namespace memd
