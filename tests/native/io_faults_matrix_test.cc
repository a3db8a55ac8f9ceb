// Every I/O of a daemon's life fails once, in every way: nothing hangs, nothing false is
// acknowledged, and whoever starts on the disk afterwards finds a commit, or an integrity error,
// and never wrong bytes.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "store_fixture.h"

namespace memd {
namespace {

using testing::bytes_shard;
using testing::halves;
using testing::Heart;
using testing::HeartOptions;
using testing::Held;
using testing::kFloorSegments;
using testing::numbers;
using testing::parameter;
using testing::pattern;

// As small as a volume can be: each run copies it.
constexpr uint64_t kMatrixDiskBytes = 16_MiB;
constexpr uint64_t kMatrixQuotaBytes = 7_MiB;
constexpr uint64_t kArenaSegments = 1;  // 2 MiB, so that two blobs do not fit
constexpr uint64_t kBlobBytes = 1'200'000;
constexpr uint64_t kSingles = 3000;
constexpr uint64_t kHalves = 2000;

enum Id : uint32_t { single, half, blob_a, blob_b, id_count };

using Bytes = std::vector<std::byte>;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// What a job holds after a commit. Nothing where it could not be read, with an integrity error.
struct State {
  uint64_t step = 0;
  std::array<std::optional<Bytes>, id_count + 2> parts;  // by Id, then moments of single and half
};

/// When the job's commits reach the disk, and how much memory it has for its tiles.
struct Setting {
  const char* name;
  const char* durability = "step";
  /// Beside the two segments without which no job is: where there are any, nothing spills, and
  /// tiles of commits in memory stay there and are updated in place.
  uint64_t spare_segments = 0;

  bool is_none() const { return std::string_view(durability) == "none"; }
  /// Which commit is on disk, at least, where `acknowledged` was; the last is that of a sync.
  size_t durable(size_t acknowledged) const {
    if (acknowledged == kCommits || std::string_view(durability) == "step") return acknowledged;
    return is_none() ? 0 : acknowledged / 2 * 2;
  }

  static constexpr size_t kCommits = 3;
};

/// Commits of the life: 0 is what it starts with, then two steps and a sync.
constexpr int kCommits = Setting::kCommits;

/// A daemon's life with a fault in it.
class Life {
 public:
  Life(std::shared_ptr<MemoryDisk> disk,
       const Setting& setting,
       const std::function<void(MemoryQueue&)>& before_load)
      : segment_count_(kArenaSegments + setting.spare_segments),
        heart_(std::move(disk),
               HeartOptions{.segment_count = kFloorSegments + segment_count_,
                            .worker_count = 1,
                            .before_load = before_load,
                            .while_loading = [this](MemoryQueue& io) { release_stalled(io); }}) {}

  Heart& heart() { return heart_; }
  MemoryQueue& io() { return heart_.faults(); }
  uint64_t session() const { return session_; }

  void attach(std::optional<Durability> durability = std::nullopt) {
    session_ = heart_.attach(heart_.open("job", segment_count_, kMatrixQuotaBytes, durability));
  }

  /// Puts what commit 0 holds.
  Status begin() {
    heart_.declare(session_,
                   {parameter("single", kSingles),
                    parameter("half", kHalves, DType::bfloat16),
                    bytes_shard("a", kBlobBytes),
                    bytes_shard("b", kBlobBytes)});
    Status status = put(single, bytes_of(numbers(kSingles, 1)));
    if (status.is_ok()) status = put(half, bytes_of(halves(kHalves, 2)));
    if (status.is_ok()) status = put(blob_a, bytes_of(pattern(kBlobBytes, 3)));
    if (status.is_ok()) status = put(blob_b, bytes_of(pattern(kBlobBytes, 4)));
    return status.is_ok() ? sync() : status;
  }

