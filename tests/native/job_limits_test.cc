// What a job may declare: its disk quota with every term, its records, and the counters of its
// pins.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "base/bulk_bytes.h"
#include "base/units.h"
#include "store/space/declared_space.h"
#include "store/space/job_space.h"
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

constexpr uint64_t kStateBytes = 12 * kTileElements;  // of one tile in fp32
constexpr uint64_t kNoLimit = ~uint64_t{0};

bool says(const Status& status, const std::string& text) {
  return status.message().find(text) != std::string::npos;
}

/// Whole blocks, as a commit writes them.
uint64_t encoded_bytes(const Job& job) {
  const WorkerBytes uncounted;
  return align_up(encode(job.record()).size(), kBlockBytes);
}

DeclaredSpace of_tiles(uint64_t count) {
  DeclaredSpace declared;
  for (uint64_t i = 0; i < count; ++i) declared.add_bucket(DType::float32, kTileElements, true);
  return declared;
}

TEST(DeclaredSpaceTest, a_step_on_disk_needs_two_copies_of_the_state) {
  const SpaceNeeded needed = of_tiles(3).needed(Durability(), kNoLimit, 8);
  EXPECT_EQ(needed.total(), 2 * 3 * kStateBytes);
}

TEST(DeclaredSpaceTest, steps_in_memory_replace_tiles_before_the_old_ones_go) {
  const Durability every = Durability::parse("every:10").value();
  EXPECT_EQ(of_tiles(3).needed(every, kNoLimit, 8).total(), (2 * 3 + 3) * kStateBytes);
  EXPECT_EQ(of_tiles(20).needed(every, kNoLimit, 8).total(), (2 * 20 + 8) * kStateBytes);
}

TEST(DeclaredSpaceTest, without_durability_one_copy_is_enough) {
  const Durability none = Durability::parse("none").value();
  EXPECT_EQ(of_tiles(20).needed(none, kNoLimit, 8).total(), (20 + 8) * kStateBytes);
}

TEST(DeclaredSpaceTest, gradients_that_the_arena_does_not_hold_spill) {
  // Three of 1 MiB, and the one that is being written.
  EXPECT_EQ(of_tiles(3).needed(Durability(), 4_MiB, 8).gradient_bytes, 0U);
  EXPECT_EQ(of_tiles(3).needed(Durability(), 2_MiB, 8).gradient_bytes, 2_MiB);
  EXPECT_EQ(of_tiles(3).needed(Durability(), 0, 8).gradient_bytes, 3_MiB) << "no more than all";
}

TEST(DeclaredSpaceTest, bf16_has_a_remainder_and_the_last_tile_of_a_bucket_is_smaller) {
  DeclaredSpace declared;
  declared.add_bucket(DType::bfloat16, kTileElements + 32, true);
  const uint64_t last_bytes = 2 * kBlockBytes;  // 64 bytes of value, 320 of the rest
  EXPECT_EQ(declared.needed(Durability(), kNoLimit, 8).updated_once_bytes,
            12 * kTileElements + last_bytes);
}

TEST(DeclaredSpaceTest, a_maximum_takes_four_bytes_a_parameter_more) {
  DeclaredSpace declared = of_tiles(3);
  declared.begin_maxima(DType::float32, kTileElements);
  const SpaceNeeded needed =
      declared.needed(Durability::parse("every:10").value(), kNoLimit, kTilesInFlight);
  EXPECT_EQ(needed.updated_once_bytes, 3 * kStateBytes + 4 * kTileElements);
  EXPECT_EQ(needed.replaced_bytes, 3 * 16 * kTileElements) << "as if each were of the longest";
  declared.add_bucket(DType::bfloat16, 32, true);
  const uint64_t before = declared.needed(Durability(), kNoLimit, 8).updated_once_bytes;
  declared.begin_maxima(DType::bfloat16, 32);
  EXPECT_EQ(declared.needed(Durability(), kNoLimit, 8).updated_once_bytes, before)
      << "there was room in the block";
}

