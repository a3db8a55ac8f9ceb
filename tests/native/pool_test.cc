// The daemon's memory: what a segment promises to whom it is handed, what a pool refuses, and what
// it reports.
#include "arena/pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arena/memory_limits.h"
#include "base/units.h"

namespace memd {
namespace {

Segment small_segment(uint64_t bytes = 64_KiB) {
  Result<Segment> segment = Segment::create({.bytes = bytes, .huge_pages = false});
  EXPECT_TRUE(segment.is_ok()) << segment.status().message();
  return std::move(segment).value();
}

bool all_zero(const Segment& segment) {
  return std::all_of(segment.data(), segment.data() + segment.bytes(), [](std::byte byte) {
    return byte == std::byte{0};
  });
}

/// Runs `body` in a child that may lock `limit_bytes` only, and returns what it wrote.
std::string with_memlock_limit(uint64_t limit_bytes, const std::function<std::string()>& body) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    __user_cap_data_struct data[2] = {};
    ::syscall(SYS_capget, &header, data);
    data[0].effective &= ~(1U << CAP_IPC_LOCK);
    const rlimit limit{.rlim_cur = limit_bytes, .rlim_max = limit_bytes};
    const bool prepared =
        ::syscall(SYS_capset, &header, data) == 0 && ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
    const std::string answer =
        prepared ? body() : std::string("the child could not lower its limits");
    const bool written =
        ::write(ends[1], answer.data(), answer.size()) == static_cast<ssize_t>(answer.size());
    ::_exit(written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string answer;
  char buffer[512];
  for (ssize_t got = 0; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
    answer.append(buffer, static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return answer;
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << content;
}

/// Somebody beside the daemon, in the same process.
class MemoryKeeper : public DescriptorKeeper {
 public:
  void keep(const std::string& name, int fd) override {
    held_[name] = OwnedFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  void forget(const std::string& name) override { held_.erase(name); }

  KeptDescriptors copies() const {
    KeptDescriptors all;
    for (const auto& [name, fd] : held_)
      all.push_back({name, OwnedFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0))});
    return all;
  }
  size_t count() const { return held_.size(); }
  bool has(const std::string& name) const { return held_.contains(name); }

 private:
  std::map<std::string, OwnedFd> held_;
};

TEST(Segment, gathered_pages_are_zeros_and_come_back_small_where_a_hole_was_punched) {
  Result<Segment> made = Segment::create({.bytes = 4_MiB, .huge_pages = false, .gathered = true});
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  Segment& segment = made.value();
  EXPECT_TRUE(all_zero(segment));
  if (!segment.is_gathered()) GTEST_SKIP() << "this kernel gathers no pages (Linux 6.1)";
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data()) % 2_MiB, 0u);
  std::memset(segment.data(), 7, segment.bytes());
  // As a trainer could do it.
  ASSERT_EQ(::fallocate(segment.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 64_KiB, 128_KiB),
            0);
  EXPECT_EQ(segment.data()[64_KiB], std::byte{0});
  EXPECT_EQ(segment.data()[64_KiB - 1], std::byte{7});
  segment.data()[100_KiB] = std::byte{1};
  EXPECT_EQ(segment.data()[100_KiB], std::byte{1});
  Segment moved = std::move(segment);
  EXPECT_TRUE(moved.is_gathered());
  moved.mark_used();
  const auto next = Segment::adopt(OwnedFd(::dup(moved.fd())), moved.id(), moved.bytes());
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  EXPECT_TRUE(next.value().is_gathered()) << "the next daemon knows";
  EXPECT_TRUE(next.value().is_used());
}

TEST(Pool, gathers_for_as_long_as_it_is_told_and_hands_those_out_first) {
  const auto made = Pool::create({.bytes = 8_MiB,
                                  .segment_bytes = 2_MiB,
                                  .huge_pages = false,
                                  .lock = LockMode::wanted,
                                  .gather_seconds_max = 60});
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  const uint64_t gathered_bytes = made.value()->report().gathered_bytes;
  if (gathered_bytes == 0) GTEST_SKIP() << "this kernel gathers no pages (Linux 6.1)";
  for (uint64_t taken = 0; taken < 8_MiB; taken += 2_MiB) {
    auto segment = made.value()->take();
    ASSERT_TRUE(segment.has_value());
    EXPECT_EQ(segment->is_gathered(), taken < gathered_bytes);
  }
  const auto none = Pool::create(
      {.bytes = 4_MiB, .segment_bytes = 2_MiB, .huge_pages = false, .lock = LockMode::wanted});
  ASSERT_TRUE(none.is_ok());
  EXPECT_EQ(none.value()->report().gathered_bytes, 0u);
}

TEST(Segment, can_neither_be_resized_nor_sealed_further) {
  const Segment segment = small_segment();
  EXPECT_EQ(::ftruncate(segment.fd(), 4096), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(segment.fd(), 128 * 1024), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  const int seals = ::fcntl(segment.fd(), F_GET_SEALS);
  constexpr int kPromised = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  EXPECT_EQ(seals & kPromised, kPromised);
  EXPECT_EQ(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE), 0);
}

TEST(Segment, is_open_to_its_owner_only_and_closes_on_exec) {
  const Segment segment = small_segment();
  struct stat status{};
  ASSERT_EQ(::fstat(segment.fd(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0600U);
  EXPECT_EQ(status.st_size, 64 * 1024);
  EXPECT_NE(::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Segment, has_every_page_touched_when_it_is_created) {
  const Segment segment = small_segment(1_MiB);
  struct stat status{};
  ASSERT_EQ(::fstat(segment.fd(), &status), 0);
  EXPECT_EQ(static_cast<uint64_t>(status.st_blocks) * 512, 1_MiB);
  EXPECT_TRUE(all_zero(segment));
}

TEST(Segment, keeps_its_bytes_when_it_moves_and_when_it_is_without_a_mapping_in_between) {
  Segment segment = small_segment();
  std::memset(segment.data(), 0x5A, segment.bytes());
  void* range = ::mmap(nullptr, 128_KiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(range, MAP_FAILED);
  auto* base = static_cast<std::byte*>(range);
  ASSERT_TRUE(segment.move_to(base).is_ok());
  EXPECT_EQ(segment.data(), base);
  EXPECT_EQ(base[segment.bytes() - 1], std::byte{0x5A});
  segment.leave_reserved();
  EXPECT_EQ(segment.data(), nullptr);
  ASSERT_TRUE(segment.move_to(base + 64_KiB).is_ok());
  EXPECT_EQ(base[64_KiB], std::byte{0x5A});
  segment.leave_reserved();
  ::munmap(range, 128_KiB);
}

/// Bytes of the mapping at `address` whose pages are mapped, and those that are locked.
std::pair<uint64_t, uint64_t> mapped_and_locked_bytes(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(address) << '-';
  std::pair<uint64_t, uint64_t> found{};
  bool is_inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(':') == std::string::npos || line.find('-') < line.find(':'))
      is_inside = line.starts_with(begin.str());
    if (!is_inside) continue;
    if (line.starts_with("Rss:")) found.first = std::stoull(line.substr(4)) * 1_KiB;
    if (line.starts_with("Locked:")) found.second = std::stoull(line.substr(7)) * 1_KiB;
  }
  return found;
}

TEST(Segment, moves_away_with_its_pages_and_leaves_its_addresses_to_their_owner) {
  Segment segment = small_segment(4_MiB);
  const bool is_locked = segment.lock().is_ok();
  std::memset(segment.data(), 0x5A, segment.bytes());
  void* range = ::mmap(nullptr, 4_MiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(range, MAP_FAILED);
  auto* base = static_cast<std::byte*>(range);
  ASSERT_TRUE(segment.move_to(base).is_ok());
  segment.move_away();
  if (segment.data() == nullptr) GTEST_SKIP() << "Linux before 5.13";
  EXPECT_NE(segment.data(), base);
  const auto [mapped_bytes, locked_bytes] = mapped_and_locked_bytes(segment.data());
  EXPECT_EQ(mapped_bytes, 4_MiB) << "its pages would have to be mapped one by one";
  if (is_locked) EXPECT_EQ(locked_bytes, 4_MiB);
  EXPECT_EQ(segment.data()[segment.bytes() - 1], std::byte{0x5A});
  EXPECT_EQ(mapped_and_locked_bytes(base).first, 0u);
  // Nobody else gets them: they are mapped, without access.
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  EXPECT_EQ(::mmap(base, 4_MiB, PROT_NONE, kFlags, -1, 0), MAP_FAILED);
  EXPECT_EQ(errno, EEXIST);
  ASSERT_TRUE(segment.move_to(base).is_ok());
  EXPECT_EQ(base[0], std::byte{0x5A});
  segment.leave_reserved();
  ::munmap(range, 4_MiB);
}

TEST(Pool, rounds_up_to_whole_segments_and_hands_out_each_once) {
  auto pool = Pool::create({.bytes = 5_MiB, .lock = LockMode::wanted});
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  EXPECT_EQ(pool.value()->report().bytes, 6_MiB);
  EXPECT_EQ(pool.value()->report().segment_bytes, 2_MiB);
  EXPECT_GT(pool.value()->report().prefault_seconds, 0.0);
  std::vector<Segment> taken;
  while (auto segment = pool.value()->take()) taken.push_back(std::move(*segment));
  EXPECT_EQ(taken.size(), 3U);
  EXPECT_EQ(pool.value()->segment_count_free(), 0U);
}

TEST(Pool, says_which_pages_it_got_and_why_not_the_huge_ones) {
  auto pool = Pool::create({.bytes = 4_MiB, .lock = LockMode::wanted});
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  const PoolReport& report = pool.value()->report();
  if (report.page_bytes == 2_MiB) {
    EXPECT_EQ(report.note.find("huge"), std::string::npos) << report.note;
  } else {
    EXPECT_EQ(report.page_bytes, 4_KiB);
    EXPECT_NE(report.note.find("vm.nr_hugepages"), std::string::npos) << report.note;
  }
}

TEST(Pool, asked_for_small_pages_takes_them_without_a_note) {
  auto pool = Pool::create({.bytes = 4_MiB, .huge_pages = false, .lock = LockMode::wanted});
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  EXPECT_EQ(pool.value()->report().page_bytes, 4_KiB);
  EXPECT_EQ(pool.value()->report().note.find("huge"), std::string::npos);
}

TEST(Pool, a_segment_given_back_is_destroyed_and_replaced_by_zeros) {
  auto pool = Pool::create({.bytes = 2_MiB, .lock = LockMode::wanted});
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  Segment segment = std::move(*pool.value()->take());
  std::memset(segment.data(), 0xFF, segment.bytes());
  const int kept_by_a_trainer = ::dup(segment.fd());
  struct stat old_status{};
  ASSERT_EQ(::fstat(kept_by_a_trainer, &old_status), 0);
  ASSERT_TRUE(pool.value()->give_back(std::move(segment)).is_ok());
  ASSERT_EQ(pool.value()->segment_count_free(), 1U);
  const Segment fresh = std::move(*pool.value()->take());
  EXPECT_TRUE(all_zero(fresh));
  struct stat fresh_status{};
  ASSERT_EQ(::fstat(fresh.fd(), &fresh_status), 0);
  EXPECT_NE(fresh_status.st_ino, old_status.st_ino);
  ::close(kept_by_a_trainer);
}

TEST(Pool, a_segment_is_replaced_while_the_pool_serves_others) {
  auto pool =
      Pool::create({.bytes = 6_MiB, .segment_bytes = 2_MiB, .lock = LockMode::wanted}).value();
  Segment old = std::move(*pool->take());
  const uint64_t id = old.id();
  Pool::Replacement replacement = pool->begin_replacement(std::move(old));
  EXPECT_EQ(replacement.segment_id(), id);
  std::thread making([&] { replacement.make(); });
  EXPECT_TRUE(pool->take().has_value());
  EXPECT_EQ(pool->segment_count_free(), 1U);
  EXPECT_EQ(pool->report().bytes, 6_MiB) << "its place is kept";
  making.join();
  ASSERT_TRUE(pool->end_replacement(std::move(replacement)).is_ok());
  EXPECT_EQ(pool->segment_count_free(), 2U);
  const Segment fresh = std::move(*pool->take());
  EXPECT_TRUE(all_zero(fresh));
  EXPECT_NE(fresh.id(), id);
}

TEST(Pool, larger_than_memory_is_refused_before_anything_is_allocated) {
  const auto available = available_memory();
  ASSERT_TRUE(available.has_value());
  const auto pool = Pool::create({.bytes = available->bytes + 16_GiB, .lock = LockMode::wanted});
  ASSERT_FALSE(pool.is_ok());
  EXPECT_EQ(pool.status().code(), StatusCode::capacity);
  const std::string asked = std::to_string(align_up(available->bytes + 16_GiB, 64_MiB));
  EXPECT_NE(pool.status().message().find(asked), std::string::npos) << pool.status().message();
  EXPECT_NE(pool.status().message().find("available"), std::string::npos);
  EXPECT_NE(pool.status().message().find("smaller pool"), std::string::npos);
}

TEST(Pool, larger_than_the_memlock_limit_is_refused_where_locking_is_required) {
  const std::string message = with_memlock_limit(3_MiB, [] {
    const auto pool = Pool::create({.bytes = 8_MiB, .lock = LockMode::required});
    return pool.is_ok() ? std::string("created") : pool.status().message();
  });
  for (const char* part : {"8388608",
                           "3145728",
                           "RLIMIT_MEMLOCK",
                           "LimitMEMLOCK=infinity",
                           "ulimit -l",
                           "smaller pool"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
  }
}

TEST(Pool, larger_than_the_memlock_limit_goes_on_unlocked_where_locking_is_wanted) {
  const std::string note = with_memlock_limit(3_MiB, [] {
    const auto pool = Pool::create({.bytes = 8_MiB, .lock = LockMode::wanted});
    if (!pool.is_ok()) return pool.status().message();
    return (pool.value()->report().locked ? "locked " : "unlocked ") + pool.value()->report().note;
  });
  EXPECT_EQ(note.rfind("unlocked ", 0), 0U) << note;
  EXPECT_NE(note.find("RLIMIT_MEMLOCK"), std::string::npos) << note;
}

TEST(Pool, is_locked_where_the_limit_allows_it) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizers turn mlock into a call that does nothing";
#endif
  const std::string answer = with_memlock_limit(4_MiB, [] {
    const auto pool = Pool::create({.bytes = 4_MiB, .lock = LockMode::required});
    if (!pool.is_ok()) return pool.status().message();
    const uint64_t locked_bytes = memlock_allowance().value_or(MemlockAllowance{}).locked_bytes;
    return (pool.value()->report().locked ? "locked " : "unlocked ") + std::to_string(locked_bytes);
  });
  EXPECT_EQ(answer, "locked 4194304");
}

TEST(Pool, a_given_back_segment_makes_room_under_the_memlock_limit_for_its_successor) {
  const std::string answer = with_memlock_limit(4_MiB, [] {
    auto pool = Pool::create({.bytes = 4_MiB, .lock = LockMode::required});
    if (!pool.is_ok()) return pool.status().message();
    const Status given_back = pool.value()->give_back(std::move(*pool.value()->take()));
    return given_back.is_ok() ? std::string("replaced") : given_back.message();
  });
  EXPECT_EQ(answer, "replaced");
}

TEST(Pool, segments_are_a_sixteenth_of_the_pool_between_2_and_64_mebibytes) {
  EXPECT_EQ(segment_bytes_for(1), 2_MiB);
  EXPECT_EQ(segment_bytes_for(64_MiB), 4_MiB);
  EXPECT_EQ(segment_bytes_for(100_MiB), 6_MiB);
  EXPECT_EQ(segment_bytes_for(1_GiB), 64_MiB);
  EXPECT_EQ(segment_bytes_for(512_GiB), 64_MiB);
}

TEST(Pool, segments_that_huge_pages_do_not_divide_are_refused) {
  const auto pool =
      Pool::create({.bytes = 4_MiB, .segment_bytes = 3_MiB, .lock = LockMode::wanted});
  ASSERT_FALSE(pool.is_ok());
  EXPECT_EQ(pool.status().code(), StatusCode::invalid_argument);
}

TEST(AvailableMemory, is_the_lowest_of_the_machine_and_of_every_cgroup_above) {
  const auto root =
      std::filesystem::current_path() / ("memory_limits_" + std::to_string(::getpid()));
  write_file(root / "proc/meminfo", "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n");
  EXPECT_EQ(available_memory(root)->bytes, 1000000U * 1024);
  write_file(root / "proc/self/cgroup", "0::/outer/inner\n");
  write_file(root / "sys/fs/cgroup/outer/inner/memory.max", "max\n");
  write_file(root / "sys/fs/cgroup/outer/inner/memory.current", "1000\n");
  write_file(root / "sys/fs/cgroup/outer/memory.max", "5000000\n");
  write_file(root / "sys/fs/cgroup/outer/memory.current", "3000000\n");
  write_file(root / "sys/fs/cgroup/outer/memory.stat",
             "anon 1\ninactive_file 400000\nactive_file 100000\n");
  EXPECT_EQ(available_memory(root)->bytes, 2500000U);  // 5000000 - (3000000 - 500000 of page cache)
  EXPECT_NE(available_memory(root)->source.find("outer/memory.max"), std::string::npos);
  write_file(root / "proc/self/cgroup", "7:cpu,memory:/job\n0::/outer/inner\n");
  write_file(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000000\n");
  write_file(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "500000\n");
  EXPECT_EQ(available_memory(root)->bytes, 1500000U);
  std::filesystem::remove_all(root);
}

TEST(KeptPool, segments_in_use_come_back_by_id_and_the_rest_is_free) {
  MemoryKeeper keeper;
  uint64_t id = 0;
  {
    auto pool =
        Pool::create({.bytes = 8_MiB, .huge_pages = false, .lock = LockMode::wanted}, &keeper);
    ASSERT_TRUE(pool.is_ok()) << pool.status().message();
    EXPECT_EQ(keeper.count(), 4U);
    const auto used = pool.value()->take();
    id = used->id();
    EXPECT_TRUE(keeper.has(concat("segment.", id)));
    std::memset(used->data(), 7, used->bytes());
    const auto lost = pool.value()->take();  // of a job that is not found again
    std::memset(lost->data(), 8, lost->bytes());
  }  // as a killed daemon, which forgets nothing
  KeptDescriptors kept = keeper.copies();
  kept.push_back({"ledger.1", OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC))});
  auto pool =
      Pool::create({.bytes = 8_MiB, .huge_pages = false, .lock = LockMode::wanted}, &keeper, &kept);
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  ASSERT_EQ(kept.size(), 1U) << "what is no segment is left to others";
  EXPECT_EQ(kept[0].name, "ledger.1");
  EXPECT_FALSE(pool.value()->take()) << "nothing is free before settle()";
  auto used = pool.value()->take_kept(id);
  ASSERT_TRUE(used);
  EXPECT_EQ(used->id(), id);
  EXPECT_EQ(used->data()[used->bytes() - 1], std::byte{7});
  EXPECT_FALSE(pool.value()->take_kept(id)) << "it is taken once";
  EXPECT_FALSE(pool.value()->take_kept(id + 1));
  ASSERT_TRUE(pool.value()->settle().is_ok());
  EXPECT_EQ(pool.value()->segment_count_free(), 3U);
  EXPECT_EQ(pool.value()->report().bytes, 8_MiB);
  EXPECT_EQ(pool.value()->report().kept_bytes, 6_MiB) << "a fresh one for that of a lost job";
  EXPECT_EQ(pool.value()->report().note, "");
  while (const auto free = pool.value()->take()) EXPECT_TRUE(all_zero(*free));
}

TEST(KeptPool, a_segment_that_was_given_up_is_never_adopted) {
  MemoryKeeper keeper;
  auto pool =
      Pool::create({.bytes = 2_MiB, .huge_pages = false, .lock = LockMode::wanted}, &keeper);
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  KeptDescriptors kept = keeper.copies();  // the keeper never hears that it ended
  auto used = pool.value()->take();
  const uint64_t id = used->id();
  ASSERT_TRUE(pool.value()->give_back(std::move(*used)).is_ok());
  EXPECT_FALSE(keeper.has(concat("segment.", id)));
  EXPECT_EQ(keeper.count(), 1U) << "the fresh one in its place";
  auto next =
      Pool::create({.bytes = 2_MiB, .huge_pages = false, .lock = LockMode::wanted}, &keeper, &kept);
  ASSERT_TRUE(next.is_ok()) << next.status().message();
  EXPECT_FALSE(next.value()->take_kept(id));
  ASSERT_TRUE(next.value()->settle().is_ok());
  EXPECT_EQ(next.value()->report().bytes, 2_MiB);
  EXPECT_EQ(next.value()->report().kept_bytes, 0U);
}

TEST(KeptPool, what_is_no_segment_is_refused_and_named) {
  OwnedFd unsealed(::memfd_create("memd", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 2_MiB), 0);
  const auto refused =
      Segment::adopt(OwnedFd(::fcntl(unsealed.get(), F_DUPFD_CLOEXEC, 0)), 5, 2_MiB);
  ASSERT_FALSE(refused.is_ok());
  EXPECT_NE(refused.status().message().find("kept as segment 5 is none of 2097152 bytes"),
            std::string::npos)
      << refused.status().message();
  const Segment whole = small_segment();
  EXPECT_FALSE(Segment::adopt(OwnedFd(::fcntl(whole.fd(), F_DUPFD_CLOEXEC, 0)), 5, 2_MiB).is_ok())
      << "of another size";
  EXPECT_TRUE(Segment::adopt(OwnedFd(::fcntl(whole.fd(), F_DUPFD_CLOEXEC, 0)), 5, 64_KiB).is_ok());

  KeptDescriptors kept;
  kept.push_back({"segment.5", std::move(unsealed)});
  auto pool =
      Pool::create({.bytes = 2_MiB, .huge_pages = false, .lock = LockMode::wanted}, nullptr, &kept);
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  EXPECT_EQ(pool.value()->report().bytes, 2_MiB) << "a pool is made without it";
}

TEST(KeptPool, a_pool_of_another_size_is_had_around_what_is_in_use) {
  MemoryKeeper keeper;
  const PoolOptions small{.bytes = 4_MiB, .huge_pages = false, .lock = LockMode::wanted};
  uint64_t id = 0;
  {
    auto pool = Pool::create(small, &keeper);
    ASSERT_TRUE(pool.is_ok()) << pool.status().message();
    id = pool.value()->take()->id();
  }
  PoolOptions large = small;
  large.bytes = 64_MiB;  // whose segments would be of 4 MiB
  for (const bool in_use : {true, false}) {
    KeptDescriptors kept = keeper.copies();
    auto pool = Pool::create(large, &keeper, &kept);
    ASSERT_TRUE(pool.is_ok()) << pool.status().message();
    if (in_use) {
      ASSERT_TRUE(pool.value()->take_kept(id));
    }
    ASSERT_TRUE(pool.value()->settle().is_ok());
    EXPECT_EQ(pool.value()->report().bytes, 64_MiB);
    EXPECT_EQ(pool.value()->segment_bytes(), in_use ? 2_MiB : 4_MiB)
        << "offsets of a job in use depend on it, of nobody else's";
    EXPECT_EQ(pool.value()->report().kept_bytes, in_use ? 4_MiB : 0);
    EXPECT_EQ(keeper.count(), in_use ? 32U : 16U);
  }
  PoolOptions tiny = small;
  tiny.bytes = 2_MiB;
  tiny.segment_bytes = 4_MiB;
  KeptDescriptors kept = keeper.copies();
  std::vector<uint64_t> ids;
  for (const KeptDescriptor& each : kept) ids.push_back(std::stoull(each.name.substr(8)));
  auto pool = Pool::create(tiny, &keeper, &kept);
  ASSERT_TRUE(pool.is_ok()) << pool.status().message();
  std::vector<Segment> used;
  for (int i = 0; i < 3; ++i) used.push_back(*pool.value()->take_kept(ids[i]));
  ASSERT_TRUE(pool.value()->settle().is_ok());
  EXPECT_EQ(pool.value()->segment_count_free(), 0U) << "what nobody uses goes back to the kernel";
  EXPECT_EQ(pool.value()->report().bytes, 12_MiB);
  EXPECT_NE(pool.value()->report().note.find("larger than asked for"), std::string::npos);
  EXPECT_EQ(keeper.count(), 3U);
}

}  // namespace
}  // namespace memd