  /// The commit after `committed`. May be called again where it failed.
  Status commit(int committed) {
    const auto seed = static_cast<uint32_t>(committed) * 10;
    const auto byte_seed = static_cast<uint8_t>(seed);
    if (committed == kCommits - 1) {
      const Status status = put(blob_b, bytes_of(pattern(kBlobBytes, byte_seed)));
      return status.is_ok() ? sync() : status;
    }
    Status status = heart_.store().gradients().drop(session_, {});
    if (!status.is_ok()) return status;
    const auto gradient = [&](Id id, const Bytes& bytes) {
      if (status.is_ok()) status = put(id, bytes, Part::gradient);
    };
    gradient(single, bytes_of(numbers(kSingles, seed + 1)));
    gradient(half, bytes_of(halves(kHalves, seed + 2)));
    if (!status.is_ok()) return status;
    // The first blob comes and the gradients have to leave; the second makes the first leave.
    status = put(blob_a, bytes_of(pattern(kBlobBytes, byte_seed)));
    if (status.is_ok()) status = get(blob_b).second;
    if (!status.is_ok()) return status;
    StepRequest request;
    request.session_id = session_;
    request.groups = {{.settings = {.lr = 1e-2}, .shard_ids = {single, half}}};
    std::optional<Status> answer;
    heart_.store().operations().step(request, [&](const Status& done, const StepReport& report) {
      answer = done;
      disk_failed_ = !report.disk_error.empty();
    });
    EXPECT_TRUE(until([&] { return answer.has_value(); })) << "a step hangs";
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }

  Status sync() {
    std::optional<Status> answer;
    heart_.store().operations().sync(session_, [&](const Status& done, const StepReport&) {
      answer = done;
      if (done.is_ok()) disk_failed_ = false;
    });
    EXPECT_TRUE(until([&] { return answer.has_value(); })) << "a sync hangs";
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }

  /// The last step was acknowledged as one that is in memory and not on disk.
  bool disk_failed() const { return disk_failed_; }

  std::pair<Bytes, Status> get(Id id) {
    const Held held = lease(id, LeaseMode::read, Part::value);
    if (!held.is_ok()) return {{}, held.status};
    const auto span = held.as<std::byte>();
    Bytes bytes(span.begin(), span.end());
    heart_.release(held);
    return {std::move(bytes), Status::ok()};
  }

  std::pair<Bytes, Status> moments(Id id, uint64_t count) {
    std::optional<Status> answer;
    std::vector<float> all;
    heart_.store().operations().read_moments(
        {.session_id = session_, .shard_id = id, .element_first = 0, .element_count = count},
        [&](const Status& status, const MomentValues& values) {
          answer = status;
          all.insert(all.end(), values.exp_avg.begin(), values.exp_avg.end());
          all.insert(all.end(), values.exp_avg_sq.begin(), values.exp_avg_sq.end());
        });
    EXPECT_TRUE(until([&] { return answer.has_value(); })) << "moments hang";
    return {bytes_of(all), answer.value_or(error(StatusCode::deadline, "no answer"))};
  }

  /// Fenced, with a lost shard, or half updated in place: this job commits nothing any more.
  bool is_stopped() {
    const Job& job = heart_.job(session_);
    return !heart_.extents().check_writable().is_ok() || job.lost().count() > 0 ||
           !job.progress().stopped().is_ok();
  }

  uint64_t stall_count() const { return stall_count_; }

