// Commits in memory, and a daemon killed at the moments of a step of them: the next one goes on
// with the same bits.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/failpoint.h"
#include "optim/bf16_master.h"
#include "scenario.h"
#include "stop.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr SessionOwner kOwner{.pid = 1, .start_time = 2, .uid = 3};  // as Heart::attach() says
constexpr uint64_t kElements = 2 * kTileElements + 1000;
constexpr uint64_t kSmall = 3000;
constexpr uint64_t kBufferBytes = 5000;
constexpr uint64_t kDisk = 64_MiB;  // small, as each kill needs one of its own

struct Case {
  std::string durability;
  DType dtype = DType::float32;
  /// Of memory beside what tiles in flight take; few: only some tiles stay.
  uint64_t arena_segments = 12;
  bool amsgrad = false;
  Tier tier = Tier::nvme;
};

class InMemoryKillTest : public ::testing::TestWithParam<Case> {
 protected:
  void start(bool redo_steps = true) {
    heart_ = new Heart(disk_,
                       HeartOptions{.segment_count = kFloorSegments + 12,
                                    .keeper = &keeper_,
                                    .worker_count = 1,
                                    .redo_steps = redo_steps});
    ASSERT_TRUE(heart_->loaded.is_ok()) << heart_->loaded.message();
  }
  void begin() {
    disk_ = std::make_shared<MemoryDisk>(kDisk);
    keeper_ = {};
    start();
    const uint64_t job_id = heart_->open("job",
                                         GetParam().arena_segments,
                                         kDisk - 10_MiB,
                                         Durability::parse(GetParam().durability).value());
    session_ = heart_->attach(job_id);
    ids_ = heart_->declare(
        session_,
        {of_tier(with_maximum(parameter("large", elements_, GetParam().dtype), settings_.amsgrad)),
         of_tier(with_maximum(parameter("small", kSmall, GetParam().dtype), settings_.amsgrad)),
         bytes_shard("buffer", kBufferBytes, ShardKind::buffer),
         bytes_shard("staged", kBufferBytes, ShardKind::buffer)});
    twins_.clear();
    for (const size_t i : {0, 1}) {
      const auto seed = static_cast<uint32_t>(i) + 1;
      if (GetParam().dtype == DType::float32) {
        twins_.push_back(Twin::fp32(numbers(count(i), seed)));
        heart_->write(session_, ids_[i], twins_[i].theta);
      } else {
        twins_.push_back(Twin::bf16(halves(count(i), seed)));
        heart_->write(session_, ids_[i], twins_[i].half);
      }
    }
    heart_->write(session_, ids_[2], pattern(kBufferBytes, 1));
    ASSERT_TRUE(heart_->sync(session_).is_ok());
  }
  static ShardSpec of_tier(ShardSpec spec) {
    spec.tier = GetParam().tier;
    return spec;
  }
  static bool is_host() { return GetParam().tier == Tier::host; }
  uint64_t count(size_t i) const { return i == 0 ? elements_ : kSmall; }
  void write_gradients(uint32_t seed) {
    for (const size_t i : {0, 1}) {
      if (GetParam().dtype == DType::float32) {
        heart_->write(session_, ids_[i], numbers(count(i), seed + i), Part::gradient);
      } else {
        heart_->write(session_, ids_[i], halves(count(i), seed + i), Part::gradient);
      }
    }
    heart_->write(session_, ids_[3], pattern(kBufferBytes, static_cast<uint8_t>(seed)));
  }
  StepRequest request(uint64_t step) const {
    return {.session_id = session_,
            .groups = {{.settings = settings_, .shard_ids = {ids_[0], ids_[1]}}},
            .staged_buffers = {{ids_[3], ids_[2]}},
            .step = step};
  }
  void step_twins(uint32_t seed) {
    for (const size_t i : {0, 1}) {
      if (GetParam().dtype == DType::float32) {
        twins_[i].step(settings_, numbers(count(i), seed + i));
      } else {
        twins_[i].step(settings_, halves(count(i), seed + i));
      }
    }
  }
  /// Asks for the step, which the daemon before may have made, and looks at every bit.
  void expect_step(uint64_t step, uint32_t seed) {
    const auto [status, report] = heart_->step(request(step));
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_EQ(report.committed_step, step);
    step_twins(seed);
    for (const size_t i : {0, 1}) {
      if (GetParam().dtype == DType::float32) {
        EXPECT_TRUE(heart_->read<float>(session_, ids_[i]) == twins_[i].theta) << i;
      } else {
        EXPECT_TRUE(heart_->read<uint16_t>(session_, ids_[i]) == twins_[i].half) << i;
      }
      const MomentValues moments = heart_->moment_values(session_, ids_[i]);
      EXPECT_TRUE(moments.exp_avg == twins_[i].m) << i;
      EXPECT_TRUE(moments.exp_avg_sq == twins_[i].v) << i;
      if (settings_.amsgrad) EXPECT_TRUE(moments.max_exp_avg_sq == twins_[i].v_max) << i;
      EXPECT_EQ(heart_->job(session_).shards()[ids_[i]].generation, twins_[i].t);
    }
    EXPECT_EQ(heart_->read<uint8_t>(session_, ids_[2]),
              pattern(kBufferBytes, static_cast<uint8_t>(seed)));
  }
  static constexpr uint64_t kLoadedGeneration = 9;
  /// A state that a load gives to a parameter with these values.
  static Twin loaded_over(Twin twin) {
    const uint64_t count = twin.m.size();
    twin.m = numbers(count, 5);
    twin.v = numbers(count, 6);
    for (float& each : twin.v) each = std::abs(each);
    twin.v_max = twin.v;
    for (int16_t& each : twin.remainder) each = static_cast<int16_t>(~each);
    return twin;
  }
  MomentValues state_of(const Twin& twin) const {
    MomentValues values{
        .exp_avg = twin.m, .exp_avg_sq = twin.v, .max_exp_avg_sq = {}, .masters = {}};
    if (settings_.amsgrad) values.max_exp_avg_sq = twin.v_max;
    for (size_t i = 0; i < twin.half.size(); ++i)
      values.masters.push_back(std::bit_cast<float>(bf16_master(twin.half[i], twin.remainder[i])));
    return values;
  }
  /// Two steps before it, so that tiles are dirty.
  void run_to_third_step() {
    begin();
    for (const uint64_t step : {1, 2}) {
      write_gradients(40 + 10 * static_cast<uint32_t>(step));
      expect_step(step, 40 + 10 * static_cast<uint32_t>(step));
    }
    write_gradients(70);
  }
  /// Asks for the step, and returns once it is answered or the daemon stands still; then the daemon
  /// is dead. Returns the moments that were reached.
  std::map<std::string, uint64_t> kill_in_step(
      uint64_t step,
      const std::string& name,
      uint64_t hit,
      const std::function<void(Heart&)>& while_it_updates = [](Heart&) {}) {
    const auto answered = std::make_shared<bool>(false);
    return kill_while(
        name,
        hit,
        [answered, while_it_updates, asked = request(step)](Heart& heart) {
          heart.store().operations().step(
              asked, [answered](const Status&, const StepReport&) { *answered = true; });
          heart.turn();
          while_it_updates(heart);
        },
        [answered](Heart&) { return *answered; });
  }
  std::map<std::string, uint64_t> kill_in_third_step(
      const std::string& name,
      uint64_t hit,
      const std::function<void(Heart&)>& while_it_updates = [](Heart&) {}) {
    return kill_in_step(3, name, hit, while_it_updates);
  }
  /// The same of what is made between the last gradient and the step.
  std::map<std::string, uint64_t> kill_while_made_early(const std::string& name, uint64_t hit) {
    return kill_while(
        name,
        hit,
        [this, groups = request(3).groups](Heart& heart) {
          EXPECT_TRUE(heart.store().gradients().expect_step(session_, groups).is_ok());
          for (const size_t i : {0, 1}) heart.store().gradients().is_final(session_, ids_[i]);
        },
        [session = session_](Heart& heart) {
          const Job& job = heart.job(session);
          return !job.state().early().has_waiting() && !job.cache().activities().any();
        });
  }
  std::map<std::string, uint64_t> kill_while(const std::string& name,
                                             uint64_t hit,
                                             const std::function<void(Heart&)>& begin,
                                             const std::function<bool(Heart&)>& has_ended) {
    auto* const stop = new Stop(name, hit);  // threads wait in it for good
    Heart* const heart = std::exchange(heart_, nullptr);
    std::thread server([heart, stop, begin, has_ended] {
      begin(*heart);
      while (!has_ended(*heart) && !stop->is_stopped()) heart->turn();
      stop->end_turns();
    });
    stop->wait(server.get_id());
    const bool was_stopped = stop->is_stopped();
    EXPECT_TRUE(was_stopped || name.empty()) << "never reached";
    if (was_stopped && stop->stopped_on == server.get_id()) {
      server.detach();
      heart->kill();
    } else {
      server.join();
      was_stopped ? heart->kill_with_stopped_workers() : heart->kill();
    }
    failpoint::set_observer({});
    return stop->hits;
  }
  void go_on(uint64_t step = 3, uint32_t seed = 70) {
    start();
    if (HasFatalFailure()) return;
    std::string notes;
    for (const std::string& note : heart_->store().load_notes()) notes += "\n" + note;
    const auto session = heart_->store().resume_session(session_, kOwner);
    ASSERT_TRUE(session.is_ok()) << session.status().message() << notes;
    expect_step(step, seed);
    write_gradients(seed + 10);
    if (!HasFatalFailure()) expect_step(step + 1, seed + 10);
  }
  /// Before the daemon makes the step of the one before: gradients are on disk, and private memory
  /// has no room for them. Returns what was taken of it.
  void take_all_room(std::vector<uint64_t>& taken) {
    Job& job = heart_->job(session_);
    const Entry& gradient = *job.shards().find_entry(ids_[0], Part::gradient);
    job.cache().activities().begin();  // else private memory would be what makes room
    std::vector<Held> held;
    for (int i = 0; gradient.slot() != nullptr; ++i) {
      ASSERT_LT(i, 40);
      const auto blob = heart_->declare(session_, {bytes_shard(concat("blob", i), 1_MiB)});
      held.push_back(heart_->lease(session_, blob[0], LeaseMode::overwrite));
      ASSERT_TRUE(held.back().is_ok()) << held.back().status.message();
    }
    job.cache().activities().end();
    for (const Held& each : held) heart_->release(each);
    ASSERT_TRUE(gradient.has_replica());
    while (job.memory()->grow_private()) {
    }
    for (uint64_t bytes = 2_MiB; bytes >= kBlockBytes; bytes /= 2) {
      while (const auto offset_bytes = job.memory()->private_side().allocate(bytes))
        taken.push_back(*offset_bytes);
    }
  }
  /// Gives back the memory of the disk, and what the dead have mapped for good.
  void end() {
    delete std::exchange(heart_, nullptr);
    if (disk_ == nullptr) return;
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
  }
  void TearDown() override { end(); }

