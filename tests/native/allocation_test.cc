// Memory that runs out: a request fails, and not the daemon.
#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/memory_reserve.h"
#include "base/units.h"
#include "server/server.h"
#include "store_fixture.h"

namespace {

/// Larger pieces are not to be had.
std::atomic<size_t> piece_bytes_max{~size_t{0}};
/// Nor is more than this at a time.
std::atomic<size_t> held_bytes_max{~size_t{0}};
std::atomic<size_t> held_bytes{0};

}  // namespace

// As the standard's, within the two bounds.
void* operator new(size_t bytes) {
  for (;;) {
    const bool is_had = bytes <= piece_bytes_max && held_bytes + bytes <= held_bytes_max;
    if (void* const piece = is_had ? std::malloc(bytes == 0 ? 1 : bytes) : nullptr) {
      held_bytes += malloc_usable_size(piece);
      return piece;
    }
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) throw std::bad_alloc();
    handler();
  }
}
void operator delete(void* piece) noexcept {
  if (piece != nullptr) held_bytes -= malloc_usable_size(piece);
  std::free(piece);
}
void operator delete(void* piece, size_t) noexcept { operator delete(piece); }

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::kDiskBytes;
using testing::numbers;
using testing::parameter;

/// Ends with the scope. There is less than what is held, so that the next allocation needs the
/// reserve, whatever was freed before it; and half of that is enough.
struct NothingMoreIsHad {
  NothingMoreIsHad() { held_bytes_max = held_bytes - kReserveBytes / 2; }
  ~NothingMoreIsHad() { held_bytes_max = ~size_t{0}; }
};

/// A parameter after one step during which memory runs out, or does not.
std::vector<float> stepped(bool is_memory_out) {
  constexpr uint64_t kElements = 70'000;
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job"));
  const auto ids = heart.declare(session, {parameter("w", kElements), bytes_shard("b", 100)});
  heart.write(session, ids[0], numbers(kElements, 1));
  heart.write(session, ids[0], numbers(kElements, 2), Part::gradient);
  heart.write(session, ids[1], testing::pattern(100, 3));
  EXPECT_TRUE(heart.sync(session).is_ok());
  EXPECT_TRUE(has_reserve());
  std::optional<Status> answer;
  StepRequest request;
  request.session_id = session;
  request.groups = {{.settings = AdamSettings{}, .shard_ids = {ids[0]}}};
  heart.store().operations().step(
      request, [&](const Status& status, const StepReport&) { answer = status; });
  {
    std::optional<NothingMoreIsHad> nothing_more;
    if (is_memory_out) nothing_more.emplace();
    EXPECT_TRUE(heart.until([&] { return answer.has_value(); }));
    EXPECT_TRUE(answer->is_ok()) << answer->message();
    EXPECT_EQ(has_reserve(), !is_memory_out);
    const auto asked = heart.lease(session, ids[1], LeaseMode::write);
    EXPECT_EQ(asked.is_ok(), !is_memory_out);
    if (asked.is_ok()) heart.release(asked);
    if (is_memory_out) {
      EXPECT_EQ(asked.status.code(), StatusCode::capacity);
      EXPECT_NE(asked.status.message().find("no memory for a lease"), std::string::npos)
          << asked.status.message();
    }
  }
  EXPECT_TRUE(has_reserve());
  EXPECT_EQ(heart.read<uint8_t>(session, ids[1]), testing::pattern(100, 3));
  EXPECT_TRUE(heart.sync(session).is_ok());
  return heart.read<float>(session, ids[0]);
}

TEST(AllocationTest, a_declaration_for_which_there_is_no_memory_is_refused_and_changes_nothing) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job"));
  heart.declare(session, {bytes_shard("first", 10)});
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 20'000; ++i) specs.push_back(bytes_shard(concat("b", i), 0));
  LabelledSpecs declared = Heart::labelled(specs);
  // Of 12 MB of records the vector of shards is the largest piece.
  piece_bytes_max = 1_MiB;
  const Status refused = heart.store().declare(session, std::move(declared)).status();
  piece_bytes_max = ~size_t{0};
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("no memory for records"), std::string::npos)
      << refused.message();
  EXPECT_EQ(heart.job(session).shards().size(), 1U);
  heart.declare(session, specs);
  EXPECT_EQ(heart.job(session).shards().size(), 20'001U);
}

