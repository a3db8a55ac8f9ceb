// The daemon is killed at every I/O and at every failpoint; whatever it was doing, the next one
// finds the state of a commit, the last acknowledged one or the one after, and goes on with the
// same numbers.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <regex>
#include <set>

#include "base/failpoint.h"
#include "relay_keeper.h"
#include "scenario.h"

namespace memd::testing {
namespace {

constexpr uint64_t kVolumeBytes = 20_MiB;
constexpr size_t kNameBytes = 56;
constexpr size_t kNamesMax = 256;
constexpr int kAttempts = 20;
constexpr int kCountingRuns = 3;

/// What children tell their parent; in memory that both map.
struct Shared {
  std::atomic<uint32_t> acknowledged{0};  // phases whose commit was acknowledged
  std::atomic<uint32_t> closed{0};        // steps that a ledger holds, or held until they were made
  std::atomic<uint64_t> io_count{0};
  std::mutex mutex;  // of one child at a time
  struct Hits {
    char name[kNameBytes];
    uint64_t count;
  } hits[kNamesMax]{};

  uint64_t hit(std::string_view name) {
    const std::lock_guard lock(mutex);
    for (Hits& each : hits) {
      if (each.name[0] == 0) {
        MEMD_CHECK_LT(name.size(), kNameBytes);
        std::memcpy(each.name, name.data(), name.size());
      }
      if (name == each.name) return ++each.count;
    }
    MEMD_CHECK(false);
    return 0;
  }
};

struct KillPoint {
  std::string name;  // a failpoint, or empty: an I/O
  uint64_t hit = 0;  // from 1
  IoMoment moment = IoMoment::before_submit;
  std::string text() const {
    if (!name.empty()) return concat(name, " #", hit);
    const char* const moments[] = {"before submitting", "after submitting", "on completion of"};
    return concat(moments[static_cast<size_t>(moment)], " I/O #", hit);
  }
};

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

/// Runs `body` in a child; its wait status.
int in_child(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  MEMD_CHECK_GE(pid, 0);
  if (pid == 0) {
    // An exception must not find its way into the parent's test runner.
    [&]() noexcept { body(); }();
    std::fflush(stderr);
    _exit(0);
  }
  int status = 0;
  MEMD_CHECK_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}
bool ended_well(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }
bool was_killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

class KillTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = "memd-kill-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = std::filesystem::absolute(pattern);
    void* const memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = static_cast<Shared*>(memory);
    new (shared_) Shared;
  }
  void TearDown() override {
    ::munmap(shared_, sizeof(Shared));
    std::filesystem::remove_all(folder_);
  }

