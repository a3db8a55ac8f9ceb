// A bug is planted, and the check that is there for it must fail; without one it must pass.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>
#include <set>

#include "base/failpoint.h"
#include "scenario.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kVolume = 20_MiB;

/// A daemon on a device in memory that two phases, a step among them, have filled.
struct Bench {
  explicit Bench(std::shared_ptr<MemoryDisk> on = std::make_shared<MemoryDisk>(kVolume),
                 bool fill = true,
                 TestKeeper* keeper = nullptr)
      : disk(std::move(on)) {
    VolumeSet set;
    Volume volume;
    volume.path = "disk";
    volume.bytes = kVolume;
    volume.data_begin_bytes = 2_MiB;
    volume.data_end_bytes = kVolume - 2_MiB;
    set.superblock = newest_superblock(disk->bytes());
    set.volumes.push_back(std::move(volume));
    daemon = std::make_unique<Daemon>(
        std::move(set),
        [this](int wake_fd) {
          auto queue = std::make_unique<DiskQueue>(
              disk, MemoryQueueOptions{.depth = 32, .wake_fd = wake_fd, .automatic = true});
          faults = &queue->memory();
          return queue;
        },
        true,
        TapQueue::Tap{},
        keeper,
        keeper == nullptr ? KeptDescriptors{} : keeper->hand_over());
    require(daemon->loaded.is_ok(), daemon->loaded.message());
    if (!fill) return;
    run_phase(*daemon, 0);
    run_phase(*daemon, 2);
  }
  uint64_t attach() { return daemon->attach(daemon->open("job", kJobDisk)); }
  std::string state() {
    const auto found = state_of(*daemon);
    require(found.is_ok(), found.status().message());
    return found.value();
  }
  /// What a daemon finds that starts on this disk.
  std::string state_after_restart() const {
    return Bench(std::make_shared<MemoryDisk>(*disk), false).state();
  }

  /// As kill -9 would: nothing is ended, and nothing moves any more.
  void kill() { static_cast<void>(daemon.release()); }

  std::shared_ptr<MemoryDisk> disk;
  MemoryQueue* faults = nullptr;
  std::unique_ptr<Daemon> daemon;
};

void a_failed_write_is_never_acknowledged_and_nothing_follows_it() {
  for (const IoKind kind : {IoKind::write, IoKind::sync}) {
    Bench bench;
    const uint64_t session = bench.attach();
    const StepRequest request = backward(*bench.daemon, session, false);
    bench.faults->add_fault({.io_kind = kind, .skip_count = 1, .count = 1});
    require(!bench.daemon->step(request).is_ok(), "a step was acknowledged that was not written");
    bench.faults->clear_faults();
    require(!bench.daemon->step(request).is_ok(), "a step was acknowledged on a fenced volume");
    require(!bench.daemon->extents().check_writable().is_ok(), "the volume is not fenced");
  }
}

void a_failed_step_leaves_everything_as_it_was() {
  Bench bench;
  const std::string before = bench.state();
  // The rest of either bucket is read: before the second one fails, the first was replaced.
  for (uint64_t skipped = 0; skipped < 2; ++skipped) {
    const uint64_t session = bench.attach();
    StepRequest request = backward(*bench.daemon, session, false);
    request.staged_buffers.clear();
    bench.daemon->job(session).tiles().drop_all(
        bench.daemon->job(session).memory()->private_side());
    bench.faults->add_fault(
        {.io_kind = IoKind::read, .skip_count = skipped, .count = 1000, .error_number = EAGAIN});
    const Status status = bench.daemon->step(request);
    bench.faults->clear_faults();
    require(!status.is_ok(), "the reads of a step failed and it did not");
    // The blob that backward() put was written on the way and belongs to no failed step.
    bench.daemon->write(session, "blob", pattern(kBlob, static_cast<uint8_t>(53)));
    bench.daemon->detach(session);
    require(bench.state() == before, "after a failed step the state is another, ", skipped);
  }
}

void what_was_made_for_another_step_is_not_used() {
  std::string states[2];
  for (const bool is_early : {false, true}) {
    Bench bench;
    const uint64_t session = bench.attach();
    StepRequest request = backward(*bench.daemon, session, false);
    if (is_early) update_early(*bench.daemon, request);
    for (StepGroup& group : request.groups) group.settings.lr *= 0.5;
    const Status status = bench.daemon->step(request);
    require(status.is_ok(), status.message());
    bench.daemon->detach(session);
    states[is_early ? 1 : 0] = bench.state();
  }
  require(states[0] == states[1], "what was made early, with other settings, gave other numbers");
}