TEST(AllocationTest,
     a_step_that_has_begun_ends_with_the_reserve_and_what_is_asked_then_is_refused) {
  use_reserve();  // this thread is the server thread
  EXPECT_EQ(stepped(true), stepped(false));
}

/// A daemon without its Python that has no memory for more than has been begun.
class NoMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Not the temporary folder: it may lie in memory, which memd refuses.
    const char* const configured = std::getenv("MEMD_TEST_DATA");
    std::string path = std::filesystem::absolute(configured != nullptr ? configured : ".");
    path += "/allocation-test-XXXXXX";
    ASSERT_NE(::mkdtemp(path.data()), nullptr) << path;
    root_ = path;
    auto started = Server::start({.directories = {path},
                                  .nvme_bytes = 64_MiB,
                                  .host_bytes = 48_MiB,
                                  .lock_required = false,
                                  .huge_pages = false,
                                  .update_thread_count = 1});
    ASSERT_TRUE(started.is_ok()) << started.status().message();
    server_ = std::move(started).value();
  }
  void TearDown() override {
    server_.reset();
    std::filesystem::remove_all(root_);
  }
  /// The reserve is gone, and is not to be had again before memory_returns().
  static void memory_runs_out() {
    use_reserve();
    piece_bytes_max = 1_MiB;
    EXPECT_THROW(std::vector<char>(2_MiB), std::bad_alloc);
  }
  static void memory_returns() { piece_bytes_max = ~size_t{0}; }

  std::filesystem::path root_;
  std::shared_ptr<Server> server_;
};

TEST_F(NoMemoryTest, each_call_that_takes_memory_is_refused_and_those_that_give_some_back_are_not) {
  const OpenJobRequest job{
      .name = "job", .uid = 1, .host_bytes = 20_MiB, .nvme_bytes = 40_MiB, .fresh = false};
  const uint64_t job_id = server_->open_job(job).value().job_id;
  const uint64_t session_id = server_->attach(job_id).value().session_id;
  const uint32_t shard_id =
      server_->declare(session_id, {bytes_shard("b", 10)}).value().first.at(0).shard_id;
  StepRequest step;
  step.session_id = session_id;
  memory_runs_out();
  MomentCalls::Write write = server_->moments().begin_write({}, 0, NewMoments());
  const std::vector<Status> refused{
      server_->open_job({.name = "other", .uid = 1, .host_bytes = 20_MiB}).status(),
      server_->attach(job_id).status(),
      server_->declare(session_id, {bytes_shard("c", 10)}).status(),
      server_->lease(session_id, shard_id, Part::value, LeaseMode::overwrite, 10).status(),
      server_->step(step, {}, 10).status(),
      server_->expect_step(session_id, {}),
      server_->sync(session_id, 10).status(),
      server_->moments().read({}, 10).status(),
      server_->moments().wait(write, 10),
      server_->set_job_weight(job_id, JobWeight()),
      server_->begin_check({}).status(),
      server_->snapshots().create({.job_id = job_id, .name = "s"}, 10).status(),
      server_->snapshots().restore(job_id, "s", 10).status()};
  for (size_t call = 0; call < refused.size(); ++call) {
    SCOPED_TRACE(::testing::Message() << "call " << call);
    EXPECT_EQ(refused[call].code(), StatusCode::capacity) << refused[call].message();
    EXPECT_NE(refused[call].message().find("has no memory for"), std::string::npos)
        << refused[call].message();
  }
  EXPECT_EQ(server_->jobs().value().size(), 1U);
  EXPECT_TRUE(server_->delete_shard(session_id, "b").value());
  EXPECT_TRUE(server_->detach(session_id).is_ok());
  memory_returns();
  const uint64_t next_id = server_->attach(job_id).value().session_id;
  EXPECT_TRUE(server_->declare(next_id, {bytes_shard("c", 10)}).is_ok());
  EXPECT_TRUE(server_->sync(next_id, 10).is_ok());
}

}  // namespace
}  // namespace memd