  std::shared_ptr<MemoryDisk> disk_;
  TestKeeper keeper_;
  Heart* heart_ = nullptr;
  uint64_t session_ = 0;
  uint64_t elements_ = kElements;
  std::vector<uint32_t> ids_;
  std::vector<Twin> twins_;
  const AdamSettings settings_{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = GetParam().amsgrad};
};

TEST_P(InMemoryKillTest, at_any_moment_of_a_step_no_bit_is_lost) {
  run_to_third_step();
  const auto moments = kill_in_third_step("", 0);
  go_on();
  end();
  ASSERT_FALSE(HasFailure());
  EXPECT_TRUE(moments.contains("ledger.pre_image_taken"));
  uint64_t kills = 0;
  for (const auto& [name, count] : moments) {
    std::set<uint64_t> hits = {1, count};
    if (count > 2 && name.starts_with("ledger.")) hits.insert(count / 2);
    for (const uint64_t hit : hits) {
      if (hit > count) continue;
      SCOPED_TRACE(concat(name, ", time ", hit));
      run_to_third_step();
      kill_in_third_step(name, hit);
      go_on();
      end();
      if (HasFailure()) return;
      ++kills;
    }
  }
  std::printf("%zu kills\n", static_cast<size_t>(kills));
  EXPECT_GT(kills, 50u);
}

