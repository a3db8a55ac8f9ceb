#include "store/verify/check.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "base/checksum.h"
#include "base/owned_fd.h"
#include "base/units.h"
#include "base/workers.h"
#include "few_threads.h"
#include "io/io_queue.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"

namespace {

constexpr off_t kOffsetOfDamage = 4 << 20;
/// So many reads there see a bit flipped that the disk has as it was.
std::atomic<int> damaged_read_count{0};

}  // namespace

extern "C" ssize_t pread(int fd, void* into, size_t bytes, off_t offset) {
  const auto got = static_cast<ssize_t>(::syscall(SYS_pread64, fd, into, bytes, offset));
  if (got > 0 && offset == kOffsetOfDamage && damaged_read_count > 0) {
    --damaged_read_count;
    *static_cast<char*>(into) ^= 1;
  }
  return got;
}

namespace memd {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kOffset = 4_MiB;
static_assert(kOffset == kOffsetOfDamage);
constexpr uint32_t kBlobBytes = 8192;

/// A set of two volumes with one job, written by hand: a blob on each volume.
class CheckTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* configured = std::getenv("MEMD_TEST_DATA");
    std::string path = fs::absolute(configured != nullptr ? configured : ".");
    path += "/check-test-XXXXXX";
    ASSERT_NE(::mkdtemp(path.data()), nullptr) << path;
    root_ = path;
    for (const char* name : {"a", "b"}) fs::create_directory(root_ / name);
    VolumeSetOptions options;
    options.directories = directories();
    options.bytes = 32_MiB;
    auto set = VolumeSet::open(options);
    ASSERT_TRUE(set.is_ok()) << set.status().message();
    superblock_ = set.value().superblock;
    set = error(StatusCode::unavailable, "closed");
    JobRecord job = job_record();
    write_job(job);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::vector<std::string> directories() const { return {root_ / "a", root_ / "b"}; }
  std::string path(uint16_t device) const {
    return root_ / (device == 0 ? "a" : "b") / "memd.volume";
  }