 private:
  Held lease(Id id, LeaseMode mode, Part part) {
    const auto answer = heart_.ask(session_, id, mode, part);
    if (!until([&] { return answer->has_value(); })) {
      ADD_FAILURE() << "a lease hangs";
      return {.status = error(StatusCode::deadline, "no answer"), .grant = {}, .session_id = 0};
    }
    return **answer;
  }
  Status put(Id id, const Bytes& bytes, Part part = Part::value) {
    const Held held = lease(id, LeaseMode::overwrite, part);
    if (!held.is_ok()) return held.status;
    const auto span = held.as<std::byte>();
    EXPECT_EQ(span.size(), bytes.size());
    std::copy(bytes.begin(), bytes.end(), span.begin());
    heart_.release(held);
    return Status::ok();
  }
  /// A device that stalls comes back after five seconds of the daemon's clock.
  bool until(const std::function<bool()>& holds) {
    return heart_.until([&] {
      if (holds()) return true;
      release_stalled(io());
      return false;
    });
  }
  void release_stalled(MemoryQueue& io) {
    quiet_turns_ = io.has_stalled() ? quiet_turns_ + 1 : 0;
    if (quiet_turns_ < 20) return;
    ++stall_count_;
    heart_.clock.advance(5'000'000'000);
    io.release_stalled();
  }

  uint64_t quiet_turns_ = 0;
  uint64_t stall_count_ = 0;
  bool disk_failed_ = false;
  uint64_t session_ = 0;
  uint64_t segment_count_ = 0;
  Heart heart_;
};

struct Kind {
  const char* name;
  MemoryFault fault;
  /// Reports success and leaves other bytes: nobody can know before they are read.
  bool lies = false;
  bool for_ever = false;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

std::vector<Kind> kinds() {
  const uint64_t ever = 1'000'000;
  using enum MemoryFaultKind;
  return {
      {.name = "EIO", .fault = {.error_number = EIO}},
      {.name = "ENOSPC", .fault = {.error_number = ENOSPC}},
      {.name = "EAGAIN", .fault = {.error_number = EAGAIN}},
      {.name = "EINTR", .fault = {.error_number = EINTR}},
      {.name = "short", .fault = {.kind = short_transfer, .transferred_bytes = 5000}},
      {.name = "failed fdatasync", .fault = {.io_kind = IoKind::sync, .error_number = EIO}},
      {.name = "stall", .fault = {.kind = stall}},
      {.name = "flipped bit", .fault = {.kind = flipped_bit, .bit = 12345}, .lies = true},
      {.name = "misdirected",
       .fault = {.kind = misdirected, .redirect_offset_bytes = 2_MiB + 64_KiB},
       .lies = true},
      {.name = "lost write", .fault = {.kind = lost_write}, .lies = true},
      {.name = "EIO for ever", .fault = {.count = ever, .error_number = EIO}, .for_ever = true},
      {.name = "ENOSPC for ever",
       .fault = {.count = ever, .error_number = ENOSPC},
       .for_ever = true},
      {.name = "EAGAIN for ever",
       .fault = {.count = ever, .error_number = EAGAIN},
       .for_ever = true},
      {.name = "EINTR for ever", .fault = {.count = ever, .error_number = EINTR}, .for_ever = true},
      {.name = "short for ever",
       .fault = {.kind = short_transfer, .count = ever, .transferred_bytes = 5000},
       .for_ever = true},
      {.name = "nothing moves, for ever",
       .fault = {.kind = zero_progress, .count = ever},
       .for_ever = true},
  };
}

struct Case {
  Setting setting;
  Kind kind;
};

std::ostream& operator<<(std::ostream& out, const Case& chosen) {
  return out << chosen.setting.name << " " << chosen.kind;
}

/// All kinds with every step on disk; of commits in memory, those that differ in what the daemon
/// makes of them.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Setting& setting :
       {Setting{.name = ""},
        Setting{.name = "every 2", .durability = "every:2"},
        Setting{.name = "every 2 in place", .durability = "every:2", .spare_segments = 3},
        Setting{.name = "none", .durability = "none"},
        Setting{.name = "none in place", .durability = "none", .spare_segments = 3}}) {
    for (const Kind& kind : kinds()) {
      using enum MemoryFaultKind;
      const bool differs = !kind.for_ever &&
                           (kind.fault.kind != error || kind.fault.error_number == EIO) &&
                           kind.fault.kind != short_transfer && kind.fault.kind != misdirected;
      if (std::string_view(setting.durability) == "step" || differs)
        all.push_back({.setting = setting, .kind = kind});
    }
  }
  return all;
}

class IoFaultsMatrix : public ::testing::TestWithParam<Case> {
 protected:
  /// What a life under a setting starts from, and how much I/O it has.
  struct Beginning {
    std::shared_ptr<MemoryDisk> disk;
    uint64_t started_count = 0;
    uint64_t sync_count = 0;
  };

  static void SetUpTestSuite() {
    // Each run copies disks: what was freed is used again instead of being faulted in anew.
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    states_.clear();
    beginnings_.clear();
    begin({.name = ""});
  }
  static void TearDownTestSuite() { beginnings_.clear(); }