/// Kills in jobs whose optimizer state has maxima.
class MaximaKillTest : public InMemoryKillTest {};

TEST_P(MaximaKillTest, in_the_step_that_makes_a_place_for_maxima_no_bit_is_lost) {
  for (const std::string name : {"maxima.before_layout", "maxima.kept", "ledger.tile_marked"}) {
    SCOPED_TRACE(name);
    begin();
    write_gradients(50);
    kill_in_step(1, name, 1);
    go_on(1, 50);
    end();
    if (HasFailure()) return;
  }
}

TEST_P(InMemoryKillTest, where_tiles_were_made_before_the_step_no_bit_is_lost) {
  const auto run_to_early_tiles = [this] {
    run_to_third_step();
    ASSERT_TRUE(heart_->store().gradients().expect_step(session_, request(3).groups).is_ok());
    for (const size_t i : {0, 1}) heart_->store().gradients().is_final(session_, ids_[i]);
    Job& job = heart_->job(session_);
    ASSERT_TRUE(heart_->until(
        [&] { return !job.state().early().has_waiting() && !job.cache().activities().any(); }));
  };
  run_to_early_tiles();
  ASSERT_FALSE(HasFailure());
  const bool is_made = heart_->job(session_).state().early().bucket_count() != 0;
  // Where all tiles stay in memory none is made early.
  EXPECT_EQ(is_made, GetParam().arena_segments < 12);
  if (!is_made) return;
  const auto moments = kill_in_third_step("", 0);
  go_on();
  end();
  ASSERT_FALSE(HasFailure());
  ASSERT_TRUE(moments.contains("early.before_tile_adopted"));
  for (const auto& [name, count] : moments) {
    const bool is_chosen = name.starts_with("early.") || name.starts_with("ledger.");
    for (uint64_t hit = 1; is_chosen && hit <= std::min<uint64_t>(count, 3); ++hit) {
      SCOPED_TRACE(concat(name, ", time ", hit));
      run_to_early_tiles();
      kill_in_third_step(name, hit);
      go_on();
      end();
      if (HasFailure()) return;
    }
  }
}

