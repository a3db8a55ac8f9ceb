#include "store/format/catalogue.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "base/checksum.h"
#include "base/units.h"
#include "cpu_seconds.h"

namespace memd {
namespace {

ExtentRecord extent(uint64_t offset_bytes, uint32_t length_bytes) {
  return {.address = {.device = 1, .offset_bytes = offset_bytes},
          .length_bytes = length_bytes,
          .checksum = 0x1122334455667788 + offset_bytes};
}

JobRecord small_job() {
  JobRecord job{.job_id = 7,
                .uid = 1000,
                .name = "demo",
                .step = 42,
                .host_bytes = 64_MiB,
                .nvme_bytes = 1_GiB,
                .shards = {},
                .buckets = {}};
  job.buckets.push_back(
      {.dtype = DType::float32,
       .element_count = kTileElements + 32,
       .tiles = {{extent(2_MiB, 1_MiB), extent(4_MiB, 2_MiB)}, {extent(8_MiB, 4096), {}}}});
  job.buckets.push_back(
      {.dtype = DType::bfloat16, .element_count = 96, .tiles = {{extent(9_MiB, 4096), {}}}});
  ShardRecord large{.name = "weight",
                    .kind = ShardKind::parameter,
                    .dtype = DType::float32,
                    .tier = Tier::nvme,
                    .shape = {kTileElements + 31},
                    .generation = 42,
                    .bucket = 0,
                    .element_offset = 0,
                    .written = true,
                    .extents = {}};
  ShardRecord first = large;
  first.name = "norm.weight";
  first.dtype = DType::bfloat16;
  first.shape = {3, 10};
  first.bucket = 1;
  ShardRecord second = first;
  second.name = "norm.bias";
  second.shape = {};
  second.written = false;
  second.element_offset = 32;
  ShardRecord blob{.name = "blob",
                   .kind = ShardKind::blob,
                   .dtype = DType::uint8,
                   .tier = Tier::host,
                   .shape = {kBlobExtentBytes + 1},
                   .generation = 3,
                   .bucket = 0,
                   .element_offset = 0,
                   .extents = {extent(16_MiB, kBlobExtentBytes), extent(20_MiB, 4096)}};
  ShardRecord buffer = blob;
  buffer.name = "running_mean";
  buffer.kind = ShardKind::buffer;
  buffer.dtype = DType::int64;
  buffer.shape = {0};
  buffer.extents = {};
  job.shards = {large, first, second, blob, buffer};
  return job;
}

RootRecord small_root() {
  return {.job_id_next = 8,
          .jobs = {{.job_id = 7, .catalogue_bytes = 5000, .catalogue = {extent(2_MiB, 8192)}},
                   {.job_id = 3,
                    .catalogue_bytes = kBlobExtentBytes + 9,
                    .catalogue = {extent(3_MiB, kBlobExtentBytes), extent(5_MiB, 4096)}}}};
}

RootRecord root_with_snapshot() {
  RootRecord root = small_root();
  root.snapshots.edit() = {
      {.job = {.job_id = 7, .catalogue_bytes = 6000, .catalogue = {extent(7_MiB, 8192)}},
       .name = "before lr drop",
       .step = 40,
       .created_s = 1'800'000'000,
       .number = 99}};
  return root;
}

std::vector<std::byte> resealed(std::vector<std::byte> bytes) {
  const uint64_t checksum = record_checksum(std::span(bytes).first(bytes.size() - 8));
  std::memcpy(bytes.data() + bytes.size() - 8, &checksum, 8);
  return bytes;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<size_t>(byte) >> 4];
    text += kDigits[static_cast<size_t>(byte) & 15];
  }
  return text;
}

std::vector<std::byte> from_hex(const std::string& text) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

