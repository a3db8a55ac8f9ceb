// A daemon is killed and the next one goes on with what its jobs had in memory.
#include "store/journal/ledger.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "released_memory.h"
#include "store/journal/job_ledger.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::DiskQueue;
using testing::halves;
using testing::Heart;
using testing::Held;
using testing::kDiskBytes;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;
using testing::pattern;
using testing::TestKeeper;
using testing::Twin;
using testing::with_maximum;

OwnedFd copy_of(int fd) { return OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

/// A commit in memory, as MemoryCommits makes it.
Status write_record(Ledger& ledger, const JobRecord& record, uint64_t base) {
  const std::vector<std::byte> encoded = encode(record);
  ledger.begin_commit();
  const auto place = ledger.open_record(encoded.size());
  if (!place.is_ok()) return place.status();
  std::copy(encoded.begin(), encoded.end(), place.value().begin());
  ledger.publish_record(encoded.size(), record_checksum(encoded), base);
  return Status::ok();
}

ShardRecord blob_record(const std::string& name, uint64_t bytes) {
  return {.name = name,
          .kind = ShardKind::blob,
          .dtype = DType::uint8,
          .tier = Tier::nvme,
          .shape = {bytes}};
}

/// The moment at which a daemon dies, before, in or after a commit.
enum class Dies : uint8_t { before_commit, before_it_is_told, after_it, after_the_next_began };

/// The next daemon reads a ledger: shard 1 came before the commit, shard 2 during it.
LedgerContents read_after_a_commit(Dies dies, bool is_on_disk) {
  constexpr uint64_t kTag = 9;
  constexpr uint64_t kNextTag = 10;
  const JobRecord job{.job_id = 7, .name = "job"};
  const std::vector<std::byte> encoded = encode(job);
  auto ledger = Ledger::create(7, 2_MiB).value();
  ledger->rebase(kTag);
  EXPECT_TRUE(write_record(*ledger, job, kTag).is_ok());
  ledger->reset_shard(1);
  // Nothing comes of this one.
  ledger->begin_commit();
  ledger->begin_commit();
  ledger->reset_shard(2);
  JobRecord layout = job;
  for (const char* name : {"before", "while"}) layout.shards.push_back(blob_record(name, 1));
  EXPECT_TRUE(ledger->write_layout(layout, {1, 2}).is_ok());
  if (!is_on_disk) {
    const auto place = ledger->open_record(encoded.size());
    EXPECT_TRUE(place.is_ok());
    std::copy(encoded.begin(), encoded.end(), place.value().begin());
  }
  if (dies >= Dies::after_it) {
    is_on_disk ? ledger->rebase(kNextTag)
               : ledger->publish_record(encoded.size(), record_checksum(encoded), kTag);
  }
  if (dies == Dies::after_the_next_began) ledger->begin_commit();
  auto next = Ledger::adopt(copy_of(ledger->fd()), 7).value();
  const bool is_made = is_on_disk && dies != Dies::before_commit;
  auto contents = next->read(is_made ? kNextTag : kTag);
  EXPECT_TRUE(contents.is_ok()) << contents.status().message();
  // And the one after it reads the same.
  EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(next->base()).value().shards,
            contents.value().shards);
  return std::move(contents).value();
}

TEST(LedgerTest, a_shard_that_came_while_a_commit_was_made_is_new_with_it_and_without) {
  using enum Dies;
  for (const bool is_on_disk : {false, true}) {
    for (const Dies dies : {before_commit, before_it_is_told, after_it, after_the_next_began}) {
      if (!is_on_disk && dies == before_it_is_told) continue;
      SCOPED_TRACE(concat(is_on_disk ? "on disk " : "in memory ", static_cast<int>(dies)));
      const LedgerContents contents = read_after_a_commit(dies, is_on_disk);
      EXPECT_EQ(contents.shards.at(1).is_new, dies == before_commit);
      EXPECT_TRUE(contents.shards.at(2).is_new);
    }
  }
}

TEST(LedgerTest, a_shard_that_came_while_a_commit_was_made_is_not_new_after_the_next) {
  for (const bool is_made : {false, true}) {
    SCOPED_TRACE(is_made);
    auto ledger = Ledger::create(7, 2_MiB).value();
    ledger->begin_commit();
    ledger->reset_shard(1);
    if (is_made) ledger->rebase(9);
    ASSERT_TRUE(
        ledger->write_layout({.job_id = 7, .name = "job", .shards = {blob_record("x", 1)}}, {1})
            .is_ok());
    // By the next daemon, which found it as the one before left it.
    auto next = Ledger::adopt(copy_of(ledger->fd()), 7).value();
    EXPECT_TRUE(next->read(is_made ? 9 : 0).value().shards.at(1).is_new);
    next->begin_commit();
    next->rebase(10);
    EXPECT_FALSE(
        Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(10).value().shards.at(1).is_new);
  }
}

TEST(LedgerTest, a_grant_that_was_begun_is_read_with_its_part) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(
      ledger->write_layout({.job_id = 7, .name = "job", .shards = {blob_record("x", 1)}}, {1})
          .is_ok());
  for (const Part part : {Part::value, Part::gradient, Part::rank_sum}) {
    for (const bool was_written : {false, true}) {
      SCOPED_TRACE(concat(static_cast<int>(part), was_written ? " written" : " new"));
      ledger->begin_grant(
          {.session_id = 5, .shard_id = 1, .part = part, .was_written = was_written});
      const auto next = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0);
      ASSERT_TRUE(next.is_ok()) << next.status().message();
      ASSERT_TRUE(next.value().grant.has_value());
      EXPECT_EQ(next.value().grant->part, part);
      EXPECT_EQ(next.value().grant->was_written, was_written);
    }
  }
  ledger->begin_grant({.session_id = 5, .shard_id = 1, .part = static_cast<Part>(3)});
  EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0).status().code(),
            StatusCode::integrity);
}

TEST(LedgerTest, the_last_whole_record_is_read_and_only_on_the_catalogue_that_it_builds_on) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  EXPECT_FALSE(ledger->read_record(0).value().has_value());
  JobRecord record;
  record.job_id = 7;
  record.name = "job";
  for (uint64_t step = 1; step <= 5; ++step) {
    record.step = step;
    ASSERT_TRUE(write_record(*ledger, record, step * 10).is_ok());
    const auto next = Ledger::adopt(copy_of(ledger->fd()), 7);
    ASSERT_TRUE(next.is_ok()) << next.status().message();
    ASSERT_TRUE(next.value()->read_record(step * 10).value().has_value());
    EXPECT_EQ(next.value()->read_record(step * 10).value()->step, step);
    EXPECT_FALSE(next.value()->read_record(step * 10 - 10).value().has_value());
  }
  EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 8).status().code(), StatusCode::integrity);
}

TEST(LedgerTest, a_record_that_cannot_be_understood_is_not_taken_for_none) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  JobRecord record;
  record.job_id = 7;
  record.buckets.push_back({.element_count = 64, .tiles = {{}}});  // a bucket without a shard
  ASSERT_TRUE(write_record(*ledger, record, 1).is_ok());
  EXPECT_EQ(ledger->read_record(1).status().code(), StatusCode::integrity);
  EXPECT_TRUE(ledger->read_record(2).is_ok());
}

JobRecord one_parameter(const std::string& name) {
  return {.job_id = 7,
          .shards = {{.name = name,
                      .kind = ShardKind::parameter,
                      .dtype = DType::float32,
                      .tier = Tier::nvme,
                      .shape = {64}}},
          .buckets = {{.dtype = DType::float32, .element_count = 64, .tiles = {{}}}}};
}

JobRecord in_bucket(JobRecord record, uint32_t bucket) {
  record.shards[0].bucket = bucket;
  return record;
}

JobRecord with_an_extent(ShardRecord shard) {
  shard.extents = {{.address = {.device = 0, .offset_bytes = 8192}, .length_bytes = 1}};
  shard.written = true;
  return {.job_id = 7, .shards = {shard}};
}

/// A word of a ledger, changed as only a bug would.
template <typename Owner, typename Word>
void replace_word(const Owner& ledger, Word word, Word by) {
  struct stat file{};
  ASSERT_EQ(fstat(ledger.fd(), &file), 0);
  int found_count = 0;
  for (off_t end = 0, at = 0; (at = lseek(ledger.fd(), end, SEEK_DATA)) >= 0;) {
    end = lseek(ledger.fd(), at, SEEK_HOLE);
    std::vector<std::byte> bytes(static_cast<size_t>(end - at));
    ASSERT_EQ(pread(ledger.fd(), bytes.data(), bytes.size(), at), end - at);
    for (size_t i = 0; i + sizeof(Word) <= bytes.size(); ++i) {
      if (std::memcmp(&bytes[i], &word, sizeof(Word)) != 0) continue;
      ++found_count;
      std::memcpy(&bytes[i], &by, sizeof(Word));
    }
    const auto memory =
        SharedMemory::map(copy_of(ledger.fd()), static_cast<uint64_t>(file.st_size));
    ASSERT_TRUE(memory.is_ok());
    std::memcpy(memory.value().data() + at, bytes.data(), bytes.size());
  }
  ASSERT_EQ(found_count, 1);
}

/// The layout of a job whose shards come and go, in a ledger and in plain memory.
class ChangingLayout {
 public:
  explicit ChangingLayout(uint64_t seed) : random_(seed) {}

  /// Some shards go, others come, ids of the former among them.
  void change() {
    LayoutChange change;
    for (uint64_t i = random_() % 3; i > 0 && !shards_.empty(); --i) {
      const auto gone = std::next(shards_.begin(), random_() % shards_.size());
      change.removed.push_back(gone->first);
      shards_.erase(gone);
    }
    change.added.job_id = kJobId;
    for (uint64_t i = random_() % 4; i > 0; --i) {
      const auto id = static_cast<uint32_t>(random_() % 500);
      if (shards_.contains(id)) continue;
      const ShardRecord shard = blob_record(concat("s", named_++), 1 + random_() % 100);
      shards_[id] = shard;
      change.added_ids.push_back(id);
      change.added.shards.push_back(shard);
    }
    if (ledger_->change_layout(change)) {
      ++changes_;
      return;
    }
    write();
  }

  void write() {
    JobRecord whole;
    whole.job_id = kJobId;
    std::vector<uint32_t> ids;
    for (const auto& [id, shard] : shards_) {
      ids.push_back(id);
      whole.shards.push_back(shard);
    }
    ASSERT_TRUE(ledger_->write_layout(whole, ids).is_ok());
    ++writes_;
  }

  void expect_told() const {
    const auto next = Ledger::adopt(copy_of(ledger_->fd()), kJobId);
    ASSERT_TRUE(next.is_ok()) << next.status().message();
    const auto contents = next.value()->read(0);
    ASSERT_TRUE(contents.is_ok()) << contents.status().message();
    std::map<uint32_t, std::pair<std::string, std::vector<uint64_t>>> told;
    std::map<uint32_t, std::pair<std::string, std::vector<uint64_t>>> meant;
    for (size_t i = 0; i < contents.value().shard_ids.size(); ++i) {
      const ShardRecord& shard = contents.value().layout.shards.at(i);
      told[contents.value().shard_ids[i]] = {shard.name, shard.shape};
    }
    for (const auto& [id, shard] : shards_) meant[id] = {shard.name, shard.shape};
    EXPECT_EQ(told, meant);
    EXPECT_EQ(contents.value().layout.shards.size(), meant.size());
    EXPECT_EQ(contents.value().shards.size(), meant.size());
  }

