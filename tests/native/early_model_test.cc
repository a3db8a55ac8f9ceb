// Random histories of a training whose updates begin before their step is closed, held against
// plain memory.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "store_fixture.h"

namespace memd::testing {
namespace {

struct Case {
  std::string durability = "step";
  uint64_t arena_segments = 8;
  uint64_t quota_bytes = kQuotaBytes;
  uint64_t large_tiles = 1;  // beside a part of one; of more than four in all some wait for others
  uint64_t history_count = 5;
};

constexpr uint64_t kBlobBytes = 1_MiB - 5;
constexpr size_t kBlobs = 4;
constexpr int kOperations = 120;
constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says

/// What a client may do, in any order; what it reads has the bits of its twin. The seed names the
/// history, the update workers' order aside.
class History {
 public:
  History(const Case& chosen, uint64_t seed) : case_(chosen), random_(seed) {
    start();
    const uint64_t job_id = heart_->open("job",
                                         chosen.arena_segments,
                                         chosen.quota_bytes,
                                         Durability::parse(chosen.durability).value());
    session_ = heart_->attach(job_id);
    reader_ = heart_->attach(job_id);
    // Two tensors of more than a tile, and a bucket of two small ones.
    const std::vector<ShardSpec> specs = {
        parameter("large", chosen.large_tiles * kTileElements + 1000),
        parameter("half", kTileElements + 7, DType::bfloat16),
        parameter("small", 3000),
        parameter("tiny", 10)};
    ids_ = heart_->declare(session_, specs);
    for (size_t i = 0; i < specs.size(); ++i) {
      twins_.push_back(specs[i].dtype == DType::bfloat16
                           ? Twin::bf16(halves(specs[i].shape[0], i))
                           : Twin::fp32(numbers(specs[i].shape[0], i)));
      write(i, Part::value, LeaseMode::overwrite, bytes_of(twins_[i]));
    }
    gradients_.resize(ids_.size());
    EXPECT_TRUE(heart_->sync(session_).is_ok());
  }
  ~History() {
    heart_.reset();
    release_memory();
  }

  void run() {
    for (int i = 0; i < kOperations && !::testing::Test::HasFailure(); ++i) {
      const uint64_t kind = random_() % 40;
      SCOPED_TRACE(concat("operation ", i, ", kind ", kind));
      if (kind < 10) {
        make_gradient();
      } else if (kind < 14) {
        turn();
      } else if (kind < 17) {
        expect_step();
      } else if (kind < 22) {
        step();
      } else if (kind < 24) {
        change_gradient();
      } else if (kind < 26) {
        write_value();
      } else if (kind < 29) {
        compare(any());
      } else if (kind == 29) {
        compare_moments(any());
      } else if (kind == 30) {
        write_moments();
      } else if (kind == 31) {
        drop_gradients();
      } else if (kind == 32) {
        EXPECT_TRUE(heart_->sync(session_).is_ok());
      } else if (kind < 35) {
        use_blob();
      } else if (kind == 35) {
        ask_ahead();
      } else if (kind == 36) {
        hold_view();
      } else if (kind == 37) {
        read_beside();
      } else if (kind == 38) {
        read_gradient();
      } else {
        kill_daemon();
      }
    }
    finish();
  }

  uint64_t adopted_count = 0;
  uint64_t discarded_count = 0;
  uint64_t kill_count = 0;