/// Its buckets keep maxima, and one shard has one; the first rest of the first bucket is
/// from before that.
JobRecord job_with_maxima() {
  JobRecord job = small_job();
  job.buckets[0].keeps_maxima = true;
  job.buckets[1].keeps_maxima = true;
  job.buckets[0].tiles[1].rest = extent(24_MiB, 4096);
  job.buckets[1].tiles[0].rest = extent(25_MiB, 4096);
  job.shards[1].keeps_maximum = true;
  return job;
}

TEST(Catalogue, a_job_with_maxima_comes_back_as_it_was) {
  const JobRecord job = job_with_maxima();
  const auto decoded = decode_job(encode(job));
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  EXPECT_EQ(encode(decoded.value()), encode(job));
  EXPECT_TRUE(decoded.value().buckets[1].keeps_maxima);
  EXPECT_EQ(decoded.value().buckets[1].dtype, DType::bfloat16);
  for (const ShardRecord& shard : decoded.value().shards) {
    EXPECT_EQ(shard.keeps_maximum, shard.name == "norm.weight") << shard.name;
    EXPECT_EQ(shard.written, shard.name == "norm.weight" || shard.name == "weight") << shard.name;
  }
}

TEST(Catalogue, only_one_with_maxima_is_refused_by_who_does_not_know_them) {
  const auto feature = [](const JobRecord& job) { return std::to_integer<int>(encode(job)[24]); };
  EXPECT_EQ(feature(small_job()), 0);
  EXPECT_EQ(feature(job_with_maxima()), 1);
  JobRecord declared = small_job();
  declared.shards[1].keeps_maximum = true;
  EXPECT_EQ(feature(declared), 1);
}

TEST(Catalogue, a_rest_is_as_long_as_with_maxima_or_as_without_them) {
  const uint32_t without = 2_MiB;
  const uint32_t with = 3_MiB;
  for (const uint32_t length : {without, with, without + 4096, with + 4096}) {
    for (const bool keeps_maxima : {false, true}) {
      JobRecord job = small_job();
      job.buckets[0].keeps_maxima = keeps_maxima;
      job.buckets[0].tiles[0].rest = extent(32_MiB, length);
      EXPECT_EQ(decode_job(encode(job)).is_ok(),
                length == without || (keeps_maxima && length == with))
          << length << ", keeps maxima: " << keeps_maxima;
    }
  }
}

TEST(Catalogue, a_job_comes_back_as_it_was) {
  const auto decoded = decode_job(encode(small_job()));
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  const JobRecord& job = decoded.value();
  const JobRecord expected = small_job();
  EXPECT_EQ(job.job_id, expected.job_id);
  EXPECT_EQ(job.uid, expected.uid);
  EXPECT_EQ(job.name, expected.name);
  EXPECT_EQ(job.step, expected.step);
  EXPECT_EQ(job.host_bytes, expected.host_bytes);
  EXPECT_EQ(job.nvme_bytes, expected.nvme_bytes);
  ASSERT_EQ(job.shards.size(), expected.shards.size());
  for (size_t i = 0; i < job.shards.size(); ++i) {
    EXPECT_EQ(job.shards[i].name, expected.shards[i].name);
    EXPECT_EQ(job.shards[i].kind, expected.shards[i].kind);
    EXPECT_EQ(job.shards[i].dtype, expected.shards[i].dtype);
    EXPECT_EQ(job.shards[i].tier, expected.shards[i].tier);
    EXPECT_EQ(job.shards[i].shape, expected.shards[i].shape);
    EXPECT_EQ(job.shards[i].generation, expected.shards[i].generation);
    EXPECT_EQ(job.shards[i].bucket, expected.shards[i].bucket);
    EXPECT_EQ(job.shards[i].element_offset, expected.shards[i].element_offset);
    EXPECT_EQ(job.shards[i].extents.size(), expected.shards[i].extents.size());
  }
  const ExtentRecord& rest = job.buckets[0].tiles[0].rest;
  EXPECT_EQ(rest.address.device, 1);
  EXPECT_EQ(rest.address.offset_bytes, 4_MiB);
  EXPECT_EQ(rest.length_bytes, 2_MiB);
  EXPECT_EQ(rest.checksum, 0x1122334455667788 + 4_MiB);
  EXPECT_FALSE(job.buckets[0].tiles[1].rest.exists());
  EXPECT_EQ(encode(job), encode(expected));
}