  std::filesystem::path volume() const { return folder_ / "volumes" / "memd.volume"; }
  void empty_folder() const {
    std::filesystem::remove_all(folder_ / "volumes");
    std::filesystem::create_directory(folder_ / "volumes");
  }
  /// With a keeper on what was kept for it.
  std::unique_ptr<Daemon> start(TapQueue::Tap tap = {}, DescriptorKeeper* keeper = nullptr) const {
    auto set = VolumeSet::open({.directories = {folder_ / "volumes"}, .bytes = kVolumeBytes});
    require(set.is_ok(), set.status().message());
    const auto make_queue = [this](int wake_fd) {
      auto choice = make_io_queue({.engine = engine_, .wake_fd = wake_fd});
      require(choice.is_ok(), choice.status().message());
      return std::move(choice.value().queue);
    };
    KeptDescriptors kept;
    if (keeper != nullptr) kept = keepsakes_.hand_over();
    auto daemon = std::make_unique<Daemon>(
        std::move(set).value(), make_queue, false, std::move(tap), keeper, std::move(kept));
    require(daemon->loaded.is_ok(), daemon->loaded.message());
    return daemon;
  }
  std::string state_file(size_t phase) const { return folder_ / concat("state-", phase); }
  static std::string read_file(const std::filesystem::path& path) {
    std::string bytes(std::filesystem::file_size(path), 0);
    std::ifstream file(path, std::ios::binary);
    MEMD_CHECK(file.read(bytes.data(), std::ssize(bytes)).good());
    return bytes;
  }
  static void write_file(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<ssize_t>(bytes.size()));
  }

  /// An undisturbed run: the state after each phase, and the volume before `first_phase`.
  void run_undisturbed(size_t first_phase) {
    const int status = in_child([&] {
      empty_folder();
      for (size_t phase = 0; phase < kPhaseCount; ++phase) {
        if (phase == first_phase && phase > 0)
          std::filesystem::copy_file(volume(), folder_ / "image");
        const auto daemon = start();
        write_file(state_file(phase), state_of(*daemon).value());
        run_phase(*daemon, phase);
      }
      const auto daemon = start();
      write_file(state_file(kPhaseCount), state_of(*daemon).value());
    });
    ASSERT_TRUE(ended_well(status)) << status;
    for (size_t phase = 0; phase <= kPhaseCount; ++phase) {
      states_.push_back(read_file(state_file(phase)));
      if (phase > 0) ASSERT_NE(states_[phase], states_[phase - 1]) << phase;
    }
    first_phase_ = first_phase;
    image_ = first_phase > 0 ? read_file(folder_ / "image") : "";
  }

  /// The volume as it was before the first phase; only what a run changed is written.
  void restore_image() const {
    if (image_.empty()) return empty_folder();
    const int fd = ::open(volume().c_str(), O_RDWR | O_CLOEXEC);
    MEMD_CHECK_GE(fd, 0);
    constexpr size_t kPart = 64_KiB;
    std::string part(kPart, 0);
    for (size_t at = 0; at < image_.size(); at += kPart) {
      MEMD_CHECK_EQ(::pread(fd, part.data(), kPart, static_cast<off_t>(at)), ssize_t{kPart});
      if (std::memcmp(part.data(), image_.data() + at, kPart) == 0) continue;
      MEMD_CHECK_EQ(::pwrite(fd, image_.data() + at, kPart, static_cast<off_t>(at)),
                    ssize_t{kPart});
    }
    MEMD_CHECK_EQ(::close(fd), 0);
  }

  /// In a child: counts, and dies at `point` if there is one.
  TapQueue::Tap watch(const std::optional<KillPoint>& point) {
    failpoint::set_observer([this, point](std::string_view name) {
      const uint64_t hit = shared_->hit(name);
      if (name == "ledger.step_closed") ++shared_->closed;
      if (point && point->name == name && point->hit == hit) die();
    });
    return [this, point, counts = std::array<uint64_t, 3>{}](IoMoment moment,
                                                             const IoRequest&) mutable {
      const uint64_t index = ++counts[static_cast<size_t>(moment)];
      if (moment == IoMoment::before_submit) shared_->io_count = index;
      if (point && point->name.empty() && point->moment == moment && point->hit == index) die();
    };
  }

  /// In a child: from the image to the end of `last_phase`, dying at `point` if there is one.
  void run_to(size_t last_phase,
              const std::optional<KillPoint>& point,
              DescriptorKeeper* keeper = nullptr) {
    auto daemon = start(watch(point), keeper);
    for (size_t phase = first_phase_; phase <= last_phase; ++phase) {
      run_phase(*daemon, phase);
      shared_->acknowledged = static_cast<uint32_t>(phase + 1);
    }
    daemon.reset();
  }

  /// In a child: what a new daemon finds, and whether it goes on from there as if nothing had been.
  void check(size_t acknowledged) const {
    size_t phase = acknowledged;
    {
      const auto daemon = start();
      const auto found = state_of(*daemon);
      require(found.is_ok(), found.status().message());
      if (found.value() != states_[phase] && phase < kPhaseCount) ++phase;
      require(found.value() == states_[phase],
              "the state is neither that of commit ",
              acknowledged,
              ", which was acknowledged, nor that of the next");
      check_disk(*daemon);
      for (; phase < kPhaseCount; ++phase) {
        run_phase(*daemon, phase);
        const auto now = state_of(*daemon);
        require(now.is_ok() && now.value() == states_[phase + 1],
                "going on from commit ",
                phase,
                " gave other numbers");
      }
      check_disk(*daemon);
    }
    const auto daemon = start();
    const auto found = state_of(*daemon);
    require(found.is_ok() && found.value() == states_[kPhaseCount], "the end is another");
  }
  void check_disk(Daemon& daemon) const {
    const std::string bytes = read_file(volume());
    check_accounts(daemon, std::as_bytes(std::span(bytes)));
  }

  /// In a lane: why the promise does not hold at `point`; empty where it does.
  std::string kill_at(const KillPoint& point, size_t last_phase) {
    // How often a point is reached may differ by a race between completions: another attempt then.
    int status = 0;
    for (int attempt = 0; attempt < kAttempts && !was_killed(status); ++attempt) {
      restore_image();
      new (shared_) Shared;
      shared_->acknowledged = static_cast<uint32_t>(first_phase_);
      status = in_child([&] { run_to(last_phase, point); });
    }
    if (!was_killed(status)) return concat("not reached: ", point.text(), ", status ", status);
    const size_t acknowledged = shared_->acknowledged;
    const int checked = in_child([&] { check(acknowledged); });
    if (ended_well(checked)) return "";
    return concat("killed ", point.text(), " in phase ", acknowledged, ", status ", checked);
  }

  // ---- Where memory outlives the daemon ----

  /// Steps of the phases before `phase` that a daemon which begins at the image makes.
  size_t steps_before(size_t phase) const {
    size_t count = 0;
    for (size_t each = first_phase_; each < phase; ++each) count += is_step(each) ? 1 : 0;
    return count;
  }
  static bool is_step(size_t phase) { return phase == 2 || phase == 5 || phase == 11; }

  /// In a child: a daemon takes over, makes what was closed, and hears from no trainer any more.
  static void take_over(Daemon& daemon) {
    daemon.until([&] { return daemon.store().is_idle(); });
    while (!daemon.store().sessions().empty())
      daemon.detach(daemon.store().sessions().begin()->first);
    daemon.until([&] { return daemon.store().is_idle(); });
  }

  /// In a child, with what outlived the last daemon. Writes outside of steps are visible before
  /// they are committed: here each is there in full or not at all, a step with all that is its own.
  void check_kept(size_t acknowledged, size_t closed_count, DescriptorKeeper& keeper) {
    size_t phase = acknowledged;
    {
      const auto daemon = start({}, &keeper);
      take_over(*daemon);
      const bool is_closed = is_step(phase) && closed_count > steps_before(phase);
      if (is_closed) {
        require(daemon->store().load_notes().empty(),
                "a closed step's memory was not taken over: ",
                daemon->store().load_notes().empty() ? "" : daemon->store().load_notes().front());
      }
      std::map<std::string, std::string> parts;
      const auto found = state_of(*daemon, &parts);
      require(found.is_ok(), found.status().message());
      const std::string& before = states_[phase];
      const std::string& after = phase < kPhaseCount ? states_[phase + 1] : before;
      bool all_before = true;
      bool all_after = true;
      for (const auto& [name, bytes] : parts) {
        const bool is_before = before.find(bytes) != std::string::npos;
        const bool is_after = after.find(bytes) != std::string::npos;
        // Its bytes are a buffer's only by the step.
        if (name == "job/staged" && !is_closed) continue;
        require(is_before || is_after, name, " has bytes of no commit");
        if (name == "job/blob") continue;  // written beside the step
        all_before &= is_before;
        all_after &= is_after;
      }
      if (is_step(phase)) {
        require(is_closed ? all_after : all_before,
                is_closed ? "a closed step was not made by the next daemon"
                          : "a step that nobody closed has left something");
      }
      if (phase == kLoadPhase)
        require(found.value() == before || found.value() == after, "half a load is left");
      if (is_closed)
        require(found.value() == after, "after a closed step that was made, something else is new");
      for (const JobInfo& info : daemon->store().reports().jobs()) {
        const uint64_t session = daemon->attach(info.job_id);
        daemon->job(session).durable().note_change();
        const Status synced = daemon->sync(session);
        require(synced.is_ok(), synced.message());
        daemon->detach(session);
      }
      check_memory(*daemon);
      check_disk(*daemon);
      if (phase < kPhaseCount && found.value() == after) ++phase;
      for (; phase < kPhaseCount; ++phase) {
        run_phase(*daemon, phase);
        const auto now = state_of(*daemon);
        require(now.is_ok() && now.value() == states_[phase + 1],
                "going on from commit ",
                phase,
                " gave other numbers");
      }
      check_memory(*daemon);
      check_disk(*daemon);
    }
    const auto daemon = start();
    const auto found = state_of(*daemon);
    require(found.is_ok() && found.value() == states_[kPhaseCount], "on disk the end is another");
  }

  /// The first daemon dies at the first point, the one that takes over from it at the second.
  std::string kill_kept_at(const std::vector<KillPoint>& points, size_t last_phase) {
    std::string text;
    for (const KillPoint& point : points) text += concat(point.text(), "; ");
    const auto kill_all = [&] {
      restore_image();
      keepsakes_.clear();
      new (shared_) Shared;
      shared_->acknowledged = static_cast<uint32_t>(first_phase_);
      for (size_t i = 0; i < points.size(); ++i) {
        const int status = keepsakes_.in_child([&](DescriptorKeeper& keeper) {
          for (auto& each : shared_->hits) each = {};
          if (i == 0) return run_to(last_phase, points[i], &keeper);
          take_over(*start(watch(points[i]), &keeper));
        });
        if (!was_killed(status)) return status;
      }
      return SIGKILL;
    };
    int status = 0;
    for (int attempt = 0; attempt < kAttempts && !was_killed(status); ++attempt)
      status = kill_all();
    if (!was_killed(status)) return concat("not reached: ", text, "status ", status);
    const size_t acknowledged = shared_->acknowledged;
    const size_t closed_count = shared_->closed;
    const int checked = keepsakes_.in_child([&](DescriptorKeeper& keeper) {
      failpoint::set_observer({});
      check_kept(acknowledged, closed_count, keeper);
    });
    if (!ended_well(checked))
      return concat("killed ", text, "in phase ", acknowledged, ", status ", checked);
    // All sessions have ended, and of two jobs one was dropped.
    const size_t segments = keepsakes_.count("segment.");
    if (segments == 2 * (Daemon::kFloor + 1) && keepsakes_.count("session.") == 0 &&
        keepsakes_.count("doorbell.") == 0 && keepsakes_.count("ledger.") == 1 &&
        keepsakes_.count("table.") == 1) {
      return "";
    }
    return concat("killed ",
                  text,
                  "in phase ",
                  acknowledged,
                  ": the keeper was left with ",
                  segments,
                  " segments, ",
                  keepsakes_.count("session."),
                  " sessions, ",
                  keepsakes_.count("ledger."),
                  " ledgers, ",
                  keepsakes_.count("table."),
                  " tables");
  }

  void count_kept(size_t last_phase) {
    restore_image();
    keepsakes_.clear();
    new (shared_) Shared;
    ASSERT_TRUE(ended_well(keepsakes_.in_child(
        [&](DescriptorKeeper& keeper) { run_to(last_phase, std::nullopt, &keeper); })));
  }
  /// What the daemon passes that takes over from one that died at `first`.
  void count_take_over(const KillPoint& first, size_t last_phase) {
    restore_image();
    keepsakes_.clear();
    new (shared_) Shared;
    ASSERT_TRUE(was_killed(keepsakes_.in_child(
        [&](DescriptorKeeper& keeper) { run_to(last_phase, first, &keeper); })));
    new (shared_) Shared;
    ASSERT_TRUE(ended_well(keepsakes_.in_child(
        [&](DescriptorKeeper& keeper) { take_over(*start(watch(std::nullopt), &keeper)); })));
  }

  void kill_at_all(const std::vector<KillPoint>& points, size_t last_phase) {
    run_lanes(points.size(), [&](size_t i) { return kill_at(points[i], last_phase); });
  }
  void kill_kept_at_all(const std::vector<std::vector<KillPoint>>& chains, size_t last_phase) {
    run_lanes(chains.size(), [&](size_t i) { return kill_kept_at(chains[i], last_phase); });
  }

  /// Every point; lanes wait for the disk beside each other, each in a folder of its own.
  void run_lanes(size_t count, const std::function<std::string(size_t)>& run) {
    constexpr size_t kLanes = 4;
    const char* const given = std::getenv("MEMD_KILLS_EVERY");
    const size_t every = given == nullptr ? 1 : std::stoull(given);
    MEMD_CHECK_GT(every, 0u);
    std::vector<pid_t> lanes;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const pid_t pid = ::fork();
      ASSERT_GE(pid, 0);
      lanes.push_back(pid);
      if (pid > 0) continue;
      [&]() noexcept {
        folder_ /= concat("lane-", lane);
        std::filesystem::create_directory(folder_);
        empty_folder();
        write_file(volume(), image_);
        void* const memory = ::mmap(
            nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        MEMD_CHECK(memory != MAP_FAILED);
        shared_ = static_cast<Shared*>(memory);
        for (size_t i = lane * every; i < count; i += kLanes * every) {
          const std::string violation = run(i);
          require(violation.empty(), violation);
        }
      }();
      _exit(0);
    }
    for (const pid_t pid : lanes) {
      int status = 0;
      ASSERT_EQ(::waitpid(pid, &status, 0), pid);
      EXPECT_TRUE(ended_well(status)) << status;
    }
    std::printf("%zu histories of kills\n", divide_up(count, every));
  }

  void count(size_t last_phase) {
    restore_image();
    new (shared_) Shared;
    ASSERT_TRUE(ended_well(in_child([&] { run_to(last_phase, std::nullopt); })));
  }
  /// How often each point is reached in every one of a few runs. A race between completions evicts
  /// once more in one run than in another, and a point that hardly any run has is none to wait for.
  std::map<std::string, uint64_t> steady_hits(const std::function<void()>& count_once) {
    count_once();
    std::map<std::string, uint64_t> least = hits();
    for (int run = 1; run < kCountingRuns; ++run) {
      count_once();
      const std::map<std::string, uint64_t> now = hits();
      std::erase_if(least, [&](const auto& each) { return !now.contains(each.first); });
      for (auto& [name, hit_count] : least) hit_count = std::min(hit_count, now.at(name));
    }
    return least;
  }
  std::map<std::string, uint64_t> hits() const {
    std::map<std::string, uint64_t> all;
    for (const auto& each : shared_->hits) {
      if (each.name[0] != 0) all[each.name] = each.count;
    }
    return all;
  }

  Keepsakes keepsakes_;
  std::filesystem::path folder_;
  Shared* shared_ = nullptr;
  IoEngine engine_ = IoEngine::automatic;
  size_t first_phase_ = 0;
  std::vector<std::string> states_;
  std::string image_;
};

