#include "store/format/volume.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include "base/checksum.h"
#include "base/units.h"

namespace memd {
namespace {

namespace fs = std::filesystem;

class VolumeTest : public testing::Test {
 protected:
  void SetUp() override {
    // Not the temporary folder: it may lie in memory, which memd refuses.
    const char* configured = std::getenv("MEMD_TEST_DATA");
    std::string path = fs::absolute(configured != nullptr ? configured : ".");
    path += "/volume-test-XXXXXX";
    ASSERT_NE(::mkdtemp(path.data()), nullptr) << path;
    root_ = path;
    for (const char* name : {"a", "b", "c"}) fs::create_directory(root_ / name);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string dir(const char* name) const { return root_ / name; }
  std::string volume(const char* name) const { return root_ / name / "memd.volume"; }
  VolumeSetOptions options(const std::vector<const char*>& names, uint64_t bytes_each = 16_MiB) {
    VolumeSetOptions options;
    for (const char* name : names) options.directories.push_back(dir(name));
    options.bytes = bytes_each * names.size();
    options.lock_wait_ms = 0;
    return options;
  }
  VolumeSet open(const VolumeSetOptions& options) {
    auto set = VolumeSet::open(options);
    EXPECT_TRUE(set.is_ok()) << set.status().message();
    return set.is_ok() ? std::move(set).value() : VolumeSet{};
  }
  void refused(const VolumeSetOptions& options,
               StatusCode code,
               const std::vector<std::string>& named) {
    const auto set = VolumeSet::open(options);
    EXPECT_EQ(set.status().code(), code) << set.status().message();
    for (const std::string& word : named) {
      EXPECT_NE(set.status().message().find(word), std::string::npos)
          << word << ": " << set.status().message();
    }
  }
  size_t file_count(const char* name) const {
    const fs::directory_iterator files(root_ / name);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }
  static void overwrite(const std::string& path,
                        uint64_t offset_bytes,
                        std::span<const std::byte> bytes) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset_bytes));
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(file.good());
  }
  static void spoil(const std::string& path, uint64_t offset_bytes) {
    const std::vector<std::byte> bytes(100, std::byte{0x5a});
    overwrite(path, offset_bytes + 200, bytes);
  }
  static void commit(const std::string& path, Superblock superblock, uint64_t sequence) {
    superblock.sequence = sequence;
    for (const uint64_t at : superblock_pair_offsets(sequence, superblock.volume_bytes)) {
      overwrite(path, at, encode_superblock(superblock, at));
    }
  }

  fs::path root_;
};

TEST_F(VolumeTest, an_empty_directory_is_formatted_once_and_opened_ever_after) {
  auto wanted = options({"a"}, 17_MiB);
  std::vector<uint64_t> progress;
  wanted.progress = [&](uint64_t done_bytes, uint64_t all_bytes) {
    EXPECT_EQ(all_bytes, 17_MiB);
    progress.push_back(done_bytes);
  };
  Superblock made;
  {
    const VolumeSet set = open(wanted);
    EXPECT_TRUE(set.formatted);
    EXPECT_GT(set.format_seconds, 0);
    ASSERT_EQ(set.volumes.size(), 1u);
    EXPECT_EQ(set.volumes[0].path, volume("a"));
    EXPECT_EQ(set.volumes[0].bytes, 17_MiB);
    EXPECT_EQ(set.volumes[0].data_begin_bytes, 2_MiB);
    EXPECT_EQ(set.volumes[0].data_end_bytes, 15_MiB);
    EXPECT_NE(::fcntl(set.volumes[0].file.get(), F_GETFL) & O_DIRECT, 0);
    made = set.superblock;
  }
  EXPECT_EQ(progress, (std::vector<uint64_t>{8_MiB, 16_MiB, 17_MiB}));
  struct stat stat{};
  ASSERT_EQ(::stat(volume("a").c_str(), &stat), 0);
  EXPECT_GE(static_cast<uint64_t>(stat.st_blocks) * 512, 17_MiB) << "space is there for ever";
  EXPECT_EQ(stat.st_mode & 077, 0u);
  const VolumeSet again = open(wanted);
  EXPECT_FALSE(again.formatted);
  EXPECT_EQ(again.superblock.set_uuid, made.set_uuid);
  EXPECT_EQ(again.superblock.sequence, 0u);
  EXPECT_EQ(again.superblock.root_bytes, 0u);
  EXPECT_EQ(progress.size(), 3u);
}