TEST(Catalogue, a_root_comes_back_as_it_was) {
  const auto decoded = decode_root(encode(small_root()));
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  EXPECT_EQ(decoded.value().job_id_next, 8u);
  EXPECT_EQ(encode(decoded.value()), encode(small_root()));
  EXPECT_TRUE(decode_root(encode(RootRecord{})).is_ok());
  EXPECT_TRUE(decode_job(encode(JobRecord{})).is_ok());
}

// Written by format 1.0; every later version must read them.
constexpr char kRootV1[] =
    "6d656d64726f6f740100000000000000ae0000000000000000000000000000000000000000000000"
    "00000000000000000800000000000000020000000700000000000000881300000000000001000000"
    "00002000000000008877865544332211002000000100030000000000000009001000000000000200"
    "00000000300000000000887796554433221100001000010000005000000000008877b65544332211"
    "001000000100c7e278355cab3ecc";
constexpr char kJobV1[] =
    "6d656d642d6a6f620100000000000000fb0100000000000000000000000000000000000000000000"
    "00000000000000000700000000000000e80300002a00000000000000000000040000000000000040"
    "00000000040064656d6f020000000120000400000000000200000000002000000000008877865544"
    "33221100001000010000004000000000008877a65544332211000020000100000080000000000088"
    "77e65544332211001000000100000000000000000000000000000000000000000000000260000000"
    "000000000100000000009000000000008877f6554433221100100000010000000000000000000000"
    "000000000000000000000000050000000600776569676874010102011f000400000000002a000000"
    "00000000000000000000000000000000010b006e6f726d2e77656967687401020202030000000000"
    "00000a000000000000002a000000000000000100000000000000000000000109006e6f726d2e6269"
    "6173010202002a00000000000000010000002000000000000000000400626c6f6202090101010010"
    "00000000000300000000000000020000000000000100000000887766564433221100001000010000"
    "004001000000008877a656443322110010000001000c0072756e6e696e675f6d65616e0308010100"
    "00000000000000030000000000000000000000171c83bc761b0839";

// The same of format 1.1, where a job has a durability.
constexpr const char* kRootV11 =
    "6d656d64726f6f740100010000000000ae0000000000000000000000000000000000000000000000"
    "00000000000000000800000000000000020000000700000000000000881300000000000001000000"
    "00002000000000008877865544332211002000000100030000000000000009001000000000000200"
    "00000000300000000000887796554433221100001000010000005000000000008877b65544332211"
    "0010000001002ee9c6b1163f5000";
constexpr const char* kJobV11 =
    "6d656d642d6a6f620100010000000000070200000000000000000000000000000000000000000000"
    "00000000000000000700000000000000e80300002a00000000000000000000040000000000000040"
    "00000000040064656d6f020000000120000400000000000200000000002000000000008877865544"
    "33221100001000010000004000000000008877a65544332211000020000100000080000000000088"
    "77e65544332211001000000100000000000000000000000000000000000000000000000260000000"
    "000000000100000000009000000000008877f6554433221100100000010000000000000000000000"
    "000000000000000000000000050000000600776569676874010102011f000400000000002a000000"
    "00000000000000000000000000000000010b006e6f726d2e77656967687401020202030000000000"
    "00000a000000000000002a000000000000000100000000000000000000000109006e6f726d2e6269"
    "6173010202002a00000000000000010000002000000000000000000400626c6f6202090101010010"
    "00000000000300000000000000020000000000000100000000887766564433221100001000010000"
    "004001000000008877a656443322110010000001000c0072756e6e696e675f6d65616e0308010100"
    "00000000000000030000000000000000000000000000000000000000000000b8b66aa1a281f1f2";