  void write(uint16_t device, uint64_t offset_bytes, std::span<const std::byte> bytes) {
    std::fstream file(path(device), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset_bytes));
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(file.good());
  }
  void flip(uint16_t device, uint64_t offset_bytes) {
    std::fstream file(path(device), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset_bytes));
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset_bytes));
    file.put(flipped);
    ASSERT_TRUE(file.good());
  }
  std::string bytes_of(uint16_t device) const {
    std::string bytes(fs::file_size(path(device)), '\0');
    std::ifstream file(path(device), std::ios::binary);
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.good());
    return bytes;
  }

  ExtentRecord write_extent(uint16_t device, uint64_t offset_bytes, std::vector<std::byte> bytes) {
    bytes.resize(align_up(bytes.size(), kBlockBytes));
    ExtentRecord extent{.address = {.device = device, .offset_bytes = offset_bytes},
                        .length_bytes = static_cast<uint32_t>(bytes.size())};
    extent.checksum = extent_checksum(bytes, extent.address);
    write(device, offset_bytes, bytes);
    return extent;
  }
  ShardRecord blob(const std::string& name, const ExtentRecord& extent) {
    return {.name = name,
            .kind = ShardKind::blob,
            .dtype = DType::uint8,
            .tier = Tier::nvme,
            .shape = {extent.length_bytes},
            .generation = 1,
            .extents = {extent}};
  }
  JobRecord job_record() {
    JobRecord job{.job_id = 1, .uid = 0, .name = "demo", .step = 7};
    for (const uint16_t device : {uint16_t{0}, uint16_t{1}}) {
      const std::vector<std::byte> bytes(kBlobBytes, std::byte(device + 3));
      job.shards.push_back(blob(device == 0 ? "one" : "two", write_extent(device, kOffset, bytes)));
    }
    return job;
  }
  void write_superblock(
      std::array<std::byte, kSuperblockBytes> (*change)(std::array<std::byte, kSuperblockBytes>)) {
    for (const uint64_t offset_bytes : superblock_pair_offsets(superblock_.sequence, 16_MiB)) {
      write(0, offset_bytes, change(encode_superblock(superblock_, offset_bytes)));
    }
  }
  static std::array<std::byte, kSuperblockBytes> as_it_is(
      std::array<std::byte, kSuperblockBytes> block) {
    return block;
  }
  template <size_t offset, uint8_t value>
  static std::array<std::byte, kSuperblockBytes> with(
      std::array<std::byte, kSuperblockBytes> block) {
    block[offset] = std::byte{value};
    const uint64_t checksum = record_checksum(std::span(block).first(kSuperblockBytes - 8));
    std::memcpy(block.data() + kSuperblockBytes - 8, &checksum, 8);
    return block;
  }
  void write_job(const JobRecord& job) { write_catalogue(encode(job)); }
  void write_catalogue(const std::vector<std::byte>& bytes) {
    write_root({.job_id_next = 2, .jobs = {root_entry(1, 3_MiB, bytes)}});
  }
  RootEntry root_entry(uint64_t job_id,
                       uint64_t offset_bytes,
                       const std::vector<std::byte>& bytes) {
    return {.job_id = job_id,
            .catalogue_bytes = bytes.size(),
            .catalogue = {write_extent(0, offset_bytes, bytes)}};
  }
  void write_root(const RootRecord& root) {
    const std::vector<std::byte> encoded = encode(root);
    ++superblock_.sequence;
    superblock_.root_bytes = encoded.size();
    superblock_.root = write_extent(0, 2_MiB, encoded);
    write_superblock(as_it_is);
  }

  CheckReport check(const std::string& job = "") {
    const std::string before = bytes_of(0) + bytes_of(1);
    auto report = check_volumes(
        {.directories = directories(), .job = job, .progress = {}, .lock_wait_ms = 0});
    EXPECT_TRUE(report.is_ok()) << report.status().message();
    EXPECT_TRUE(before == bytes_of(0) + bytes_of(1)) << "a check writes nothing";
    return report.is_ok() ? std::move(report).value() : CheckReport{};
  }
  void refused(StatusCode code, const std::string& word, const std::string& job = "") {
    const std::string before = bytes_of(0) + bytes_of(1);
    const auto report = check_volumes(
        {.directories = directories(), .job = job, .progress = {}, .lock_wait_ms = 0});
    EXPECT_EQ(report.status().code(), code);
    EXPECT_NE(report.status().message().find(word), std::string::npos) << report.status().message();
    EXPECT_TRUE(before == bytes_of(0) + bytes_of(1));
  }
  /// A daemon that would open them.
  Status opened() {
    VolumeSetOptions options;
    options.directories = directories();
    options.bytes = 32_MiB;
    return VolumeSet::open(options).status();
  }
  /// What it says of root and catalogues.
  Status loaded() {
    VolumeSetOptions options;
    options.directories = directories();
    options.bytes = 32_MiB;
    auto set = VolumeSet::open(options);
    if (!set.is_ok()) return set.status();
    auto io = make_io_queue({.engine = IoEngine::threads, .depth = 4});
    const SteadyClock clock;
    const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    Workers workers(1, wake.get());
    ExtentStore extents(*io.value().queue, workers, std::move(set).value(), clock);
    Commits commits(extents, workers, clock);
    return commits
        .load([&] {
          io.value().queue->reap();
          workers.reap();
          std::this_thread::yield();
          return Status::ok();
        })
        .status();
  }

  fs::path root_;
  Superblock superblock_;
};

TEST_F(CheckTest, a_mismatch_is_read_once_more_and_then_it_is_lost) {
  damaged_read_count = 1;
  EXPECT_TRUE(check().findings.empty());
  EXPECT_EQ(damaged_read_count, 0) << "nothing was read there";
  damaged_read_count = 4;  // both reads of both blobs
  const CheckReport report = check();
  EXPECT_EQ(damaged_read_count, 0);
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_NE(report.findings[0].reason.find("read twice"), std::string::npos);
}