  Ledger& ledger() { return *ledger_; }
  uint64_t changes() const { return changes_; }
  uint64_t writes() const { return writes_; }

  static constexpr uint64_t kJobId = 7;

 private:
  std::mt19937_64 random_;
  std::unique_ptr<Ledger> ledger_ = Ledger::create(kJobId, 2_MiB).value();
  std::map<uint32_t, ShardRecord> shards_;
  uint64_t named_ = 0;
  uint64_t changes_ = 0;
  uint64_t writes_ = 0;
};

TEST(JobLedgerTest, where_there_is_no_ledger_nothing_is_refused_and_no_step_has_a_place) {
  JobLedger ledger;
  EXPECT_FALSE(ledger.is_open());
  EXPECT_TRUE(ledger.claim(1, Side::arena, 0).is_ok());
  EXPECT_TRUE(ledger.note_session({.session_id = 1}).is_ok());
  ledger.note_shard(0, true, {});
  ledger.note_loose({.kind = LooseKey::Kind::value}, {});
  ledger.begin_commit();
  ledger.committed_on_disk(1);
  EXPECT_TRUE(ledger.forget_old_extents(0)) << "a commit would wait for it";
  const auto place = ledger.close_step({.session_id = 1, .step = 1});
  ASSERT_TRUE(place.is_ok()) << place.status().message();
  EXPECT_FALSE(place.value().has_value());
}

TEST(JobLedgerTest, what_the_owners_of_a_job_tell_goes_into_the_ledger_that_it_has_by_then) {
  JobLedger of_job;
  ASSERT_TRUE(of_job.claim(1, Side::arena, 0).is_ok());  // before it has one
  JobLedger kept;
  ASSERT_TRUE(kept.create(7, 2_MiB).is_ok());
  ASSERT_TRUE(kept.claim(2, Side::arena, 0).is_ok());
  of_job = std::move(kept);
  EXPECT_TRUE(of_job.is_open());
  EXPECT_FALSE(kept.is_open());  // NOLINT(bugprone-use-after-move): what it promises
  ASSERT_TRUE(of_job.claim(3, Side::private_side, 0).is_ok());
  ASSERT_TRUE(kept.claim(4, Side::private_side, 1).is_ok());
  const auto next = JobLedger::adopt(copy_of(of_job.fd()), 7);
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  const auto claims = next.value().claims();
  ASSERT_TRUE(claims.is_ok()) << claims.status().message();
  std::set<uint64_t> ids;
  for (const SegmentClaim& claim : claims.value()) ids.insert(claim.id);
  EXPECT_EQ(ids, (std::set<uint64_t>{2, 3}));
  EXPECT_EQ(JobLedger::adopt(copy_of(of_job.fd()), 8).status().code(), StatusCode::integrity);
}

TEST(JobLedgerTest, a_ledger_that_does_not_say_which_segments_its_job_used_is_not_taken) {
  JobLedger ledger;
  ASSERT_TRUE(ledger.create(7, 2_MiB).is_ok());
  ASSERT_TRUE(ledger.claim(0xabcdef, Side::private_side, 5).is_ok());
  ASSERT_TRUE(JobLedger::adopt(copy_of(ledger.fd()), 7).is_ok());
  replace_word(ledger, uint64_t{2} << 32 | 5, uint64_t{9} << 32 | 5);
  EXPECT_EQ(JobLedger::adopt(copy_of(ledger.fd()), 7).status().code(), StatusCode::integrity);
}

TEST(LedgerTest, shards_that_come_and_go_are_told_at_the_cost_of_the_change) {
  ChangingLayout layout(1);
  layout.change();
  EXPECT_EQ(layout.writes(), 1U) << "there is nothing yet that it could change";
  for (int i = 0; i < 4000; ++i) {
    layout.change();
    if (i % 16 == 0) layout.expect_told();
    if (i % 1000 == 999) layout.write();
  }
  layout.expect_told();
  EXPECT_GT(layout.changes(), 3900U);
  EXPECT_GT(layout.writes(), 5U) << "changes must not pile up for ever";
}

TEST(LedgerTest, changes_of_shards_that_make_no_sense_are_told_from_those_that_do) {
  const auto blob = [](const std::string& name) { return blob_record(name, 1); };
  const auto read_after = [&](const LayoutChange& change) {
    ChangingLayout layout(1);
    layout.write();
    EXPECT_TRUE(layout.ledger().change_layout(
        {.removed = {}, .added = {.job_id = 7, .shards = {blob("a")}}, .added_ids = {3}}));
    EXPECT_TRUE(layout.ledger().change_layout(change));
    return Ledger::adopt(copy_of(layout.ledger().fd()), 7).value()->read(0).status();
  };
  EXPECT_TRUE(read_after({.removed = {3}, .added = {.job_id = 7}, .added_ids = {}}).is_ok());
  for (const LayoutChange& change : std::vector<LayoutChange>{
           {.removed = {4}, .added = {.job_id = 7}, .added_ids = {}},
           {.removed = {1u << 30}, .added = {.job_id = 7}, .added_ids = {}},
           {.removed = {}, .added = {.job_id = 7, .shards = {blob("b")}}, .added_ids = {3}},
           {.removed = {}, .added = {.job_id = 7, .shards = {blob("a")}}, .added_ids = {4}},
           {.removed = {}, .added = {.job_id = 7, .shards = {blob("b")}}, .added_ids = {4, 5}},
           {.removed = {}, .added = {.job_id = 8, .shards = {blob("b")}}, .added_ids = {4}},
           {.removed = {}, .added = one_parameter("a"), .added_ids = {4}},
           {.removed = {}, .added = one_parameter("b"), .added_ids = {3}},
           {.removed = {}, .added = in_bucket(one_parameter("b"), 1), .added_ids = {4}},
           {.removed = {}, .added = with_an_extent(blob("b")), .added_ids = {4}},
       }) {
    EXPECT_EQ(read_after(change).code(), StatusCode::integrity);
  }
}

TEST(LedgerTest, parameters_come_in_buckets_behind_those_that_the_job_has_and_never_go) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(ledger->write_layout(one_parameter("a"), {3}).is_ok());
  for (const uint32_t id : {5, 4}) {
    JobRecord added = one_parameter(concat("p", id));
    added.shards.push_back(blob_record(concat("b", id), 1));
    added.buckets[0].element_count = added.shards[0].shape[0] = 64 * id;
    ASSERT_TRUE(ledger->change_layout({.removed = {}, .added = added, .added_ids = {id, 10 + id}}));
  }
  const auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0);
  ASSERT_TRUE(contents.is_ok()) << contents.status().message();
  EXPECT_EQ(contents.value().shard_ids, (std::vector<uint32_t>{3, 5, 15, 4, 14}));
  const JobRecord& layout = contents.value().layout;
  ASSERT_EQ(layout.buckets.size(), 3U);
  for (const auto& [shard, bucket] :
       std::vector<std::pair<size_t, uint32_t>>{{0, 0}, {1, 1}, {3, 2}}) {
    EXPECT_EQ(layout.shards.at(shard).bucket, bucket);
    EXPECT_EQ(layout.buckets.at(bucket).element_count, layout.shards.at(shard).shape.at(0));
  }
  ASSERT_TRUE(ledger->change_layout(
      {.removed = {3}, .added = {.job_id = 7, .shards = {}}, .added_ids = {}}));
  EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0).status().code(),
            StatusCode::integrity);
}

/// Parameter 3 in bucket 0, blob 4, and parameter 5 in bucket 1, which came later.
std::unique_ptr<Ledger> ledger_of_three() {
  auto ledger = Ledger::create(7, 2_MiB).value();
  JobRecord job = one_parameter("a");
  job.shards.push_back(blob_record("b", 1));
  EXPECT_TRUE(ledger->write_layout(job, {3, 4}).is_ok());
  EXPECT_TRUE(
      ledger->change_layout({.removed = {}, .added = one_parameter("c"), .added_ids = {5}}));
  return ledger;
}

TEST(LedgerTest, what_changes_of_a_job_and_its_shards_is_told_at_the_cost_of_the_change) {
  const auto ledger = ledger_of_three();
  const JobRecord terms{.job_id = 7,
                        .name = "job",
                        .host_bytes = 4_MiB,
                        .nvme_bytes = 8_MiB,
                        .durability = Durability::parse("every:4").value().code(),
                        .weight = 3 * JobWeight::kOne};
  const uint64_t before = ledger->record_bytes_written();
  ASSERT_TRUE(ledger->change_facts({.maxima = {{3, true}, {5, true}}}));
  ASSERT_TRUE(ledger->change_facts({.job = terms, .buckets_with_maxima = {1}}));
  ASSERT_TRUE(ledger->change_facts({.maxima = {{5, false}}}));
  EXPECT_LT(ledger->record_bytes_written() - before, 1_KiB);
  const auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0);
  ASSERT_TRUE(contents.is_ok()) << contents.status().message();
  EXPECT_EQ(contents.value().shard_ids, (std::vector<uint32_t>{3, 4, 5}));
  const JobRecord& layout = contents.value().layout;
  ASSERT_EQ(layout.shards.size(), 3U);
  EXPECT_TRUE(layout.shards[0].keeps_maximum);
  EXPECT_FALSE(layout.shards[2].keeps_maximum) << "the last word counts";
  ASSERT_EQ(layout.buckets.size(), 2U);
  EXPECT_FALSE(layout.buckets[0].keeps_maxima);
  EXPECT_TRUE(layout.buckets[1].keeps_maxima);
  EXPECT_EQ(layout.name, terms.name);
  EXPECT_EQ(layout.host_bytes, terms.host_bytes);
  EXPECT_EQ(layout.nvme_bytes, terms.nvme_bytes);
  EXPECT_EQ(layout.durability, terms.durability);
  EXPECT_EQ(layout.weight, terms.weight);
}

TEST(LedgerTest, facts_of_shards_that_are_not_there_are_no_facts) {
  JobRecord of_another{.job_id = 8};
  for (const LayoutFacts& facts : std::vector<LayoutFacts>{
           {.maxima = {{6, true}}},
           {.maxima = {{1u << 30, true}}},
           {.maxima = {{4, true}}},
           {.buckets_with_maxima = {2}},
           {.job = of_another},
           {.job = one_parameter("d")},
       }) {
    const auto ledger = ledger_of_three();
    ASSERT_TRUE(Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0).is_ok());
    ASSERT_TRUE(ledger->change_facts(facts));
    EXPECT_EQ(Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0).status().code(),
              StatusCode::integrity);
  }
}

