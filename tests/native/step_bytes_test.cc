// Bytes that training moves in the store itself, beside the fewest that its plan allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "noting_client.h"
#include "store_fixture.h"

namespace memd {
namespace {

using testing::Heart;
using testing::HeartOptions;
using testing::NotingClient;

// Blocks of a GPT, in MiB of fp32: attention (two of them), projections up and down; and what is
// small beside them.
std::vector<uint64_t> gpt_mib(uint32_t layer_count) {
  std::vector<uint64_t> sizes = {6, 1};
  for (uint32_t i = 0; i < layer_count; ++i) sizes.insert(sizes.end(), {3, 1, 4, 4});
  return sizes;
}

struct Settings {
  const char* name;
  uint32_t cache_divisor;  // of parameters and moments
  Durability durability;
  uint32_t period_steps;  // what every k-th step writes belongs to all of them
  enum class Pace {
    slow,        // the disk has time for everything between two uses
    hasty,       // it has none
    overlapped,  // none, and the next forward begins when the step is closed
  } pace;
  // Where commits are in memory the fewest bytes would move if updated parameters were dirty in the
  // arena. A trainer can write there: what is nowhere else does not stay there, and the private
  // side gets only what gradients and a few values leave.
  double moved_to_necessary_max = 1.05;
  bool in_backward = false;  // a parameter is updated as soon as its gradient is final
  uint64_t quota_bytes = 480_MiB;
  uint32_t micro_batches = 1;
  bool is_tied = false;  // the first parameter's value is used after its gradient
};

uint64_t sum(const std::vector<uint64_t>& sizes) {
  uint64_t all = 0;
  for (const uint64_t each : sizes) all += each;
  return all;
}

class Training {
 public:
  explicit Training(const Settings& settings)
      : settings_(settings),
        arena_segments_(divide_up(sum(sizes_) + 3 * sum(sizes_) / settings.cache_divisor, 2)),
        heart_(std::make_shared<MemoryDisk>(settings.quota_bytes + 32_MiB),
               HeartOptions{.segment_count = testing::kFloorSegments + arena_segments_}),
        job_id_(heart_.open("job", arena_segments_, settings.quota_bytes, settings.durability)),
        session_id_(heart_.attach(job_id_)),
        client_(heart_, session_id_),
        ids_(heart_.declare(session_id_, parameters())) {
    for (const uint32_t id : ids_) {
      const auto held = heart_.lease(session_id_, id, LeaseMode::overwrite);
      EXPECT_TRUE(held.is_ok()) << held.status.message();
      std::memset(held.grant.data, 0, held.grant.length_bytes);
      heart_.release(held);
    }
    EXPECT_TRUE(heart_.sync(session_id_).is_ok());
    if (settings.in_backward) {
      const std::vector<StepGroup> groups{{.settings = {}, .shard_ids = ids_}};
      EXPECT_TRUE(heart_.store().gradients().expect_step(session_id_, groups).is_ok());
    }
  }

  void step() { step(settings_.micro_batches); }
  void step(uint32_t micro_batches) {
    for (uint32_t i = 0; i < micro_batches; ++i)
      pass(i == 0 ? LeaseMode::overwrite : LeaseMode::write);
    const StepRequest request{.session_id = session_id_,
                              .groups = {{.settings = {}, .shard_ids = ids_}},
                              .staged_buffers = {},
                              .step = ++step_};
    finish_step();
    request_seen_ = false;
    heart_.store().operations().step(request, [this](const Status& status, const StepReport&) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      request_seen_ = true;
    });
    if (settings_.pace == Settings::Pace::overlapped) return;
    finish_step();
    if (settings_.pace == Settings::Pace::slow) client_.settle();
  }
  void finish_step() {
    EXPECT_TRUE(heart_.until([this] { return request_seen_; }));
  }

  Job& job() { return heart_.job(session_id_); }
  IoDeviceStatistics io() { return heart_.io().device_statistics(0); }
  std::string sizes_text() const {
    std::string text;
    for (const uint64_t each : sizes_) text += (text.empty() ? "" : " ") + std::to_string(each);
    return text;
  }

 private:
  std::vector<ShardSpec> parameters() const {
    std::vector<ShardSpec> specs;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      specs.push_back({.name = "p" + std::to_string(i),
                       .kind = ShardKind::parameter,
                       .dtype = DType::float32,
                       .tier = Tier::nvme,
                       .shape = {sizes_[i] * (1_MiB / 4)}});
    }
    return specs;
  }
  /// Forward and backward of one micro-batch.
  void pass(LeaseMode of_gradients) {
    for (const uint32_t id : ids_) use(id);
    for (size_t i = ids_.size(); i-- > 0;) {
      use(ids_[i]);
      use(ids_[i], of_gradients, Part::gradient);
      // As the embedding of a model that uses it once more for its output.
      if (settings_.is_tied && i == 0) use(ids_[i]);
      if (settings_.in_backward) make_early(ids_[i]);
    }
  }
  void make_early(uint32_t id) {
    heart_.store().gradients().is_final(session_id_, id);
    if (settings_.pace != Settings::Pace::slow) return;
    EXPECT_TRUE(heart_.until([this] {
      return !job().state().early().has_waiting() && job().state().early().running_count() == 0;
    }));
    client_.settle();
  }
  void use(uint32_t id, LeaseMode mode = LeaseMode::read, Part part = Part::value) {
    if (settings_.pace == Settings::Pace::slow) {
      client_.use_slowly(id, mode, part);
    } else {
      heart_.turn();  // a request is served in one
      client_.use(id, mode, part);
    }
  }