TEST_F(CheckTest, what_is_whole_has_no_findings) {
  const CheckReport report = check();
  EXPECT_TRUE(report.findings.empty());
  EXPECT_FALSE(report.anything_lost());
  ASSERT_EQ(report.jobs.size(), 1u);
  EXPECT_EQ(report.jobs[0].step, 7u);
  EXPECT_EQ(report.jobs[0].shard_count, 2u);
  EXPECT_EQ(report.jobs[0].bytes, 2 * uint64_t{kBlobBytes});
  EXPECT_EQ(report.bytes, 2 * uint64_t{kBlobBytes} + 2 * kBlockBytes);
}

TEST_F(CheckTest, a_flipped_bit_is_found_with_shard_file_and_offset) {
  flip(1, kOffset + 5000);
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_TRUE(report.findings[0].is_lost);
  EXPECT_EQ(report.findings[0].path, path(1));
  EXPECT_EQ(report.findings[0].offset_bytes, kOffset);
  EXPECT_EQ(report.findings[0].job, "demo");
  EXPECT_EQ(report.findings[0].shards, std::vector<std::string>{"two"});
  EXPECT_EQ(report.jobs.at(0).lost_shards, std::vector<std::string>{"two"});
}

TEST_F(CheckTest, what_a_job_and_its_snapshot_name_is_read_once_and_lost_for_both) {
  RootRecord root{.job_id_next = 2, .jobs = {root_entry(1, 3_MiB, encode(job_record()))}};
  root.snapshots.edit() = {{.job = root.jobs[0], .name = "first", .step = 7}};
  write_root(root);
  const CheckReport whole = check();
  EXPECT_TRUE(whole.findings.empty());
  EXPECT_EQ(whole.bytes, 2 * uint64_t{kBlobBytes} + 2 * kBlockBytes);
  EXPECT_EQ(whole.jobs.at(0).snapshots.at(0).bytes, 2 * uint64_t{kBlobBytes});
  flip(1, kOffset + 5000);
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_EQ(report.findings[0].snapshot, "");
  EXPECT_EQ(report.findings[1].snapshot, "first");
  EXPECT_EQ(report.jobs.at(0).lost_shards, std::vector<std::string>{"two"});
  EXPECT_EQ(report.jobs[0].snapshots.at(0).lost_shards, std::vector<std::string>{"two"});
  EXPECT_FALSE(report.jobs[0].snapshots[0].is_lost);
  flip(0, 3_MiB + 60);  // the catalogue of both
  const CheckReport lost = check();
  ASSERT_EQ(lost.findings.size(), 2u);
  EXPECT_EQ(lost.findings[1].snapshot, "first");
}

TEST_F(CheckTest, a_damaged_catalogue_or_list_of_jobs_is_lost) {
  flip(0, 3_MiB + 60);
  const CheckReport catalogue = check();
  ASSERT_EQ(catalogue.findings.size(), 1u);
  EXPECT_TRUE(catalogue.anything_lost());
  EXPECT_EQ(catalogue.findings[0].part, "the catalogue of job 1");
  flip(0, 2_MiB + 60);
  const CheckReport root = check();
  ASSERT_EQ(root.findings.size(), 1u);
  EXPECT_EQ(root.findings[0].part, "the list of jobs");
  EXPECT_TRUE(root.anything_lost());
}

