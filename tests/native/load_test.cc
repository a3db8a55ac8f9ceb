// A checkpoint that is loaded in place, behind a snapshot: the job is what it was, or has all of
// the load, whoever is killed meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/snapshot/snapshot_readings.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kElements = kTileElements + 100;
constexpr uint64_t kHalves = 3000;
constexpr uint64_t kBlobBytes = 1'100'000;
constexpr uint64_t kJobSegments = 12;
constexpr uint64_t kSegments = kFloorSegments + 16;
constexpr uint64_t kQuota = 60_MiB;
const std::string kLoad = "load/20261126T092228Z-0123456789ab";
const std::string kNextLoad = "load/20261126T092230Z-0123456789ab";
const std::string kLater = "load/20261126T092229Z-0123456789ab";
const AdamSettings kSettings{.lr = 1e-2};

struct Kind {
  const char* durability = "step";
  bool in_host = false;  // its large parameter
};

/// All of a job that training goes on from.
struct Content {
  Twin w;
  Twin h;
  uint8_t blob = 0;  // seed of its pattern

  static Content written(uint32_t seed) {
    return {.w = Twin::fp32(numbers(kElements, seed)),
            .h = Twin::bf16(halves(kHalves, seed + 1)),
            .blob = static_cast<uint8_t>(seed + 2)};
  }
  void step(uint32_t seed) {
    w.step(kSettings, numbers(kElements, seed));
    h.step(kSettings, halves(kHalves, seed + 1));
  }
};