TEST(JobSpaceQuotaTest, state_leaves_the_catalogue_its_part_of_the_quota) {
  JobSpace space;
  space.set_quota_bytes(100 * kBlockBytes);
  space.set_metadata_bytes(10 * kBlockBytes);
  EXPECT_TRUE(space.has_room(SpaceUse::state, 90 * kBlockBytes));
  EXPECT_FALSE(space.has_room(SpaceUse::state, 91 * kBlockBytes));
  space.promise(80 * kBlockBytes);
  EXPECT_TRUE(space.keeps_promise(10 * kBlockBytes));
  EXPECT_FALSE(space.keeps_promise(11 * kBlockBytes));
}

class JobSpaceTest : public ::testing::Test {
 protected:
  ExtentRecord allocate() { return heart_.extents().allocate(kBlockBytes).value(); }
  /// Of those that allocate() has made.
  uint64_t taken_bytes() { return free_bytes_ - heart_.extents().free_bytes(); }
  void replace(Replica& place) {
    space_.replace(ReplicaPlace(place), allocate(), heart_.extents());
    space_.take(SpaceUse::state, kBlockBytes);
  }
  bool release(size_t count = 100) { return space_.release_superseded(heart_.extents(), count); }

  Heart heart_{std::make_shared<MemoryDisk>(kDiskBytes)};
  const uint64_t free_bytes_ = heart_.extents().free_bytes();
  JobSpace space_;
};

TEST_F(JobSpaceTest, what_is_superseded_while_a_commit_is_under_way_is_released_by_the_next_one) {
  space_.add_superseded({allocate()});
  space_.begin_commit();
  space_.add_superseded({allocate(), allocate()});
  space_.end_commit(true);
  EXPECT_TRUE(release());
  EXPECT_EQ(space_.used_bytes(), 2 * kBlockBytes);
  EXPECT_EQ(taken_bytes(), 2 * kBlockBytes);
  space_.begin_commit();
  space_.end_commit(true);
  EXPECT_FALSE(release(1)) << "as many as were asked for";
  EXPECT_EQ(taken_bytes(), kBlockBytes);
  EXPECT_TRUE(release());
  EXPECT_EQ(space_.used_bytes(), 0u);
  EXPECT_EQ(taken_bytes(), 0u);
}

TEST_F(JobSpaceTest, what_came_after_a_commit_began_is_free_at_once_and_what_came_before_is_not) {
  Replica before;
  replace(before);
  space_.begin_commit();
  Replica after;
  replace(after);
  EXPECT_TRUE(space_.is_referenced(before));
  EXPECT_FALSE(space_.is_referenced(after));
  space_.end_commit(true);
  EXPECT_TRUE(release());
  for (Replica* const place : {&before, &after})
    space_.release(ReplicaPlace(*place), heart_.extents());
  EXPECT_EQ(taken_bytes(), kBlockBytes) << "the catalogue on disk names it";
  EXPECT_EQ(space_.used_bytes(), kBlockBytes);
}

TEST_F(JobSpaceTest,
       a_commit_that_wrote_nothing_leaves_free_what_was_free_and_the_next_counts_all) {
  Replica first;
  replace(first);
  space_.begin_commit();
  Replica second;
  replace(second);
  space_.abandon_commit();
  EXPECT_FALSE(space_.is_referenced(first));
  EXPECT_FALSE(space_.is_referenced(second));
  space_.begin_commit();
  EXPECT_TRUE(space_.is_referenced(first));
  EXPECT_TRUE(space_.is_referenced(second));
}

TEST_F(JobSpaceTest, after_a_commit_that_is_no_step_nothing_is_kept_for_a_return) {
  Replica place;
  replace(place);
  space_.begin_commit();
  space_.end_commit(false);
  EXPECT_FALSE(space_.is_referenced(place));
  space_.begin_update();
  EXPECT_TRUE(space_.is_referenced(place)) << "a step that can be undone returns to it";
}