TEST_P(InMemoryKillTest, while_tiles_are_made_before_the_step_no_bit_is_lost) {
  run_to_third_step();
  const auto moments = kill_while_made_early("", 0);
  go_on();
  end();
  ASSERT_FALSE(HasFailure());
  // Where all tiles stay in memory none is made early.
  EXPECT_EQ(moments.contains("early.tile_ended"), GetParam().arena_segments < 12);
  for (const auto& [name, count] : moments) {
    for (uint64_t hit = 1; hit <= std::min<uint64_t>(count, 2); ++hit) {
      SCOPED_TRACE(concat(name, ", time ", hit));
      run_to_third_step();
      kill_while_made_early(name, hit);
      go_on();
      end();
      if (HasFailure()) return;
    }
  }
}

TEST_P(InMemoryKillTest, killed_again_while_it_finishes_the_step_the_next_one_does) {
  run_to_third_step();
  kill_in_third_step("ledger.piece_half_updated", 20);
  for (const char* name : {"ledger.piece_half_updated", "ledger.pre_image_taken"}) {
    start();
    ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
    kill_in_third_step(name, 7);
  }
  go_on();
}

TEST_P(InMemoryKillTest, a_half_updated_tile_that_has_to_make_room_is_updated_once) {
  if (GetParam().arena_segments < 12) GTEST_SKIP() << "all tiles are to be in memory";
  if (is_host()) GTEST_SKIP() << "tier host makes no room";
  // With one large tile nothing but itself can make room for its gradient.
  for (const uint64_t elements : {kElements, kTileElements + 1000}) {
    elements_ = elements;
    for (const uint64_t piece : {3, 200}) {
      for (const uint64_t hit : {1, 2, 3}) {
        SCOPED_TRACE(concat(elements, " elements, piece ", piece, ", mark ", hit));
        run_to_third_step();
        kill_in_third_step("ledger.piece_half_updated", piece);
        start(false);
        ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
        std::vector<uint64_t> taken;
        take_all_room(taken);
        if (HasFatalFailure()) return;
        heart_->store().operations().redo_steps();
        kill_in_third_step("ledger.tile_marked", hit);
        go_on();
        end();
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(InMemoryKillTest, a_tile_whose_gradient_is_read_again_gives_its_scratch_place_back) {
  if (GetParam().arena_segments < 12) GTEST_SKIP() << "all tiles are to be in memory";
  if (is_host()) GTEST_SKIP() << "tier host makes no room";
  run_to_third_step();
  kill_in_third_step("ledger.piece_half_updated", 3);
  start(false);
  ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
  std::vector<uint64_t> taken;
  take_all_room(taken);
  if (HasFatalFailure()) return;
  const Job& job = heart_->job(session_);
  heart_->faults().add_fault({.kind = MemoryFaultKind::flipped_bit,
                              .io_kind = IoKind::read,
                              .offset_bytes = job.shards()
                                                  .find_entry(ids_[0], Part::gradient)
                                                  ->replicas()[0]
                                                  .extent()
                                                  .address.offset_bytes});
  heart_->store().operations().redo_steps();
  expect_step(3, 70);
  for (const uint64_t each : taken) job.memory()->private_side().free(each);
  EXPECT_EQ(heart_->faults().fault_hit_count(), 1U);
  int free_count = 0;
  while (job.tiles().words()->take_scratch()) ++free_count;
  EXPECT_EQ(free_count, 16);
}

TEST_P(InMemoryKillTest, a_lease_of_another_parameter_is_not_in_the_way_of_what_was_begun) {
  for (const bool is_alive : {true, false}) {
    SCOPED_TRACE(is_alive ? "with its trainer" : "without its trainer");
    begin();
    const auto other = heart_->declare(session_, {parameter("other", 64)});
    heart_->write(session_, other[0], numbers(64, 1));
    for (const uint64_t step : {1, 2}) {
      write_gradients(40 + 10 * static_cast<uint32_t>(step));
      expect_step(step, 40 + 10 * static_cast<uint32_t>(step));
    }
    write_gradients(70);
    std::shared_ptr<std::optional<Held>> asked;
    kill_in_third_step("ledger.tile_marked", 1, [&](Heart& heart) {
      asked = heart.ask(session_, other[0], LeaseMode::write);
    });
    ASSERT_TRUE(asked->has_value() && (*asked)->is_ok()) << "it was granted while tiles change";
    const Held writer = **asked;
    const uint32_t pin = writer.grant.slot->pin_first + writer.grant.index;
    const auto values = numbers(64, 2);
    std::copy_n(values.begin(), 32, writer.as<float>().begin());
    start(false);
    if (is_alive) {
      const auto session = heart_->store().resume_session(session_, kOwner);
      ASSERT_TRUE(session.is_ok()) << session.status().message();
      heart_->store().operations().redo_steps();
      expect_step(3, 70);
      std::copy_n(values.begin() + 32, 32, writer.as<float>().begin() + 32);
      session.value()->ring.add_pin(pin, ~kWriterPin + 1);
      EXPECT_EQ(heart_->read<float>(session_, other[0]), values);
      EXPECT_TRUE(heart_->sync(session_).is_ok());
    } else {
      ASSERT_TRUE(heart_->store().detach(session_).is_ok());
      heart_->store().operations().redo_steps();
      ASSERT_TRUE(heart_->until([this] { return heart_->store().is_idle(); }));
      session_ = heart_->attach(heart_->open("job"));
      EXPECT_EQ(heart_->job(session_).progress().committed_step(), 3U);
      EXPECT_EQ(heart_->read<float>(session_, other[0]), numbers(64, 1));
    }
    end();
    if (HasFailure()) return;
  }
}

TEST_P(InMemoryKillTest, without_its_trainer_the_job_stands_at_its_last_commit_in_memory) {
  run_to_third_step();
  std::exchange(heart_, nullptr)->kill();
  start();
  ASSERT_TRUE(heart_->store().detach(session_).is_ok());
  session_ = heart_->attach(heart_->open("job"));
  EXPECT_EQ(heart_->job(session_).progress().committed_step(), 2U);
  EXPECT_EQ(heart_->job(session_).progress().durable_step(), 0U);
  write_gradients(70);
  expect_step(3, 70);
  ASSERT_TRUE(heart_->sync(session_).is_ok());
  EXPECT_EQ(heart_->job(session_).progress().durable_step(), is_host() ? 0U : 3U);
}

TEST_P(InMemoryKillTest, at_any_moment_of_a_snapshot_no_bit_of_tier_host_is_lost) {
  if (!is_host()) GTEST_SKIP() << "snapshot_test.cc has the others";
  const auto kill_in_snapshot = [this](const std::string& name, uint64_t hit) {
    const auto made = std::make_shared<bool>(false);
    const uint64_t job_id = heart_->job(session_).job_id();
    return kill_while(
        name,
        hit,
        [made, job_id](Heart& heart) {
          heart.store().snapshots().create(
              {.job_id = job_id, .name = "s", .created_s = 1, .number = 7},
              [made](const Result<SnapshotInfo>&) { *made = true; });
        },
        [made](Heart&) { return *made; });
  };
  run_to_third_step();
  const auto moments = kill_in_snapshot("", 0);
  go_on();
  end();
  ASSERT_FALSE(HasFailure());
  ASSERT_TRUE(moments.contains("host.before_copies"));
  ASSERT_TRUE(moments.contains("host.copied"));
  for (const auto& [name, count] : moments) {
    for (const uint64_t hit : std::set<uint64_t>{1, count}) {
      SCOPED_TRACE(concat(name, ", time ", hit));
      run_to_third_step();
      kill_in_snapshot(name, hit);
      go_on();
      end();
      if (HasFailure()) return;
    }
  }
}

TEST_P(InMemoryKillTest, while_tier_host_comes_back_from_a_snapshot_no_bit_is_lost) {
  if (!is_host()) GTEST_SKIP() << "others stay on disk";
  const auto go_back = [this] {
    run_to_third_step();
    const uint64_t job_id = heart_->job(session_).job_id();
    std::optional<Status> answer;
    heart_->store().snapshots().create(
        {.job_id = job_id, .name = "s", .created_s = 1, .number = 7},
        [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
    ASSERT_TRUE(heart_->until([&] { return answer.has_value(); }));
    ASSERT_TRUE(answer->is_ok()) << answer->message();
    ASSERT_TRUE(heart_->store().detach(session_).is_ok());
    answer.reset();
    heart_->store().snapshots().restore(
        job_id, "s", [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
    ASSERT_TRUE(heart_->until([&] { return answer.has_value(); }));
    ASSERT_TRUE(answer->is_ok()) << answer->message();
    session_ = heart_->attach(job_id);
    ids_ = heart_->declare(
        session_,
        {of_tier(with_maximum(parameter("large", elements_, GetParam().dtype), settings_.amsgrad)),
         of_tier(with_maximum(parameter("small", kSmall, GetParam().dtype), settings_.amsgrad)),
         bytes_shard("buffer", kBufferBytes, ShardKind::buffer),
         bytes_shard("staged", kBufferBytes, ShardKind::buffer)});
  };
  const auto kill_in_read = [this](const std::string& name, uint64_t hit) {
    const auto held = std::make_shared<std::shared_ptr<std::optional<Held>>>();
    return kill_while(
        name,
        hit,
        [held, session = session_, id = ids_[0]](Heart& heart) { *held = heart.ask(session, id); },
        [held](Heart&) { return (*held)->has_value(); });
  };
  const auto go_on_from_snapshot = [this] {
    start();
    if (HasFatalFailure()) return;
    ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
    write_gradients(70);
    expect_step(3, 70);
  };
  go_back();
  const auto moments = kill_in_read("", 0);
  go_on_from_snapshot();
  end();
  ASSERT_FALSE(HasFailure());
  ASSERT_EQ(moments.at("tile.recorded"), 3U);
  for (const auto& [name, count] : moments) {
    for (const uint64_t hit : std::set<uint64_t>{1, count}) {
      SCOPED_TRACE(concat(name, ", time ", hit));
      go_back();
      kill_in_read(name, hit);
      go_on_from_snapshot();
      end();
      if (HasFailure()) return;
    }
  }
}

TEST_P(InMemoryKillTest, a_state_that_is_loaded_into_tier_host_is_the_old_one_or_the_new_one) {
  if (!is_host()) GTEST_SKIP() << "a dirty tile is on disk first";
  Twin loaded;
  const auto kill_in_load = [&](const std::string& name, uint64_t hit) {
    loaded = loaded_over(twins_[1]);
    const auto written = std::make_shared<bool>(false);
    return kill_while(
        name,
        hit,
        [written, values = state_of(loaded), session = session_, id = ids_[1]](Heart& heart) {
          heart.store().operations().write_moments(
              {.session_id = session, .shard_id = id, .element_first = 0, .element_count = kSmall},
              kLoadedGeneration,
              values,
              [written](const Status& status) {
                EXPECT_TRUE(status.is_ok()) << status.message();
                *written = true;
              });
        },
        [written](Heart&) { return *written; });
  };
  run_to_third_step();
  const auto moments = kill_in_load("", 0);
  ASSERT_TRUE(moments.contains("host.guarded"));
  end();
  for (const auto& [name, count] : moments) {
    for (const uint64_t hit : std::set<uint64_t>{1, count}) {
      SCOPED_TRACE(concat(name, ", time ", hit));
      run_to_third_step();
      kill_in_load(name, hit);
      start();
      ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
      if (heart_->moment_values(session_, ids_[1]).exp_avg == loaded.m) {
        loaded.t = heart_->job(session_).shards()[ids_[1]].generation;
        EXPECT_TRUE(loaded.t == twins_[1].t || loaded.t == kLoadedGeneration);
        twins_[1] = loaded;
      }
      // The remainders of bf16 show in the values that it makes.
      expect_step(3, 70);
      end();
      if (HasFailure()) return;
    }
  }
}

TEST_P(InMemoryKillTest, without_pre_images_bits_are_lost) {
  if (GetParam().arena_segments < 12) GTEST_SKIP() << "one case is enough";
  run_to_third_step();
  failpoint::plant("update.no_pre_image");
  kill_in_third_step("ledger.piece_half_updated", 3);
  start();
  ASSERT_TRUE(heart_->store().resume_session(session_, kOwner).is_ok());
  ASSERT_TRUE(heart_->step(request(3)).first.is_ok());
  failpoint::plant("");
  step_twins(70);
  if (GetParam().dtype == DType::float32) {
    EXPECT_FALSE(heart_->read<float>(session_, ids_[0]) == twins_[0].theta);
  } else {
    EXPECT_FALSE(heart_->read<uint16_t>(session_, ids_[0]) == twins_[0].half);
  }
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  std::string name =
      info.param.durability + (info.param.dtype == DType::bfloat16 ? "_bf16_" : "_fp32_") +
      std::to_string(info.param.arena_segments) + (info.param.amsgrad ? "_amsgrad" : "") +
      (info.param.tier == Tier::host ? "_host" : "");
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Kinds,
                         InMemoryKillTest,
                         ::testing::Values(Case{"every:3", DType::float32, 12, true},
                                           Case{"none", DType::bfloat16, 12, true},
                                           Case{"none", DType::float32, 5},
                                           Case{"every:5", DType::bfloat16, 4},
                                           Case{"step", DType::float32, 12, true, Tier::host},
                                           Case{"step", DType::bfloat16, 12, false, Tier::host}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Kinds,
                         MaximaKillTest,
                         ::testing::Values(Case{"every:3", DType::float32, 12, true},
                                           Case{"none", DType::bfloat16, 4, true},
                                           Case{"step", DType::float32, 12, true, Tier::host}),
                         name_of);

}  // namespace
}  // namespace memd::testing
