#include "store/cache/entry_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "store/cache/entry.h"
#include "store/cache/shard_ids.h"
#include "store/space/job_space.h"
#include "store/space/replica.h"

namespace memd {
namespace {

ExtentRecord extent_at(uint64_t offset_bytes) {
  ExtentRecord extent;
  extent.address.device = 3;
  extent.address.offset_bytes = offset_bytes;
  extent.length_bytes = 4096;
  extent.checksum = ~offset_bytes;
  return extent;
}

TEST(Replica, says_what_it_was_given_in_24_bytes) {
  static_assert(sizeof(Replica) == 24);
  for (const uint64_t epoch :
       {uint64_t{0}, uint64_t{1}, uint64_t{0x5a'a5a5'a5a5}, Replica::kEpochMax}) {
    const Replica replica(extent_at(~uint64_t{4095}), epoch);
    EXPECT_TRUE(replica.exists());
    EXPECT_EQ(replica.epoch(), epoch);
    EXPECT_EQ(replica.extent().address.device, 3u);
    EXPECT_EQ(replica.extent().address.offset_bytes, ~uint64_t{4095});
    EXPECT_EQ(replica.extent().length_bytes, 4096u);
    EXPECT_EQ(replica.extent().checksum, uint64_t{4095});
  }
  EXPECT_FALSE(Replica().exists());
}

TEST(ReplicaList, lets_everybody_read_and_nobody_but_the_jobs_space_write) {
  using Read = decltype(std::declval<ReplicaList&>()[0]);
  using Place = decltype(*std::declval<ReplicaList&>().place(0));
  static_assert(std::is_same_v<Read, const Replica&>);
  static_assert(std::is_same_v<Place, const Replica&>);
  static_assert(std::is_same_v<decltype(std::declval<Entry&>().replicas()), const ReplicaList&>);
  ReplicaList list(2);
  const ReplicaPlace second = list.place(1);
  JobSpace::adopt(second, extent_at(8192), JobSpace::kOnDisk);
  EXPECT_EQ(list[1].offset_bytes(), 8192U);
  EXPECT_EQ(second->offset_bytes(), 8192U);
  EXPECT_FALSE(list[0].exists());
}

TEST(ReplicaList, holds_none_one_and_many_and_one_takes_no_memory_of_its_own) {
  for (const size_t count : {0, 1, 2, 300}) {
    ReplicaList list(count);
    ASSERT_EQ(list.size(), count);
    EXPECT_EQ(list.empty(), count == 0);
    for (const Replica& replica : list) EXPECT_FALSE(replica.exists() || replica.epoch() != 0);
    for (size_t i = 0; i < count; ++i)
      JobSpace::adopt(list.place(i), extent_at(4096 * (i + 1)), Replica::kEpochMax - i);
    const auto* const place = reinterpret_cast<const std::byte*>(list.data());
    const auto* const self = reinterpret_cast<const std::byte*>(&list);
    EXPECT_EQ(place == self, count == 1);

    ReplicaList moved(std::move(list));
    ReplicaList again;
    again = std::move(moved);
    ASSERT_EQ(again.size(), count);
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(again[i].extent().address.offset_bytes, 4096 * (i + 1));
      EXPECT_EQ(again[i].epoch(), Replica::kEpochMax - i);
    }
    if (count == 1) JobSpace::adopt(again.place(0), {}, JobSpace::kOnDisk);
    EXPECT_EQ(again.size(), count) << "an empty replica is one as well";
  }
}

TEST(ShardIds, hold_none_one_and_many) {
  static_assert(sizeof(ShardIds) == 8);
  for (const std::vector<uint32_t>& ids : std::vector<std::vector<uint32_t>>{
           {}, {0}, {~uint32_t{0}}, {7, 7}, {1, 2, 3, ~uint32_t{0}}}) {
    ShardIds first(ids);
    ShardIds made(std::move(first));
    ShardIds held;
    held = std::move(made);
    ASSERT_EQ(held.size(), ids.size());
    EXPECT_EQ(held.empty(), ids.empty());
    EXPECT_EQ(std::vector<uint32_t>(held.begin(), held.end()), ids);
    if (!ids.empty()) EXPECT_EQ(held.front(), ids.front());

    ShardIds set(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) set.set(i, ids[i]);
    EXPECT_EQ(std::vector<uint32_t>(set.begin(), set.end()), ids);
    set.sort([](uint32_t a, uint32_t b) { return a > b; });
    EXPECT_TRUE(std::is_sorted(set.begin(), set.end(), std::greater<>()));
    EXPECT_EQ(std::set<uint32_t>(set.begin(), set.end()),
              std::set<uint32_t>(ids.begin(), ids.end()));
  }
}

TEST(EntryTable, entries_stay_where_they_are_and_ids_are_given_again) {
  EntryTable table;
  const auto add = [&table](uint64_t bytes) {
    return table.add({.kind = EntryKind::bytes, .bytes = bytes, .stride_bytes = 1 << 20});
  };
  std::vector<Entry*> entries;
  for (uint64_t i = 0; i < 100; ++i) entries.push_back(add(i));
  ASSERT_EQ(table.size(), 100u);
  for (uint32_t id = 0; id < 100; ++id) {
    ASSERT_EQ(table[id], entries[id]);
    EXPECT_EQ(entries[id]->id(), id);
    EXPECT_EQ(entries[id]->bytes(), id);
  }
  EXPECT_EQ(table[100], nullptr);
  EXPECT_EQ(table[127], nullptr) << "in a chunk that has room";
  EXPECT_EQ(table[1'000'000], nullptr);

  table.remove(31);
  table.remove(64);
  EXPECT_EQ(table[31], nullptr);
  size_t count = 0;
  size_t missing = 0;
  for (Entry* const entry : table) {
    ++count;
    missing += entry == nullptr ? 1 : 0;
  }
  EXPECT_EQ(count, 100u);
  EXPECT_EQ(missing, 2u);
  EXPECT_EQ(add(1000)->id(), 64u);
  EXPECT_EQ(add(1001)->id(), 31u);
  EXPECT_EQ(add(1002)->id(), 100u);
  EXPECT_EQ(table[31]->bytes(), 1001u);
  EXPECT_EQ(table[99], entries[99]);
}

}  // namespace
}  // namespace memd