TEST(LedgerTest, a_change_whose_bytes_are_others_is_no_change) {
  ChangingLayout layout(2);
  layout.write();
  for (int i = 0; i < 20; ++i) layout.change();
  // In no record of a shard, each of which has a checksum of its own.
  constexpr uint32_t kId = 0xabcde;
  ASSERT_TRUE(
      layout.ledger().change_layout({.removed = {},
                                     .added = {.job_id = 7, .shards = {blob_record("a", 1)}},
                                     .added_ids = {kId}}));
  ASSERT_TRUE(Ledger::adopt(copy_of(layout.ledger().fd()), 7).value()->read(0).is_ok());
  replace_word(layout.ledger(), kId, kId + 1);
  const auto next = Ledger::adopt(copy_of(layout.ledger().fd()), 7);
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  EXPECT_EQ(next.value()->read(0).status().code(), StatusCode::integrity);
}

TEST(LedgerTest, where_the_newest_record_is_damaged_the_one_before_is_not_taken_for_it) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  constexpr uint32_t kId = 0xabcde;
  const JobRecord record{.job_id = 7, .shards = {blob_record("a", 1)}};
  ASSERT_TRUE(ledger->write_layout(record, {3}).is_ok());
  ASSERT_TRUE(ledger->write_layout(record, {kId}).is_ok());
  for (const uint64_t step : {1, 0x0123'4567}) {
    ASSERT_TRUE(write_record(*ledger, {.job_id = 7, .step = step}, 9).is_ok());
  }
  replace_word(*ledger, kId, kId + 1);
  replace_word(*ledger, uint64_t{0x0123'4567}, uint64_t{0x0123'4568});
  const auto next = Ledger::adopt(copy_of(ledger->fd()), 7);
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  EXPECT_EQ(next.value()->read(0).status().code(), StatusCode::integrity);
  EXPECT_EQ(next.value()->read_record(9).status().code(), StatusCode::integrity);
}

TEST(LedgerTest, a_slot_that_leaves_its_entry_is_at_no_moment_newer_than_the_one_that_came) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  JobRecord record;
  record.job_id = 7;
  record.name = "job";
  ASSERT_TRUE(ledger->write_layout(record, {}).is_ok());
  const auto note = [&](uint32_t pin_first, SlotRole role) {
    ledger->note_slot(
        {.role = role, .owner = 3, .bytes = 64, .pin_first = pin_first, .pin_count = 1});
  };
  note(0, SlotRole::made);
  note(0, SlotRole::current);
  note(1, SlotRole::made);
  note(1, SlotRole::pending);
  note(1, SlotRole::current);
  note(0, SlotRole::retired);
  const auto next = Ledger::adopt(copy_of(ledger->fd()), 7);
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  const auto contents = next.value()->read(0);
  ASSERT_TRUE(contents.is_ok()) << contents.status().message();
  // The number is stored before the role: with a higher one the old bytes would be meant between.
  EXPECT_LT(contents.value().slots.at(0).sequence, contents.value().slots.at(1).sequence);
}

TEST(LedgerTest, an_extent_counts_on_the_catalogue_that_it_builds_on_and_a_gradients_on_any) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(ledger->write_layout({.job_id = 7, .name = "job"}, {}).is_ok());
  ledger->rebase(1);
  const LooseKey value{.kind = LooseKey::Kind::value, .owner = 3};
  const LooseKey gradient{.kind = LooseKey::Kind::gradient, .owner = 3};
  for (const LooseKey& key : {value, gradient}) {
    ledger->note_loose(key, {.address = {.device = 0, .offset_bytes = 8192}, .length_bytes = 4096});
  }
  const auto loose_on = [&](uint64_t base) {
    auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(base);
    EXPECT_TRUE(contents.is_ok()) << contents.status().message();
    return contents.value().loose;
  };
  EXPECT_EQ(loose_on(1).size(), 2u);
  // The daemon died after its commit, before it could say so.
  const auto loose = loose_on(2);
  EXPECT_FALSE(loose.contains(value));
  EXPECT_TRUE(loose.contains(gradient));
}

TEST(LedgerTest, what_a_commit_made_old_does_not_come_back_with_an_earlier_catalogues_tag) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(ledger->write_layout({.job_id = 7, .name = "job"}, {}).is_ok());
  ledger->rebase(1);
  for (uint32_t index = 0; index < 10; ++index) {
    ledger->note_loose({.kind = LooseKey::Kind::value, .index = index},
                       {.address = {.device = 0, .offset_bytes = 8192}, .length_bytes = 4096});
  }
  const auto loose_count_on = [&](uint64_t base) {
    auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(base);
    EXPECT_TRUE(contents.is_ok()) << contents.status().message();
    return contents.value().loose.size();
  };
  ledger->rebase(2);
  EXPECT_FALSE(ledger->empty_old_places(9)) << "no more than so many at a time";
  EXPECT_TRUE(ledger->empty_old_places(1));
  ledger->rebase(1);
  EXPECT_EQ(loose_count_on(1), 0U);
  const LooseKey key{.kind = LooseKey::Kind::value};
  ledger->note_loose(key, {.address = {.device = 0, .offset_bytes = 8192}, .length_bytes = 4096});
  ledger->rebase(2);
  ledger->rebase(1);
  EXPECT_EQ(loose_count_on(1), 0U) << "the second commit came before the place was emptied";
}

TEST(LedgerTest, closed_steps_are_read_in_the_order_in_which_they_were_closed) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(ledger->write_layout({.job_id = 7, .name = "job"}, {}).is_ok());
  const auto close = [&](uint64_t step) {
    StepRequest request;
    request.session_id = 1;
    request.step = step;
    return ledger->close_step(request).value();
  };
  const size_t first = close(1);
  close(2);
  ledger->forget_step(first);
  EXPECT_EQ(close(3), first) << "its place is used again";
  const auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0);
  ASSERT_TRUE(contents.is_ok()) << contents.status().message();
  ASSERT_EQ(contents.value().steps.size(), 2u);
  EXPECT_EQ(contents.value().steps[0].request.step, 2u);
  EXPECT_EQ(contents.value().steps[1].request.step, 3u);
}

/// A step over these, whose gradients are sums.
StepRequest step_over(const std::vector<uint32_t>& ids) {
  return {.session_id = 1,
          .groups = {{.settings = {}, .shard_ids = ids}, {.settings = {}, .shard_ids = {3, 1}}},
          .step = 2,
          .summed = {{.session_ids = {1, 9}, .shard_ids = ids}}};
}