void who_dies_while_writing_leaves_no_trace() {
  Bench bench;
  const std::string before = bench.state();
  const uint64_t writer = bench.attach();
  const auto held = bench.daemon->lease(writer, "blob", LeaseMode::overwrite);
  require(held.status.is_ok(), held.status.message());
  std::memset(held.grant.data, 0xFF, kBlob / 2);
  bench.daemon->detach(writer);
  require(bench.state() == before, "a blob that was half written is shown");
}

void who_dies_holds_nothing() {
  Bench bench;
  const uint64_t reader = bench.attach();
  require(bench.daemon->lease(reader, "blob").status.is_ok(), "no lease");
  Job& job = bench.daemon->job(reader);
  require(job.cache().slots().lease_count() == 1, "the lease is not counted");
  bench.daemon->detach(reader);
  require(job.cache().slots().lease_count() == 0,
          "the lease of a session that has ended is still held");
}

void what_is_leased_keeps_its_bytes() {
  Bench bench;
  const uint64_t session = bench.attach();
  const auto held = bench.daemon->lease(session, "ballast");
  require(held.status.is_ok(), held.status.message());
  const auto other = bench.attach();
  for (int round = 0; round < 4; ++round) {
    for (const char* const name : {"w", "h", "blob", "extra", "buffer"}) {
      const auto bytes = bench.daemon->read(other, name);
      require(bytes.is_ok(), bytes.status().message());
    }
  }
  const auto expected = pattern(kBallast, 7);
  require(std::memcmp(held.grant.data, expected.data(), kBallast) == 0, "leased bytes changed");
  require(bench.daemon->job(session)
              .shards()
              .find_entry(bench.daemon->id(session, "ballast"), Part::value)
              ->is_resident(),
          "leased bytes were evicted");
}

void a_closed_step_needs_its_trainer_no_more() {
  Bench undisturbed;
  {
    const uint64_t session = undisturbed.attach();
    const Status status = undisturbed.daemon->step(backward(*undisturbed.daemon, session, false));
    require(status.is_ok(), status.message());
    undisturbed.daemon->detach(session);
  }
  Bench bench;
  const uint64_t session = bench.attach();
  std::optional<Status> answer;
  bench.daemon->store().operations().step(
      backward(*bench.daemon, session, false),
      [&](const Status& status, const StepReport&) { answer = status; });
  bench.daemon->detach(session);
  bench.daemon->until([&] { return answer.has_value(); });
  require(answer->is_ok(), answer->message());
  require(bench.state() == undisturbed.state(), "its numbers are others");
}

void gradients_are_there_until_the_step_is_durable() {
  Bench bench;
  const uint64_t session = bench.attach();
  Job& job = bench.daemon->job(session);
  uint32_t seen_count = 0;
  failpoint::set_observer([&](std::string_view name) {
    if (name != "commit.before_second_flush") return;
    for (const char* const shard : {"w", "b", "h"}) {
      require(job.shards()[bench.daemon->id(session, shard)].contributors.is_sealed(),
              "the gradient of ",
              shard,
              " is gone before its step is durable");
      ++seen_count;
    }
  });
  const Status status = bench.daemon->step(backward(*bench.daemon, session, false));
  failpoint::set_observer({});
  require(status.is_ok() && seen_count == 3, "no commit was seen");
}

/// Bytes that are not those of their place are an error, wherever they are read.
void damage(const std::function<void(std::span<std::byte>, const ExtentRecord&)>& spoil,
            bool by_step) {
  auto disk = std::make_shared<MemoryDisk>(kVolume);
  {
    const Bench filled(disk);
  }
  for (const ExtentRecord& extent : named_extents(disk->bytes()).all) {
    auto damaged = std::make_shared<MemoryDisk>(*disk);
    spoil(damaged->bytes(), extent);
    // Catalogue and root are records with a checksum of their own besides.
    if (extent.length_bytes <= 8192) continue;
    Bench bench(damaged, false);
    if (!by_step) {
      require(!state_of(*bench.daemon).is_ok(),
              "damaged bytes were returned, at ",
              extent.address.offset_bytes);
      continue;
    }
    const uint64_t session = bench.attach();
    bench.daemon->job(session).tiles().drop_all(
        bench.daemon->job(session).memory()->private_side());
    const Job& job = bench.daemon->job(session);
    bool of_tile = false;
    for (const Bucket& bucket : job.shards().buckets()) {
      for (const Replica& rest : bucket.rest)
        of_tile |= rest.offset_bytes() == extent.address.offset_bytes;
    }
    if (!of_tile) continue;
    const Status status = bench.daemon->step(backward(*bench.daemon, session, false));
    require(status.code() == StatusCode::integrity, "a step used damaged moments");
  }
}
void flip(std::span<std::byte> disk, const ExtentRecord& extent) {
  disk[extent.address.offset_bytes + extent.length_bytes / 3] ^= std::byte{0x10};
}
void no_flipped_bit_is_returned() { damage(flip, false); }
void no_flipped_bit_is_used() { damage(flip, true); }

