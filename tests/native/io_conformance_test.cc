// Every engine keeps the same promises, and the automatic choice says why it fell back.
#include "io_conformance.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "forbid_io_uring.h"
#include "io/memory_queue.h"
#include "io/thread_queue.h"
#include "io/uring_queue.h"

namespace memd::testing {
namespace {

using QueueResult = Result<std::unique_ptr<IoQueue>>;

QueueResult make_engine(IoEngine engine, IoQueueOptions options) {
  options.engine = engine;
  auto choice = make_io_queue(options);
  if (!choice.is_ok()) return choice.status();
  return std::move(choice).value().queue;
}

QueueResult make_uring(const IoQueueOptions& options) {
  return make_engine(IoEngine::io_uring, options);
}
QueueResult make_threads(const IoQueueOptions& options) {
  return make_engine(IoEngine::threads, options);
}
QueueResult make_automatic(const IoQueueOptions& options) {
  return make_engine(IoEngine::automatic, options);
}
QueueResult make_memory(const IoQueueOptions& options) {
  return QueueResult(std::make_unique<MemoryQueue>(
      MemoryQueueOptions{.depth = options.depth, .wake_fd = options.wake_fd, .automatic = true}));
}
QueueResult make_memory_shuffled(const IoQueueOptions& options) {
  return QueueResult(std::make_unique<MemoryQueue>(MemoryQueueOptions{
      .depth = options.depth, .wake_fd = options.wake_fd, .automatic = true, .order_seed = 42}));
}

INSTANTIATE_TEST_SUITE_P(
    Engines,
    IoConformance,
    ::testing::Values(EngineUnderTest{"io_uring", make_uring},
                      EngineUnderTest{"threads", make_threads},
                      EngineUnderTest{"automatic", make_automatic},
                      EngineUnderTest{"memory", make_memory},
                      EngineUnderTest{"memory_shuffled", make_memory_shuffled}),
    [](const ::testing::TestParamInfo<EngineUnderTest>& engine) { return engine.param.name; });

/// Runs `body` in a child that may not use io_uring; what it returns is the exit status.
int run_without_io_uring(int error_number, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(forbid_io_uring(error_number) ? body() : 126);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class IoUringForbidden : public ::testing::TestWithParam<int> {};

TEST_P(IoUringForbidden, the_automatic_choice_is_threads_and_says_why) {
  const std::string reason = concat("io_uring_setup: ", std::strerror(GetParam()));
  EXPECT_EQ(0, run_without_io_uring(GetParam(), [&reason] {
              auto choice = make_io_queue({});
              if (!choice.is_ok() || choice.value().queue->name() != "threads") return 1;
              return choice.value().reason == reason ? 0 : 2;
            }));
}

TEST_P(IoUringForbidden, asking_for_io_uring_is_an_error_that_says_what_to_do) {
  EXPECT_EQ(0, run_without_io_uring(GetParam(), [] {
              const auto choice = make_io_queue({.engine = IoEngine::io_uring});
              if (choice.is_ok() || choice.status().error_number() != GetParam()) return 1;
              const std::string& message = choice.status().message();
              return message.find("choose the engine threads") != std::string::npos ? 0 : 2;
            }));
}

TEST_P(IoUringForbidden, the_automatic_choice_conforms) {
  EXPECT_EQ(0, run_without_io_uring(GetParam(), [] {
              execl("/proc/self/exe",
                    "io_conformance_test",
                    "--gtest_filter=Engines/*/automatic:Engines/*/threads",
                    nullptr);
              return 127;
            }));
}

INSTANTIATE_TEST_SUITE_P(Answers, IoUringForbidden, ::testing::Values(EPERM, ENOSYS));

TEST(MakeIoQueue, refuses_a_depth_that_is_no_depth) {
  for (const uint32_t depth : {0U, 4097U}) {
    const auto choice = make_io_queue({.depth = depth});
    ASSERT_FALSE(choice.is_ok());
    EXPECT_EQ(choice.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(choice.status().message().find(std::to_string(depth)), std::string::npos);
  }
}

TEST(MakeIoQueue, threads_are_chosen_when_asked_for) {
  const auto choice = make_io_queue({.engine = IoEngine::threads});
  ASSERT_TRUE(choice.is_ok());
  EXPECT_EQ(choice.value().queue->name(), "threads");
  EXPECT_EQ(choice.value().reason, "threads were asked for");
}

TEST(UringQueue, memory_that_can_be_registered_is_and_statistics_say_so) {
  auto made = UringQueue::create({});
  if (!made.is_ok()) GTEST_SKIP() << made.status().message();
  UringQueue& queue = *made.value();
  EXPECT_FALSE(queue.statistics().registered_buffers);
  Block block(1_MiB);
  queue.add_memory(block.span(), PageKind::small);
  queue.reap();
  EXPECT_TRUE(queue.statistics().registered_buffers);
  queue.remove_memory(block.span());
  EXPECT_FALSE(queue.statistics().registered_buffers);
}

TEST(UringQueue, a_reap_registers_one_piece_and_asks_for_the_next_turn) {
  const OwnedFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  auto made = UringQueue::create({.wake_fd = wake.get()});
  if (!made.is_ok()) GTEST_SKIP() << made.status().message();
  UringQueue& queue = *made.value();
  Block block(10_MiB);  // three pieces
  queue.add_memory(block.span(), PageKind::small);
  uint64_t woken = 0;
  for (int reap_count = 0; reap_count < 3; ++reap_count) {
    EXPECT_FALSE(queue.statistics().registered_buffers) << reap_count;
    EXPECT_EQ(::read(wake.get(), &woken, sizeof(woken)), static_cast<ssize_t>(sizeof(woken)))
        << "nobody would call the next reap()";
    queue.reap();
  }
  EXPECT_TRUE(queue.statistics().registered_buffers);
  EXPECT_EQ(::read(wake.get(), &woken, sizeof(woken)), -1) << "there is nothing more to do";

  // The queue skips pieces that were removed before their turn, and registers one that came back.
  queue.remove_memory(block.span());
  queue.add_memory(block.span(), PageKind::small);
  queue.remove_memory(block.span());
  queue.add_memory(block.span().first(1_MiB), PageKind::small);
  for (int reap_count = 0; reap_count < 4; ++reap_count) queue.reap();
  EXPECT_TRUE(queue.statistics().registered_buffers);
  queue.remove_memory(block.span().first(1_MiB));
}

TEST(UringQueue, huge_pages_are_registered_unless_the_kernel_would_look_through_much_else) {
  auto made = UringQueue::create({});
  if (!made.is_ok()) GTEST_SKIP() << made.status().message();
  UringQueue& queue = *made.value();
  Block huge(4_MiB);
  const auto add_huge = [&] {
    queue.add_memory(huge.span(), PageKind::huge);
    queue.reap();
    const bool are_all_registered = queue.statistics().registered_buffers;
    queue.remove_memory(huge.span());
    return are_all_registered;
  };
  EXPECT_TRUE(add_huge());

  constexpr uint64_t kPieceCount = 9;  // of 1,024 entries each
  Block small(kPieceCount * 4_MiB);
  queue.add_memory(small.span(), PageKind::small);
  for (uint64_t i = 0; i < kPieceCount; ++i) queue.reap();
  EXPECT_TRUE(queue.statistics().registered_buffers);
  EXPECT_FALSE(add_huge());

  queue.remove_memory(small.span());
  EXPECT_TRUE(add_huge()) << "what was removed is not looked through";
}

TEST(UringQueue, memory_that_cannot_be_registered_is_used_unregistered_and_statistics_say_so) {
  if (!UringQueue::create({}).is_ok()) GTEST_SKIP() << "io_uring is forbidden here";
  auto made = UringQueue::create({});
  UringQueue& queue = *made.value();
  // Address space that is no memory: the kernel can't pin it.
  Block block(1_MiB);
  const std::span<std::byte> nowhere(reinterpret_cast<std::byte*>(kBlockBytes), 1_MiB);
  queue.add_memory(block.span(), PageKind::small);
  queue.add_memory(nowhere, PageKind::small);
  for (int reap_count = 0; reap_count < 2; ++reap_count) queue.reap();
  EXPECT_FALSE(queue.statistics().registered_buffers);
  queue.remove_memory(nowhere);
  EXPECT_TRUE(queue.statistics().registered_buffers);
}

TEST(UringQueue, memory_that_the_kernel_cannot_let_go_of_is_held_until_it_can_and_others_go_on) {
  bool has_memory = false;
  auto made =
      UringQueue::create({.fail_unregister = [&has_memory] { return has_memory ? 0 : ENOMEM; }});
  if (!made.is_ok()) GTEST_SKIP() << made.status().message();
  UringQueue& queue = *made.value();
  Block block(1_MiB);
  queue.add_memory(block.span(), PageKind::small);
  queue.reap();
  queue.remove_memory(block.span());
  EXPECT_EQ(queue.statistics().removed_and_held_count, 1u);
  EXPECT_FALSE(queue.statistics().registered_buffers);

  // The same bytes are added and used again, under another number.
  queue.add_memory(block.span(), PageKind::small);
  queue.reap();
  EXPECT_TRUE(queue.statistics().registered_buffers);
  const uint16_t device = queue.add_device(OwnedFd(memfd_create("device", MFD_CLOEXEC)), "device");
  block.span()[0] = std::byte{7};
  bool is_written = false;
  queue.submit({.kind = IoKind::write,
                .device = device,
                .offset_bytes = 0,
                .data = block.span(),
                .complete = [&](const Status& status) { is_written = status.is_ok(); }});
  while (!is_written) queue.reap();
  queue.remove_memory(block.span());

  EXPECT_EQ(queue.statistics().removed_and_held_count, 2u);
  has_memory = true;
  while (queue.statistics().removed_and_held_count > 0) queue.reap();
}

}  // namespace
}  // namespace memd::testing