constexpr size_t kLastKilledPhase = 9;

std::vector<KillPoint> every_hit(const std::map<std::string, uint64_t>& hits) {
  std::vector<KillPoint> points;
  for (const auto& [name, count] : hits) {
    for (uint64_t hit = 1; hit <= count; ++hit) points.push_back({.name = name, .hit = hit});
  }
  return points;
}

std::vector<KillPoint> every_io(uint64_t io_count, const std::vector<IoMoment>& moments) {
  std::vector<KillPoint> points;
  for (uint64_t index = 1; index <= io_count; ++index) {
    for (const IoMoment moment : moments)
      points.push_back({.name = "", .hit = index, .moment = moment});
  }
  return points;
}

TEST_F(KillTest, at_every_io_of_a_step_and_its_commit_the_state_is_that_of_a_commit) {
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kFirstKilledPhase));
  count(kLastKilledPhase);
  const uint64_t io_count = shared_->io_count;
  ASSERT_GT(io_count, 40u);
  kill_at_all(
      every_io(io_count, {IoMoment::before_submit, IoMoment::after_submit, IoMoment::completed}),
      kLastKilledPhase);
}

TEST_F(KillTest, at_every_failpoint_of_a_step_and_its_commit_the_state_is_that_of_a_commit) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kFirstKilledPhase));
  const auto hits = steady_hits([this] { count(kLastKilledPhase); });
  ASSERT_GT(hits.size(), 40u);
  kill_at_all(every_hit(hits), kLastKilledPhase);
}