TEST_F(VolumeTest, a_set_keeps_its_order_when_directories_are_named_in_another) {
  {
    const VolumeSet set = open(options({"a", "b"}));
  }
  const VolumeSet set = open(options({"b", "a"}));
  EXPECT_EQ(set.volumes[0].directory, dir("a"));
  EXPECT_EQ(set.volumes[1].directory, dir("b"));
  EXPECT_EQ(set.superblock.volume_index, 0);
}

TEST_F(VolumeTest, the_newest_valid_superblock_wins_whatever_happens_to_one_pair) {
  Superblock superblock;
  {
    superblock = open(options({"a"})).superblock;
  }
  const auto sequence = [&] { return open(options({"a"})).superblock.sequence; };
  commit(volume("a"), superblock, 1);
  EXPECT_EQ(sequence(), 1u);
  commit(volume("a"), superblock, 2);
  EXPECT_EQ(sequence(), 2u);
  spoil(volume("a"), 0);
  EXPECT_EQ(sequence(), 2u) << "its other copy";
  spoil(volume("a"), 14_MiB);
  EXPECT_EQ(sequence(), 1u) << "the other pair";
  spoil(volume("a"), 1_MiB);
  EXPECT_EQ(sequence(), 1u);
  spoil(volume("a"), 15_MiB);
  refused(options({"a"}), StatusCode::integrity, {volume("a"), "no valid superblock", "restore"});
  EXPECT_EQ(fs::file_size(volume("a")), 16_MiB) << "not formatted over";
}