std::vector<uint32_t> ids_from(uint32_t first, uint32_t count) {
  std::vector<uint32_t> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

TEST(LedgerTest, a_closed_step_names_its_shards_in_their_order_and_a_whole_model_in_few_bytes) {
  std::vector<uint32_t> two_runs = ids_from(100, 50);
  for (const uint32_t id : ids_from(7, 60)) two_runs.push_back(id);
  for (const std::vector<uint32_t>& ids : std::vector<std::vector<uint32_t>>{
           {},
           {5},
           {5, 6},
           {6, 5, 4, 3},
           {1, 3, 5, 7},
           {1, 2, 3, 10, 11, 12, 9},
           {0, ~uint32_t{0}, 0, 1, 2, 3, 4},
           ids_from(~uint32_t{0} - 9, 10),
           two_runs,
       }) {
    const auto read = decode_step(encode_step(step_over(ids)));
    ASSERT_TRUE(read.is_ok()) << read.status().message();
    ASSERT_EQ(read.value().groups.size(), 2U);
    EXPECT_EQ(read.value().groups[0].shard_ids, ids);
    EXPECT_EQ(read.value().groups[1].shard_ids, (std::vector<uint32_t>{3, 1}));
    ASSERT_EQ(read.value().summed.size(), 1U);
    EXPECT_EQ(read.value().summed[0].session_ids, (std::vector<uint64_t>{1, 9}));
    EXPECT_EQ(read.value().summed[0].shard_ids, ids);
  }
  EXPECT_LT(encode_step(step_over(ids_from(0, 100'000))).size(), 300U);
}

TEST(LedgerTest, a_run_of_shards_that_no_step_can_have_is_told_from_those_that_it_may) {
  constexpr uint32_t kFirst = 0xabcde;
  constexpr uint32_t kCount = 0x1234;
  StepRequest request = step_over({});
  request.groups[0].shard_ids = ids_from(kFirst, kCount);
  const std::vector<std::byte> encoded = encode_step(request);
  ASSERT_TRUE(decode_step(encoded).is_ok());
  const auto read_with = [&](uint32_t word, uint32_t by) {
    std::vector<std::byte> bytes = encoded;
    const auto* const begin = reinterpret_cast<const std::byte*>(&word);
    const auto at = std::search(bytes.begin(), bytes.end(), begin, begin + sizeof(word));
    EXPECT_NE(at, bytes.end());
    std::memcpy(&*at, &by, sizeof(by));
    return decode_step(bytes).status().code();
  };
  EXPECT_EQ(read_with(kCount, ~uint32_t{0}), StatusCode::integrity) << "16 GiB of ids";
  EXPECT_EQ(read_with(kFirst, ~uint32_t{0} - 1), StatusCode::integrity) << "beyond all ids";
  EXPECT_EQ(read_with(kCount, kCount + 1), StatusCode::ok);
}

TEST(LedgerTest, a_closed_step_has_every_setting_of_its_groups_in_the_next_daemon) {
  auto ledger = Ledger::create(7, 2_MiB).value();
  ASSERT_TRUE(ledger->write_layout({.job_id = 7, .name = "job"}, {}).is_ok());
  StepRequest request{.session_id = 1, .step = 1};
  for (uint32_t i = 0; i < 8; ++i) {
    request.groups.push_back({.settings = {.lr = 0.1 * i,
                                           .beta1 = 0.2 * i,
                                           .beta2 = 0.3 * i,
                                           .eps = 1e-3 * i,
                                           .weight_decay = 0.01 * i,
                                           .decoupled = (i & 1) != 0,
                                           .maximize = (i & 2) != 0,
                                           .amsgrad = (i & 4) != 0},
                              .shard_ids = {i}});
  }
  ASSERT_TRUE(ledger->close_step(request).is_ok());
  const auto contents = Ledger::adopt(copy_of(ledger->fd()), 7).value()->read(0);
  ASSERT_TRUE(contents.is_ok()) << contents.status().message();
  ASSERT_EQ(contents.value().steps.size(), 1u);
  const auto& groups = contents.value().steps[0].request.groups;
  ASSERT_EQ(groups.size(), 8u);
  for (uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(groups[i].settings, request.groups[i].settings) << i;
    EXPECT_EQ(groups[i].shard_ids, request.groups[i].shard_ids) << i;
  }
}

class RepeatedStepTest : public ::testing::Test {
 protected:
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
};

TEST_F(RepeatedStepTest, a_step_that_is_asked_for_twice_is_made_once) {
  Heart heart(disk_);
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("w", 1000)});
  heart.write(session, ids[0], numbers(1000, 1));
  heart.write(session, ids[0], numbers(1000, 2), Part::gradient);
  StepRequest request{
      .session_id = session, .groups = {{.settings = {}, .shard_ids = ids}}, .staged_buffers = {}};
  request.step = 1;
  int answers = 0;
  for (int i = 0; i < 2; ++i) {
    heart.store().operations().step(request, [&](const Status& status, const StepReport& report) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      EXPECT_EQ(report.committed_step, 1U);
      ++answers;
    });
  }
  ASSERT_TRUE(heart.until([&] { return answers == 2; }));
  const auto after = heart.read<float>(session, ids[0]);
  const auto [again, report] = heart.step(request);
  EXPECT_TRUE(again.is_ok()) << again.message();
  EXPECT_EQ(report.committed_step, 1U);
  EXPECT_EQ(heart.read<float>(session, ids[0]), after);
}

TEST_F(RepeatedStepTest, a_step_that_another_session_made_is_refused) {
  Heart heart(disk_);
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const auto ids = heart.declare(session, {parameter("v", 1000), parameter("w", 1000)});
  for (int i = 0; i < 2; ++i) {
    heart.write(session, ids[i], numbers(1000, 1));
    heart.write(i == 0 ? session : other, ids[i], numbers(1000, 2), Part::gradient);
  }
  StepRequest first{.session_id = session,
                    .groups = {{.settings = {}, .shard_ids = {ids[0]}}},
                    .staged_buffers = {},
                    .step = 1};
  ASSERT_TRUE(heart.step(first).first.is_ok());
  StepRequest second{.session_id = other,
                     .groups = {{.settings = {}, .shard_ids = {ids[1]}}},
                     .staged_buffers = {},
                     .step = 1};
  const Status refused = heart.step(second).first;
  EXPECT_EQ(refused.code(), StatusCode::fenced);
  EXPECT_NE(refused.message().find("stands at step"), std::string::npos) << refused.message();
  second.step = 2;
  EXPECT_TRUE(heart.step(second).first.is_ok());
}

// ---- Daemons that are killed

constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says

/// Thrown out of an operation's submission: the daemon gets no further.
struct Killed {};

/// Daemons that were killed. Their memory stays mapped, as nothing of theirs may run any more.
std::vector<Heart*>& dead_hearts() {
  // Never destroyed: what only a destroyed list refers to is a leak.
  static auto* const dead = new std::vector<Heart*>;
  return *dead;
}

class AdoptionTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 300'000;  // two tiles
  static constexpr uint64_t kBufferBytes = 5000;
  // Small, as each kill needs one of its own.
  static constexpr uint64_t kSmallDiskBytes = 44_MiB;
  static constexpr uint64_t kJobDiskBytes = 30_MiB;

  void start() {
    heart_ = new Heart(disk_, segment_count_, &keeper_);
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  void kill() {
    heart_->kill();
    dead_hearts().push_back(std::exchange(heart_, nullptr));
  }
  /// The next daemon, and the trainer's session in it.
  void restart(bool is_back = true) {
    kill();
    start();
    if (is_back) resume();
  }
  void resume() {
    const auto session = heart_->store().resume_session(session_, kOwner);
    ASSERT_TRUE(session.is_ok()) << session.status().message() << notes();
  }
  std::string notes() const {
    std::string all;
    for (const std::string& note : heart_->store().load_notes()) all += "\n" + note;
    return all;
  }
  void TearDown() override {
    delete std::exchange(heart_, nullptr);
    give_memory_back();
  }
  /// Of the disk, and of what the dead have mapped for good.
  void give_memory_back() {
    for (const auto bytes : {disk_->bytes(), disk_->durable_bytes()}) {
      const uint64_t begin = align_up(reinterpret_cast<uint64_t>(bytes.data()), kBlockBytes);
      const uint64_t end =
          align_down(reinterpret_cast<uint64_t>(bytes.data() + bytes.size()), kBlockBytes);
      ASSERT_EQ(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED), 0);
    }
    for (const std::string& name : keeper_.names()) {
      if (name.starts_with("doorbell.")) continue;
      struct stat status{};
      ASSERT_EQ(fstat(keeper_.find(name), &status), 0);
      ASSERT_EQ(
          fallocate(
              keeper_.find(name), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, status.st_size),
          0);
    }
    keeper_ = {};
  }

  void begin(DType dtype, uint64_t arena_segments = 8, const std::string& durability = "step") {
    start();
    job_id_ =
        heart_->open("job", arena_segments, kJobDiskBytes, Durability::parse(durability).value());
    session_ = heart_->attach(job_id_);
    ids_ = heart_->declare(session_,
                           {with_maximum(parameter("v", kElements, dtype), settings_.amsgrad),
                            with_maximum(parameter("w", 1000, dtype), settings_.amsgrad),
                            bytes_shard("buffer", kBufferBytes, ShardKind::buffer),
                            bytes_shard("staged", kBufferBytes, ShardKind::buffer)});
    twins_.clear();
    for (const size_t i : {0, 1}) {
      if (dtype == DType::float32) {
        twins_.push_back(Twin::fp32(numbers(count(i), i + 1)));
        heart_->write(session_, ids_[i], twins_[i].theta);
      } else {
        twins_.push_back(Twin::bf16(halves(count(i), i + 1)));
        heart_->write(session_, ids_[i], twins_[i].half);
      }
    }
    heart_->write(session_, ids_[2], pattern(kBufferBytes, 1));
    ASSERT_TRUE(heart_->sync(session_).is_ok());
    dtype_ = dtype;
  }
  static uint64_t count(size_t i) { return i == 0 ? kElements : 1000; }
  void write_gradients(uint32_t seed) {
    for (const size_t i : {0, 1}) {
      if (dtype_ == DType::float32) {
        heart_->write(session_, ids_[i], numbers(count(i), seed + i), Part::gradient);
      } else {
        heart_->write(session_, ids_[i], halves(count(i), seed + i), Part::gradient);
      }
    }
    heart_->write(session_, ids_[3], pattern(kBufferBytes, static_cast<uint8_t>(seed)));
  }
  void step_twins(uint32_t seed) {
    for (const size_t i : {0, 1}) {
      if (dtype_ == DType::float32) {
        twins_[i].step(settings_, numbers(count(i), seed + i));
      } else {
        twins_[i].step(settings_, halves(count(i), seed + i));
      }
    }
  }
  StepRequest request(uint64_t step) const {
    return {.session_id = session_,
            .groups = {{.settings = settings_, .shard_ids = {ids_[0], ids_[1]}}},
            .staged_buffers = {{ids_[3], ids_[2]}},
            .step = step};
  }
  void remove(const std::string& name) {
    bool is_removed = false;
    heart_->store().delete_shard(
        session_, name, [&](const Result<bool>& result) { is_removed = result.is_ok(); });
    ASSERT_TRUE(heart_->until([&] { return is_removed; }));
  }
  /// What the job's operation is doing.
  bool is_in_phase(const std::string& phase) {
    const auto all = heart_->store().reports().in_flight();
    return std::any_of(
        all.begin(), all.end(), [&](const Activity& each) { return each.what == phase; });
  }
  /// The job's next trainer wants another durability.
  void change_durability(const std::string& durability) {
    ASSERT_TRUE(heart_->store().detach(session_).is_ok());
    heart_->open("job", 8, kJobDiskBytes, Durability::parse(durability).value());
    session_ = heart_->attach(job_id_);
  }
  /// Of the second parameter, all of them.
  void write_moments(uint64_t generation,
                     std::vector<float> m,
                     std::vector<float> v,
                     std::vector<float> v_max = {}) {
    const Status written = heart_->write_moments(
        session_,
        ids_[1],
        generation,
        {.exp_avg = std::move(m), .exp_avg_sq = std::move(v), .max_exp_avg_sq = std::move(v_max)});
    ASSERT_TRUE(written.is_ok()) << written.message();
  }
  /// A blob as large as the arena, less what one lease of it needs.
  uint32_t put_large(const std::string& name, uint8_t seed = 9) {
    const auto blob = heart_->declare(session_, {bytes_shard(name, 5_MiB)});
    heart_->write(session_, blob[0], pattern(5_MiB, seed));
    return blob[0];
  }
  void spill_gradients() {
    put_large("blob");
    const Entry& gradient = *heart_->job(session_).shards().find_entry(ids_[0], Part::gradient);
    EXPECT_EQ(gradient.residency(), Residency::absent);
    EXPECT_TRUE(gradient.has_replica());
  }
  void expect_twins(uint32_t buffer_seed) {
    for (const size_t i : {0, 1}) {
      if (dtype_ == DType::float32) {
        EXPECT_EQ(heart_->read<float>(session_, ids_[i]), twins_[i].theta);
      } else {
        EXPECT_EQ(heart_->read<uint16_t>(session_, ids_[i]), twins_[i].half);
      }
      const MomentValues moments = heart_->moment_values(session_, ids_[i]);
      EXPECT_EQ(moments.exp_avg, twins_[i].m);
      EXPECT_EQ(moments.exp_avg_sq, twins_[i].v);
      const bool keeps_maximum = heart_->job(session_).shards()[ids_[i]].keeps_maximum;
      EXPECT_EQ(moments.max_exp_avg_sq, keeps_maximum ? twins_[i].v_max : std::vector<float>());
    }
    EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[2]),
              pattern(kBufferBytes, static_cast<uint8_t>(buffer_seed)));
  }
  /// The step that was closed before the kill is made: by its number, whoever finishes it.
  void expect_step(uint64_t step, uint32_t seed) {
    const auto [status, report] = heart_->step(request(step));
    ASSERT_TRUE(status.is_ok()) << status.message() << notes();
    EXPECT_EQ(report.committed_step, step);
    step_twins(seed);
    expect_twins(seed);
    for (const size_t i : {0, 1}) {
      EXPECT_EQ(heart_->lease(session_, ids_[i], LeaseMode::read, Part::gradient).status.code(),
                StatusCode::not_found)
          << "gradients are used once";
    }
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
  TestKeeper keeper_;
  uint64_t segment_count_ = kFloorSegments + 8;
  Heart* heart_ = nullptr;
  uint64_t job_id_ = 0;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  DType dtype_ = DType::float32;
  AdamSettings settings_{.lr = 1e-2, .weight_decay = 0.1};
};

TEST_F(AdoptionTest, leases_stay_valid_and_nobody_writes_over_them) {
  begin(DType::float32);
  const Held view = heart_->lease(session_, ids_[0]);
  ASSERT_TRUE(view.is_ok());
  const uint64_t offset = view.grant.offset_bytes;
  const uint32_t pin = view.grant.slot->pin_first + view.grant.index;
  const auto old = twins_[0].theta;
  restart();
  Job& job = heart_->job(session_);
  EXPECT_EQ(job.cache().slots().lease_count(), 1U);
  const auto* const still = reinterpret_cast<const float*>(job.memory()->arena().at(offset));
  EXPECT_TRUE(std::equal(old.begin(), old.end(), still));
  write_gradients(20);
  expect_step(1, 20);
  EXPECT_TRUE(std::equal(old.begin(), old.end(), still)) << "a live view is never written";
  heart_->store().sessions().at(session_)->ring.add_pin(pin, ~kReaderPin + 1);
  EXPECT_EQ(job.cache().slots().lease_count(), 0U);
  // And all that was retired can be used again.
  heart_->write(
      session_, heart_->declare(session_, {bytes_shard("large", 12_MiB)})[0], pattern(12_MiB, 3));
}