TEST_F(KillTest, at_every_io_of_a_load_the_job_is_what_it_was_or_all_of_the_load) {
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kLoadPhase));
  count(kLoadPhase);
  ASSERT_GT(shared_->io_count, 40u);
  kill_at_all(every_io(shared_->io_count,
                       {IoMoment::before_submit, IoMoment::after_submit, IoMoment::completed}),
              kLoadPhase);
}

TEST_F(KillTest, at_every_failpoint_of_a_load_the_job_is_what_it_was_or_all_of_the_load) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kLoadPhase));
  const auto hits = steady_hits([this] { count(kLoadPhase); });
  for (const char* const name : {"snapshot.committed", "snapshot.restored", "snapshot.dropped"})
    ASSERT_TRUE(hits.contains(name)) << name;
  kill_at_all(every_hit(hits), kLoadPhase);
}

TEST_F(KillTest, at_every_failpoint_of_the_first_start_the_next_one_begins_anew_or_goes_on) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(0));
  const auto hits = steady_hits([this] { count(0); });
  ASSERT_TRUE(hits.contains("format.before_rename"));
  kill_at_all(every_hit(hits), 0);
}

/// What only an error reaches; planted_test.cc makes those.
const std::set<std::string> kReachedByErrors = {"commit.abandoned",
                                                "read.before_second_attempt",
                                                "read.given_up",
                                                "rollback.begun",
                                                "step.undoing",
                                                "volume.fencing"};