  Settings settings_;
  std::vector<uint64_t> sizes_ = gpt_mib(4);
  uint64_t arena_segments_;
  Heart heart_;
  uint64_t job_id_;
  uint64_t session_id_;
  NotingClient client_;
  std::vector<uint32_t> ids_;
  uint64_t step_ = 0;
  bool request_seen_ = true;
};

const Durability kStep = Durability::of_code(Durability::kStep);
const Durability kEvery4 = Durability::of_code(4);
const Durability kEvery10 = Durability::of_code(10);

/// Two micro-batches a step.
Settings twice(const char* name, uint32_t cache_divisor, double moved_to_necessary_max) {
  return {.name = name,
          .cache_divisor = cache_divisor,
          .durability = kEvery10,
          .period_steps = 10,
          .pace = Settings::Pace::slow,
          .moved_to_necessary_max = moved_to_necessary_max,
          .micro_batches = 2};
}

class StepBytes : public ::testing::TestWithParam<Settings> {};

// What it records is held against the lower bound by tests/numerics/test_plan_bytes.py.
TEST_P(StepBytes, are_few) {
  const Settings& settings = GetParam();
  Training training(settings);
  // From the third step on.
  for (uint32_t i = 0; i < std::max(2u, settings.period_steps); ++i) training.step();
  training.finish_step();
  const auto before = training.io();
  const JobCounters counters_before = training.job().cache().counters();
  const uint32_t step_count = std::max(4u, settings.period_steps);
  for (uint32_t i = 0; i < step_count; ++i) training.step();
  training.finish_step();
  const auto after = training.io();
  const JobCounters& counters = training.job().cache().counters();

  const auto bytes_per_step = [&](const IoKindStatistics& from, const IoKindStatistics& to) {
    return (to.bytes - from.bytes) / step_count;
  };
  const JobMemory& memory = *training.job().memory();
  RecordProperty("parameters_mib", training.sizes_text());
  RecordProperty("durability", settings.durability.text());
  RecordProperty("cache_bytes", std::to_string(memory.bytes() - memory.working_bytes()));
  // What may stay there.
  RecordProperty("private_bytes",
                 std::to_string(memory.private_bytes_max() - memory.working_bytes()));
  RecordProperty("read_bytes", std::to_string(bytes_per_step(before.read, after.read)));
  RecordProperty("written_bytes", std::to_string(bytes_per_step(before.write, after.write)));
  const uint64_t moved_bytes = counters.plan_moved_bytes - counters_before.plan_moved_bytes;
  const uint64_t necessary_bytes =
      counters.plan_necessary_bytes - counters_before.plan_necessary_bytes;
  RecordProperty("plan_moved_bytes", std::to_string(moved_bytes / step_count));
  RecordProperty("plan_necessary_bytes", std::to_string(necessary_bytes / step_count));
  // All that goes to the device is counted, catalogues and superblocks aside.
  const double on_device = static_cast<double>(bytes_per_step(before.read, after.read) +
                                               bytes_per_step(before.write, after.write));
  EXPECT_NEAR(static_cast<double>(moved_bytes) / step_count / on_device, 1, 0.01);
  EXPECT_LE(static_cast<double>(moved_bytes),
            settings.moved_to_necessary_max * static_cast<double>(necessary_bytes));
  EXPECT_EQ(counters.spilled_bytes, 0u);
  if (settings.pace == Settings::Pace::slow)
    EXPECT_EQ(counters.lease_misses, counters_before.lease_misses);
}

INSTANTIATE_TEST_SUITE_P(
    Training,
    StepBytes,
    ::testing::Values(Settings{"quarter_slow", 4, kStep, 1, Settings::Pace::slow},
                      Settings{"quarter_hasty", 4, kStep, 1, Settings::Pace::hasty},
                      Settings{"quarter_overlapped", 4, kStep, 1, Settings::Pace::overlapped},
                      Settings{"eighth_slow", 8, kStep, 1, Settings::Pace::slow},
                      Settings{"eighth_hasty", 8, kStep, 1, Settings::Pace::hasty},
                      Settings{"eighth_overlapped", 8, kStep, 1, Settings::Pace::overlapped},
                      Settings{"half_every_10", 2, kEvery10, 10, Settings::Pace::slow, 1.25},
                      Settings{"quarter_every_10", 4, kEvery10, 10, Settings::Pace::slow, 1.15},
                      Settings{"eighth_every_10", 8, kEvery10, 10, Settings::Pace::slow, 1.1},
                      twice("half_twice", 2, 1.45),
                      twice("quarter_twice", 4, 1.2)),
    [](const auto& param) { return param.param.name; });