TEST_F(AdoptionTest, pins_are_of_the_same_shards_where_ids_were_used_again) {
  begin(DType::float32);
  for (const auto& name : {"x", "y", "z"}) {
    const auto blob = heart_->declare(session_, {bytes_shard(name, 100)});
    heart_->write(session_, blob[0], pattern(100, 1));
  }
  for (const auto& name : {"x", "y", "z"}) remove(name);
  // Empty tensors share their offset with the one behind them.
  const auto ids = heart_->declare(
      session_,
      {parameter("p", 100), parameter("empty", 0), parameter("as empty", 0), parameter("q", 200)});
  ASSERT_GT(ids[0], ids[1]) << "ids that are used again come in another order";
  ASSERT_GT(ids[1], ids[2]);
  heart_->write(session_, ids[0], numbers(100, 1));
  heart_->write(session_, ids[3], numbers(200, 2));
  // And the ledger's list of shards in another one still.
  heart_->declare(session_, {bytes_shard("x", 100)});
  remove("x");
  std::vector<uint32_t> places;
  for (const uint32_t id : ids)
    places.push_back(heart_->job(session_).shards()[id].index_in_bucket);
  const Held view = heart_->lease(session_, ids[0]);
  ASSERT_TRUE(view.is_ok());
  const uint64_t offset = view.grant.offset_bytes;
  restart();
  for (size_t i = 0; i < ids.size(); ++i)
    EXPECT_EQ(heart_->job(session_).shards()[ids[i]].index_in_bucket, places[i]) << i;
  const Held writer = heart_->lease(session_, ids[0], LeaseMode::write);
  ASSERT_TRUE(writer.is_ok()) << writer.status.message();
  EXPECT_NE(writer.grant.offset_bytes, offset) << "a live view is never written";
}

TEST_F(AdoptionTest, what_was_written_and_not_synced_is_still_there) {
  begin(DType::bfloat16);
  const auto more = heart_->declare(session_, {bytes_shard("blob", 3_MiB), parameter("x", 64)});
  heart_->write(session_, more[0], pattern(3_MiB, 4));
  heart_->write(session_, more[1], numbers(64, 4));
  twins_[0].half = halves(kElements, 77);
  heart_->write(session_, ids_[0], twins_[0].half);
  // Two that lie on disk by now, where no catalogue names them.
  for (const auto& name : {"big", "bigger"}) {
    const auto blob = heart_->declare(session_, {bytes_shard(name, 7_MiB)});
    heart_->write(session_, blob[0], pattern(7_MiB, 5));
  }
  EXPECT_GT(heart_->job(session_).cache().counters().spilled_bytes, 0U);
  restart();
  EXPECT_EQ(heart_->read<uint8_t>(session_, more[0]), pattern(3_MiB, 4));
  EXPECT_EQ(heart_->read<float>(session_, more[1]), numbers(64, 4));
  EXPECT_EQ(heart_->read<uint16_t>(session_, ids_[0]), twins_[0].half);
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  restart();
  write_gradients(30);
  expect_step(1, 30);
  EXPECT_EQ(heart_->read<uint8_t>(session_, more[0]), pattern(3_MiB, 4));
}

TEST_F(AdoptionTest, gradients_of_a_living_trainer_survive_and_those_of_a_dead_one_are_dropped) {
  begin(DType::float32, 3);
  write_gradients(5);
  restart();
  EXPECT_EQ(heart_->read<float>(session_, ids_[0], Part::gradient), numbers(kElements, 5));
  expect_step(1, 5);
  write_gradients(6);
  spill_gradients();
  restart();
  EXPECT_EQ(heart_->read<float>(session_, ids_[0], Part::gradient), numbers(kElements, 6));
  expect_step(2, 6);

  write_gradients(7);
  restart(false);
  ASSERT_EQ(heart_->store().kept_sessions().size(), 1U);
  EXPECT_EQ(heart_->store().kept_sessions()[0].owner, kOwner);
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  EXPECT_TRUE(heart_->store().kept_sessions().empty());
  session_ = heart_->attach(job_id_);
  for (const size_t i : {0, 1}) {
    EXPECT_EQ(heart_->lease(session_, ids_[i], LeaseMode::read, Part::gradient).status.code(),
              StatusCode::not_found);
  }
  expect_twins(6);
}

TEST_F(AdoptionTest, who_trained_together_does_so_with_the_next_daemon_and_nobody_else_does) {
  begin(DType::float32);
  const uint64_t member = heart_->attach(job_id_);
  const uint64_t other = heart_->attach(job_id_);
  for (const uint64_t session : {session_, member})
    ASSERT_TRUE(heart_->job(session_).cache().group().join(session).is_ok());
  const auto expect_group = [&] {
    const TrainingGroup& group = heart_->job(session_).cache().group();
    EXPECT_EQ(group.size(), 2U);
    EXPECT_TRUE(group.are_together(session_, member));
    for (const auto& session : heart_->job(session_).cache().sessions())
      EXPECT_EQ(session->ring.in_group(), session->session_id != other) << session->session_id;
  };
  expect_group();
  for (int life = 0; life < 2; ++life) {
    restart();
    expect_group();
  }
  ASSERT_TRUE(heart_->store().detach(member).is_ok());
  restart();
  EXPECT_EQ(heart_->job(session_).cache().group().size(), 1U);
  EXPECT_TRUE(heart_->job(session_).cache().group().contains(session_));
}

TEST_F(AdoptionTest, a_sum_of_two_sessions_outlives_a_daemon_and_its_end_is_told_by_the_next) {
  begin(DType::float32);
  const uint64_t member = heart_->attach(job_id_);
  for (const uint64_t session : {session_, member})
    ASSERT_TRUE(heart_->job(session_).cache().group().join(session).is_ok());
  const auto add = [&](uint64_t session, uint32_t seed) {
    const Held held = heart_->lease(session, ids_[1], LeaseMode::write, Part::gradient);
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    const auto values = numbers(1000, seed);
    for (size_t i = 0; i < values.size(); ++i) held.as<float>()[i] += values[i];
    heart_->release(held);
  };
  const StepRequest step{.session_id = session_,
                         .groups = {{.settings = settings_, .shard_ids = {ids_[1]}}},
                         .staged_buffers = {}};
  add(session_, 5);
  add(member, 6);
  restart();
  ASSERT_TRUE(heart_->store().resume_session(member, kOwner).is_ok());
  ASSERT_TRUE(heart_->step(step).first.is_ok());
  auto sum = numbers(1000, 5);
  const auto second = numbers(1000, 6);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += second[i];
  twins_[1].step(settings_, sum);
  EXPECT_EQ(heart_->read<float>(session_, ids_[1]), twins_[1].theta);

  add(session_, 7);
  add(member, 8);
  restart();
  // The other's process is dead.
  ASSERT_TRUE(heart_->store().detach(member).is_ok());
  EXPECT_TRUE(heart_->job(session_).shards()[ids_[1]].contributors.empty());
  // Nor does the daemon live until the first hears of it.
  restart();
  const Status told = heart_->lease(session_, ids_[1], LeaseMode::write, Part::gradient).status;
  EXPECT_EQ(told.code(), StatusCode::invalid_argument);
  EXPECT_NE(told.message().find("a gradient is void"), std::string::npos) << told.message();
  restart();
  add(session_, 9);
  ASSERT_TRUE(heart_->step(step).first.is_ok()) << "it was told once";
  twins_[1].step(settings_, numbers(1000, 9));
  EXPECT_EQ(heart_->read<float>(session_, ids_[1]), twins_[1].theta);
}

TEST_F(AdoptionTest, only_its_own_process_comes_back_to_a_session) {
  begin(DType::float32);
  restart(false);
  for (const SessionOwner& other : {SessionOwner{.pid = 1, .start_time = 9, .uid = 3},
                                    SessionOwner{.pid = 2, .start_time = 2, .uid = 3},
                                    SessionOwner{.pid = 1, .start_time = 2, .uid = 4}}) {
    EXPECT_EQ(heart_->store().resume_session(session_, other).status().code(), StatusCode::fenced);
  }
  resume();
}

TEST_F(AdoptionTest, who_comes_back_to_the_same_daemon_is_granted_nothing_that_it_asked_before) {
  begin(DType::float32);
  const uint64_t other = heart_->attach(job_id_);
  const Held writer = heart_->lease(other, ids_[0], LeaseMode::write);
  ASSERT_TRUE(writer.is_ok());
  const auto waits = heart_->ask(session_, ids_[0], LeaseMode::write);
  ASSERT_FALSE(waits->has_value());
  resume();
  ASSERT_TRUE(waits->has_value());
  EXPECT_EQ((*waits)->status.code(), StatusCode::unavailable);
  heart_->release(writer);
  heart_->turns();
  EXPECT_EQ(heart_->job(session_).cache().slots().lease_count(), 0U);
  expect_twins(1);
}

TEST_F(AdoptionTest, a_step_that_the_next_daemon_cannot_make_gives_the_sum_back_to_who_made_it) {
  for (const bool has_one_ended : {false, true}) {
    SCOPED_TRACE(has_one_ended);
    disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
    begin(DType::float32);
    const uint64_t member = heart_->attach(job_id_);
    const uint64_t idle = heart_->attach(job_id_);  // adds nothing
    for (const uint64_t session : {session_, member, idle})
      ASSERT_TRUE(heart_->job(session_).cache().group().join(session).is_ok());
    for (const uint64_t session : {session_, member}) {
      const Held held = heart_->lease(session, ids_[1], LeaseMode::write, Part::gradient);
      ASSERT_TRUE(held.is_ok()) << held.status.message();
      std::ranges::fill(held.as<float>(), 1.0F);
      heart_->release(held);
    }
    heart_->store().operations().step({.session_id = session_,
                                       .groups = {{.settings = settings_, .shard_ids = {ids_[1]}}},
                                       .staged_buffers = {}},
                                      [](const Status&, const StepReport&) {});
    if (has_one_ended) {
      ASSERT_TRUE(heart_->store().detach(member).is_ok());
    }
    kill();
    heart_ =
        new Heart(disk_,
                  testing::HeartOptions{
                      .segment_count = segment_count_, .keeper = &keeper_, .redo_steps = false});
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
    for (const uint64_t session : {session_, idle})
      ASSERT_TRUE(heart_->store().resume_session(session, kOwner).is_ok());
    Job& job = heart_->job(session_);
    job.space().set_quota_bytes(job.space().used_bytes());
    heart_->store().operations().redo_steps();
    ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
    EXPECT_EQ(job.progress().committed_step(), 0U);
    const TrainingGroup& group = job.cache().group();
    const Contributors& contributors = job.shards()[ids_[1]].contributors;
    EXPECT_EQ(group.sessions_of(contributors),
              has_one_ended ? std::vector<uint64_t>() : std::vector<uint64_t>({session_, member}));
    const Status said = heart_->lease(session_, ids_[1], LeaseMode::read, Part::gradient).status;
    EXPECT_EQ(said.message().find("is void, since session") != std::string::npos, has_one_ended)
        << said.message();
    delete std::exchange(heart_, nullptr);
    give_memory_back();
  }
}

