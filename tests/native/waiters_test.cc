// Leases that wait, among random calls of several sessions: no event that one of them waits for is
// lost. The fixture tries each that sleeps whenever the store has nothing to do.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kElements = 192 * 1024;  // of a parameter: 768 KiB
constexpr size_t kParameters = 4;
constexpr size_t kBlobs = 6;
constexpr size_t kSessions = 3;
constexpr int kCalls = 400;

/// Sessions that ask, give back, close steps and end, in the order that the seed says.
class RandomCalls {
 public:
  RandomCalls(uint32_t seed, std::optional<Durability> durability)
      : random_(seed), heart_(std::make_shared<MemoryDisk>(kDiskBytes)) {
    job_id_ = heart_.open("job", 3, kQuotaBytes, durability);
    for (size_t i = 0; i < kSessions; ++i) sessions_.push_back(heart_.attach(job_id_));
    std::vector<ShardSpec> specs;
    for (size_t i = 0; i < kParameters; ++i) {
      specs.push_back({.name = "parameter" + std::to_string(i),
                       .kind = ShardKind::parameter,
                       .dtype = DType::float32,
                       .shape = {kElements}});
    }
    for (size_t i = 0; i < kBlobs; ++i) {
      specs.push_back({.name = "blob" + std::to_string(i),
                       .kind = ShardKind::blob,
                       .dtype = DType::float32,
                       .shape = {(1 + i % 3) * kElements}});
    }
    ids_ = heart_.declare(sessions_[0], specs);
    for (size_t i = 0; i < kParameters; ++i)
      heart_.write(sessions_[0], ids_[i], std::vector<float>(kElements, 1.0F));
  }

  void call() {
    switch (random_() % 10) {
      case 0:
      case 1:
      case 2:
        return ask(LeaseMode::read, Part::value);
      case 3:
        return ask(random_() % 2 == 0 ? LeaseMode::write : LeaseMode::overwrite, Part::value);
      case 4:
        return ask(LeaseMode::overwrite, Part::gradient);
      case 5:
      case 6:
      case 7:
        return release(random_());
      case 8:
        return random_() % 2 == 0 ? sync() : step();
      default:
        return random_() % 8 == 0 ? end_session() : turns();
    }
  }

  /// Everything is given back: everybody is answered.
  void end() {
    ASSERT_TRUE(heart_.until([this] {
      while (!held_.empty()) release(0);
      collect();
      return held_.empty() && asked_.empty() && open_calls_ == 0;
    })) << asked_.size()
        << " leases are not answered";
  }

 private:
  uint64_t session() { return sessions_[random_() % sessions_.size()]; }

  void ask(LeaseMode mode, Part part) {
    const size_t count = part == Part::gradient ? kParameters : ids_.size();
    const uint64_t timeout_ns = random_() % 8 == 0 ? 1'000'000 : 60'000'000'000;
    asked_.push_back(heart_.ask({.session_id = session(),
                                 .shard_id = ids_[random_() % count],
                                 .part = part,
                                 .mode = mode,
                                 .timeout_ns = timeout_ns}));
    collect();
  }
  void collect() {
    std::erase_if(asked_, [this](const auto& answer) {
      if (!answer->has_value()) return false;
      if ((*answer)->is_ok()) held_.push_back(**answer);
      return true;
    });
  }
  void release(size_t which) {
    collect();
    if (held_.empty()) return;
    const size_t index = which % held_.size();
    const Held held = held_[index];
    held_.erase(held_.begin() + static_cast<ptrdiff_t>(index));
    heart_.release(held);
  }
  void sync() {
    ++open_calls_;
    heart_.store().operations().sync(session(),
                                     [this](const Status&, const StepReport&) { --open_calls_; });
  }
  void step() {
    StepRequest request;
    request.session_id = session();
    StepGroup group;
    for (size_t i = 0; i < kParameters; ++i) {
      const Shard& shard = heart_.job(request.session_id).shards()[ids_[i]];
      if (shard.contributors.only() == request.session_id) group.shard_ids.push_back(ids_[i]);
    }
    if (group.shard_ids.empty()) return;
    request.groups.push_back(group);
    ++open_calls_;
    heart_.store().operations().step(std::move(request),
                                     [this](const Status&, const StepReport&) { --open_calls_; });
  }
  void end_session() {
    const size_t index = random_() % sessions_.size();
    const uint64_t ended = sessions_[index];
    std::erase_if(held_, [ended](const Held& held) { return held.session_id == ended; });
    ASSERT_TRUE(heart_.store().detach(ended).is_ok());
    collect();
    std::erase_if(held_, [ended](const Held& held) { return held.session_id == ended; });
    sessions_[index] = heart_.attach(job_id_);
  }
  void turns() {
    for (uint32_t count = random_() % 8; count > 0; --count) {
      heart_.clock.advance(100'000);
      heart_.turn();
      collect();
    }
  }

  std::mt19937 random_;
  Heart heart_;
  uint64_t job_id_ = 0;
  std::vector<uint64_t> sessions_;
  std::vector<uint32_t> ids_;
  std::vector<std::shared_ptr<std::optional<Held>>> asked_;
  std::vector<Held> held_;
  int open_calls_ = 0;
};

TEST(WaitersTest, no_event_is_lost_whatever_sessions_do) {
  for (uint32_t seed = 1; seed <= 16; ++seed) {
    SCOPED_TRACE(seed);
    RandomCalls calls(
        seed, seed % 2 == 0 ? std::nullopt : std::optional(Durability::parse("every:2").value()));
    for (int i = 0; i < kCalls && !::testing::Test::HasFailure(); ++i) calls.call();
    calls.end();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace memd::testing