TEST_F(CheckTest, a_catalogue_of_another_job_is_refused_by_check_and_daemon) {
  const auto bare = [](uint64_t job_id, const std::string& name) {
    return encode(JobRecord{.job_id = job_id, .uid = 0, .name = name, .step = 1});
  };
  const std::string wrong_id = "it is that of job 1, and named as job 2";
  for (const auto& [bytes, reason] :
       {std::pair(bare(1, "other"), wrong_id),
        std::pair(bare(1, "demo"), wrong_id),
        std::pair(bare(2, "demo"), std::string("two jobs are named demo")),
        std::pair(bare(2, "other"), std::string())}) {
    write_root({.job_id_next = 3,
                .jobs = {root_entry(1, 3_MiB, encode(job_record())), root_entry(2, 5_MiB, bytes)}});
    const CheckReport report = check();
    const Status status = loaded();
    if (reason.empty()) {
      EXPECT_TRUE(report.findings.empty());
      EXPECT_TRUE(status.is_ok()) << status.message();
      continue;
    }
    ASSERT_EQ(report.findings.size(), 1u) << reason;
    EXPECT_TRUE(report.anything_lost());
    EXPECT_EQ(report.findings[0].part, "the catalogue of job 2");
    EXPECT_NE(report.findings[0].reason.find(reason), std::string::npos)
        << report.findings[0].reason;
    EXPECT_EQ(status.code(), StatusCode::integrity);
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
  }
}

TEST_F(CheckTest, a_list_of_jobs_that_names_the_same_bytes_often_is_refused_and_not_followed) {
  const ExtentRecord extent = write_extent(0, 5_MiB, std::vector<std::byte>(kBlobExtentBytes));
  RootEntry entry{.job_id = 2, .catalogue_bytes = 100_MiB, .catalogue = {}};
  entry.catalogue.assign(100, extent);
  write_root({.job_id_next = 3, .jobs = {root_entry(1, 3_MiB, encode(job_record())), entry}});
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].part, "the catalogue of job 2");
  EXPECT_NE(report.findings[0].reason.find("two owners"), std::string::npos);
  EXPECT_TRUE(report.anything_lost());
  EXPECT_EQ(report.bytes, kBlockBytes) << "the list alone";
  const auto listed = list_volumes(directories());
  ASSERT_TRUE(listed.is_ok());
  EXPECT_NE(listed.value().jobs_unknown.find("two owners"), std::string::npos);
  EXPECT_NE(loaded().message().find("two owners"), std::string::npos) << loaded().message();
}

TEST_F(CheckTest, what_a_daemon_cannot_start_from_is_said_with_what_to_do) {
  for (const uint64_t offset_bytes : {3_MiB, 2_MiB}) {
    flip(0, offset_bytes + 60);
    const Status status = loaded();
    EXPECT_EQ(status.code(), StatusCode::integrity);
    for (const std::string& part :
         {std::string(offset_bytes == 2_MiB ? "the volume's root" : "the catalogue of job 1"),
          std::string("restore the volumes, or move them away to start empty"),
          concat(path(0), " at ", offset_bytes)}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    }
    EXPECT_EQ(status.message().find("connect("), std::string::npos) << "nobody can";
  }
}

TEST_F(CheckTest, one_damaged_copy_of_a_superblock_is_a_warning) {
  for (const uint64_t offset_bytes : superblock_pair_offsets(1, 16_MiB)) {
    flip(0, offset_bytes + 100);
    const CheckReport report = check();
    ASSERT_EQ(report.findings.size(), 1u);
    EXPECT_FALSE(report.findings[0].is_lost);
    EXPECT_EQ(report.findings[0].offset_bytes, offset_bytes);
    EXPECT_FALSE(report.anything_lost());
    flip(0, offset_bytes + 100);
  }
}

TEST_F(CheckTest, a_pair_without_a_valid_copy_says_that_a_commit_may_be_gone) {
  for (const uint64_t offset_bytes : superblock_pair_offsets(1, 16_MiB)) {
    flip(0, offset_bytes + 100);
  }
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_NE(report.findings[1].reason.find("the last commit may be gone"), std::string::npos)
      << report.findings[1].reason;
}