TEST_F(AdoptionTest, a_closed_step_is_finished_although_its_trainer_is_dead) {
  settings_.maximize = true;
  settings_.amsgrad = true;
  begin(DType::float32);
  write_gradients(8);
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  restart(false);
  EXPECT_EQ(heart_->store().operations().closing_step(job_id_), 1U);
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
  session_ = heart_->attach(job_id_);
  step_twins(8);
  expect_twins(8);
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 1U);
}

TEST_F(AdoptionTest, a_lease_of_a_dead_trainer_is_not_in_the_way_of_the_step_that_it_closed) {
  begin(DType::float32);
  const auto other = heart_->declare(session_, {parameter("other", 64)});
  heart_->write(session_, other[0], numbers(64, 4));
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  write_gradients(8);
  ASSERT_TRUE(heart_->lease(session_, other[0], LeaseMode::write).is_ok());
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  kill();
  heart_ = new Heart(disk_,
                     testing::HeartOptions{
                         .segment_count = segment_count_, .keeper = &keeper_, .redo_steps = false});
  ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  heart_->turns(5);
  EXPECT_EQ(heart_->store().operations().closing_step(job_id_), 1U) << "it waits";
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  heart_->store().operations().redo_steps();
  ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
  session_ = heart_->attach(job_id_);
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 1U);
  step_twins(8);
  expect_twins(8);
  EXPECT_EQ(heart_->read<float>(session_, other[0]), numbers(64, 4));
}

TEST_F(AdoptionTest, what_was_half_written_when_the_daemon_died_with_its_trainer_is_gone) {
  begin(DType::float32);
  const Held blob = heart_->lease(session_, ids_[2], LeaseMode::overwrite);
  ASSERT_TRUE(blob.is_ok());
  std::fill_n(blob.grant.data, 2000, std::byte{0x55});
  const Held value = heart_->lease(session_, ids_[0], LeaseMode::write);
  ASSERT_TRUE(value.is_ok());
  value.as<float>()[3] = 55;
  restart(false);
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  session_ = heart_->attach(job_id_);
  expect_twins(1);
}

TEST_F(AdoptionTest, a_daemon_that_dies_while_it_starts_leaves_the_same) {
  begin(DType::float32);
  write_gradients(8);
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  for (int i = 0; i < 3; ++i) restart(false);
  resume();
  expect_step(1, 8);
}

TEST_F(AdoptionTest, a_job_without_a_kept_segment_starts_from_disk_and_its_memory_is_nobodys) {
  begin(DType::float32);
  for (const std::string& name : keeper_.names()) {
    if (!name.starts_with("segment.")) continue;
    keeper_.forget(name);
    break;
  }
  restart(false);
  EXPECT_FALSE(notes().empty());
  EXPECT_EQ(heart_->store().resume_session(session_, kOwner).status().code(), StatusCode::fenced);
  session_ = heart_->attach(heart_->open("job", 8, kJobDiskBytes));
  ids_ = {};
  for (const ShardInfo& info : heart_->shards(job_id_)) ids_.push_back(info.shard_id);
  expect_twins(1);
}

TEST_F(AdoptionTest, a_trainer_that_spoils_its_session_costs_the_others_of_its_job_nothing) {
  begin(DType::float32);
  write_gradients(8);
  const uint64_t spoiler = heart_->attach(job_id_);
  const Held blob = heart_->lease(spoiler, ids_[2], LeaseMode::overwrite);
  ASSERT_TRUE(blob.is_ok());
  std::fill_n(blob.grant.data, 2000, std::byte{0x55});
  const auto memory = SharedMemory::map(
      OwnedFd(fcntl(keeper_.find(concat("session.", spoiler)), F_DUPFD_CLOEXEC, 0)),
      sizeof(SessionLayout));
  ASSERT_TRUE(memory.is_ok());
  reinterpret_cast<SessionLayout*>(memory.value().data())->header.magic = 0;
  restart();
  EXPECT_EQ(notes(), "");
  heart_->turn();
  EXPECT_EQ(heart_->store().resume_session(spoiler, kOwner).status().code(), StatusCode::fenced);
  EXPECT_EQ(heart_->store().sessions().size(), 1U);
  expect_twins(1);  // and nothing of what it half wrote
  expect_step(1, 8);
}

TEST_F(AdoptionTest, sessions_of_a_job_whose_memory_is_lost_are_kept_no_longer) {
  begin(DType::float32);
  for (const std::string& name : keeper_.names()) {
    if (name.starts_with("table.")) keeper_.forget(name);
  }
  restart(false);
  EXPECT_NE(notes().find("nobody kept its shard table"), std::string::npos) << notes();
  for (const std::string& name : keeper_.names()) EXPECT_TRUE(name.starts_with("segment.")) << name;
}

TEST_F(AdoptionTest, nobody_comes_back_to_a_session_of_a_daemon_whose_memory_was_lost) {
  begin(DType::float32);
  const uint64_t old = session_;
  for (const std::string& name : keeper_.names()) keeper_.forget(name);
  restart(false);
  session_ = heart_->attach(heart_->open("job", 8, kJobDiskBytes));
  EXPECT_NE(session_, old);
  EXPECT_EQ(heart_->store().resume_session(old, kOwner).status().code(), StatusCode::fenced);
}

TEST_F(AdoptionTest, a_dropped_job_and_one_that_the_disk_does_not_know_leave_nothing) {
  segment_count_ = 2 * kFloorSegments + 4;
  begin(DType::float32, 2);
  heart_->attach(heart_->open("young", 1, 1_MiB));
  restart();
  EXPECT_EQ(heart_->store().reports().find_job("young").status().code(), StatusCode::not_found);
  bool is_dropped = false;
  heart_->store().drop_job(job_id_, true, [&](const Status& status) {
    EXPECT_TRUE(status.is_ok()) << status.message();
    is_dropped = true;
  });
  ASSERT_TRUE(heart_->until([&] { return is_dropped; }));
  testing::replace_released(heart_->store().memory());
  for (const std::string& name : keeper_.names()) EXPECT_TRUE(name.starts_with("segment."));
  restart(false);
  EXPECT_TRUE(heart_->store().reports().jobs().empty());
}

TEST_F(AdoptionTest, a_deleted_blobs_id_is_known_to_the_sessions_of_the_daemon_before) {
  begin(DType::float32);
  const uint64_t other = heart_->attach(job_id_);
  const auto blob = heart_->declare(session_, {bytes_shard("blob", 5000)});
  heart_->write(session_, blob[0], pattern(5000, 1));
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  remove("blob");
  restart();
  ASSERT_TRUE(heart_->store().resume_session(other, kOwner).is_ok());
  const auto next = heart_->declare(session_, {bytes_shard("next", 5000)});
  EXPECT_NE(next[0], blob[0]);
  EXPECT_EQ(heart_->lease(other, blob[0]).status.code(), StatusCode::not_found);
  ASSERT_TRUE(heart_->store().detach(other).is_ok());
  const uint64_t third = heart_->attach(job_id_);
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  session_ = third;
  EXPECT_EQ(heart_->declare(session_, {bytes_shard("last", 5000)})[0], blob[0]);
}

TEST_F(AdoptionTest, a_blob_that_is_deleted_during_a_step_in_memory_costs_no_memory) {
  begin(DType::float32, 8, "every:1");
  const auto blob = heart_->declare(session_, {bytes_shard("blob", 5000)});
  heart_->write(session_, blob[0], pattern(5000, 1));
  write_gradients(8);
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  // Buffers have changed places, and the step is not committed.
  ASSERT_TRUE(heart_->until([this] { return is_in_phase("updates tiles"); }));
  remove("blob");
  restart();
  expect_step(1, 8);
}

TEST_F(AdoptionTest, a_buffer_that_is_put_while_a_step_in_memory_goes_to_disk_is_not_the_steps) {
  begin(DType::float32, 8, "every:1");
  write_gradients(8);
  heart_->faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::sync});
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  ASSERT_TRUE(
      heart_->until([this] { return heart_->job(session_).progress().committed_step() == 1; }));
  heart_->write(session_, ids_[2], pattern(kBufferBytes, 50));
  heart_->write(session_, ids_[3], pattern(kBufferBytes, 51));
  ASSERT_EQ(heart_->shards(job_id_).size(), 4U);  // what was put is settled
  ASSERT_EQ(heart_->job(session_).progress().durable_step(), 0U);
  restart();
  EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[2]), pattern(kBufferBytes, 50));
  EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[3]), pattern(kBufferBytes, 51));
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 1U);
  step_twins(8);
  expect_twins(50);
}

TEST_F(AdoptionTest, moments_that_were_written_after_steps_in_memory_keep_their_generation) {
  begin(DType::float32, 8, "every:4");
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  step_twins(8);
  change_durability("step");
  twins_[1].t = 100;
  twins_[1].m = numbers(count(1), 60);
  twins_[1].v = std::vector<float>(count(1), 0.25F);
  write_moments(100, twins_[1].m, twins_[1].v);
  restart();
  expect_twins(8);
  EXPECT_EQ(heart_->job(session_).shards()[ids_[1]].generation, 100U);
}

TEST_F(AdoptionTest, moments_that_were_written_before_a_step_in_memory_count_with_it) {
  begin(DType::float32, 8, "every:4");
  for (const uint64_t generation : {100, 200}) {
    twins_[1].t = generation;
    twins_[1].m = numbers(count(1), 60);
    twins_[1].v = std::vector<float>(count(1), 0.25F);
    write_moments(generation, twins_[1].m, twins_[1].v);
    write_gradients(8);
    ASSERT_TRUE(heart_->step(request(generation / 100)).first.is_ok());
    step_twins(8);
    restart();
    expect_twins(8);
    EXPECT_EQ(heart_->job(session_).shards()[ids_[1]].generation, generation + 1);
  }
}

TEST_F(AdoptionTest, a_blob_that_came_back_has_none_of_the_bytes_of_the_deleted_one) {
  begin(DType::float32, 3, "every:4");
  const auto extents_of = [this](uint32_t shard_id) {
    std::set<uint64_t> offsets;
    for (const Replica& replica : heart_->job(session_).shards()[shard_id].value->replicas()) {
      EXPECT_TRUE(replica.exists());
      offsets.insert(replica.offset_bytes());
    }
    return offsets;
  };
  const uint32_t old = put_large("blob");
  put_large("other 0");  // takes its room: it lies on disk
  const std::set<uint64_t> old_extents = extents_of(old);
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  step_twins(8);
  remove("blob");
  bool is_taken = false;  // by others
  for (int i = 1; i < 50 && !is_taken; ++i) {
    const uint32_t other = put_large(concat("other ", i));
    remove(concat("other ", i - 1));
    put_large("next");
    for (const uint64_t offset : extents_of(other)) is_taken |= old_extents.contains(offset);
    remove("next");
  }
  ASSERT_TRUE(is_taken);
  const uint32_t again = put_large("blob", 77);
  EXPECT_FALSE(heart_->shards(job_id_).empty());  // what was put is settled
  restart();
  EXPECT_EQ(notes(), "");
  EXPECT_EQ(heart_->read<uint8_t>(session_, again), pattern(5_MiB, 77));
  expect_twins(8);
}