// The same of format 1.2, where a job has a weight.
constexpr const char* kRootV12 =
    "6d656d64726f6f740100020000000000ae0000000000000000000000000000000000000000000000"
    "00000000000000000800000000000000020000000700000000000000881300000000000001000000"
    "00002000000000008877865544332211002000000100030000000000000009001000000000000200"
    "00000000300000000000887796554433221100001000010000005000000000008877b65544332211"
    "0010000001005083443a1dfbc756";
constexpr const char* kJobV12 =
    "6d656d642d6a6f6201000200000000000b0200000000000000000000000000000000000000000000"
    "00000000000000000700000000000000e80300002a00000000000000000000040000000000000040"
    "00000000040064656d6f020000000120000400000000000200000000002000000000008877865544"
    "33221100001000010000004000000000008877a65544332211000020000100000080000000000088"
    "77e65544332211001000000100000000000000000000000000000000000000000000000260000000"
    "000000000100000000009000000000008877f6554433221100100000010000000000000000000000"
    "000000000000000000000000050000000600776569676874010102011f000400000000002a000000"
    "00000000000000000000000000000000010b006e6f726d2e77656967687401020202030000000000"
    "00000a000000000000002a000000000000000100000000000000000000000109006e6f726d2e6269"
    "6173010202002a00000000000000010000002000000000000000000400626c6f6202090101010010"
    "00000000000300000000000000020000000000000100000000887766564433221100001000010000"
    "004001000000008877a656443322110010000001000c0072756e6e696e675f6d65616e0308010100"
    "00000000000000030000000000000000000000000000000000000000000000e803000070b6211045"
    "cb7752";

// The same of format 1.3, where a root has snapshots, here none and one.
constexpr const char* kRootV13 =
    "6d656d64726f6f740100030000000000b20000000000000000000000000000000000000000000000"
    "00000000000000000800000000000000020000000700000000000000881300000000000001000000"
    "00002000000000008877865544332211002000000100030000000000000009001000000000000200"
    "00000000300000000000887796554433221100001000010000005000000000008877b65544332211"
    "0010000001000000000067d23331ee65841f";
constexpr const char* kJobV13 =
    "6d656d642d6a6f6201000300000000000b0200000000000000000000000000000000000000000000"
    "00000000000000000700000000000000e80300002a00000000000000000000040000000000000040"
    "00000000040064656d6f020000000120000400000000000200000000002000000000008877865544"
    "33221100001000010000004000000000008877a65544332211000020000100000080000000000088"
    "77e65544332211001000000100000000000000000000000000000000000000000000000260000000"
    "000000000100000000009000000000008877f6554433221100100000010000000000000000000000"
    "000000000000000000000000050000000600776569676874010102011f000400000000002a000000"
    "00000000000000000000000000000000010b006e6f726d2e77656967687401020202030000000000"
    "00000a000000000000002a000000000000000100000000000000000000000109006e6f726d2e6269"
    "6173010202002a00000000000000010000002000000000000000000400626c6f6202090101010010"
    "00000000000300000000000000020000000000000100000000887766564433221100001000010000"
    "004001000000008877a656443322110010000001000c0072756e6e696e675f6d65616e0308010100"
    "00000000000000030000000000000000000000000000000000000000000000e80300000e1ccfc60f"
    "1c0ba6";
constexpr const char* kRootWithSnapshotV13 =
    "6d656d64726f6f740100030000000000040100000000000002000000000000000000000000000000"
    "00000000000000000800000000000000020000000700000000000000881300000000000001000000"
    "00002000000000008877865544332211002000000100030000000000000009001000000000000200"
    "00000000300000000000887796554433221100001000010000005000000000008877b65544332211"
    "00100000010001000000070000000000000070170000000000000100000000007000000000008877"
    "d65544332211002000000100280000000000000000d2496b0000000063000000000000000e006265"
    "666f7265206c722064726f702168bc0a015be6fe";