 private:
  void start() {
    heart_ = std::make_unique<Heart>(
        disk_, HeartOptions{.segment_count = kFloorSegments + 8, .keeper = &keeper_});
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  size_t any() { return random_() % ids_.size(); }
  bool chance(uint64_t of_8) { return random_() % 8 < of_8; }
  Job& job() { return heart_->job(session_); }

  static std::vector<uint8_t> bytes_of(const Twin& twin) {
    return twin.half.empty() ? raw(twin.theta) : raw(twin.half);
  }
  template <typename T>
  static std::vector<uint8_t> raw(const std::vector<T>& values) {
    const auto* const begin = reinterpret_cast<const uint8_t*>(values.data());
    return {begin, begin + values.size() * sizeof(T)};
  }
  std::vector<uint8_t> gradient_bytes(size_t i, uint32_t seed) const {
    const Twin& twin = twins_[i];
    return twin.half.empty() ? raw(numbers(twin.theta.size(), seed))
                             : raw(halves(twin.half.size(), seed));
  }
  static void advance(Twin& twin, const AdamSettings& settings, uint32_t seed) {
    twin.half.empty() ? twin.step(settings, numbers(twin.theta.size(), seed))
                      : twin.step(settings, halves(twin.half.size(), seed));
  }

  LeaseRequest request(uint64_t session, uint32_t id, Part part, LeaseMode mode) const {
    return {.session_id = session,
            .shard_id = id,
            .part = part,
            .mode = mode,
            .timeout_ns = 60'000'000'000,
            .for_service = false,
            .prefetch = false,
            // As a client says it until it has heard of the step.
            .after_call = session == session_ && request_ ? request_->call : 0};
  }
  Held lease(const LeaseRequest& request) {
    const auto answer = heart_->ask(request);
    EXPECT_TRUE(heart_->until([&] { return answer->has_value(); })) << in_flight();
    if (!answer->has_value()) return {.status = error(StatusCode::deadline, "hangs"), .grant = {}};
    EXPECT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
    return **answer;
  }
  std::string in_flight() const {
    std::string all;
    for (const Activity& each : heart_->store().reports().in_flight())
      all += concat(each.kind, " ", each.what, ", waits on ", each.waits_on, "\n");
    return all;
  }
  void write(size_t i, Part part, LeaseMode mode, const std::vector<uint8_t>& bytes) {
    const Held held = lease(request(session_, ids_[i], part, mode));
    if (!held.is_ok()) return;
    ASSERT_EQ(held.as<uint8_t>().size(), bytes.size());
    std::copy(bytes.begin(), bytes.end(), held.as<uint8_t>().begin());
    heart_->release(held);
  }

  // ---- Operations -------------------------------------------------------------------------------

  void make_gradient() {
    wait_for_step();  // as clients do before they write one
    const size_t i = any();
    const uint32_t seed = ++seed_;
    write(i, Part::gradient, LeaseMode::overwrite, gradient_bytes(i, seed));
    gradients_[i] = seed;
    if (chance(7)) heart_->store().gradients().is_final(session_, ids_[i]);
    if (chance(2)) turn();
  }
  void change_gradient() {
    const size_t i = any();
    if (!gradients_[i]) return;
    write(i, Part::gradient, LeaseMode::write, gradient_bytes(i, ++seed_));
    gradients_[i] = seed_;
    if (chance(4)) heart_->store().gradients().is_final(session_, ids_[i]);
  }
  void turn() {
    for (uint64_t count = random_() % 60; count > 0; --count) heart_->turn();
  }
  void expect_step() {
    AdamSettings settings = settings_;
    if (chance(1)) settings.lr *= 2;
    const Status status = heart_->store().gradients().expect_step(
        session_, {{.settings = settings, .shard_ids = ids_}});
    EXPECT_TRUE(status.is_ok()) << status.message();
  }
  void step() {
    wait_for_step();
    if (chance(1)) settings_.lr *= 0.9;
    StepRequest request{.session_id = session_,
                        .groups = {{.settings = settings_, .shard_ids = {}}},
                        .step = job().progress().committed_step() + 1,
                        .call = call_ + 1};
    before_ = twins_;
    const bool takes_all = chance(6);
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (!gradients_[i] || (!takes_all && chance(4))) continue;
      request.groups[0].shard_ids.push_back(ids_[i]);
      advance(twins_[i], settings_, *gradients_[i]);
      gradients_[i].reset();
    }
    if (request.groups[0].shard_ids.empty()) return;
    ++call_;
    request_ = request;
    send_step();
    if (chance(4)) wait_for_step();
  }
  void send_step() {
    answer_ = std::make_shared<std::optional<Status>>();
    heart_->store().operations().step(
        *request_,
        [answer = answer_](const Status& status, const StepReport&) { *answer = status; });
  }
  void wait_for_step() {
    if (!request_) return;
    ASSERT_TRUE(heart_->until([&] { return answer_->has_value(); })) << in_flight();
    const Status status = **answer_;
    request_.reset();
    before_.clear();
    EXPECT_TRUE(status.is_ok()) << status.message();
  }
  void write_value() {
    const size_t i = any();
    const auto seed = static_cast<uint32_t>(random_());
    Twin& twin = twins_[i];
    if (twin.half.empty()) {
      twin.theta = numbers(twin.theta.size(), seed);
    } else {
      std::vector<uint16_t> fresh = halves(twin.half.size(), seed);
      // Where the user writes what was there the parameter keeps its remainder.
      if (chance(4)) std::copy_n(twin.half.begin(), fresh.size() / 2, fresh.begin());
      for (size_t at = 0; at < fresh.size(); ++at) {
        if (twin.half[at] != fresh[at]) twin.remainder[at] = 0;
      }
      twin.half = std::move(fresh);
    }
    write(i, Part::value, chance(4) ? LeaseMode::overwrite : LeaseMode::write, bytes_of(twin));
    // A half that is what it was before two writes keeps its remainder, unless it was written back
    // between them.
    if (!twin.half.empty()) {
      EXPECT_TRUE(heart_->sync(session_).is_ok());
    }
  }
  void compare(size_t i) {
    const Held held = lease(request(session_, ids_[i], Part::value, LeaseMode::read));
    if (!held.is_ok()) return;
    EXPECT_TRUE(std::ranges::equal(held.as<uint8_t>(), bytes_of(twins_[i]))) << "shard " << i;
    heart_->release(held);
  }
  void read_beside() {
    const size_t i = any();
    const bool is_open = request_.has_value();
    const Held held = lease(request(reader_, ids_[i], Part::value, LeaseMode::read));
    if (!held.is_ok()) return;
    EXPECT_TRUE(std::ranges::equal(held.as<uint8_t>(), bytes_of(twins_[i])) ||
                (is_open && std::ranges::equal(held.as<uint8_t>(), bytes_of(before_[i]))))
        << "shard " << i;
    heart_->release(held);
  }
  void read_gradient() {
    const size_t i = any();
    if (!gradients_[i]) return;
    const Held held = lease(request(session_, ids_[i], Part::gradient, LeaseMode::read));
    if (!held.is_ok()) return;
    EXPECT_TRUE(std::ranges::equal(held.as<uint8_t>(), gradient_bytes(i, *gradients_[i]))) << i;
    heart_->release(held);
  }
  void compare_moments(size_t i) {
    wait_for_step();
    const auto [m, v] = heart_->moments(session_, ids_[i]);
    EXPECT_TRUE(m == twins_[i].m) << "shard " << i;
    EXPECT_TRUE(v == twins_[i].v) << "shard " << i;
    EXPECT_EQ(job().shards()[ids_[i]].generation, twins_[i].t) << "shard " << i;
  }
  void write_moments() {
    wait_for_step();
    const size_t i = any();
    Twin& twin = twins_[i];
    const size_t count = std::min<size_t>(twin.m.size(), 100);
    std::fill_n(twin.m.begin(), count, 0.5F);
    std::fill_n(twin.v.begin(), count, 0.25F);
    std::optional<Status> written;
    heart_->store().operations().write_moments(
        {.session_id = session_, .shard_id = ids_[i], .element_first = 0, .element_count = count},
        twin.t,
        {.exp_avg = std::vector<float>(count, 0.5F),
         .exp_avg_sq = std::vector<float>(count, 0.25F),
         .max_exp_avg_sq = {}},
        [&](const Status& status) { written = status; });
    ASSERT_TRUE(heart_->until([&] { return written.has_value(); }));
    EXPECT_TRUE(written->is_ok()) << written->message();
  }
  void drop_gradients() {
    std::vector<uint32_t> dropped;
    for (size_t i = 0; i < ids_.size(); ++i) {
      if (!gradients_[i] || chance(4)) continue;
      dropped.push_back(ids_[i]);
      gradients_[i].reset();
    }
    if (dropped.empty()) return;
    EXPECT_TRUE(heart_->store().gradients().drop(session_, dropped).is_ok());
  }
  /// Takes room that others have.
  void use_blob() {
    if (blobs_.size() < kBlobs && chance(4)) {
      blobs_.push_back(
          heart_->declare(session_, {bytes_shard(concat("blob", blobs_.size()), kBlobBytes)})[0]);
      seeds_.push_back(0);
    }
    if (blobs_.empty()) return;
    const size_t i = random_() % blobs_.size();
    if (seeds_[i] != 0 && chance(4)) {
      const Held held = lease(request(session_, blobs_[i], Part::value, LeaseMode::read));
      if (!held.is_ok()) return;
      EXPECT_TRUE(std::ranges::equal(held.as<uint8_t>(), pattern(kBlobBytes, seeds_[i])));
      return heart_->release(held);
    }
    const Held held = lease(request(session_, blobs_[i], Part::value, LeaseMode::overwrite));
    if (!held.is_ok()) return;
    seeds_[i] = static_cast<uint8_t>(1 + random_() % 250);
    const auto bytes = pattern(kBlobBytes, seeds_[i]);
    std::copy(bytes.begin(), bytes.end(), held.as<uint8_t>().begin());
    heart_->release(held);
  }
  void ask_ahead() {
    wait_for_step();
    const size_t i = any();
    if (gradients_[i]) return;
    LeaseRequest asked = request(session_, ids_[i], Part::gradient, LeaseMode::overwrite);
    asked.is_expected = true;
    const Held held = lease(asked);
    if (!held.is_ok()) return;
    turn();
    if (chance(4)) {
      heart_->release(held);
      heart_->store().gradients().unused(session_, ids_[i]);
      return;
    }
    const auto bytes = gradient_bytes(i, ++seed_);
    std::copy(bytes.begin(), bytes.end(), held.as<uint8_t>().begin());
    // Not before its lease has ended.
    if (chance(1)) heart_->store().gradients().is_final(session_, ids_[i]);
    heart_->release(held);
    gradients_[i] = seed_;
    heart_->store().gradients().is_final(session_, ids_[i]);
  }
  void hold_view() {
    if (view_) {
      EXPECT_TRUE(std::ranges::equal(view_->as<uint8_t>(), view_bytes_)) << "a live view";
      heart_->release(*std::exchange(view_, std::nullopt));
      return;
    }
    const size_t i = any();
    const Held held = lease(request(session_, ids_[i], Part::value, LeaseMode::read));
    if (!held.is_ok()) return;
    view_ = held;
    view_bytes_ = bytes_of(twins_[i]);
  }
  /// The next one takes over what there was, the step that is under way too.
  void kill_daemon() {
    if (view_) hold_view();
    // Clients see that a step is answered before they ask the next daemon for anything.
    if (request_ && answer_->has_value()) wait_for_step();
    ++kill_count;
    count();
    heart_->kill();
    let_go();
    start();
    if (::testing::Test::HasFatalFailure()) return;
    for (const uint64_t session : {session_, reader_}) {
      const auto resumed = heart_->store().resume_session(session, kOwner);
      ASSERT_TRUE(resumed.is_ok()) << resumed.status().message();
    }
    if (request_) send_step();
  }
  void let_go() {
    static std::vector<Heart*> dead;  // not to be destroyed
    dead.push_back(heart_.release());
  }
  /// Of the disk, and what the dead have mapped for good.
  void release_memory() {
    for (const auto bytes : {disk_->bytes(), disk_->durable_bytes()}) {
      const uint64_t begin = align_up(reinterpret_cast<uint64_t>(bytes.data()), kBlockBytes);
      const uint64_t end =
          align_down(reinterpret_cast<uint64_t>(bytes.data() + bytes.size()), kBlockBytes);
      EXPECT_EQ(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED), 0);
    }
    for (const std::string& name : keeper_.names()) {
      if (name.starts_with("doorbell.")) continue;
      struct stat status{};
      EXPECT_EQ(fstat(keeper_.find(name), &status), 0);
      EXPECT_EQ(
          fallocate(
              keeper_.find(name), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, status.st_size),
          0);
    }
  }