class JobLimits : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(JobLimits, shards_that_need_more_than_the_quota_together_are_refused_with_every_term) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, 50_MiB));
  std::vector<ShardSpec> fits;
  for (int i = 0; i < 8; ++i) fits.push_back(parameter(concat("w", i), kTileElements));
  heart.declare(session, fits);  // 2 x 24 MiB
  const size_t entry_count = heart.job(session).shards().entries().size();
  const Status refused =
      heart.store()
          .declare(session, {bytes_shard("blob", 5000), parameter("one more", kTileElements)})
          .status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "2 x 28311552 (parameters and their optimizer state)"))
      << refused.message();
  EXPECT_TRUE(says(refused, "8192 (blobs and buffers)")) << refused.message();
  EXPECT_TRUE(says(refused, "8192 (the catalogue, old and new)")) << refused.message();
  EXPECT_TRUE(says(refused, "nvme_bytes 52428800")) << refused.message();
  EXPECT_EQ(heart.job(session).shards().count(), 8U) << "nothing of it was declared";
  EXPECT_EQ(heart.job(session).shards().entries().size(), entry_count);
  heart.declare(session, {bytes_shard("blob", 5000)});
  heart.declare(session, fits);  // known already
}

TEST_F(JobLimits, a_parameter_needs_room_for_its_moments_once_an_optimizer_takes_it) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, 20_MiB));
  std::vector<ShardSpec> model;
  for (int i = 0; i < 10; ++i) {
    model.push_back(parameter(concat("w", i), kTileElements));
    model.back().value_only = true;
  }
  const auto ids = heart.declare(session, model);
  for (const uint32_t id : ids) heart.write(session, id, numbers(kTileElements, 1));
  ASSERT_TRUE(heart.sync(session).is_ok()) << "10 MiB of values";
  for (ShardSpec& spec : model) spec.value_only = false;
  const Status refused = heart.store().declare(session, model).status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "2 x 31457280 (parameters and their")) << refused.message();
  model.resize(1);
  heart.declare(session, model);
  const SpaceNeeded needed = heart.job(session).admission().space_needed();
  EXPECT_EQ(needed.updated_once_bytes, kStateBytes);
  EXPECT_EQ(needed.kept_value_bytes, 9_MiB);
}

TEST_F(JobLimits, a_parameter_needs_room_for_its_maximum_once_an_optimizer_wants_it) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, 15_MiB));
  std::vector<ShardSpec> model{parameter("a", kTileElements), parameter("b", kTileElements)};
  heart.declare(session, model);
  for (ShardSpec& spec : model) spec.keeps_maximum = true;
  const Status refused = heart.store().declare(session, model).status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "2 x 8388608 (parameters and their")) << refused.message();
  const auto is_kept = [&](size_t id) { return heart.job(session).shards()[id].keeps_maximum; };
  EXPECT_FALSE(is_kept(0) || is_kept(1)) << "nothing is changed then";
  const auto ids = heart.declare(session, {model[0]});
  EXPECT_TRUE(is_kept(ids[0]));
  EXPECT_EQ(heart.job(session).admission().space_needed().updated_once_bytes,
            2 * kStateBytes + 4 * kTileElements);
}