/// Of jobs whose steps are committed in memory; in_memory_kill_test.cc kills in their steps, and
/// passes ledger.piece_restored, which is of the take-over, without a kill.
const std::set<std::string> kReachedInMemory = {"adoption.host_tile_taken",
                                                "host.before_copies",
                                                "host.copied",
                                                "host.guarded",
                                                "ledger.before_memory_commit",
                                                "ledger.memory_commit_recorded",
                                                "ledger.piece_half_updated",
                                                "ledger.piece_restored",
                                                "ledger.pre_image_taken",
                                                "ledger.tile_marked",
                                                "ledger.tile_not_marked"};

bool is_of_kept_memory(const std::string& name) {
  return name.starts_with("ledger.") || name.starts_with("adoption.");
}

std::vector<KillPoint> kept_hits(const std::map<std::string, uint64_t>& hits) {
  std::vector<KillPoint> points = every_hit(hits);
  std::erase_if(points, [](const KillPoint& point) { return !is_of_kept_memory(point.name); });
  return points;
}

/// The one step of the killed phases, with spilled gradients and a staged buffer.
const KillPoint kStepClosed{.name = "ledger.step_closed", .hit = 1};
/// It is on disk, and the ledger says that it is still to be made.
const KillPoint kStepCommitted{.name = "step.before_staged_dropped", .hit = 1};
/// All of the second load is on disk, and it does not count yet. The first one's return passed here
/// before.
const KillPoint kLoadSynced{.name = "snapshot.before_drop", .hit = 2};