  void count() {
    const JobCounters& counters = job().cache().counters();
    adopted_count += counters.early_tiles_adopted;
    for (const uint64_t each : counters.early_tiles_discarded) discarded_count += each;
  }
  void finish() {
    if (::testing::Test::HasFailure()) return;
    wait_for_step();
    if (view_) hold_view();
    for (size_t i = 0; i < ids_.size(); ++i) {
      compare(i);
      compare_moments(i);
    }
    expect_nothing_leaked();
    count();
  }
  /// Of disk, quota and memory nothing is taken but what the job's entries name.
  void expect_nothing_leaked() {
    ASSERT_TRUE(heart_->store().gradients().drop(session_, {}).is_ok());
    ASSERT_TRUE(heart_->until([&] {
      return job().state().early().bucket_count() == 0 &&
             job().state().early().running_count() == 0 && !job().cache().activities().any();
    }));
    for (int i = 0; i < 2; ++i) {
      job().durable().note_change();
      ASSERT_TRUE(heart_->sync(session_).is_ok());
    }
    testing::expect_all_bytes_held(job());
  }

  const Case case_;
  std::mt19937_64 random_;
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  TestKeeper keeper_;
  std::unique_ptr<Heart> heart_;
  uint64_t session_ = 0;
  uint64_t reader_ = 0;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;  // as they are once the step under way is made
  std::vector<Twin> before_;
  std::vector<std::optional<uint32_t>> gradients_;  // seeds
  AdamSettings settings_{.lr = 0.01, .weight_decay = 0.1};
  std::optional<StepRequest> request_;  // under way
  std::shared_ptr<std::optional<Status>> answer_;
  uint64_t call_ = 0;
  uint32_t seed_ = 100;
  std::vector<uint32_t> blobs_;
  std::vector<uint8_t> seeds_;  // 0: never written
  std::optional<Held> view_;
  std::vector<uint8_t> view_bytes_;
};

class EarlyModelTest : public ::testing::TestWithParam<Case> {};

TEST_P(EarlyModelTest, whatever_comes_between_gradients_and_their_step_it_has_the_same_bits) {
  // More by hand: MEMD_HISTORIES=1000.
  const char* const wanted = std::getenv("MEMD_HISTORIES");
  const char* const first = std::getenv("MEMD_HISTORY_FIRST");
  const uint64_t begin = first == nullptr ? 1 : std::strtoull(first, nullptr, 10);
  const uint64_t count =
      wanted == nullptr ? GetParam().history_count : std::strtoull(wanted, nullptr, 10);
  uint64_t adopted = 0;
  uint64_t discarded = 0;
  uint64_t kills = 0;
  for (uint64_t seed = begin; seed < begin + count; ++seed) {
    SCOPED_TRACE(concat("seed ", seed));
    History history(GetParam(), seed);
    if (!HasFailure()) history.run();
    if (HasFailure()) return;
    adopted += history.adopted_count;
    discarded += history.discarded_count;
    kills += history.kill_count;
  }
  EXPECT_GT(kills, 0u);
  if (GetParam().durability != "step") return;
  EXPECT_GT(adopted, 0u);
  EXPECT_GT(discarded, 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         EarlyModelTest,
                         ::testing::Values(Case{},
                                           Case{.arena_segments = 3},
                                           Case{.large_tiles = 4, .history_count = 25},
                                           Case{.durability = "every:3"},
                                           Case{.durability = "every:2", .arena_segments = 3},
                                           Case{.durability = "none", .arena_segments = 3}),
                         [](const auto& info) {
                           std::string name = concat(info.param.durability,
                                                     "_",
                                                     info.param.arena_segments,
                                                     "_of_",
                                                     info.param.large_tiles);
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

}  // namespace
}  // namespace memd::testing