TEST_F(JobLimits, maxima_find_room_in_exactly_the_bytes_that_they_are_said_to_need) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, 15_MiB));
  const std::vector<uint64_t> counts{kTileElements, 100, 200};
  const auto ids = heart.declare(session,
                                 {parameter("a", counts[0]),
                                  parameter("b", counts[1]),
                                  parameter("c", counts[2]),
                                  bytes_shard("blob", 100)});
  for (size_t i = 0; i < counts.size(); ++i) heart.write(session, ids[i], numbers(counts[i], 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  const auto said = [&](const std::vector<uint32_t>& shard_ids) {
    return heart.store().reports().bytes_of_maxima(session, shard_ids);
  };
  EXPECT_EQ(said({}).value(), 0u);
  EXPECT_EQ(said({ids[1]}).value(), said({ids[1], ids[2]}).value()) << "they share a bucket";
  EXPECT_EQ(said({ids[3]}).status().code(), StatusCode::not_found) << "it is no parameter";
  EXPECT_EQ(said({99}).status().code(), StatusCode::not_found);
  Job& job = heart.job(session);
  const uint64_t quota_bytes =
      job.admission().space_needed().total() + said({ids[0], ids[1]}).value();
  const auto write = [&](size_t i) {
    const std::vector<float> moment(counts[i], 0.5F);
    return heart.write_moments(
        session, ids[i], 3, {.exp_avg = moment, .exp_avg_sq = moment, .max_exp_avg_sq = moment});
  };
  job.space().set_quota_bytes(quota_bytes - 1);
  const Status first = write(0);
  ASSERT_TRUE(first.is_ok()) << first.message();
  EXPECT_EQ(write(1).code(), StatusCode::capacity);
  job.space().set_quota_bytes(quota_bytes);
  const Status second = write(1);
  ASSERT_TRUE(second.is_ok()) << second.message();
  EXPECT_EQ(said({ids[0], ids[1], ids[2]}).value(), 0u) << "they have it";
}

TEST_F(JobLimits, a_job_that_was_admitted_under_older_rules_trains_on_and_declares_no_more) {
  const auto train = [](Heart& heart, uint64_t session, uint32_t id, uint64_t step) {
    heart.write(session, id, numbers(kTileElements, 5), Part::gradient);
    StepRequest request{.session_id = session, .groups = {}, .staged_buffers = {}, .step = step};
    request.groups.push_back({.settings = {}, .shard_ids = {id}});
    return heart.step(request).first;
  };
  {
    Heart heart(disk_);
    const uint64_t session = heart.attach(heart.open("job", 8, 20_MiB));
    const auto ids = heart.declare(session, {parameter("w", kTileElements)});
    heart.write(session, ids[0], numbers(kTileElements, 1));
    // No room for a catalogue, which was in no quota.
    heart.job(session).space().set_quota_bytes(2 * kStateBytes);
    heart.job(session).space().set_metadata_bytes(0);
    ASSERT_TRUE(train(heart, session, ids[0], 1).is_ok());
  }
  Heart heart(disk_);
  const uint64_t session = heart.attach(1);
  ASSERT_EQ(heart.job(session).space().quota_bytes(), 2 * kStateBytes);
  const auto ids = heart.declare(session, {parameter("w", kTileElements)});
  for (uint64_t step = 2; step < 5; ++step) {
    const Status trained = train(heart, session, ids[0], step);
    EXPECT_TRUE(trained.is_ok()) << trained.message();
  }
  const Status refused = heart.store().declare(session, {bytes_shard("blob", 1)}).status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
}

TEST_F(JobLimits, the_catalogue_is_as_long_as_it_was_said_to_become) {
  Heart heart(disk_, kFloorSegments + 24);
  const uint64_t session = heart.attach(heart.open("job", 24, 50_MiB));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 5000; ++i) specs.push_back(parameter(concat("parameter ", i), 33));
  specs.push_back(parameter("large", 2 * kTileElements + 1, DType::bfloat16));
  for (int i = 0; i < 500; ++i) specs.push_back(bytes_shard(concat("b", i), 1 + (i % 2)));
  specs.push_back(bytes_shard("two extents", kBlobExtentBytes + 1));
  ShardSpec shaped = bytes_shard("shaped", 1);
  shaped.shape = {2, 1, 2, 1};
  specs.push_back(shaped);
  const auto ids = heart.declare(session, specs);
  for (size_t i = 5001; i < specs.size(); ++i) {
    const ShardInfo info = heart.job(session).info(ids[i]);
    heart.write(session, ids[i], pattern(info.bytes, 1));
  }
  ASSERT_TRUE(heart.sync(session).is_ok());
  const uint64_t bytes = encoded_bytes(heart.job(session));
  EXPECT_EQ(heart.job(session).admission().space_needed().catalogue_bytes, 2 * bytes);
  EXPECT_EQ(heart.job(session).admission().metadata_bytes(), 2 * bytes);
}