void bytes_of_another_place_are_not_returned() {
  ExtentRecord here{.address = {.device = 0, .offset_bytes = 4_MiB}};
  here.length_bytes = 4096;
  const std::vector<std::byte> bytes(4096, std::byte{7});
  here.checksum = extent_checksum(bytes, here.address);
  require(ExtentStore::matches(here, bytes), "its own bytes do not match");
  here.address.offset_bytes += 4096;
  require(!ExtentStore::matches(here, bytes), "bytes of another place match");
}

/// The explorer of power cuts is a program of its own, which plants what MEMD_PLANT says.
void no_power_cut_breaks_a_promise() {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string path = program / "powercut_planted";
  ::execl(path.c_str(),
          path.c_str(),
          "--gtest_filter=Seeds/PowerCut.every_state_is_*/0:Seeds/PowerCut.every_state_is_*/1:"
          "PowerCutRestarts.*:PowerCutSnapshots.*",
          "--gtest_brief=1",
          nullptr);
  std::perror(path.c_str());
  _exit(127);
}

/// The state after an undisturbed step that says its number.
std::string state_after_step() {
  Bench bench;
  const uint64_t session = bench.attach();
  const Status status = bench.daemon->step(backward(*bench.daemon, session, true));
  require(status.is_ok(), status.message());
  bench.daemon->detach(session);
  return bench.state();
}

void a_closed_step_needs_its_daemon_no_more() {
  TestKeeper keeper;
  auto disk = std::make_shared<MemoryDisk>(kVolume);
  {
    const Bench filled(disk);
  }
  Bench bench(disk, false, &keeper);
  const uint64_t session = bench.attach();
  StepRequest request = backward(*bench.daemon, session, true);
  request.step = bench.daemon->job(session).progress().committed_step() + 1;
  bench.daemon->store().operations().step(request, [](const Status&, const StepReport&) {});
  bench.kill();
  const Bench next(disk, false, &keeper);
  next.daemon->until([&] { return next.daemon->store().is_idle(); });
  require(next.daemon->store().sessions().contains(session), "the session is gone");
  const Status repeated = next.daemon->step(request);
  require(repeated.is_ok(), "a repeated call: ", repeated.message());
  require(next.daemon->job(session).progress().committed_step() == request.step,
          "it was made twice");
  next.daemon->detach(session);
  const auto found = state_of(*next.daemon);
  require(found.is_ok() && found.value() == state_after_step(), "its numbers are others");
}

void what_was_being_read_is_read_again_by_the_next_daemon() {
  TestKeeper keeper;
  auto disk = std::make_shared<MemoryDisk>(kVolume);
  {
    const Bench filled(disk);
  }
  const std::string before = Bench(std::make_shared<MemoryDisk>(*disk), false).state();
  Bench bench(disk, false, &keeper);
  const uint64_t session = bench.attach();
  bench.faults->add_fault({.kind = MemoryFaultKind::stall, .io_kind = IoKind::read, .count = 100});
  const auto answer = bench.daemon->ask(session, "extra", LeaseMode::read);
  for (int i = 0; i < 10; ++i) bench.daemon->turn();
  require(!answer->has_value(), "the read did not stall");
  bench.kill();
  Bench next(disk, false, &keeper);
  next.daemon->detach(session);
  require(next.state() == before, "bytes that nobody had read were returned");
}

struct Plant {
  const char* bug;
  void (*check)();
};