TEST_F(CheckTest, what_a_drive_cannot_flush_is_a_finding_and_no_clean_bill) {
  int call_count = 0;
  CheckOptions options{
      .directories = directories(), .job = "", .progress = {}, .lock_wait_ms = 0, .flush_file = {}};
  options.flush_file = [&call_count](int file) {
    if (++call_count == 1) return ::fdatasync(file);
    errno = EIO;
    return -1;
  };
  const auto report = check_volumes(options);
  ASSERT_TRUE(report.is_ok()) << report.status().message();
  EXPECT_EQ(call_count, 2);
  EXPECT_TRUE(report.value().anything_lost());
  ASSERT_EQ(report.value().findings.size(), 1u);
  EXPECT_NE(report.value().findings[0].path.find("/b/"), std::string::npos);
  EXPECT_NE(report.value().findings[0].reason.find("can't be flushed"), std::string::npos);
  EXPECT_EQ(report.value().bytes, check().bytes) << "the rest is compared all the same";
}

TEST_F(CheckTest, a_check_goes_on_with_the_threads_that_it_gets) {
  if (!kThreadsCanBeFew) GTEST_SKIP() << "under a sanitizer";
  {
    const FewThreads few(1);
    EXPECT_TRUE(check().findings.empty());
  }
  const FewThreads none(0);
  refused(StatusCode::capacity, "raise the limit of processes");
}

TEST_F(CheckTest, extents_that_overlap_are_found) {
  JobRecord job = job_record();
  ShardRecord third = job.shards[0];
  third.name = "third";
  job.shards.push_back(third);
  write_job(job);
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_NE(report.findings[0].reason.find("two owners"), std::string::npos);
  EXPECT_TRUE(report.findings[0].is_lost);
}

TEST_F(CheckTest, extents_outside_of_the_volume_are_found_and_not_read) {
  JobRecord job = job_record();
  job.shards[0].extents[0].address.offset_bytes = 15_MiB;
  job.shards[1].extents[0].address.device = 9;
  write_job(job);
  const CheckReport report = check();
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_NE(report.findings[0].reason.find("outside of the volume's space"), std::string::npos)
      << report.findings[0].reason;
  EXPECT_NE(report.findings[1].reason.find("which the set does not have"), std::string::npos)
      << report.findings[1].reason;
  EXPECT_EQ(report.jobs.at(0).lost_shards, (std::vector<std::string>{"one", "two"}));
}