/// One job that its session loads into, in one daemon after the other.
class LoadTest : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { start(); }
  void start() {
    heart_ = std::make_unique<Heart>(disk_, kSegments, &keeper_);
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  /// As kill -9 would; its memory stays.
  void kill() {
    heart_->kill();
    [[maybe_unused]] Heart* const leaked = heart_.release();
  }
  /// Nothing stays but what the disk had for certain.
  void cut_power() {
    kill();
    for (const std::string& name : keeper_.names()) keeper_.forget(name);
    disk_->crash([](const UnsyncedWrite&) { return false; });
  }

  ShardStore& store() { return heart_->store(); }
  JobSnapshots& snapshots() { return heart_->store().snapshots(); }
  uint64_t job_id() { return store().reports().find_job("job").value().job_id; }
  Job& job() { return heart_->job(session_); }

  /// As the server does it.
  Result<uint64_t> attach() {
    bool has_gone_back = false;
    store().returns_to_snapshots().when_ended(job_id(), [&] { has_gone_back = true; });
    EXPECT_TRUE(heart_->until([&] { return has_gone_back; }));
    const auto opened =
        store().admissions().open({.name = "job",
                                   .uid = 1000,
                                   .host_bytes = (kFloorSegments + kJobSegments) * kSegmentBytes,
                                   .nvme_bytes = kQuota,
                                   .fresh = false,
                                   .durability = std::nullopt});
    if (!opened.is_ok()) return opened.status();
    const auto session =
        store().attach(opened.value().job_id, {.pid = 1, .start_time = 2, .uid = 3});
    if (!session.is_ok()) return session.status();
    return session.value()->session_id;
  }
  void attach_again() {
    const auto session = attach();
    ASSERT_TRUE(session.is_ok()) << session.status().message();
    session_ = session.value();
    declare();
  }
  void declare() {
    std::vector<ShardSpec> specs{parameter("w", kElements),
                                 parameter("h", kHalves, DType::bfloat16),
                                 bytes_shard("blob", kBlobBytes)};
    if (GetParam().in_host) specs[0].tier = Tier::host;
    ids_ = heart_->declare(session_, specs);
  }
  void write(const Content& content) {
    heart_->write(session_, ids_[0], content.w.theta);
    heart_->write(session_, ids_[1], content.h.half);
    heart_->write(session_, ids_[2], pattern(kBlobBytes, content.blob));
  }
  StepRequest request() const {
    return {.session_id = session_,
            .groups = {{.settings = kSettings, .shard_ids = {ids_[0], ids_[1]}}}};
  }
  Status step(uint32_t seed) {
    heart_->write(session_, ids_[0], numbers(kElements, seed), Part::gradient);
    heart_->write(session_, ids_[1], halves(kHalves, seed + 1), Part::gradient);
    Status status = heart_->step(request()).first;
    if (status.is_ok()) now_.step(seed);
    return status;
  }
  /// A job of two steps, of which memory may be ahead of the disk.
  void begin() {
    heart_->open("job", kJobSegments, kQuota, Durability::parse(GetParam().durability).value());
    attach_again();
    ASSERT_TRUE(heart_->sync(session_).is_ok());  // so that its memory outlives a daemon
    write(now_);
    for (const uint32_t seed : {10U, 20U}) ASSERT_TRUE(step(seed).is_ok());
  }

  Status snapshot(const std::string& name, uint64_t session = 0, uint64_t number = 0) {
    std::optional<Status> answer;
    snapshots().create(
        {.job_id = job_id(), .name = name, .created_s = 1, .number = number, .session_id = session},
        [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status begin_load() { return snapshot(kLoad, session_, 7); }
  /// Commits what it has half-way, as a client does behind its reads.
  void load_first_half() {
    heart_->write(session_, ids_[0], loaded_.w.theta);
    heart_->write(session_, ids_[1], loaded_.h.half);
    ASSERT_TRUE(heart_->sync(session_).is_ok());
    heart_->write(session_, ids_[2], pattern(kBlobBytes, loaded_.blob));
  }
  void load_rest() {
    loaded_.w.t = 9;
    const MomentValues moments{.exp_avg = numbers(kTileElements, 503),
                               .exp_avg_sq = std::vector<float>(kTileElements, 0.25F),
                               .max_exp_avg_sq = {}};
    ASSERT_TRUE(heart_->write_moments(session_, ids_[0], 9, moments).is_ok());
    // The rest of them stays.
    loaded_.w.m = now_.w.m;
    loaded_.w.v = now_.w.v;
    std::copy(moments.exp_avg.begin(), moments.exp_avg.end(), loaded_.w.m.begin());
    std::copy(moments.exp_avg_sq.begin(), moments.exp_avg_sq.end(), loaded_.w.v.begin());
    loaded_.h.m = now_.h.m;
    loaded_.h.v = now_.h.v;
    loaded_.h.t = now_.h.t;
  }
  Status end_load(uint64_t session, const std::string& name = kLoad) {
    std::optional<Status> answer;
    snapshots().end_load(session, name, [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status drop(const std::string& name) {
    std::optional<Status> answer;
    snapshots().drop(job_id(), name, [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status restore(const std::string& name) {
    std::optional<Status> answer;
    snapshots().restore(
        job_id(), name, [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  Status drop_job(bool force) {
    std::optional<Status> answer;
    store().drop_job(job_id(), force, [&](const Status& status) { answer = status; });
    EXPECT_TRUE(heart_->until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  void detach() { ASSERT_TRUE(store().detach(session_).is_ok()); }
  void until_idle() {
    ASSERT_TRUE(heart_->until([&] { return store().is_idle(); }));
  }
  std::vector<std::string> names() {
    std::vector<std::string> all;
    const auto listed = snapshots().list(job_id());
    for (const SnapshotInfo& each : listed.value()) all.push_back(each.name);
    return all;
  }
  /// The job as the snapshot on disk names it.
  JobRecord record_of(const std::string& name) const {
    const WorkerBytes uncounted;
    const RootEntry entry = on_disk(name).job;
    const auto record = decode_job(std::span(disk_->bytes())
                                       .subspan(entry.catalogue.at(0).address.offset_bytes)
                                       .first(entry.catalogue_bytes));
    EXPECT_TRUE(record.is_ok()) << record.status().message();
    return record.is_ok() ? record.value() : JobRecord{};
  }
  void check_all() {
    LiveCheck& check = store().live_check();
    const auto id = check.begin({.job_ids = {}, .whole = true});
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    ASSERT_TRUE(heart_->until([&] {
      heart_->clock.advance(1'000'000);
      const auto progress = check.progress(id.value());
      return !progress.is_ok() || progress.value().report.has_value();
    }));
  }
  SnapshotEntry on_disk(const std::string& name) const {
    const WorkerBytes uncounted;
    const Superblock superblock = newest_superblock(disk_->bytes());
    const auto root = decode_root(std::span(disk_->bytes())
                                      .subspan(superblock.root.address.offset_bytes)
                                      .first(superblock.root_bytes));
    EXPECT_TRUE(root.is_ok()) << root.status().message();
    for (const SnapshotEntry& entry : root.value().snapshots) {
      if (entry.name == name) return entry;
    }
    ADD_FAILURE() << "no snapshot " << name;
    return {};
  }
  std::vector<std::string> notes() { return store().returns_to_snapshots().take_notes(); }

  void expect(const Content& content) {
    EXPECT_TRUE(heart_->read<float>(session_, ids_[0]) == content.w.theta);
    EXPECT_TRUE(heart_->read<uint16_t>(session_, ids_[1]) == content.h.half);
    EXPECT_TRUE(heart_->read<uint8_t>(session_, ids_[2]) == pattern(kBlobBytes, content.blob));
    size_t at = 0;
    for (const Twin* const twin : {&content.w, &content.h}) {
      const MomentValues moments = heart_->moment_values(session_, ids_[at]);
      EXPECT_TRUE(moments.exp_avg == twin->m) << at;
      EXPECT_TRUE(moments.exp_avg_sq == twin->v) << at;
      EXPECT_EQ(job().shards()[ids_[at]].generation, twin->t) << at;
      ++at;
    }
  }
  /// All bits are those from before the load: also the remainders of bf16, which a step shows.
  void expect_back() {
    EXPECT_EQ(job().progress().committed_step(), 2U);
    expect(now_);
    EXPECT_TRUE(names().empty());
    const Status stepped = step(30);
    ASSERT_TRUE(stepped.is_ok()) << stepped.message();
    expect(now_);
    expect_all_bytes_held(job());
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  TestKeeper keeper_;
  std::unique_ptr<Heart> heart_;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  Content now_ = Content::written(1);
  Content loaded_ = Content::written(500);
};

TEST_P(LoadTest, counts_once_it_has_ended) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  EXPECT_EQ(names(), std::vector{kLoad});
  load_first_half();
  load_rest();
  const Status ended = end_load(session_);
  ASSERT_TRUE(ended.is_ok()) << ended.message();
  EXPECT_TRUE(names().empty());
  EXPECT_EQ(job().progress().committed_step(), 2U);
  expect(loaded_);
  cut_power();
  start();
  attach_again();
  expect(loaded_);
  EXPECT_TRUE(notes().empty());
}

TEST_P(LoadTest, breaks_off_with_its_session) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  detach();
  attach_again();
  const std::vector<std::string> said = notes();
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find(concat("job job went back to what it was before, snapshot ", kLoad)),
            std::string::npos)
      << said[0];
  EXPECT_NE(said[0].find("at step 2"), std::string::npos) << said[0];
  expect_back();
}

TEST_P(LoadTest, breaks_off_before_anybody_attaches) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  detach();
  until_idle();
  EXPECT_TRUE(names().empty());
  EXPECT_EQ(notes().size(), 1U);
  attach_again();
  expect_back();
}

TEST_P(LoadTest, breaks_off_with_bytes_that_nobody_has_synced) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  write(loaded_);
  const Held half_written = heart_->lease(session_, ids_[2], LeaseMode::overwrite);
  ASSERT_TRUE(half_written.is_ok());
  detach();
  attach_again();
  expect_back();
}

TEST_P(LoadTest, breaks_off_with_the_power) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  load_rest();
  cut_power();
  start();
  attach_again();
  EXPECT_EQ(notes().size(), 1U);
  expect_back();
}

TEST_P(LoadTest, goes_on_in_the_daemon_that_takes_its_session_over) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  const uint64_t session = session_;
  const uint64_t kept_bytes = job().space().snapshots().kept_bytes();
  kill();
  start();
  EXPECT_EQ(job().space().snapshots().kept_bytes(), kept_bytes);
  ASSERT_TRUE(store().load_notes().empty()) << store().load_notes()[0];
  heart_->turns();
  EXPECT_EQ(names(), std::vector{kLoad});
  ASSERT_TRUE(store().resume_session(session, {.pid = 1, .start_time = 2, .uid = 3}).is_ok());
  // As a client asks that has heard nothing from the daemon before.
  EXPECT_TRUE(begin_load().is_ok());
  EXPECT_EQ(step(40).code(), StatusCode::in_use);
  load_rest();
  const Status ended = end_load(session);
  ASSERT_TRUE(ended.is_ok()) << ended.message();
  expect(loaded_);
  EXPECT_TRUE(notes().empty());
  EXPECT_EQ(end_load(session).code(), StatusCode::not_found) << "its answer was lost";
}

TEST_P(LoadTest, breaks_off_when_the_next_daemon_finds_its_process_dead) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  kill();
  start();
  detach();
  attach_again();
  expect_back();
}

TEST_P(LoadTest, that_its_session_has_ended_breaks_off_in_the_next_daemon_if_not_in_this_one) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  detach();
  kill();  // before a turn
  start();
  attach_again();
  expect_back();
}

TEST_P(LoadTest, lets_nobody_else_in_and_no_step_begin) {
  begin();
  ASSERT_TRUE(snapshot("before").is_ok());
  ASSERT_TRUE(begin_load().is_ok());
  const Status stepped = step(40);
  EXPECT_EQ(stepped.code(), StatusCode::in_use);
  EXPECT_NE(stepped.message().find("a checkpoint is being loaded into it"), std::string::npos);
  const auto second = attach();
  EXPECT_EQ(second.status().code(), StatusCode::in_use);
  EXPECT_NE(second.status().message().find("another session loads a checkpoint into it"),
            std::string::npos);
  EXPECT_EQ(snapshot("half").code(), StatusCode::in_use);
  EXPECT_EQ(snapshot(kLater, session_).code(), StatusCode::in_use);
  EXPECT_EQ(restore("before").code(), StatusCode::in_use);
  EXPECT_EQ(restore(kLoad).code(), StatusCode::in_use);
  const Status dropped = drop(kLoad);
  EXPECT_EQ(dropped.code(), StatusCode::in_use);
  EXPECT_NE(dropped.message().find("half a load would count"), std::string::npos);
  EXPECT_EQ(drop_job(false).code(), StatusCode::in_use);
  EXPECT_EQ(names(), (std::vector<std::string>{"before", kLoad}));
  EXPECT_TRUE(drop("before").is_ok());
  load_first_half();
  load_rest();
  ASSERT_TRUE(end_load(session_).is_ok());
  const auto company = attach();
  ASSERT_TRUE(company.is_ok());
  ASSERT_TRUE(store().detach(company.value()).is_ok());
  ASSERT_TRUE(snapshot("after").is_ok());
  expect(loaded_);
}

TEST_P(LoadTest, has_its_own_names_and_a_session_alone) {
  begin();
  EXPECT_EQ(snapshot(kLoad).code(), StatusCode::invalid_argument);
  EXPECT_EQ(snapshot("mine", session_).code(), StatusCode::invalid_argument);
  EXPECT_EQ(snapshot(kLoad, session_ + 100).code(), StatusCode::fenced);
  EXPECT_EQ(end_load(session_ + 100).code(), StatusCode::fenced);
  EXPECT_EQ(end_load(session_, "mine").code(), StatusCode::invalid_argument);
  EXPECT_EQ(end_load(session_, kLoad + "0").code(), StatusCode::invalid_argument);
  const auto company = attach();
  ASSERT_TRUE(company.is_ok());
  const Status refused = begin_load();
  EXPECT_EQ(refused.code(), StatusCode::in_use);
  EXPECT_NE(refused.message().find("close them first: 1"), std::string::npos) << refused.message();
  ASSERT_TRUE(store().detach(company.value()).is_ok());
  // Nothing of it is left.
  ASSERT_TRUE(step(30).is_ok());
  expect(now_);
}

TEST_P(LoadTest, of_one_rank_is_ended_by_no_other) {
  begin();
  const auto other = attach();
  ASSERT_TRUE(other.is_ok());
  TrainingGroup& group = job().cache().group();
  ASSERT_TRUE(group.join(session_, "job", {.rank = 0, .world_size = 2}).is_ok());
  ASSERT_TRUE(group.join(other.value(), "job", {.rank = 1, .world_size = 2}).is_ok());
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  const Status refused = end_load(other.value());
  EXPECT_EQ(refused.code(), StatusCode::in_use);
  EXPECT_NE(refused.message().find("half a load would count"), std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{kLoad});
  load_rest();
  ASSERT_TRUE(end_load(session_).is_ok());
  expect(loaded_);
}

TEST_P(LoadTest, that_begins_after_its_client_has_ended_it_is_refused) {
  begin();
  EXPECT_EQ(end_load(session_).code(), StatusCode::not_found);
  EXPECT_EQ(begin_load().code(), StatusCode::invalid_argument);
  // Nothing of it is left.
  ASSERT_TRUE(step(30).is_ok());
  // It is asked for while its end waits for a sync.
  std::optional<Status> ended;
  std::optional<Status> begun;
  snapshots().end_load(session_, kNextLoad, [&](const Status& status) { ended = status; });
  snapshots().create(
      {.job_id = job_id(), .name = kNextLoad, .created_s = 1, .number = 8, .session_id = session_},
      [&](const Result<SnapshotInfo>& made) { begun = made.status(); });
  ASSERT_TRUE(heart_->until([&] { return ended && begun; }));
  EXPECT_EQ(ended->code(), StatusCode::not_found);
  EXPECT_EQ(begun->code(), StatusCode::invalid_argument);
  ASSERT_TRUE(step(31).is_ok());
  expect(now_);
  // The next load of the session has a name of its own.
  ASSERT_TRUE(snapshot("load/20261126T092228Z-0123456789ac", session_, 9).is_ok());
}

TEST_P(LoadTest, that_cannot_begin_leaves_the_job_to_its_steps) {
  begin();
  heart_->faults().add_fault({.io_kind = IoKind::read, .count = 3, .error_number = EIO});
  EXPECT_FALSE(begin_load().is_ok()) << "the catalogue cannot be read back";
  ASSERT_TRUE(step(30).is_ok());
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  load_rest();
  ASSERT_TRUE(end_load(session_).is_ok());
  expect(loaded_);
}

TEST_P(LoadTest, has_what_was_closed_before_it_and_no_step_that_comes_behind_it) {
  begin();
  heart_->write(session_, ids_[0], numbers(kElements, 30), Part::gradient);
  heart_->write(session_, ids_[1], halves(kHalves, 31), Part::gradient);
  std::optional<Status> earlier;
  std::optional<Status> later;
  std::optional<Status> made;
  store().operations().step(request(),
                            [&](const Status& status, const StepReport&) { earlier = status; });
  snapshots().create(
      {.job_id = job_id(), .name = kLoad, .created_s = 1, .number = 7, .session_id = session_},
      [&](const Result<SnapshotInfo>& answer) { made = answer.status(); });
  store().operations().step({.session_id = session_, .groups = {}},
                            [&](const Status& status, const StepReport&) { later = status; });
  ASSERT_TRUE(heart_->until([&] { return earlier && made && later; }));
  EXPECT_TRUE(earlier->is_ok()) << earlier->message();
  EXPECT_TRUE(made->is_ok()) << made->message();
  EXPECT_EQ(later->code(), StatusCode::in_use);
  now_.step(30);
  load_first_half();
  detach();
  attach_again();
  EXPECT_EQ(job().progress().committed_step(), 3U);
  expect(now_);
}

TEST_P(LoadTest, whose_session_ends_while_its_snapshot_is_made_leaves_nothing) {
  begin();
  for (const int turns : {0, 1, 2, 4, 8, 16}) {
    std::optional<Status> made;
    snapshots().create(
        {.job_id = job_id(), .name = kLoad, .created_s = 1, .number = 7, .session_id = session_},
        [&](const Result<SnapshotInfo>& answer) { made = answer.status(); });
    for (int i = 0; i < turns; ++i) heart_->turn();
    detach();
    attach_again();
    EXPECT_TRUE(made.has_value());
    EXPECT_TRUE(names().empty()) << turns;
    expect(now_);
  }
  ASSERT_TRUE(step(30).is_ok());
  expect(now_);
}

TEST_P(LoadTest, that_was_ended_counts_although_its_session_ends_before_the_answer) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  load_rest();
  std::optional<Status> ended;
  snapshots().end_load(session_, kLoad, [&](const Status& status) { ended = status; });
  detach();
  attach_again();
  ASSERT_TRUE(ended.has_value());
  EXPECT_TRUE(ended->is_ok()) << ended->message();
  expect(loaded_);
  EXPECT_TRUE(notes().empty());
}

TEST_P(LoadTest, does_not_end_while_something_is_still_being_written) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  const Held writing = heart_->lease(session_, ids_[0], LeaseMode::overwrite);
  ASSERT_TRUE(writing.is_ok());
  EXPECT_EQ(end_load(session_).code(), StatusCode::invalid_argument);
  EXPECT_EQ(names(), std::vector{kLoad});
  heart_->release(writing);
  detach();
  attach_again();
  expect_back();
}

TEST_P(LoadTest, waits_for_whoever_reads_what_was_there_before) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  const auto reading = store().snapshot_readings().begin(
      {.job_id = job_id(), .name = kLoad, .owner = "1000", .uid = 1000, .pid = 1});
  ASSERT_TRUE(reading.is_ok()) << reading.status().message();
  EXPECT_EQ(end_load(session_).code(), StatusCode::in_use);
  detach();
  bool has_gone_back = false;
  store().returns_to_snapshots().when_ended(job_id(), [&] { has_gone_back = true; });
  heart_->turns();
  EXPECT_FALSE(has_gone_back);
  EXPECT_EQ(names(), std::vector{kLoad});
  std::optional<Status> attached;
  store().returns_to_snapshots().when_ended(job_id(), [&] {
    const auto session = store().attach(job_id(), {.pid = 1, .start_time = 2, .uid = 3});
    attached = session.status();
    if (session.is_ok()) session_ = session.value()->session_id;
  });
  store().snapshot_readings().end(reading.value().reading_id);
  ASSERT_TRUE(heart_->until([&] { return attached.has_value(); }));
  ASSERT_TRUE(attached->is_ok()) << attached->message();
  EXPECT_TRUE(has_gone_back);
  EXPECT_EQ(notes().size(), 1U);
  declare();
  expect_back();
}

TEST_P(LoadTest, goes_with_a_job_that_is_dropped) {
  const uint64_t free_bytes = heart_->extents().free_bytes();
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  const Status dropped = drop_job(true);
  ASSERT_TRUE(dropped.is_ok()) << dropped.message();
  EXPECT_FALSE(store().reports().find_job("job").is_ok());
  EXPECT_EQ(heart_->extents().free_bytes() + kBlockBytes, free_bytes) << "the root";
  EXPECT_TRUE(notes().empty());
}

TEST_P(LoadTest, that_cannot_be_taken_back_now_is_by_the_next_daemon) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  until_idle();
  heart_->faults().add_fault({.io_kind = IoKind::write, .count = 1, .error_number = EIO});
  detach();
  const auto refused = attach();
  EXPECT_EQ(refused.status().code(), StatusCode::device) << refused.status().message();
  EXPECT_NE(refused.status().message().find("is half loaded"), std::string::npos)
      << refused.status().message();
  ASSERT_EQ(notes().size(), 1U);
  kill();
  start();
  attach_again();
  expect_back();
}

TEST_P(LoadTest, that_lost_what_was_before_lets_nobody_in_until_somebody_decides) {
  begin();
  ASSERT_TRUE(snapshot("older").is_ok());
  const Content older = now_;
  ASSERT_TRUE(step(30).is_ok());
  ASSERT_TRUE(begin_load().is_ok());
  load_first_half();
  until_idle();
  const ExtentRecord catalogue = on_disk(kLoad).job.catalogue.at(0);
  cut_power();
  disk_->bytes()[catalogue.address.offset_bytes + 99] ^= std::byte{4};
  start();
  for (int again = 0; again < 2; ++again) {
    const auto refused = attach();
    EXPECT_EQ(refused.status().code(), StatusCode::integrity);
    const std::string& text = refused.status().message();
    EXPECT_NE(text.find("is half loaded"), std::string::npos) << text;
    EXPECT_NE(text.find("memd snapshot restore"), std::string::npos) << text;
    EXPECT_NE(text.find("memd job drop --force"), std::string::npos) << text;
  }
  EXPECT_EQ(notes().size(), 1U) << "said once";
  EXPECT_EQ(drop(kLoad).code(), StatusCode::in_use);
  EXPECT_FALSE(snapshot("half").is_ok());
  const Status restored = restore("older");
  ASSERT_TRUE(restored.is_ok()) << restored.message();
  EXPECT_EQ(names(), std::vector<std::string>{"older"});
  attach_again();
  now_ = older;
  expect(now_);
  ASSERT_TRUE(step(40).is_ok());
  // The next load begins without the reason why this one was not taken back.
  ASSERT_TRUE(begin_load().is_ok());
  const auto reading = store().snapshot_readings().begin(
      {.job_id = job_id(), .name = kLoad, .owner = "1000", .uid = 1000, .pid = 1});
  ASSERT_TRUE(reading.is_ok()) << reading.status().message();
  detach();
  ASSERT_TRUE(heart_->until([&] {
    return std::ranges::any_of(store().reports().in_flight(),
                               [](const Activity& each) { return each.kind == "snapshot drop"; });
  }));
  EXPECT_EQ(store().attach(job_id()).status().code(), StatusCode::unavailable);
  store().snapshot_readings().end(reading.value().reading_id);
  attach_again();
  expect(now_);
}

TEST_P(LoadTest, that_breaks_off_takes_the_job_back_with_the_shards_that_it_had_lost) {
  begin();
  ASSERT_TRUE(begin_load().is_ok());
  const JobRecord before = record_of(kLoad);
  const auto blob = std::ranges::find(before.shards, "blob", &ShardRecord::name);
  ASSERT_NE(blob, before.shards.end());
  const uint64_t lost_at = blob->extents.at(0).address.offset_bytes;
  load_first_half();
  until_idle();
  disk_->bytes()[lost_at + 99] ^= std::byte{4};
  check_all();
  ASSERT_EQ(snapshots().list(job_id()).value().at(0).lost_shards, std::vector<std::string>{"blob"});
  detach();
  attach_again();
  EXPECT_TRUE(names().empty());
  EXPECT_TRUE(heart_->read<float>(session_, ids_[0]) == now_.w.theta);
  EXPECT_TRUE(heart_->read<uint16_t>(session_, ids_[1]) == now_.h.half);
  ASSERT_TRUE(step(30).is_ok()) << "it needs no blob";
  const Held lost = heart_->lease(session_, ids_[2], LeaseMode::read);
  EXPECT_EQ(lost.status.code(), StatusCode::integrity) << lost.status.message();
}

TEST_P(LoadTest, fits_into_exactly_the_quota_that_it_was_admitted_to) {
  if (GetParam().in_host) GTEST_SKIP() << "more is checked before that is written";
  begin();
  const SpaceNeeded plain = job().admission().space_needed();
  ASSERT_TRUE(begin_load().is_ok());
  const SpaceNeeded loading = job().admission().space_needed();
  const uint64_t before_bytes = job().space().snapshots().bytes;
  EXPECT_LE(job().space().snapshots().kept_bytes(), 2 * uint64_t{kBlockBytes})
      << "all but its catalogue is the job's, too, and counts there";
  ASSERT_TRUE(end_load(session_).is_ok());
  // A step's second copy has its place, without blobs and the catalogue.
  const bool is_none = job().admission().durability().is_none();
  EXPECT_EQ(plain.copies, is_none ? 1U : 2U);
  EXPECT_EQ(loading.snapshot_bytes, before_bytes - (is_none ? 0 : plain.updated_once_bytes));
  if (!is_none) EXPECT_LT(loading.snapshot_bytes, kBlobBytes + 4 * uint64_t{kBlockBytes});

  const uint64_t quota_bytes = loading.total();
  job().space().set_quota_bytes(quota_bytes - 1);
  EXPECT_EQ(begin_load().code(), StatusCode::capacity);
  ASSERT_TRUE(step(30).is_ok());
  job().space().set_quota_bytes(quota_bytes);
  ASSERT_TRUE(begin_load().is_ok());
  for (uint32_t seed = 500; seed < 503; ++seed) {
    // Each tile in turn, with a commit behind it: also a second time.
    heart_->write(session_, ids_[0], numbers(kElements, seed));
    ASSERT_TRUE(heart_->sync(session_).is_ok()) << seed;
    const MomentValues moments{.exp_avg = numbers(kTileElements, seed),
                               .exp_avg_sq = std::vector<float>(kTileElements, 0.5F),
                               .max_exp_avg_sq = {}};
    const Status moved = heart_->write_moments(session_, ids_[0], 9, moments);
    ASSERT_TRUE(moved.is_ok()) << moved.message();
    heart_->write(session_, ids_[1], halves(kHalves, seed));
    const Status synced = heart_->sync(session_);
    ASSERT_TRUE(synced.is_ok()) << synced.message();
    heart_->write(session_, ids_[2], pattern(kBlobBytes, static_cast<uint8_t>(seed)));
    ASSERT_TRUE(heart_->sync(session_).is_ok()) << seed;
    const uint64_t taken_bytes =
        heart_->extents().capacity_bytes() - heart_->extents().free_bytes();
    EXPECT_LE(taken_bytes, quota_bytes + kBlockBytes) << "and the root";
    const JobInfo info = store().reports().find_job("job").value();
    EXPECT_LE(info.nvme_bytes_used + info.metadata_bytes + info.snapshot_bytes, quota_bytes);
  }
  const Status ended = end_load(session_);
  ASSERT_TRUE(ended.is_ok()) << ended.message();
  job().space().set_quota_bytes(plain.total());
  const Status stepped = step(40);
  EXPECT_TRUE(stepped.is_ok()) << stepped.message();
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         LoadTest,
                         ::testing::Values(Kind{},
                                           Kind{.durability = "every:3"},
                                           Kind{.durability = "none"},
                                           Kind{.in_host = true}));

}  // namespace
}  // namespace memd::testing