/// Ends with a violation, or with a CHECK of the daemon; silently where all is well.
int run(const Plant& plant) {
  const pid_t pid = ::fork();
  MEMD_CHECK_GE(pid, 0);
  if (pid == 0) {
    [&]() noexcept {
      ::setenv("MEMD_PLANT", plant.bug, 1);
      failpoint::plant(plant.bug);
      plant.check();
    }();
    _exit(0);
  }
  int status = 0;
  MEMD_CHECK_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

const Plant kPlants[] = {
    {"commit.no_first_flush", no_power_cut_breaks_a_promise},
    {"commit.superblock_before_data", no_power_cut_breaks_a_promise},
    {"commit.acknowledged_before_second_flush", no_power_cut_breaks_a_promise},
    {"commit.superblock_in_the_other_pair", no_power_cut_breaks_a_promise},
    {"volume.not_flushed_at_start", no_power_cut_breaks_a_promise},
    {"extent.released_before_the_commit", no_power_cut_breaks_a_promise},
    {"snapshot.extents_not_kept", no_power_cut_breaks_a_promise},
    {"tile.rest_not_written", no_power_cut_breaks_a_promise},
    {"extent.address_not_in_checksum", bytes_of_another_place_are_not_returned},
    {"read.checksum_not_verified", no_flipped_bit_is_returned},
    {"tile.checksum_not_verified", no_flipped_bit_is_used},
    {"write.failure_ignored", a_failed_write_is_never_acknowledged_and_nothing_follows_it},
    {"write.failure_not_fenced", a_failed_write_is_never_acknowledged_and_nothing_follows_it},
    {"sync.failure_retried", a_failed_write_is_never_acknowledged_and_nothing_follows_it},
    {"rollback.forgets_a_replica", a_failed_step_leaves_everything_as_it_was},
    {"session.half_written_shown", who_dies_while_writing_leaves_no_trace},
    {"session.pins_kept", who_dies_holds_nothing},
    {"session.sealed_gradients_dropped", a_closed_step_needs_its_trainer_no_more},
    {"step.gradient_released_early", gradients_are_there_until_the_step_is_durable},
    {"early.settings_not_compared", what_was_made_for_another_step_is_not_used},
    {"early.never_discarded", what_was_made_for_another_step_is_not_used},
    {"ledger.step_not_recorded", a_closed_step_needs_its_daemon_no_more},
    {"ledger.segment_used_unclaimed", a_closed_step_needs_its_daemon_no_more},
    {"adoption.sealed_gradients_dropped", a_closed_step_needs_its_daemon_no_more},
    {"adoption.filling_slot_trusted", what_was_being_read_is_read_again_by_the_next_daemon},
    {"step.made_again_when_repeated", a_closed_step_needs_its_daemon_no_more},
    {"evict.leased_slot", what_is_leased_keeps_its_bytes},
};

class PlantedTest : public ::testing::TestWithParam<Plant> {};

TEST_P(PlantedTest, is_caught) {
  const int status = run(GetParam());
  const bool violation = WIFEXITED(status) && WEXITSTATUS(status) == kViolation;
  const bool check_failed = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  EXPECT_TRUE(violation || check_failed) << GetParam().bug << " went unseen, status " << status;
}

INSTANTIATE_TEST_SUITE_P(Bugs, PlantedTest, ::testing::ValuesIn(kPlants), [](const auto& it) {
  std::string name = it.param.bug;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
});

TEST(WithNothingPlanted, every_check_passes) {
  std::set<void (*)()> checks;
  for (const Plant& plant : kPlants) checks.insert(plant.check);
  for (void (*const check)() : checks) EXPECT_EQ(run({.bug = "", .check = check}), 0);
}

TEST(Failpoints, that_only_errors_reach_are_reached_by_errors) {
  const auto check = [] {
    std::set<std::string, std::less<>> reached;
    failpoint::set_observer([&](std::string_view name) {
      if (name == "commit.abandoned" || name == "rollback.begun" || name == "step.undoing" ||
          name == "volume.fencing" || name == "read.before_second_attempt" ||
          name == "read.given_up")
        reached.insert(std::string(name));
    });
    a_failed_step_leaves_everything_as_it_was();
    a_failed_write_is_never_acknowledged_and_nothing_follows_it();
    {
      // A full disk: the catalogue finds no room, nothing changes, and later it does.
      Bench bench;
      const uint64_t session = bench.attach();
      bench.daemon->job(session).durable().note_change();
      std::vector<ExtentRecord> taken;
      for (;;) {
        const auto extent = bench.daemon->extents().allocate(4096);
        if (!extent.is_ok()) break;
        taken.push_back(extent.value());
      }
      require(bench.daemon->sync(session).code() == StatusCode::capacity, "room on a full disk");
      for (const ExtentRecord& extent : taken) bench.daemon->extents().release(extent);
      const Status status = bench.daemon->sync(session);
      require(status.is_ok(), status.message());
      check_accounts(*bench.daemon, bench.disk->bytes());
    }
    {
      // One read brings a wrong bit, and the second attempt the right ones.
      Bench bench;
      const uint64_t session = bench.attach();
      Job& job = bench.daemon->job(session);
      const StepRequest request = backward(*bench.daemon, session, false);
      job.tiles().drop_all(job.memory()->private_side());
      bench.faults->add_fault({.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::read});
      const Status status = bench.daemon->step(request);
      require(status.is_ok(), status.message());
    }
    require(reached.size() == 6, "reached only ", reached.size());
  };
  EXPECT_EQ(run({.bug = "", .check = check}), 0);
}

}  // namespace
}  // namespace memd::testing