TEST(Catalogue, records_of_format_1_0_are_read_for_ever) {
  ASSERT_TRUE(decode_root(from_hex(kRootV1)).is_ok());
  ASSERT_TRUE(decode_job(from_hex(kJobV1)).is_ok());
  // What the older record does not say is what was the only choice then.
  EXPECT_EQ(hex(encode(decode_job(from_hex(kJobV1)).value())), kJobV13);
  EXPECT_EQ(hex(encode(decode_root(from_hex(kRootV1)).value())), kRootV13);
}

TEST(Catalogue, records_of_format_1_1_are_read_for_ever) {
  ASSERT_TRUE(decode_root(from_hex(kRootV11)).is_ok());
  ASSERT_TRUE(decode_job(from_hex(kJobV11)).is_ok());
  EXPECT_EQ(decode_job(from_hex(kJobV11)).value().weight, JobWeight::kOne);
  EXPECT_EQ(hex(encode(decode_job(from_hex(kJobV11)).value())), kJobV13);
  EXPECT_EQ(hex(encode(decode_root(from_hex(kRootV11)).value())), kRootV13);
}

TEST(Catalogue, records_of_format_1_2_are_read_for_ever) {
  EXPECT_EQ(hex(encode(decode_job(from_hex(kJobV12)).value())), kJobV13);
  EXPECT_EQ(hex(encode(decode_root(from_hex(kRootV12)).value())), kRootV13);
  JobRecord job = small_job();
  job.weight = 2500;
  EXPECT_EQ(decode_job(encode(job)).value().weight, 2500U);
  for (const uint32_t bad : {0U, 99U, 10001U, ~0U}) {
    job.weight = bad;
    EXPECT_NE(decode_job(encode(job)).status().message().find("weight: "), std::string::npos);
  }
}

TEST(Catalogue, records_of_format_1_3_are_read_for_ever) {
  EXPECT_EQ(hex(encode(small_root())), kRootV13);
  EXPECT_EQ(hex(encode(small_job())), kJobV13);
  EXPECT_EQ(hex(encode(root_with_snapshot())), kRootWithSnapshotV13);
}