TEST_F(AdoptionTest, a_tile_of_moments_and_a_deleted_blob_cost_the_same_in_a_job_of_any_size) {
  std::map<std::string, std::vector<uint64_t>> bytes;
  for (const uint32_t shard_count : {100, 10'000}) {
    segment_count_ = kFloorSegments + 24;
    begin(DType::float32, 24, "every:4");
    std::vector<ShardSpec> blobs;
    for (uint32_t i = 0; i < shard_count; ++i) {
      blobs.push_back(bytes_shard(concat("b", i + 10'000), 1));
      blobs.back().tier = Tier::host;  // no disk quota holds so many
    }
    heart_->declare(session_, blobs);
    write_gradients(8);
    ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
    const JobLedger& ledger = heart_->job(session_).kept().ledger();
    const auto count = [&](const std::string& name, const std::function<void()>& act) {
      const uint64_t before = ledger.record_bytes_written();
      act();
      bytes[name].push_back(ledger.record_bytes_written() - before);
    };
    count("step", [&] {
      write_gradients(9);
      ASSERT_TRUE(heart_->step(request(2)).first.is_ok());
    });
    count("moments", [&] { write_moments(7, numbers(1000, 1), numbers(1000, 1)); });
    count("deletion", [&] { remove("b10050"); });
    TearDown();
    disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
  }
  EXPECT_GT(bytes["step"][1], 10 * bytes["step"][0]) << "what is counted grows with the job";
  EXPECT_EQ(bytes["moments"], (std::vector<uint64_t>{0, 0})) << "words alone say them";
  EXPECT_EQ(bytes["deletion"][0], bytes["deletion"][1]);
  EXPECT_LT(bytes["deletion"][1], 1_KiB);
}

TEST_F(AdoptionTest, parameters_that_were_declared_one_by_one_are_there_with_the_next_daemon) {
  segment_count_ = kFloorSegments + 16;
  begin(DType::float32, 16, "every:4");
  const JobLedger& ledger = heart_->job(session_).kept().ledger();
  std::vector<uint32_t> ids;
  std::set<uint64_t> cost_bytes;
  for (uint32_t i = 0; i < 3; ++i) {
    const uint64_t before = ledger.record_bytes_written();
    const auto added = heart_->declare(
        session_,
        {with_maximum(parameter(concat("p", i), 3000), i == 2), bytes_shard(concat("b", i), 100)});
    cost_bytes.insert(ledger.record_bytes_written() - before);
    heart_->write(session_, added[0], numbers(3000, 50 + i));
    heart_->write(session_, added[1], pattern(100, static_cast<uint8_t>(i)));
    ids.insert(ids.end(), added.begin(), added.end());
  }
  EXPECT_EQ(cost_bytes.size(), 1U) << "what is declared costs the same, whatever the job has";
  EXPECT_LT(*cost_bytes.begin(), 1_KiB);
  remove("b1");
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  step_twins(8);
  restart();
  EXPECT_EQ(notes(), "");
  expect_twins(8);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(heart_->read<float>(session_, ids[2 * i]), numbers(3000, 50 + i)) << i;
    EXPECT_EQ(heart_->job(session_).shards()[ids[2 * i]].keeps_maximum, i == 2) << i;
    if (i == 1) continue;
    EXPECT_EQ(heart_->read<uint8_t>(session_, ids[2 * i + 1]),
              pattern(100, static_cast<uint8_t>(i)));
  }
}

TEST_F(AdoptionTest, a_weight_costs_the_same_in_a_job_of_any_size_and_outlives_its_daemon) {
  begin(DType::float32, 8);
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 200; ++i) specs.push_back(bytes_shard(concat("b", i), 0));
  heart_->declare(session_, specs);
  const JobWeight weight = JobWeight::of(3).value();
  const JobLedger& ledger = heart_->job(session_).kept().ledger();
  const uint64_t before = ledger.record_bytes_written();
  ASSERT_TRUE(heart_->store().admissions().set_weight(job_id_, weight).is_ok());
  EXPECT_LT(ledger.record_bytes_written() - before, 1_KiB);
  restart();
  EXPECT_EQ(notes(), "");
  EXPECT_EQ(heart_->job(session_).admission().weight().code(), weight.code());
  EXPECT_EQ(heart_->shards(job_id_).size(), 204U);
}

TEST_F(AdoptionTest, shards_that_come_with_a_maximum_of_an_earlier_one_are_told_once) {
  segment_count_ = kFloorSegments + 16;
  begin(DType::float32, 16);
  std::vector<ShardSpec> model;
  for (int i = 0; i < 1000; ++i) model.push_back(parameter(concat("p", i), 10));
  heart_->declare(session_, model);
  const JobLedger& ledger = heart_->job(session_).kept().ledger();
  size_t blob_count = 0;
  // Until maxima are as many bytes of changes as a layout may have: then the ledger is told all.
  for (uint64_t told_bytes = 0; told_bytes < 32_KiB; ++blob_count) {
    ASSERT_LT(blob_count, 100U);
    for (ShardSpec& spec : model) spec.keeps_maximum = blob_count % 2 == 0;
    std::vector<ShardSpec> specs = model;
    specs.push_back(bytes_shard(concat("blob", blob_count), 0));
    const uint64_t before = ledger.record_bytes_written();
    heart_->declare(session_, specs);
    told_bytes = ledger.record_bytes_written() - before;
  }
  restart();
  EXPECT_EQ(notes(), "");
  Job& job = heart_->job(session_);
  EXPECT_EQ(job.shards().count(), 4 + model.size() + blob_count);
  for (const ShardSpec& spec : model) {
    EXPECT_EQ(job.shards()[job.shards().id_of(spec.name)].keeps_maximum, spec.keeps_maximum);
  }
  expect_twins(1);
}

TEST_F(AdoptionTest, before_a_catalogue_is_on_disk_no_extent_is_left_that_an_earlier_one_made_old) {
  begin(DType::float32, 8);
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 200; ++i) specs.push_back(bytes_shard(concat("b", i), 10));
  for (const uint32_t id : heart_->declare(session_, specs))
    heart_->write(session_, id, pattern(10, 1));
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  JobLedger& ledger = heart_->job(session_).kept().ledger();
  ASSERT_FALSE(ledger.forget_old_extents(0)) << "they are emptied over turns";
  heart_->write(session_, ids_[2], pattern(kBufferBytes, 2));
  bool is_any_left = true;
  heart_->io().before_submit = [&](const DiskQueue::Operation& operation) {
    if (operation.kind == IoKind::write) is_any_left = !ledger.forget_old_extents(0);
  };
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  heart_->io().before_submit = nullptr;
  EXPECT_FALSE(is_any_left) << "when the superblock was written";
  restart();
  EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[2]), pattern(kBufferBytes, 2));
}

TEST_F(AdoptionTest, a_first_writeback_that_is_half_done_costs_no_memory) {
  begin(DType::float32, 8, "every:4");
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  step_twins(8);
  constexpr uint64_t kTail = 4000;
  const auto ids = heart_->declare(
      session_, {parameter("x", kTileElements + kTail), bytes_shard("blob", kBufferBytes)});
  heart_->write(session_, ids[0], numbers(kTileElements + kTail, 5));
  // Of its two tiles one is written, and no other write has the length of the second.
  heart_->io().before_submit = [this](const DiskQueue::Operation& operation) {
    if (operation.kind == IoKind::write && operation.length_bytes == align_up(kTail * 4, 4_KiB))
      heart_->faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::write});
  };
  heart_->store().operations().sync(session_, [](const Status&, const StepReport&) {});
  const Entry& entry = *heart_->job(session_).shards()[ids[0]].value;
  ASSERT_TRUE(heart_->until([&] { return entry.replicas()[0].exists(); }));
  ASSERT_FALSE(entry.has_replica());
  remove("blob");
  heart_->io().before_submit = nullptr;
  restart();
  EXPECT_TRUE(heart_->read<float>(session_, ids[0]) == numbers(kTileElements + kTail, 5));
  expect_twins(8);
  EXPECT_TRUE(heart_->sync(session_).is_ok());
}

TEST_F(AdoptionTest, without_its_words_of_tiles_a_job_starts_from_disk_whatever_its_durability) {
  begin(DType::float32, 8, "every:4");
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  change_durability("step");
  keeper_.forget(concat("tiles.", job_id_));
  restart(false);
  EXPECT_NE(notes().find("nobody kept what is said of its tiles"), std::string::npos) << notes();
  session_ = heart_->attach(heart_->open("job", 8, kJobDiskBytes));
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 0U);
  expect_twins(1);
}