Settings one_pass() {
  Settings settings = twice("", 2, 0);
  settings.micro_batches = 1;
  return settings;
}

uint64_t private_bytes_after(const std::vector<uint32_t>& micro_batches, const Settings& settings) {
  Training training(settings);
  for (const uint32_t count : micro_batches) training.step(count);
  training.finish_step();
  return training.job().memory()->private_bytes_max();
}

TEST(PrivateSide, has_less_where_another_pass_uses_values_after_their_gradients) {
  const uint64_t one_bytes = private_bytes_after({1, 1, 1, 1}, one_pass());
  const uint64_t two_bytes = private_bytes_after({2, 2, 2, 2}, one_pass());
  EXPECT_GE(one_bytes, two_bytes + 16_MiB);
  EXPECT_EQ(private_bytes_after({1, 1, 1, 1, 2, 2, 2}, one_pass()), two_bytes);
  // The arena keeps the segments that it has taken.
  EXPECT_LT(private_bytes_after({1, 1, 2, 2, 2, 1, 1, 1}, one_pass()), one_bytes);
}

TEST(PrivateSide, is_not_narrowed_by_one_parameter_that_is_used_again) {
  Settings tied = one_pass();
  tied.is_tied = true;
  EXPECT_GE(private_bytes_after({1, 1, 1, 1}, tied),
            private_bytes_after({2, 2, 2, 2}, one_pass()) + 16_MiB);
}

/// Read and written a step, once there is a plan.
struct Moved {
  double read_mib = 0;
  double written_mib = 0;
  uint64_t adopted_count = 0;  // tiles
};

Moved moved_a_step(const Settings& settings) {
  Training training(settings);
  for (uint32_t i = 0; i < std::max(2u, settings.period_steps); ++i) training.step();
  training.finish_step();
  const auto before = training.io();
  const uint64_t adopted_before = training.job().cache().counters().early_tiles_adopted;
  const uint32_t step_count = std::max(4u, settings.period_steps);
  for (uint32_t i = 0; i < step_count; ++i) training.step();
  training.finish_step();
  const auto after = training.io();
  const double per_step = 1.0 / (step_count * 1_MiB);
  return {.read_mib = static_cast<double>(after.read.bytes - before.read.bytes) * per_step,
          .written_mib = static_cast<double>(after.write.bytes - before.write.bytes) * per_step,
          .adopted_count = training.job().cache().counters().early_tiles_adopted - adopted_before};
}

Settings in_backward(const char* name,
                     uint32_t cache_divisor,
                     Durability durability,
                     Settings::Pace pace,
                     uint64_t quota_bytes = 720_MiB) {
  return {.name = name,
          .cache_divisor = cache_divisor,
          .durability = durability,
          .period_steps = durability.is_in_memory() ? 4U : 1U,
          .pace = pace,
          .in_backward = true,
          .quota_bytes = quota_bytes};
}

class BackwardBytes : public ::testing::TestWithParam<Settings> {};

TEST_P(BackwardBytes, are_about_those_of_the_ordinary_step) {
  Settings settings = GetParam();
  const Moved in_backward = moved_a_step(settings);
  settings.in_backward = false;
  const Moved ordinary = moved_a_step(settings);
  RecordProperty("read_mib", std::to_string(ordinary.read_mib));
  RecordProperty("read_in_backward_mib", std::to_string(in_backward.read_mib));
  RecordProperty("written_mib", std::to_string(ordinary.written_mib));
  RecordProperty("written_in_backward_mib", std::to_string(in_backward.written_mib));
  EXPECT_EQ(ordinary.adopted_count, 0u);
  EXPECT_GT(in_backward.adopted_count, 0u);
  // A disk without time loses some early tiles before they are used. With commits in memory, which
  // clean tile makes room for a third one in work depends on who is first: a MiB of 131 either way.
  const double slow_limit = settings.durability.is_in_memory() ? 1.01 : 1.0;
  const double limit = settings.pace == Settings::Pace::slow ? slow_limit : 1.1;
  EXPECT_LE(in_backward.read_mib, limit * ordinary.read_mib);
  EXPECT_LE(in_backward.written_mib, 1.01 * ordinary.written_mib);
}

INSTANTIATE_TEST_SUITE_P(
    Training,
    BackwardBytes,
    ::testing::Values(in_backward("quarter_slow", 4, kStep, Settings::Pace::slow),
                      in_backward("quarter_hasty", 4, kStep, Settings::Pace::hasty),
                      in_backward("quarter_overlapped", 4, kStep, Settings::Pace::overlapped),
                      in_backward("eighth_slow", 8, kStep, Settings::Pace::slow),
                      in_backward("eighth_hasty", 8, kStep, Settings::Pace::hasty),
                      in_backward("eighth_overlapped", 8, kStep, Settings::Pace::overlapped),
                      in_backward("quarter_every_4", 4, kEvery4, Settings::Pace::slow),
                      in_backward("eighth_every_4", 8, kEvery4, Settings::Pace::slow),
                      // All that is made early would leave the step no room.
                      in_backward("small_quota", 8, kEvery4, Settings::Pace::slow, 480_MiB)),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace memd