TEST(Catalogue, a_roots_snapshots_come_back_as_they_were) {
  const auto decoded = decode_root(encode(root_with_snapshot()));
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  ASSERT_EQ(decoded.value().snapshots.size(), 1u);
  const SnapshotEntry& snapshot = decoded.value().snapshots[0];
  EXPECT_EQ(snapshot.job.job_id, 7u);
  EXPECT_EQ(snapshot.job.catalogue_bytes, 6000u);
  EXPECT_EQ(snapshot.job.catalogue[0].address.offset_bytes, 7_MiB);
  EXPECT_EQ(snapshot.name, "before lr drop");
  EXPECT_EQ(snapshot.step, 40u);
  EXPECT_EQ(snapshot.created_s, 1'800'000'000u);
  EXPECT_EQ(snapshot.number, 99u);
}

TEST(Catalogue, a_copy_of_a_root_shares_its_snapshots_until_it_is_edited) {
  const RootRecord root = root_with_snapshot();
  RootRecord copy = root;
  EXPECT_EQ(&copy.snapshots[0], &root.snapshots[0]);
  copy.snapshots.edit()[0].name = "other";
  EXPECT_EQ(copy.snapshots[0].name, "other");
  EXPECT_EQ(root.snapshots[0].name, "before lr drop");
  EXPECT_EQ(root_with_snapshot().snapshots[0].name, "before lr drop");
}

TEST(Catalogue, only_a_root_with_snapshots_is_refused_by_who_does_not_know_them) {
  EXPECT_EQ(std::to_integer<int>(encode(small_root())[24]), 0);
  EXPECT_EQ(std::to_integer<int>(encode(root_with_snapshot())[24]), 2);
}

TEST(Catalogue, a_root_with_a_load_is_refused_by_who_would_take_half_of_it_for_the_job) {
  const auto features = [](const std::string& name) {
    RootRecord root = root_with_snapshot();
    root.snapshots.edit()[0].name = name;
    return std::to_integer<int>(encode(root)[24]);
  };
  EXPECT_EQ(features("load/20261126T092228Z-0123456789ab"), 2 | 4);
  for (const char* const chosen_by_a_user : {"load/",
                                             "load/before",
                                             "load/20261126T092228Z-0123456789a",
                                             "load/20261126T092228Z-0123456789abc",
                                             "load/20261126T092228Z-0123456789aB",
                                             "load/20261126T09222xZ-0123456789ab",
                                             "load/20261126 092228Z-0123456789ab",
                                             "async_save/20261126T092228Z-0123456789ab"})
    EXPECT_EQ(features(chosen_by_a_user), 2) << chosen_by_a_user;
}

TEST(Catalogue, snapshots_that_contradict_themselves_are_refused) {
  const auto refuse = [](const std::string& named, const std::function<void(RootRecord&)>& spoil) {
    RootRecord root = root_with_snapshot();
    spoil(root);
    const auto decoded = decode_root(encode(root));
    EXPECT_EQ(decoded.status().code(), StatusCode::integrity) << named;
    EXPECT_NE(decoded.status().message().find(named), std::string::npos)
        << decoded.status().message();
  };
  refuse("a snapshot of job 5", [](RootRecord& root) { root.snapshots.edit()[0].job.job_id = 5; });
  refuse("name of 0 bytes", [](RootRecord& root) { root.snapshots.edit()[0].name = ""; });
  refuse("name of 129 bytes",
         [](RootRecord& root) { root.snapshots.edit()[0].name = std::string(129, 'x'); });
  refuse("two snapshots named before", [](RootRecord& root) {
    root.snapshots.edit().push_back(SnapshotEntry(root.snapshots[0]));
  });
  refuse("snapshot count", [](RootRecord& root) {
    for (int i = 0; i < 64; ++i) {
      root.snapshots.edit().push_back(SnapshotEntry(root.snapshots[0]));
      root.snapshots.edit().back().name = concat("s", i);
    }
  });
  refuse("no catalogue",
         [](RootRecord& root) { root.snapshots.edit()[0].job.catalogue_bytes = 0; });
  refuse("extent count", [](RootRecord& root) { root.snapshots.edit()[0].job.catalogue.clear(); });
}

TEST(Catalogue, a_jobs_durability_is_kept) {
  JobRecord job = small_job();
  job.durability = 3;
  job.undurable_since = 42;
  const auto decoded = decode_job(encode(job));
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  EXPECT_EQ(decoded.value().durability, 3U);
  EXPECT_EQ(decoded.value().undurable_since, 42U);
  job.durability = 0xf000'0000;
  EXPECT_NE(decode_job(encode(job)).status().message().find("durability"), std::string::npos);
}

TEST(Catalogue, any_flipped_bit_and_any_truncation_is_refused) {
  for (const auto& good :
       {encode(small_job()), encode(small_root()), encode(root_with_snapshot())}) {
    const auto refuse = [](std::span<const std::byte> bytes) {
      EXPECT_EQ(decode_job(bytes).status().code(), StatusCode::integrity);
      EXPECT_EQ(decode_root(bytes).status().code(), StatusCode::integrity);
    };
    for (size_t i = 0; i < good.size(); ++i) {
      for (const int flip : {0x01, 0x80, 0xff}) {
        auto bytes = good;
        bytes[i] ^= static_cast<std::byte>(flip);
        refuse(bytes);
      }
      refuse(std::span(good).first(i));
    }
    auto longer = good;
    longer.push_back(std::byte{0});
    refuse(longer);
  }
}

TEST(Catalogue, garbage_with_a_valid_checksum_never_crashes) {
  std::mt19937 random(1);
  const auto job = encode(small_job());
  const auto root = encode(root_with_snapshot());
  int refused = 0;
  for (int i = 0; i < 100'000; ++i) {
    auto bytes = i % 2 == 0 ? job : root;
    if (i % 4 < 2) {
      const size_t place = random() % bytes.size();
      const size_t count = std::min<size_t>(1 + random() % 8, bytes.size() - place);
      for (size_t k = 0; k < count; ++k) bytes[place + k] = static_cast<std::byte>(random());
    } else {
      bytes.resize(56 + random() % 256);
      for (size_t k = 48; k < bytes.size(); ++k) bytes[k] = static_cast<std::byte>(random());
      const uint64_t length_bytes = bytes.size();
      std::memcpy(bytes.data() + 16, &length_bytes, 8);
    }
    bytes = resealed(std::move(bytes));
    if (!decode_job(bytes).is_ok()) ++refused;
    if (!decode_root(bytes).is_ok()) ++refused;
  }
  EXPECT_GT(refused, 150'000);
}

TEST(Catalogue, a_newer_format_is_refused_with_both_versions_and_the_feature_named) {
  auto newer = encode(small_job());
  newer[8] = std::byte{2};
  const auto version = decode_job(resealed(newer));
  EXPECT_EQ(version.status().code(), StatusCode::not_yet);
  EXPECT_NE(version.status().message().find("2.3"), std::string::npos);
  EXPECT_NE(version.status().message().find("1.x"), std::string::npos);
  for (const size_t word : {24, 32}) {
    auto feature = encode(small_job());
    feature[word] = std::byte{8};
    const auto refused = decode_job(resealed(feature));
    EXPECT_EQ(refused.status().code(), StatusCode::not_yet);
    EXPECT_NE(refused.status().message().find("bit 3"), std::string::npos);
  }
  auto compatible = encode(small_job());
  compatible[40] = std::byte{8};
  EXPECT_TRUE(decode_job(resealed(compatible)).is_ok());
}

TEST(Catalogue, fields_that_a_newer_minor_version_appended_are_skipped) {
  auto bytes = encode(small_root());
  bytes.insert(bytes.end() - 8, std::byte{9});
  const uint64_t length_bytes = bytes.size();
  std::memcpy(bytes.data() + 16, &length_bytes, 8);
  EXPECT_EQ(decode_root(resealed(bytes)).status().code(), StatusCode::integrity);
  bytes[10] = std::byte{9};
  EXPECT_TRUE(decode_root(resealed(bytes)).is_ok());
}

TEST(Catalogue, what_contradicts_itself_is_refused_naming_the_field) {
  const auto refuse = [](const std::string& named, const std::function<void(JobRecord&)>& spoil) {
    JobRecord job = small_job();
    spoil(job);
    const auto decoded = decode_job(encode(job));
    EXPECT_EQ(decoded.status().code(), StatusCode::integrity) << named;
    EXPECT_NE(decoded.status().message().find(named), std::string::npos)
        << decoded.status().message();
  };
  refuse("bucket: 9", [](JobRecord& job) { job.shards[0].bucket = 9; });
  refuse("element range", [](JobRecord& job) { job.shards[0].shape = {kTileElements + 33}; });
  refuse("element range", [](JobRecord& job) { job.shards[1].element_offset = 96; });
  refuse("element range", [](JobRecord& job) { job.shards[1].element_offset = 1; });
  refuse("two shards share", [](JobRecord& job) { job.shards[2].element_offset = 0; });
  refuse("dtype is not that", [](JobRecord& job) { job.shards[1].dtype = DType::float32; });
  refuse("dtype: 200", [](JobRecord& job) { job.shards[3].dtype = static_cast<DType>(200); });
  refuse("kind: 0", [](JobRecord& job) { job.shards[3].kind = ShardKind::unspecified; });
  refuse("tier: 3", [](JobRecord& job) { job.shards[3].tier = static_cast<Tier>(3); });
  refuse("shape overflows", [](JobRecord& job) { job.shards[3].shape = {1_GiB, 1_GiB}; });
  refuse("two shards named", [](JobRecord& job) { job.shards[2].name = "blob"; });
  refuse("a bucket without a shard", [](JobRecord& job) { job.shards.erase(job.shards.begin()); });
  refuse("extent count", [](JobRecord& job) { job.shards[3].extents.pop_back(); });
  refuse("extent length", [](JobRecord& job) { job.shards[3].extents[1].length_bytes = 8192; });
  refuse("whole block", [](JobRecord& job) { job.shards[3].extents[0].address.offset_bytes = 1; });
  refuse("overflows",
         [](JobRecord& job) { job.shards[3].extents[0].address.offset_bytes = UINT64_MAX - 4095; });
  refuse("tile count", [](JobRecord& job) { job.buckets[0].tiles.pop_back(); });
  refuse("tile count", [](JobRecord& job) { job.buckets[0].element_count += kTileElements; });
  refuse("extent length", [](JobRecord& job) { job.buckets[0].tiles[0].rest.length_bytes = 4096; });
  refuse("dtype: 5", [](JobRecord& job) { job.buckets[0].dtype = DType::int8; });
  refuse("some of its tiles", [](JobRecord& job) { job.buckets[0].tiles[1].parameter = {}; });
  refuse("without length", [](JobRecord& job) { job.buckets[0].tiles[1].rest.checksum = 1; });

  RootRecord twice = small_root();
  twice.jobs[1].job_id = 7;
  EXPECT_EQ(decode_root(encode(twice)).status().code(), StatusCode::integrity);
  RootRecord nobody = small_root();
  nobody.jobs[0].job_id = 0;
  EXPECT_EQ(decode_root(encode(nobody)).status().code(), StatusCode::integrity);
  RootRecord future = small_root();
  future.job_id_next = 7;
  EXPECT_EQ(decode_root(encode(future)).status().code(), StatusCode::integrity);
}

JobRecord job_of_shards(uint32_t shard_count) {
  JobRecord job = small_job();
  const ShardRecord example = job.shards[0];
  for (uint32_t i = 0; i < shard_count; ++i) {
    ShardRecord shard = example;
    shard.name = "layers." + std::to_string(i) + ".weight";
    shard.shape = {64, 64};
    shard.bucket = static_cast<uint32_t>(job.buckets.size());
    job.shards.push_back(shard);
    job.buckets.push_back({.dtype = DType::float32,
                           .element_count = 4096,
                           .tiles = {{extent(2_MiB, 16384), extent(4_MiB, 32768)}}});
  }
  return job;
}

double seconds_to_decode(const std::vector<std::byte>& bytes) {
  return testing::cpu_seconds([&] { ASSERT_TRUE(decode_job(bytes).is_ok()); });
}

TEST(Catalogue, a_hundred_thousand_shards_stay_small_and_fast) {
  constexpr uint32_t kShards = 100'000;
  const JobRecord job = job_of_shards(kShards);
  size_t name_bytes = 0;
  for (const ShardRecord& shard : job.shards) name_bytes += shard.name.size();
  const auto bytes = encode(job);
  constexpr size_t kTileBytesMax = 48;
  constexpr size_t kBucketBytes = 13;
  constexpr size_t kShardBytesMax = 60;
  EXPECT_LE(bytes.size() - encode(small_job()).size(),
            kShards * (kTileBytesMax + kBucketBytes + kShardBytesMax) + name_bytes);
  // 22 to 31 ms in a release build. Decoding is linear: a hundred times the shards take about a
  // hundred times as long. Quadratic decoding would take ten thousand times as long.
  EXPECT_LT(seconds_to_decode(bytes),
            1000 * seconds_to_decode(encode(job_of_shards(kShards / 100))));
}

}  // namespace
}  // namespace memd