  /// Under every setting a commit has the same bytes: that of the first, whose commits are all on
  /// disk, is what the others are compared with.
  static const Beginning& begin(const Setting& setting) {
    Beginning& made = beginnings_[setting.name];
    if (made.disk != nullptr) return made;
    const auto began = std::make_shared<MemoryDisk>(kMatrixDiskBytes);
    {
      Life life(began, setting, [](MemoryQueue&) {});
      life.attach(Durability::parse(setting.durability).value());
      const Status begun = life.begin();
      EXPECT_TRUE(begun.is_ok()) << begun.message();
    }
    const bool is_first = states_.empty();
    const auto disk = std::make_shared<MemoryDisk>(*began);
    Life life(disk, setting, [](MemoryQueue&) {});
    life.attach();
    const auto look = [&](size_t committed) {
      const auto found = found_on(std::make_shared<MemoryDisk>(*disk), setting);
      if (is_first) return states_.push_back(found.state.value());
      const bool in_memory = setting.durable(committed) != committed;
      EXPECT_EQ(found.was_not_drained, in_memory && setting.is_none()) << setting.name;
      EXPECT_EQ(life.heart().job(life.session()).tiles().has_dirty(),
                in_memory && setting.spare_segments > 0)
          << setting.name << " after commit " << committed;
      if (setting.durable(committed) == committed) {
        EXPECT_TRUE(found.state && agree(*found.state, states_.at(committed))) << setting.name;
      }
    };
    look(0);
    for (int committed = 0; committed < kCommits; ++committed) {
      const Status status = life.commit(committed);
      EXPECT_TRUE(status.is_ok()) << status.message();
      look(static_cast<size_t>(committed) + 1);
    }
    made.started_count = life.io().started_count();
    made.sync_count = static_cast<uint64_t>(
        std::count_if(life.heart().io().operations.begin(),
                      life.heart().io().operations.end(),
                      [](const auto& operation) { return operation.kind == IoKind::sync; }));
    const JobCounters& counters = life.heart().job(life.session()).cache().counters();
    if (setting.spare_segments == 0) {
      EXPECT_GT(counters.spilled_bytes, kBlobBytes) << "the life is to spill gradients and blobs";
      EXPECT_GT(counters.fetched_bytes, kBlobBytes);
    }
    made.disk = began;
    return made;
  }

  struct Found {
    /// Nothing where the daemon refuses to start, for the bytes are not those that were written.
    std::optional<State> state;
    bool was_not_drained = false;  // and has to be started over: the disk holds no step of it
  };

  /// What a daemon finds that starts on `disk`, and has no memory of the one before.
  static Found found_on(std::shared_ptr<MemoryDisk> disk, const Setting& setting) {
    Life life(std::move(disk), setting, [](MemoryQueue&) {});
    if (!life.heart().loaded.is_ok()) {
      EXPECT_EQ(life.heart().loaded.code(), StatusCode::integrity) << life.heart().loaded.message();
      return {};
    }
    const auto info = life.heart().store().reports().find_job("job");
    EXPECT_TRUE(info.is_ok()) << "the job is gone";
    if (!info.is_ok()) return {};
    const auto opened = life.heart().store().admissions().open({.name = "job", .uid = 1000});
    if (opened.status().message().find("ran on without durability") != std::string::npos)
      return {.state = std::nullopt, .was_not_drained = true};
    life.attach();
    State state;
    state.step = info.value().committed_step;
    const auto take = [&](size_t part, std::pair<Bytes, Status> read) {
      if (read.second.is_ok()) {
        state.parts.at(part) = std::move(read.first);
      } else {
        EXPECT_EQ(read.second.code(), StatusCode::integrity) << read.second.message();
      }
    };
    for (const Id id : {single, half, blob_a, blob_b}) take(id, life.get(id));
    take(id_count, life.moments(single, kSingles));
    take(id_count + 1, life.moments(half, kHalves));
    return {.state = std::move(state), .was_not_drained = false};
  }

  static bool agree(const State& found, const State& expected) {
    if (found.step != expected.step) return false;
    for (size_t i = 0; i < found.parts.size(); ++i) {
      if (found.parts[i] && *found.parts[i] != *expected.parts[i]) return false;
    }
    return true;
  }

  static void expect_commit(const std::shared_ptr<MemoryDisk>& disk,
                            const Setting& setting,
                            size_t durable,
                            size_t acknowledged,
                            bool lies) {
    const auto [found, was_not_drained] = found_on(disk, setting);
    if (was_not_drained) {
      EXPECT_TRUE(setting.is_none());
      EXPECT_LT(durable, size_t{kCommits}) << "it was drained";
      return;
    }
    if (!lies) {
      ASSERT_TRUE(found.has_value()) << "the daemon does not start";
      for (const auto& part : found->parts) ASSERT_TRUE(part.has_value()) << "a shard is lost";
    }
    if (!found) return;
    bool known = false;
    // Of a job that runs without durability an older step is on disk only while it has made none.
    const size_t first = setting.is_none() && !lies ? acknowledged : durable;
    for (size_t i = first; i <= std::min<size_t>(acknowledged + 1, kCommits); ++i) {
      known |= agree(*found, states_[i]);
    }
    EXPECT_TRUE(known) << "step " << found->step << " after commit " << acknowledged
                       << " was acknowledged: a false acknowledgement, or wrong bytes";
  }