TEST_F(JobLimits, records_of_what_was_declared_take_no_other_jobs_disk) {
  Heart heart(disk_, 2 * kFloorSegments + 20);
  const uint64_t greedy = heart.attach(heart.open("greedy", 16, 10_MiB));
  const uint64_t other = heart.attach(heart.open("other", 4, 45_MiB));
  const std::string filler(1000, 'x');
  Status refused;
  for (int batch = 0; batch < 40 && refused.is_ok(); ++batch) {
    std::vector<ShardSpec> specs;
    for (int i = 0; i < 500; ++i) specs.push_back(bytes_shard(concat(batch, ".", i, filler), 0));
    refused = heart.store().declare(greedy, Heart::labelled(specs)).status();
    ASSERT_TRUE(heart.sync(greedy).is_ok());
  }
  EXPECT_EQ(refused.code(), StatusCode::capacity) << "20,000 names of 1 kB";
  EXPECT_TRUE(says(refused, "(the catalogue, old and new)")) << refused.message();
  const JobInfo info = heart.job(greedy).job_info();
  EXPECT_LE(info.nvme_bytes_used + info.metadata_bytes, 10_MiB);
  for (int i = 0; i < 11; ++i) {
    const auto ids = heart.declare(other, {bytes_shard(concat("blob", i), 4_MiB)});
    heart.write(other, ids[0], pattern(4_MiB, 1));
  }
  const Status synced = heart.sync(other);
  EXPECT_TRUE(synced.is_ok()) << synced.message();
}

TEST_F(JobLimits, blobs_written_again_need_room_for_two_copies_and_one_tile) {
  constexpr uint64_t kCount = 6;
  constexpr uint64_t kBytes = 3_MiB;
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 6));
  std::vector<ShardSpec> specs;
  for (uint64_t i = 0; i < kCount; ++i) specs.push_back(bytes_shard(concat("blob", i), kBytes));
  const auto ids = heart.declare(session, specs);
  Job& job = heart.job(session);
  job.space().set_quota_bytes(2 * kCount * kBytes + 1_MiB + job.admission().metadata_bytes());
  uint8_t seed = 0;
  for (const bool syncs : {true, false, false, true, false, false, true}) {
    for (const uint32_t id : ids) heart.write(session, id, pattern(kBytes, ++seed));
    if (!syncs) continue;
    const Status synced = heart.sync(session);
    ASSERT_TRUE(synced.is_ok()) << synced.message();
  }
  for (uint64_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(heart.read<uint8_t>(session, ids[i]),
              pattern(kBytes, static_cast<uint8_t>(seed - kCount + 1 + i)));
  }
}

TEST_F(JobLimits, a_blob_written_again_at_exactly_the_quota_is_refused_with_every_term) {
  constexpr uint64_t kBytes = 3_MiB;
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  auto ids = heart.declare(session, {bytes_shard("blob", kBytes)});
  Job& job = heart.job(session);
  const uint64_t quota_bytes = job.admission().space_needed().total();
  job.space().set_quota_bytes(quota_bytes);
  heart.write(session, ids[0], pattern(kBytes, 1));
  ASSERT_TRUE(heart.sync(session).is_ok());
  heart.write(session, ids[0], pattern(kBytes, 2));
  const Status refused = heart.sync(session);
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "delete it and commit before it is put again")) << refused.message();
  EXPECT_TRUE(says(refused, "1048576 bytes more are wanted than 3145728 (in use) + "))
      << refused.message();
  EXPECT_TRUE(says(refused, " (the catalogue, old and new); nvme_bytes ")) << refused.message();
  EXPECT_TRUE(says(refused, concat("nvme_bytes ", quota_bytes))) << refused.message();
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(kBytes, 2)) << "nothing is lost";
  // The way that the error names.
  std::optional<Result<bool>> deleted;
  heart.store().delete_shard(
      session, "blob", [&](const Result<bool>& result) { deleted = result; });
  ASSERT_TRUE(heart.until([&] { return deleted.has_value(); }));
  ASSERT_TRUE(deleted->is_ok()) << deleted->status().message();
  ASSERT_TRUE(heart.sync(session).is_ok());
  ids = heart.declare(session, {bytes_shard("blob", kBytes)});
  heart.write(session, ids[0], pattern(kBytes, 2));
  const Status synced = heart.sync(session);
  ASSERT_TRUE(synced.is_ok()) << synced.message();
  EXPECT_EQ(heart.read<uint8_t>(session, ids[0]), pattern(kBytes, 2));
}