TEST_F(KillTest, where_memory_survives_a_closed_step_is_made_whatever_the_moment_of_the_kill) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kFirstKilledPhase));
  const auto hits = steady_hits([this] { count_kept(kLastKilledPhase); });
  ASSERT_EQ(shared_->closed, 1u);
  ASSERT_GT(shared_->io_count, 40u);
  std::vector<std::vector<KillPoint>> chains;
  for (const KillPoint& point : kept_hits(hits)) chains.push_back({point});
  ASSERT_GT(chains.size(), 10u);
  for (const KillPoint& point :
       every_io(shared_->io_count, {IoMoment::before_submit, IoMoment::completed}))
    chains.push_back({point});
  kill_kept_at_all(chains, kLastKilledPhase);
}

TEST_F(KillTest, where_memory_survives_a_load_is_taken_back_or_counts_in_full) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kLoadPhase));
  const auto hits = steady_hits([this] { count_kept(kLoadPhase); });
  std::vector<std::vector<KillPoint>> chains;
  for (const KillPoint& point : every_hit(hits)) chains.push_back({point});
  for (const KillPoint& point : every_io(shared_->io_count, {IoMoment::completed}))
    chains.push_back({point});
  ASSERT_GT(chains.size(), 40u);
  kill_kept_at_all(chains, kLoadPhase);
}