  static void live_and_die(const Setting& setting, const Kind& kind, uint64_t index) {
    const auto disk = std::make_shared<MemoryDisk>(*begin(setting).disk);
    size_t acknowledged = 0;
    bool disk_failed = false;
    {
      Life life(disk, setting, [&](MemoryQueue& io) {
        MemoryFault fault = kind.fault;
        fault.skip_count = index;
        io.add_fault(fault);
      });
      if (life.heart().loaded.is_ok()) {
        life.attach();
        acknowledged = live(life, kind);
        disk_failed = life.disk_failed();
      } else {
        EXPECT_TRUE(kind.for_ever) << life.heart().loaded.message();
      }
      EXPECT_GT(life.io().fault_hit_count(), 0u) << "there was no such I/O";
      if (kind.fault.kind == MemoryFaultKind::stall) EXPECT_GT(life.stall_count(), 0u);
    }
    const size_t durable = disk_failed ? 0 : setting.durable(acknowledged);
    // One of the two after each run, unless there is time for both.
    const bool both = std::getenv("MEMD_MATRIX_FULL") != nullptr;
    const bool cuts_power = (index + std::strlen(kind.name)) % 2 == 0;
    if (both || !cuts_power) {  // only the process died
      expect_commit(std::make_shared<MemoryDisk>(*disk), setting, durable, acknowledged, kind.lies);
    }
    if (both || cuts_power) {  // nothing reached the medium that no sync covered
      disk->crash([](const UnsyncedWrite&) { return false; });
      // Against a device that only says that it synced nothing helps; still no bytes are wrong.
      const bool loses_syncs = kind.fault.kind == MemoryFaultKind::lost_write;
      expect_commit(disk, setting, loses_syncs ? 0 : durable, acknowledged, kind.lies);
    }
  }

  static bool must_survive(Life& life, const Kind& kind) {
    const bool interrupted =
        kind.fault.kind == MemoryFaultKind::error && !kind.for_ever &&
        (kind.fault.error_number == EAGAIN || kind.fault.error_number == EINTR);
    // A sync is never asked for again, whatever the reason.
    if (interrupted) return life.io().device_statistics(0).sync.error_count() == 0;
    return kind.fault.kind == MemoryFaultKind::short_transfer ||
           kind.fault.kind == MemoryFaultKind::stall;
  }

  /// Returns which commit was acknowledged last.
  static size_t live(Life& life, const Kind& kind) {
    for (int committed = 0; committed < kCommits; ++committed) {
      Status status = life.commit(committed);
      if (!status.is_ok() && !life.is_stopped()) {
        // Nothing is lost: the same works as soon as the device does.
        EXPECT_TRUE(kind.for_ever || kind.lies) << status.message();
        life.io().clear_faults();
        status = life.commit(committed);
        EXPECT_TRUE(status.is_ok() || life.is_stopped()) << status.message();
      }
      if (status.is_ok()) continue;
      EXPECT_FALSE(must_survive(life, kind)) << status.message();
      // It stays where it is, however often one asks and whatever the device does.
      life.io().clear_faults();
      const uint64_t written_bytes = life.io().device_statistics(0).write.bytes;
      const bool fenced = !life.heart().extents().check_writable().is_ok();
      EXPECT_FALSE(life.commit(committed).is_ok());
      EXPECT_FALSE(life.sync().is_ok());
      if (fenced) {
        EXPECT_EQ(life.io().device_statistics(0).write.bytes, written_bytes)
            << "a fenced volume was written";
      }
      return static_cast<size_t>(committed);
    }
    return kCommits;
  }

  static std::map<std::string, Beginning> beginnings_;  // by the setting's name
  static std::vector<State> states_;
};

std::map<std::string, IoFaultsMatrix::Beginning> IoFaultsMatrix::beginnings_;
std::vector<State> IoFaultsMatrix::states_;

TEST_P(IoFaultsMatrix, whichever_io_fails) {
  const auto& [setting, kind] = GetParam();
  const bool syncs_only = kind.fault.io_kind == IoKind::sync;
  const Beginning& beginning = begin(setting);
  const uint64_t count = syncs_only ? beginning.sync_count : beginning.started_count;
  ASSERT_GT(count, syncs_only ? 1u : 15u);
  for (uint64_t index = 0; index < count; ++index) {
    SCOPED_TRACE(::testing::Message() << kind.name << " at I/O " << index << " of " << count);
    live_and_die(setting, kind, index);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, IoFaultsMatrix, ::testing::ValuesIn(cases()), [](const auto& param) {
      const Setting& setting = param.param.setting;
      std::string name = concat(
          setting.name, std::string_view(setting.name).empty() ? "" : " ", param.param.kind.name);
      std::replace_if(name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
      return name;
    });

}  // namespace
}  // namespace memd