TEST_F(CheckTest, a_volume_that_is_held_is_refused_with_the_name_of_its_holder) {
  const int fd = ::open(path(1).c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  std::ofstream(root_ / "b" / "memd.lock") << ::getpid() << "\n";
  refused(StatusCode::unavailable, "process " + std::to_string(::getpid()));
  const auto listed = list_volumes(directories());
  ASSERT_TRUE(listed.is_ok()) << listed.status().message();
  EXPECT_EQ(listed.value().volumes[1].holder, "process " + std::to_string(::getpid()));
  ::close(fd);
}

TEST_F(CheckTest, wrong_directories_are_refused_and_named) {
  refused(StatusCode::not_found, "there is no job nobody", "nobody");
  const auto code_of = [](const std::vector<std::string>& of) {
    return check_volumes({.directories = of, .job = "", .progress = {}, .lock_wait_ms = 0})
        .status()
        .code();
  };
  EXPECT_EQ(code_of({}), StatusCode::invalid_argument);
  EXPECT_EQ(code_of({root_ / "none"}), StatusCode::not_found);
  EXPECT_EQ(code_of({root_}), StatusCode::not_found);
  EXPECT_EQ(code_of({path(0)}), StatusCode::invalid_argument);
  EXPECT_EQ(code_of({root_ / "a"}), StatusCode::invalid_argument);
  EXPECT_EQ(code_of({root_ / "a", root_ / "a"}), StatusCode::invalid_argument);
}

TEST_F(CheckTest, a_check_that_is_broken_off_ends) {
  const auto report =
      check_volumes({.directories = directories(), .job = "", .progress = [](uint64_t, uint64_t) {
                       return false;
                     }});
  EXPECT_EQ(report.status().code(), StatusCode::unavailable);
}

// The feature words of the header, each way.

TEST_F(CheckTest, an_unknown_incompatible_feature_is_refused_by_all_and_named) {
  write_superblock(with<24, 128>);
  refused(StatusCode::not_yet, "unknown incompatible feature, bit 7");
  EXPECT_EQ(list_volumes(directories()).status().code(), StatusCode::not_yet);
  const std::string before = bytes_of(0) + bytes_of(1);
  EXPECT_EQ(opened().code(), StatusCode::not_yet);
  EXPECT_NE(opened().message().find("install that one"), std::string::npos);
  EXPECT_TRUE(before == bytes_of(0) + bytes_of(1)) << "a refusal touches nothing";
}

TEST_F(CheckTest, an_unknown_read_only_compatible_feature_is_read_and_not_opened_by_a_daemon) {
  write_superblock(with<32, 8>);
  EXPECT_TRUE(check().findings.empty());
  const auto listed = list_volumes(directories());
  ASSERT_TRUE(listed.is_ok());
  EXPECT_EQ(listed.value().volumes[0].superblock.format.read_only_compatible, 8u);
  const std::string before = bytes_of(0) + bytes_of(1);
  EXPECT_EQ(opened().code(), StatusCode::not_yet);
  EXPECT_NE(opened().message().find("read-only compatible feature, bit 3"), std::string::npos);
  EXPECT_TRUE(before == bytes_of(0) + bytes_of(1));
}

TEST_F(CheckTest, an_unknown_compatible_feature_and_a_newer_minor_version_are_opened) {
  write_superblock(with<40, 1>);
  EXPECT_TRUE(check().findings.empty());
  EXPECT_TRUE(opened().is_ok()) << opened().message();
  write_superblock(with<10, 9>);
  EXPECT_TRUE(check().findings.empty());
  EXPECT_TRUE(opened().is_ok()) << opened().message();
}

TEST_F(CheckTest, a_newer_major_version_is_refused_and_left_as_it_is) {
  write_superblock(with<8, 2>);
  refused(StatusCode::not_yet, "format 2.");
  const std::string before = bytes_of(0) + bytes_of(1);
  EXPECT_EQ(opened().code(), StatusCode::not_yet);
  EXPECT_TRUE(before == bytes_of(0) + bytes_of(1));
}

TEST_F(CheckTest, features_of_a_catalogue_count_like_those_of_a_superblock) {
  const auto resealed = [](std::vector<std::byte> bytes, size_t offset) {
    bytes[offset] = std::byte{128};
    const uint64_t checksum = record_checksum(std::span(bytes).first(bytes.size() - 8));
    std::memcpy(bytes.data() + bytes.size() - 8, &checksum, 8);
    return bytes;
  };
  const std::vector<std::byte> plain = encode(job_record());
  write_catalogue(resealed(plain, 32));
  EXPECT_TRUE(check().findings.empty());
  EXPECT_EQ(decode_job(resealed(plain, 32)).status().code(), StatusCode::not_yet);
  write_catalogue(resealed(plain, 24));
  refused(StatusCode::not_yet, "unknown incompatible feature, bit 7");
}

TEST_F(CheckTest, volumes_are_removed_only_by_the_uuid_of_their_set) {
  std::array<uint8_t, 16> other = superblock_.set_uuid;
  other[0] ^= 1;
  EXPECT_EQ(remove_volumes(directories(), other).code(), StatusCode::invalid_argument);
  EXPECT_TRUE(fs::exists(path(0)) && fs::exists(path(1)));
  {
    const auto held = inspect_volume(root_ / "b", 0);
    EXPECT_EQ(remove_volumes(directories(), superblock_.set_uuid, 0).code(),
              StatusCode::unavailable);
    EXPECT_TRUE(fs::exists(path(0)) && fs::exists(path(1)));
  }
  EXPECT_TRUE(remove_volumes(directories(), superblock_.set_uuid).is_ok());
  EXPECT_FALSE(fs::exists(path(0)) || fs::exists(path(1)));
}

}  // namespace
}  // namespace memd