TEST_F(KillTest, a_daemon_that_takes_over_may_be_killed_too) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kFirstKilledPhase));
  std::vector<std::vector<KillPoint>> chains;
  for (const KillPoint& first : {kStepClosed, kStepCommitted}) {
    const auto hits = steady_hits([&] { count_take_over(first, kLastKilledPhase); });
    ASSERT_TRUE(hits.contains("adoption.slots_noted"));
    ASSERT_EQ(hits.contains("adoption.before_redo"), first.name == kStepClosed.name);
    for (const KillPoint& point : kept_hits(hits)) chains.push_back({first, point});
    for (const KillPoint& point :
         every_io(shared_->io_count, {IoMoment::before_submit, IoMoment::completed}))
      chains.push_back({first, point});
  }
  ASSERT_GT(chains.size(), 20u);
  kill_kept_at_all(chains, kLastKilledPhase);
}

TEST_F(KillTest, a_daemon_that_takes_a_load_back_may_be_killed_too) {
  engine_ = IoEngine::threads;
  ASSERT_NO_FATAL_FAILURE(run_undisturbed(kLoadPhase));
  const auto hits = steady_hits([&] { count_take_over(kLoadSynced, kLoadPhase); });
  ASSERT_TRUE(hits.contains("snapshot.dropped"));
  std::vector<std::vector<KillPoint>> chains;
  for (const KillPoint& point : every_hit(hits)) chains.push_back({kLoadSynced, point});
  for (const KillPoint& point : every_io(shared_->io_count, {IoMoment::completed}))
    chains.push_back({kLoadSynced, point});
  ASSERT_GT(chains.size(), 20u);
  kill_kept_at_all(chains, kLoadPhase);
}

TEST_F(KillTest, every_failpoint_in_the_sources_is_killed_at) {
  std::set<std::string> named;
  const std::regex call("MEMD_FAILPOINT\\(\"([^\"]+)\"\\)");
  for (const auto& file : std::filesystem::recursive_directory_iterator(MEMD_NATIVE_FOLDER)) {
    if (file.path().extension() != ".cc") continue;
    const std::string text = read_file(file.path());
    for (std::sregex_iterator it(text.begin(), text.end(), call), end; it != end; ++it) {
      EXPECT_TRUE(named.insert((*it)[1]).second) << "two moments have one name: " << (*it)[1];
    }
  }
  EXPECT_GE(named.size(), 40u);
  engine_ = IoEngine::threads;
  std::set<std::string> reached = kReachedByErrors;
  reached.insert(kReachedInMemory.begin(), kReachedInMemory.end());
  // As the two tests above count them.
  for (const size_t first_phase : {size_t{0}, kFirstKilledPhase}) {
    states_.clear();
    ASSERT_NO_FATAL_FAILURE(run_undisturbed(first_phase));
    count(first_phase == 0 ? 0 : kLastKilledPhase);
    for (const auto& [name, hit_count] : hits()) reached.insert(name);
  }
  count_kept(kLastKilledPhase);
  for (const KillPoint& point : kept_hits(hits())) reached.insert(point.name);
  ASSERT_NO_FATAL_FAILURE(count_take_over(kStepClosed, kLastKilledPhase));
  for (const KillPoint& point : kept_hits(hits())) reached.insert(point.name);
  for (const std::string& name : named) EXPECT_TRUE(reached.contains(name)) << name;
  for (const std::string& name : reached) EXPECT_TRUE(named.contains(name)) << name;
}

}  // namespace
}  // namespace memd::testing