TEST_F(AdoptionTest, a_blob_that_is_deleted_during_a_step_leaves_nothing_to_who_gets_its_id) {
  begin(DType::float32, 3);
  const auto old = heart_->declare(session_, {bytes_shard("old", 100'000)});
  heart_->write(session_, old[0], pattern(100'000, 1));
  write_gradients(8);
  spill_gradients();
  ASSERT_TRUE(heart_->job(session_).shards()[old[0]].value->has_replica());
  // The step fails after the blob is gone.
  heart_->faults().add_fault({.io_kind = IoKind::read, .count = 1000});
  std::optional<Status> failed;
  heart_->store().operations().step(
      request(1), [&](const Status& status, const StepReport&) { failed = status; });
  ASSERT_TRUE(heart_->until([this] { return is_in_phase("updates tiles"); }));
  remove("old");
  ASSERT_TRUE(heart_->until([&] { return failed.has_value(); }));
  ASSERT_FALSE(failed->is_ok());
  heart_->faults().clear_faults();
  const auto other = heart_->declare(session_, {bytes_shard("other", kBufferBytes)});
  ASSERT_EQ(other[0], old[0]);
  heart_->write(session_, other[0], pattern(kBufferBytes, 2));
  EXPECT_FALSE(heart_->shards(job_id_).empty());  // what was put is settled
  restart();
  EXPECT_EQ(heart_->read<uint8_t>(session_, other[0]), pattern(kBufferBytes, 2));
  expect_twins(1);
}

TEST_F(AdoptionTest, a_buffer_that_a_closed_step_names_is_deleted_after_the_step) {
  begin(DType::float32);
  write_gradients(8);
  heart_->job(session_).durable().note_change();
  heart_->faults().add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::sync});
  heart_->store().operations().sync(session_, [](const Status&, const StepReport&) {});
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  ASSERT_TRUE(heart_->until([this] { return heart_->faults().has_stalled(); }));
  int deleted = 0;
  const auto count_deleted = [&](const Result<bool>& result) { deleted += result.value() ? 1 : 0; };
  heart_->store().delete_shard(session_, "staged", count_deleted);
  heart_->turns();
  EXPECT_EQ(deleted, 0);
  restart();
  if (HasFatalFailure()) return;
  heart_->store().delete_shard(session_, "staged", count_deleted);
  expect_step(1, 8);
  ASSERT_TRUE(heart_->until([&] { return deleted == 1; }));
}

TEST_F(AdoptionTest, a_ledger_that_is_kept_claims_all_segments_of_its_job) {
  uint64_t kept_count = 0;
  const auto watch = [&](uint64_t segments) {
    keeper_.before_keep = [&, segments](const std::string& name, int fd) {
      if (!name.starts_with("ledger.")) return;
      const auto ledger = Ledger::adopt(copy_of(fd), job_id_ == 0 ? 1 : job_id_);
      ASSERT_TRUE(ledger.is_ok()) << ledger.status().message();
      EXPECT_EQ(ledger.value()->claims().value().size(), segments);
      ++kept_count;
    };
  };
  watch(kFloorSegments + 3);
  begin(DType::float32, 3, "every:4");
  EXPECT_EQ(kept_count, 1U);
  // A step that cannot be undone: the job goes back to what is on disk, with its memory.
  write_gradients(8);
  spill_gradients();
  heart_->faults().add_fault({.io_kind = IoKind::read, .count = 1000});
  ASSERT_FALSE(heart_->step(request(1)).first.is_ok());
  heart_->faults().clear_faults();
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  ASSERT_TRUE(heart_->until([&] { return kept_count == 2; }));
  keeper_.before_keep = nullptr;
  session_ = heart_->attach(heart_->open("job", 3, kJobDiskBytes));
  expect_twins(1);
}

TEST_F(AdoptionTest, extents_that_the_disk_names_are_not_free_for_the_next_daemon) {
  begin(DType::float32, 8);
  restart();
  Job& job = heart_->job(session_);
  size_t count = 0;
  job.shards().for_each_replica([&](ReplicaPlace each) {
    EXPECT_TRUE(job.space().is_referenced(*each)) << "at " << each->offset_bytes();
    ++count;
  });
  EXPECT_GT(count, 0U);
}

TEST_F(AdoptionTest, segments_that_the_next_daemon_takes_are_claimed_for_the_one_after_it) {
  segment_count_ = kFloorSegments + 8;
  begin(DType::float32, 8);
  restart();
  const auto arena_segments = [this] {
    return heart_->job(session_).memory()->arena().segment_count();
  };
  const uint64_t before = arena_segments();
  const uint32_t blob = put_large("blob");
  ASSERT_GT(arena_segments(), before);
  restart();
  EXPECT_EQ(notes(), "");
  EXPECT_EQ(heart_->read<uint8_t>(session_, blob), pattern(5_MiB, 9));
  expect_twins(1);
}

TEST_F(AdoptionTest, a_daemon_that_dies_while_it_drops_an_ended_session_costs_no_memory) {
  begin(DType::float32);
  const uint64_t ended = session_;
  session_ = heart_->attach(job_id_);
  heart_->write(session_, ids_[2], pattern(kBufferBytes, 2));
  heart_->store().sessions().at(ended)->ring.end();
  kill();
  keeper_.before_forget = [&](const std::string& name) {
    // Its rings are forgotten by then.
    if (name == concat("doorbell.", ended)) throw Killed{};
  };
  EXPECT_THROW(start(), Killed);
  keeper_.before_forget = nullptr;
  start();
  EXPECT_EQ(notes(), "");
  resume();
  expect_twins(2);
}

TEST_F(AdoptionTest, what_is_damaged_of_a_job_costs_no_segment_of_others) {
  begin(DType::float32, 3, "every:4");
  write_gradients(8);
  ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
  kill();
  const int tiles = keeper_.find(concat("tiles.", job_id_));
  // The step that either state of the first tile says.
  for (const off_t place : {4096 + 24, 4096 + 112}) {
    uint8_t byte = 0;
    ASSERT_EQ(pread(tiles, &byte, 1, place), 1);
    byte ^= 1;
    ASSERT_EQ(pwrite(tiles, &byte, 1, place), 1);
  }
  const auto before = keeper_.names();
  start();
  EXPECT_NE(notes().find("damaged"), std::string::npos) << notes();
  const auto after = keeper_.names();
  const auto left = std::count_if(before.begin(), before.end(), [&](const std::string& name) {
    return name.starts_with("segment.") &&
           std::find(after.begin(), after.end(), name) != after.end();
  });
  EXPECT_EQ(left, 5) << "those that no job ever had";
}

TEST_F(AdoptionTest, memory_that_cannot_be_mapped_goes_back_to_the_pool) {
  Heart heart(disk_);
  const uint64_t free_bytes = heart.store().reports().statistics().pool_bytes_free;
  std::ifstream pages("/proc/self/statm");
  uint64_t page_count = 0;
  ASSERT_TRUE(pages >> page_count);
  struct rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  struct rlimit tight = before;
  tight.rlim_cur = page_count * 4_KiB + 12_MiB;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  const auto refused = heart.store().admissions().open({.name = "job",
                                                        .uid = 1000,
                                                        .host_bytes = free_bytes,
                                                        .nvme_bytes = kJobDiskBytes,
                                                        .fresh = false,
                                                        .durability = std::nullopt});
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_EQ(heart.store().reports().statistics().pool_bytes_free, free_bytes);
  heart.open("job", 8, kJobDiskBytes);
}

TEST_F(AdoptionTest, a_sync_that_fails_leaves_the_memory_to_the_next_daemon) {
  // Before the superblock is written, and after.
  for (const uint64_t skipped : {0, 1}) {
    SCOPED_TRACE(concat("sync ", skipped));
    disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
    begin(DType::float32);
    heart_->write(session_, ids_[2], pattern(kBufferBytes, 2));
    write_gradients(8);
    heart_->faults().add_fault({.io_kind = IoKind::sync, .skip_count = skipped});
    ASSERT_FALSE(heart_->sync(session_).is_ok());
    heart_->write(session_, ids_[3], pattern(kBufferBytes, 9));
    heart_->faults().clear_faults();
    restart();
    if (HasFatalFailure()) return;
    expect_twins(2);
    heart_->write(session_, ids_[3], pattern(kBufferBytes, 8));
    expect_step(1, 8);
    delete std::exchange(heart_, nullptr);
    give_memory_back();
  }
}

/// The kind of parameter, and whether gradients lie on disk.
class KilledStepTest : public AdoptionTest,
                       public ::testing::WithParamInterface<std::pair<DType, bool>> {};

TEST_P(KilledStepTest, a_kill_at_any_operation_of_a_step_changes_no_bit) {
  const auto [dtype, spilled] = GetParam();
  settings_.maximize = dtype == DType::bfloat16;
  settings_.amsgrad = dtype == DType::bfloat16;
  // The first one makes the place for maxima.
  const uint64_t killed = settings_.amsgrad ? 1 : 2;
  uint64_t kills = 0;
  bool finished = false;
  for (uint64_t index = 0; !finished; ++index) {
    SCOPED_TRACE(concat("operation ", index));
    disk_ = std::make_shared<MemoryDisk>(kSmallDiskBytes);
    begin(dtype, spilled ? 3 : 8);
    if (killed == 2) {
      write_gradients(40);
      ASSERT_TRUE(heart_->step(request(1)).first.is_ok());
      step_twins(40);
    }
    write_gradients(41);
    if (spilled) spill_gradients();
    uint64_t seen = 0;
    heart_->io().before_submit = [&](const DiskQueue::Operation&) {
      if (seen++ == index) throw Killed{};
    };
    try {
      bool answered = false;
      heart_->store().operations().step(request(killed),
                                        [&](const Status&, const StepReport&) { answered = true; });
      ASSERT_TRUE(heart_->until([&] { return answered; }));
      finished = true;
    } catch (const Killed&) {
      ++kills;
    }
    heart_->io().before_submit = nullptr;
    restart();
    if (HasFatalFailure()) return;
    expect_step(killed, 41);
    write_gradients(42);
    expect_step(killed + 1, 42);
    if (HasFailure()) return;
    delete std::exchange(heart_, nullptr);
    give_memory_back();
  }
  EXPECT_GT(kills, 10U);
}

INSTANTIATE_TEST_SUITE_P(Gradients,
                         KilledStepTest,
                         ::testing::Values(std::pair{DType::float32, false},
                                           std::pair{DType::bfloat16, true}));

TEST_F(AdoptionTest, a_damaged_ledger_stops_no_daemon) {
  begin(DType::float32);
  heart_->declare(session_, {bytes_shard("alone", 100)});
  write_gradients(8);
  heart_->store().operations().step(request(1), [](const Status&, const StepReport&) {});
  kill();
  const int ledger = keeper_.find(concat("ledger.", job_id_));
  ASSERT_GE(ledger, 0);
  // Every page that holds anything, in pieces; what matters lies in few of them.
  std::vector<off_t> places;
  for (off_t at = lseek(ledger, 0, SEEK_DATA); at >= 0;) {
    const off_t end = lseek(ledger, at, SEEK_HOLE);
    for (off_t page = at; page < end; page += 4096) {
      std::array<uint8_t, 4096> bytes{};
      ASSERT_EQ(pread(ledger, bytes.data(), bytes.size(), page), 4096);
      for (off_t i = 0; i < 4096; i += 8) {
        if (std::any_of(bytes.begin() + i, bytes.begin() + i + 8, [](uint8_t b) { return b != 0; }))
          places.push_back(page + i);
      }
    }
    at = lseek(ledger, end, SEEK_DATA);
  }
  ASSERT_GT(places.size(), 50U);
  const size_t stride = places.size() / 25 + 1;
  for (size_t which = 0; which < places.size(); which += which < 20 ? 1 : stride) {
    const off_t place = places[which];
    uint64_t word = 0;
    ASSERT_EQ(pread(ledger, &word, 8, place), 8);
    TestKeeper copy;
    for (const auto& name : keeper_.names()) {
      // Segments go to the next daemon; a damaged ledger's are destroyed, so each gets a copy.
      const int fd = keeper_.find(name);
      struct stat status{};
      ASSERT_EQ(fstat(fd, &status), 0);
      if (name.starts_with("doorbell.")) {
        copy.keep(name, fd);
        continue;
      }
      auto memory = SharedMemory::create("copy", static_cast<uint64_t>(status.st_size)).value();
      for (off_t at = lseek(fd, 0, SEEK_DATA); at >= 0;) {
        const off_t end = lseek(fd, at, SEEK_HOLE);
        ASSERT_EQ(pread(fd, memory.data() + at, static_cast<size_t>(end - at), at), end - at);
        at = lseek(fd, end, SEEK_DATA);
      }
      if (name.starts_with("ledger.")) {
        const uint64_t flipped = word ^ (which % 2 == 0 ? ~uint64_t{0} : uint64_t{1} << which % 64);
        std::memcpy(memory.data() + place, &flipped, 8);
      }
      copy.keep(name, memory.fd());
    }
    auto disk = std::make_shared<MemoryDisk>(kSmallDiskBytes);
    std::copy(disk_->bytes().begin(), disk_->bytes().end(), disk->bytes().begin());
    Heart next(disk, kFloorSegments + 8, &copy);
    ASSERT_TRUE(next.loaded.is_ok()) << "word at " << place << ": " << next.loaded.message();
    ASSERT_TRUE(next.until([&] { return next.store().is_idle(); })) << "word at " << place;
  }
}

}  // namespace
}  // namespace memd