TEST_F(VolumeTest, each_volume_is_locked_then_flushed_and_only_then_read) {
  auto wanted = options({"a", "b"});
  const Superblock made = open(wanted).superblock;
  std::vector<ino_t> flushed;
  wanted.flush_file = [&](int file) {
    struct stat stat{};
    EXPECT_EQ(::fstat(file, &stat), 0);
    flushed.push_back(stat.st_ino);
    const std::string path = volume(flushed.size() == 1 ? "a" : "b");
    const OwnedFd other(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_EQ(::flock(other.get(), LOCK_SH | LOCK_NB), -1) << "it is ours by now";
    // What was read before would miss this commit.
    if (flushed.size() == 1) commit(path, made, 1);
    return ::fdatasync(file);
  };
  const VolumeSet set = open(wanted);
  EXPECT_EQ(set.superblock.sequence, 1u);
  std::vector<ino_t> all;
  for (const char* name : {"a", "b"}) {
    struct stat stat{};
    ASSERT_EQ(::stat(volume(name).c_str(), &stat), 0);
    all.push_back(stat.st_ino);
  }
  EXPECT_EQ(flushed, all);
}

TEST_F(VolumeTest, a_volume_that_cannot_be_flushed_is_refused_and_opened_when_it_can) {
  auto wanted = options({"a", "b"});
  open(wanted);
  for (const int failing : {1, 2}) {
    int call_count = 0;
    wanted.flush_file = [&](int file) {
      if (++call_count != failing) return ::fdatasync(file);
      errno = EIO;
      return -1;
    };
    refused(wanted,
            StatusCode::device,
            {volume(failing == 1 ? "a" : "b"), "look at the device", std::strerror(EIO)});
    EXPECT_EQ(call_count, failing) << "a flush that failed is not tried again";
  }
  wanted.flush_file = {};
  open(wanted);
}

TEST_F(VolumeTest, a_file_that_is_no_volume_is_refused_and_not_touched) {
  std::ofstream(volume("a")) << "hello";
  refused(options({"a"}), StatusCode::integrity, {volume("a"), "no memd volume"});
  EXPECT_EQ(fs::file_size(volume("a")), 5u);
}

TEST_F(VolumeTest, what_a_crash_left_half_made_is_made_anew) {
  const std::string unfinished = dir("a") + "/memd.volume.unfinished";
  std::ofstream(unfinished) << "half";
  EXPECT_TRUE(open(options({"a"})).formatted);
  EXPECT_FALSE(fs::exists(unfinished));
}

TEST_F(VolumeTest, a_crash_between_the_renames_of_a_set_is_completed) {
  {
    const VolumeSet set = open(options({"a", "b"}));
  }
  fs::rename(volume("b"), dir("b") + "/memd.volume.unfinished");
  const VolumeSet set = open(options({"a", "b"}));
  EXPECT_EQ(set.volumes.size(), 2u);
  EXPECT_FALSE(set.formatted);
  EXPECT_TRUE(fs::exists(volume("b")));
}

TEST_F(VolumeTest, bad_directories_are_refused_with_what_to_do) {
  refused(options({}), StatusCode::invalid_argument, {"data directories"});
  refused(options({"missing"}), StatusCode::invalid_argument, {dir("missing"), "create it"});
  std::ofstream(dir("file")) << "x";
  refused(options({"file"}), StatusCode::invalid_argument, {dir("file"), "not a directory"});
  refused(options({"a", "a"}), StatusCode::invalid_argument, {"twice"});
  refused(options({"a"}, 15_MiB), StatusCode::invalid_argument, {"at least"});
  EXPECT_EQ(file_count("a"), 0u);
}

TEST_F(VolumeTest, a_directory_in_memory_is_refused_though_it_accepts_direct_io) {
  struct statfs filesystem{};
  if (::statfs("/dev/shm", &filesystem) != 0 || filesystem.f_type != TMPFS_MAGIC) {
    GTEST_SKIP() << "/dev/shm is no tmpfs here";
  }
  VolumeSetOptions wanted = options({"a"});
  wanted.directories = {"/dev/shm"};
  refused(wanted, StatusCode::invalid_argument, {"/dev/shm", "tmpfs"});
  EXPECT_FALSE(fs::exists("/dev/shm/memd.lock"));
}

TEST_F(VolumeTest, a_file_system_without_direct_io_is_refused_and_nothing_left_behind) {
  VolumeSetOptions wanted = options({"a"});
  wanted.open_file = [](const char* path, int flags) {
    // As ext4 and others do: the file is made before the flag is found impossible.
    if ((flags & O_CREAT) != 0) std::ofstream{path};
    errno = EINVAL;
    return -1;
  };
  refused(wanted, StatusCode::invalid_argument, {dir("a"), "O_DIRECT"});
  EXPECT_EQ(file_count("a"), 0u);
}

TEST_F(VolumeTest, too_little_space_is_refused_with_both_sizes_and_nothing_left_behind) {
  refused(options({"a", "b"}, 1_GiB << 20), StatusCode::capacity, {"2251799813685248", "free "});
  EXPECT_EQ(file_count("a"), 0u);
  EXPECT_EQ(file_count("b"), 0u);
}

TEST_F(VolumeTest, a_directory_that_is_not_writable_is_refused) {
  // Root ignores permission bits, but not the immutable flag.
  const int fd = ::open(dir("a").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int flags = 0;
  const bool immutable = ::geteuid() == 0 && ::ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 &&
                         (flags |= FS_IMMUTABLE_FL, ::ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0);
  if (::geteuid() == 0 && !immutable) {
    ::close(fd);
    GTEST_SKIP() << "root, and the file system has no immutable flag";
  }
  fs::permissions(dir("b"), fs::perms::owner_read | fs::perms::owner_exec);
  refused(options({immutable ? "a" : "b"}), StatusCode::device, {"not writable", "daemon's user"});
  flags &= ~FS_IMMUTABLE_FL;
  if (immutable) {
    EXPECT_EQ(::ioctl(fd, FS_IOC_SETFLAGS, &flags), 0);
  }
  ::close(fd);
  EXPECT_EQ(file_count("a"), 0u);
}

TEST_F(VolumeTest, a_lock_that_cannot_be_had_at_all_is_no_other_daemon) {
  {
    open(options({"a"}));
  }
  VolumeSetOptions unlockable = options({"a"});
  unlockable.open_file = [](const char* path, int) { return ::open(path, O_PATH | O_CLOEXEC); };
  refused(unlockable, StatusCode::device, {volume("a"), "lock", std::strerror(EBADF)});
}

TEST_F(VolumeTest, a_second_daemon_is_refused_naming_the_first_until_that_one_is_dead) {
  const VolumeSetOptions wanted = options({"a"});
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto set = VolumeSet::open(wanted);
    const char answer = set.is_ok() ? 'y' : 'n';
    (void)!::write(ready[1], &answer, 1);
    ::pause();
    ::_exit(0);
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  const std::string named = "process " + std::to_string(child);
  refused(wanted, StatusCode::unavailable, {dir("a"), named, "stop that daemon"});
  refused(wanted, StatusCode::unavailable, {named});
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  VolumeSetOptions patient = wanted;
  patient.lock_wait_ms = 2000;
  EXPECT_FALSE(open(patient).formatted);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(VolumeTest, volumes_of_different_sets_or_of_a_part_of_one_are_refused) {
  {
    const VolumeSet set = open(options({"a", "b"}));
  }
  {
    const VolumeSet set = open(options({"c"}));
  }
  refused(options({"a"}), StatusCode::invalid_argument, {volume("a"), "the set has 2"});
  refused(options({"a", "c"}), StatusCode::invalid_argument, {"different sets", volume("c")});
  fs::rename(volume("b"), dir("b") + "/kept");
  refused(options({"a", "b"}), StatusCode::invalid_argument, {volume("b"), "missing"});
  fs::copy_file(volume("a"), volume("b"));
  refused(options({"a", "b"}), StatusCode::invalid_argument, {"copy of another"});
}

TEST_F(VolumeTest, another_size_is_refused_naming_the_setting_that_fits) {
  {
    const VolumeSet set = open(options({"a"}));
  }
  refused(options({"a"}, 32_MiB), StatusCode::invalid_argument, {"set nvme to 16777216"});
  fs::resize_file(volume("a"), 18_MiB);
  refused(options({"a"}, 18_MiB), StatusCode::integrity, {"cut or grown"});
}

TEST_F(VolumeTest, a_newer_format_is_refused_with_both_versions_named) {
  Superblock superblock;
  {
    superblock = open(options({"a"})).superblock;
  }
  auto block = encode_superblock(superblock, 1_MiB);
  block[8] = std::byte{2};
  const uint64_t checksum = record_checksum(std::span(block).first(kSuperblockBytes - 8));
  std::memcpy(block.data() + kSuperblockBytes - 8, &checksum, 8);
  overwrite(volume("a"), 1_MiB, block);
  refused(options({"a"}), StatusCode::not_yet, {volume("a"), concat("2.", kFormatMinor), "1.x"});
}

TEST(Superblock, a_pair_that_cannot_be_read_is_read_once_more_and_never_given_up_in_silence) {
  constexpr uint64_t kBytes = 16_MiB;
  std::map<uint64_t, std::array<std::byte, kSuperblockBytes>> copies;
  for (const uint64_t sequence : {6, 7}) {
    Superblock superblock;
    superblock.sequence = sequence;
    superblock.volume_count = 1;
    superblock.volume_bytes = kBytes;
    for (const uint64_t offset_bytes : superblock_pair_offsets(sequence, kBytes)) {
      copies[offset_bytes] = encode_superblock(superblock, offset_bytes);
    }
  }
  for (const uint64_t sequence : {6, 7}) {
    const auto pair = superblock_pair_offsets(sequence, kBytes);
    // How often reads of each copy of the pair fail, and whether the other one is torn.
    struct Case {
      std::array<int, 2> failures;
      bool torn;
      bool is_read;
    };
    for (const Case& each : {Case{.failures = {1, 1}, .torn = false, .is_read = true},
                             Case{.failures = {99, 0}, .torn = false, .is_read = true},
                             Case{.failures = {0, 99}, .torn = false, .is_read = true},
                             Case{.failures = {99, 1}, .torn = false, .is_read = true},
                             Case{.failures = {1, 0}, .torn = true, .is_read = true},
                             Case{.failures = {99, 99}, .torn = false, .is_read = false},
                             Case{.failures = {99, 0}, .torn = true, .is_read = false}}) {
      std::map<uint64_t, int> failures{{pair[0], each.failures[0]}, {pair[1], each.failures[1]}};
      const auto found = newest_superblock(
          kBytes, "disk", [&](std::span<std::byte> block, uint64_t offset_bytes) -> Status {
            if (failures[offset_bytes]-- > 0) return device_error(EIO, "read disk");
            std::copy_n(copies[offset_bytes].begin(), block.size(), block.begin());
            if (each.torn && offset_bytes == pair[1]) block[100] ^= std::byte{1};
            return Status::ok();
          });
      if (each.is_read) {
        ASSERT_TRUE(found.is_ok()) << found.status().message();
        EXPECT_EQ(found.value().sequence, 7u);
        continue;
      }
      EXPECT_EQ(found.status().code(), StatusCode::device) << "pair of " << sequence;
      EXPECT_EQ(found.status().error_number(), EIO);
      EXPECT_NE(found.status().message().find("look at the device, then start again"),
                std::string::npos)
          << found.status().message();
    }
  }
}

TEST(Superblock, comes_back_as_it_was_and_only_from_its_own_place) {
  Superblock superblock;
  superblock.sequence = 9;
  superblock.set_uuid.fill(7);
  superblock.volume_count = 2;
  superblock.volume_bytes = 64_MiB;
  superblock.root_bytes = 5000;
  superblock.root = {
      .address = {.device = 1, .offset_bytes = 2_MiB}, .length_bytes = 8192, .checksum = 77};
  const auto block = encode_superblock(superblock, 1_MiB);
  const auto decoded = decode_superblock(block, 1_MiB);
  ASSERT_TRUE(decoded.is_ok()) << decoded.status().message();
  EXPECT_EQ(encode_superblock(decoded.value(), 1_MiB), block);
  EXPECT_EQ(decoded.value().root.checksum, 77u);
  const auto field = [&block](size_t offset_bytes) {
    uint64_t value = 0;
    std::memcpy(&value, block.data() + offset_bytes, sizeof(value));
    return value;
  };
  // Where format 1.0 has them, for ever.
  EXPECT_EQ(std::memcmp(block.data(), "memd-vol\1\0\3\0\0\0\0\0", 16), 0);
  EXPECT_EQ(field(16), kSuperblockBytes);
  EXPECT_EQ(field(48), 1_MiB);
  EXPECT_EQ(field(56), 9u);
  EXPECT_EQ(field(64), 0x0707070707070707u);
  EXPECT_EQ(field(80), uint64_t{2} << 16);
  EXPECT_EQ(field(88), 64_MiB);
  EXPECT_EQ(field(96), 5000u);
  EXPECT_EQ(field(104), 2_MiB);
  EXPECT_EQ(field(112), 77u);
  EXPECT_EQ(field(120), (uint64_t{1} << 32) + 8192);
  EXPECT_EQ(decode_superblock(block, 63_MiB).status().code(), StatusCode::integrity);
  for (size_t i = 0; i < block.size(); ++i) {
    auto flipped = block;
    flipped[i] ^= std::byte{1};
    EXPECT_EQ(decode_superblock(flipped, 1_MiB).status().code(), StatusCode::integrity) << i;
  }
  EXPECT_EQ(superblock_pair_offsets(4, 64_MiB), (std::array<uint64_t, 2>{0, 62_MiB}));
  EXPECT_EQ(superblock_pair_offsets(5, 64_MiB), (std::array<uint64_t, 2>{1_MiB, 63_MiB}));
}

}  // namespace
}  // namespace memd