TEST_F(JobLimits, blobs_that_are_written_again_one_a_commit_need_room_for_one_more) {
  constexpr uint64_t kBytes = 3_MiB;
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {bytes_shard("a", kBytes), bytes_shard("b", kBytes)});
  Job& job = heart.job(session);
  job.space().set_quota_bytes(job.admission().space_needed().total() + kBytes);
  for (uint8_t seed = 1; seed < 4; ++seed) {
    for (const uint32_t id : ids) {
      heart.write(session, id, pattern(kBytes, seed));
      const Status synced = heart.sync(session);
      ASSERT_TRUE(synced.is_ok()) << synced.message();
    }
  }
  for (const uint32_t id : ids) heart.write(session, id, pattern(kBytes, 9));
  const Status refused = heart.sync(session);
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "3145728 (old ones, until the next commit)")) << refused.message();
}

TEST_F(JobLimits, a_catalogue_on_disk_counts_until_the_next_one_is) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 300; ++i) specs.push_back(bytes_shard(std::string(500, 'a') + concat(i), 1));
  heart.declare(session, specs);
  ASSERT_TRUE(heart.sync(session).is_ok());
  const uint64_t on_disk_bytes = encoded_bytes(heart.job(session));
  for (const ShardSpec& spec : specs) {
    heart.store().delete_shard(
        session, spec.name, [](const Result<bool>& result) { EXPECT_TRUE(result.value()); });
  }
  EXPECT_EQ(heart.job(session).admission().metadata_bytes(), on_disk_bytes + kBlockBytes);
  ASSERT_TRUE(heart.sync(session).is_ok());
  EXPECT_EQ(heart.job(session).admission().metadata_bytes(), 2 * kBlockBytes);
}

TEST_F(JobLimits, what_many_shards_are_called_is_written_down_by_who_declares_them) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job", 8, 50_MiB));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 20'000; ++i) specs.push_back(parameter(concat("w", i), 1));
  LabelledSpecs declared = Heart::labelled(specs);
  end_turn();  // in which more than 64 KiB abort
  const auto infos = heart.store().declare(session, std::move(declared));
  ASSERT_TRUE(infos.is_ok()) << infos.status().message();
  for (const size_t i : {0, 777, 19'999}) {
    const ShardInfo& info = infos.value().first[i];
    EXPECT_EQ(info.spec.name, specs[i].name);
    EXPECT_EQ(info.spec.shape, specs[i].shape);
    EXPECT_EQ(heart.job(session).shards().find(specs[i].name), info.shard_id);
  }
}

TEST_F(JobLimits, records_take_no_more_memory_than_the_job_was_admitted_to) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 60'000; ++i) specs.push_back(bytes_shard(concat("b", i), 0));
  const Status refused = heart.store().declare(session, Heart::labelled(specs)).status();
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_TRUE(says(refused, "bytes of records, at most 16777216 + half of host_bytes"))
      << refused.message();
  specs.resize(20'000);
  heart.declare(session, specs);
}

}  // namespace
}  // namespace memd
