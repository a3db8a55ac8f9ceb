#include "store/format/volume.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <thread>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/encoding.h"

namespace memd {

namespace {

constexpr std::string_view kVolumeName = "memd.volume";
constexpr std::string_view kUnfinishedName = "memd.volume.unfinished";
constexpr std::string_view kLockName = "memd.lock";

constexpr std::string_view kMagic = "memd-vol";
constexpr uint64_t kChecksumOffset = kSuperblockBytes - 8;

constexpr uint64_t kVolumeBytesMin = 16_MiB;
constexpr uint64_t kSuperblockSpaceBytes = 2_MiB;  // at each end
constexpr uint64_t kCopyStrideBytes = 1_MiB;

// One write at a time, which the kernel splits: 1 GiB took 0.4 to 0.7 s on a virtual disk whether
// it was 1, 4, 8 or 16 MiB, with no order among them.
constexpr uint64_t kFormatWriteBytes = 8_MiB;
constexpr auto kLockRetry = std::chrono::milliseconds(50);

using AlignedBytes = std::unique_ptr<std::byte, decltype(&std::free)>;

AlignedBytes aligned_bytes(uint64_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes));
  MEMD_CHECK(memory != nullptr);
  zero_bytes(memory, bytes);
  return {memory, &std::free};
}

Status write_all(int fd,
                 std::span<const std::byte> bytes,
                 uint64_t offset_bytes,
                 const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written =
        ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      return device_error(written < 0 ? errno : EIO, concat("write ", path, " at ", offset_bytes));
    }
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset_bytes += static_cast<uint64_t>(written);
  }
  return Status::ok();
}

Status read_all(int fd,
                std::span<std::byte> bytes,
                uint64_t offset_bytes,
                const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t got = ::pread(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      return device_error(got < 0 ? errno : EIO, concat("read ", path, " at ", offset_bytes));
    }
    bytes = bytes.subspan(static_cast<size_t>(got));
    offset_bytes += static_cast<uint64_t>(got);
  }
  return Status::ok();
}

/// Makes durable what is in the drive's cache. It covers writes of a process that is gone as well.
Status flush_cache(int fd,
                   const std::function<int(int file)>& flush_file,
                   const std::string& path) {
  const int failed = flush_file ? flush_file(fd) : ::fdatasync(fd);
  if (failed == 0) return Status::ok();
  return device_error(errno, concat("flush ", path));
}

Status sync_directory(const std::string& directory) {
  const OwnedFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open() || ::fsync(fd.get()) != 0) return device_error(errno, "sync " + directory);
  return Status::ok();
}

/// One configured directory while the set is opened.
struct Place {
  std::string directory;
  struct stat stat{};
  OwnedFd lock;  // until the set is open; from then on the volume's own lock holds
  OwnedFd file;
  bool has_volume = false;
  Superblock superblock;
  uint64_t file_bytes = 0;

  std::string path(std::string_view name) const { return concat(directory, "/", name); }
};

Status check_directory(Place& place) {
  const std::string who = "data directory " + place.directory;
  if (::stat(place.directory.c_str(), &place.stat) != 0) {
    if (errno != ENOENT) return device_error(errno, who);
    return error(StatusCode::invalid_argument, who, " does not exist; create it");
  }
  if (!S_ISDIR(place.stat.st_mode)) {
    return error(StatusCode::invalid_argument, who, " is not a directory; name one");
  }
  struct statfs filesystem{};
  if (::statfs(place.directory.c_str(), &filesystem) != 0) return device_error(errno, who);
  const auto type = static_cast<uint32_t>(filesystem.f_type);
  if (type == TMPFS_MAGIC || type == RAMFS_MAGIC) {
    return error(StatusCode::invalid_argument,
                 who,
                 " lies in memory (",
                 type == TMPFS_MAGIC ? "tmpfs" : "ramfs",
                 "), what memd wrote there would need the memory it saves; name one on a disk");
  }
  if (::access(place.directory.c_str(), W_OK | X_OK) != 0) {
    return device_error(errno, who + " is not writable; give it to the daemon's user");
  }
  struct stat volume{};
  place.has_volume = ::stat(place.path(kVolumeName).c_str(), &volume) == 0;
  if (!place.has_volume && errno != ENOENT) return device_error(errno, place.path(kVolumeName));
  return Status::ok();
}

/// A file that a crash left half made is removed before formatting, so its space counts as free.
uint64_t unfinished_bytes(const Place& place) {
  struct stat unfinished{};
  if (::stat(place.path(kUnfinishedName).c_str(), &unfinished) != 0) return 0;
  return static_cast<uint64_t>(unfinished.st_blocks) * 512;
}

Status check_space(const std::vector<Place>& places, uint64_t volume_bytes) {
  std::map<dev_t, uint64_t> wanted_bytes;  // directories may share a file system
  for (const Place& place : places) wanted_bytes[place.stat.st_dev] += volume_bytes;
  std::map<dev_t, uint64_t> reclaimed_bytes;
  for (const Place& place : places) reclaimed_bytes[place.stat.st_dev] += unfinished_bytes(place);
  for (const Place& place : places) {
    struct statvfs filesystem{};
    if (::statvfs(place.directory.c_str(), &filesystem) != 0) {
      return device_error(errno, "data directory " + place.directory);
    }
    const uint64_t free_bytes =
        filesystem.f_bavail * filesystem.f_frsize + reclaimed_bytes[place.stat.st_dev];
    if (wanted_bytes[place.stat.st_dev] > free_bytes) {
      return error(StatusCode::capacity,
                   "data directory ",
                   place.directory,
                   " has too little free space; free some, or configure less nvme: wanted ",
                   wanted_bytes[place.stat.st_dev],
                   " bytes, free ",
                   free_bytes);
    }
  }
  return Status::ok();
}

std::string holder(int lock_fd) {
  std::array<char, 20> text{};
  const ssize_t got = ::pread(lock_fd, text.data(), text.size(), 0);
  int64_t pid = 0;
  if (got <= 0 || std::from_chars(text.data(), text.data() + got, pid).ec != std::errc()) {
    return "another process";
  }
  // `memd check` holds a volume and does not write who it is.
  if (::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH) {
    return "another process, such as `memd check`";
  }
  return concat("process ", pid);
}

/// Locks `fd` until `deadline`; the kernel keeps the files of a daemon that just died a moment
/// longer. 0, or the reason: EWOULDBLOCK where another process has it.
int lock_until(int fd, std::chrono::steady_clock::time_point deadline, int operation = LOCK_EX) {
  while (::flock(fd, operation | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= deadline) return errno;
    std::this_thread::sleep_for(kLockRetry);
  }
  return 0;
}

Status cannot_lock(const std::string& path, int error_number) {
  return device_error(error_number,
                      concat("lock ", path, "; name a folder on a file system that can lock"));
}

Status not_locked(const Place& place, const std::string& path, int error_number) {
  if (error_number != EWOULDBLOCK) return cannot_lock(path, error_number);
  return error(StatusCode::unavailable,
               "data directory ",
               place.directory,
               " is in use by ",
               holder(place.lock.get()),
               "; stop that daemon, or give this one a directory of its own");
}

Status lock_directory(Place& place, std::chrono::steady_clock::time_point deadline) {
  const std::string path = place.path(kLockName);
  while (true) {
    place.lock = OwnedFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!place.lock.is_open()) {
      return device_error(errno,
                          "data directory " + place.directory +
                              " is not writable; give it to the daemon's user: " + path);
    }
    if (const int failed = lock_until(place.lock.get(), deadline); failed != 0) {
      return not_locked(place, path, failed);
    }
    // A process that could not format removed it together with what it had begun.
    struct stat held{};
    struct stat named{};
    if (::fstat(place.lock.get(), &held) == 0 && ::stat(path.c_str(), &named) == 0 &&
        held.st_ino == named.st_ino) {
      return Status::ok();
    }
  }
}

Status write_pid(const Place& place) {
  const std::string text = concat(::getpid(), "\n");
  if (::ftruncate(place.lock.get(), 0) != 0 ||
      ::pwrite(place.lock.get(), text.data(), text.size(), 0) !=
          static_cast<ssize_t>(text.size())) {
    return device_error(errno, place.path(kLockName));
  }
  return Status::ok();
}

Result<OwnedFd> open_direct(const Place& place,
                            const std::string& path,
                            int flags,
                            const VolumeSetOptions& options) {
  flags |= O_RDWR | O_DIRECT | O_CLOEXEC;
  OwnedFd fd(options.open_file ? options.open_file(path.c_str(), flags)
                               : ::open(path.c_str(), flags, 0600));
  if (fd.is_open()) return fd;
  if (errno == EINVAL) {
    return error(
        StatusCode::invalid_argument,
        "data directory ",
        place.directory,
        " is on a file system without direct I/O (O_DIRECT); name one on ext4, xfs or btrfs");
  }
  return device_error(errno, "open " + path);
}

Result<Superblock> read_superblock(int fd,
                                   uint64_t file_bytes,
                                   const std::string& path,
                                   const VolumeSetOptions& options) {
  if (file_bytes < 2 * kSuperblockSpaceBytes) {
    return error(StatusCode::integrity,
                 path,
                 " is no memd volume, or was cut; restore it or move it away: ",
                 file_bytes,
                 " bytes");
  }
  const auto read_block = [fd, &path](std::span<std::byte> block, uint64_t offset_bytes) {
    return read_all(fd, block, offset_bytes, path);
  };
  const auto flush = [&] { return flush_cache(fd, options.flush_file, path); };
  return durable_superblock(align_down(file_bytes, kBlockBytes), path, flush, read_block);
}

Status open_volume(Place& place,
                   std::string_view name,
                   const VolumeSetOptions& options,
                   std::chrono::steady_clock::time_point deadline) {
  const std::string path = place.path(name);
  auto file = open_direct(place, path, 0, options);
  if (!file.is_ok()) return file.status();
  place.file = std::move(file).value();
  if (const int failed = lock_until(place.file.get(), deadline); failed != 0) {
    return not_locked(place, path, failed);
  }
  struct stat stat{};
  if (::fstat(place.file.get(), &stat) != 0) return device_error(errno, path);
  if (!S_ISREG(stat.st_mode)) {
    return error(StatusCode::invalid_argument, path, " is not a file; move it away");
  }
  place.file_bytes = static_cast<uint64_t>(stat.st_size);
  auto superblock = read_superblock(place.file.get(), place.file_bytes, path, options);
  if (!superblock.is_ok()) return superblock.status();
  place.superblock = superblock.value();
  if (place.superblock.volume_bytes != place.file_bytes) {
    return error(StatusCode::integrity,
                 path,
                 " was cut or grown; restore it: formatted with ",
                 place.superblock.volume_bytes,
                 " bytes, has ",
                 place.file_bytes);
  }
  return Status::ok();
}

Status format_volume(Place& place,
                     const Superblock& superblock,
                     const VolumeSetOptions& options,
                     const std::function<void(uint64_t)>& progress) {
  const std::string path = place.path(kUnfinishedName);
  ::unlink(path.c_str());
  auto file = open_direct(place, path, O_CREAT | O_EXCL, options);
  if (!file.is_ok()) return file.status();
  place.file = std::move(file).value();
  place.superblock = superblock;
  place.file_bytes = superblock.volume_bytes;
  const int fd = place.file.get();
  // Held from the first moment: another daemon must not open it between rename and lock.
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) return device_error(errno, "lock " + path);
  // Contiguous where the file system can; the writes below make the space certain in any case.
  if (::fallocate(fd, 0, 0, static_cast<off_t>(place.file_bytes)) != 0 && errno != EOPNOTSUPP) {
    return device_error(errno, concat("allocate ", place.file_bytes, " bytes for ", path));
  }
  MEMD_FAILPOINT("format.allocated");
  const AlignedBytes zeros = aligned_bytes(kFormatWriteBytes);
  for (uint64_t done_bytes = 0; done_bytes < place.file_bytes;) {
    const uint64_t bytes = std::min(kFormatWriteBytes, place.file_bytes - done_bytes);
    if (Status status = write_all(fd, {zeros.get(), bytes}, done_bytes, path); !status.is_ok()) {
      return status;
    }
    done_bytes += bytes;
    progress(done_bytes);
  }
  MEMD_FAILPOINT("format.before_sync");
  if (::fdatasync(fd) != 0) return device_error(errno, "sync " + path);
  MEMD_FAILPOINT("format.before_superblocks");
  // After everything else is durable: a valid superblock says that the file is complete.
  const AlignedBytes block = aligned_bytes(kSuperblockBytes);
  for (const uint64_t offset_bytes : superblock_pair_offsets(0, place.file_bytes)) {
    const auto encoded = encode_superblock(superblock, offset_bytes);
    copy_bytes(block.get(), encoded.data(), encoded.size());
    if (Status status = write_all(fd, {block.get(), kSuperblockBytes}, offset_bytes, path);
        !status.is_ok()) {
      return status;
    }
    MEMD_FAILPOINT("format.superblock_copy_written");
  }
  if (::fdatasync(fd) != 0) return device_error(errno, "sync " + path);
  MEMD_FAILPOINT("format.superblocks_synced");
  return sync_directory(place.directory);
}

Status finish_volume(Place& place) {
  MEMD_FAILPOINT("format.before_rename");
  const std::string path = place.path(kVolumeName);
  if (::rename(place.path(kUnfinishedName).c_str(), path.c_str()) != 0) {
    return device_error(errno, "rename to " + path);
  }
  MEMD_FAILPOINT("format.renamed");
  place.has_volume = true;
  return sync_directory(place.directory);
}

Status format_set(std::vector<Place>& places,
                  uint64_t volume_bytes,
                  const VolumeSetOptions& options) {
  Superblock superblock;
  superblock.volume_count = static_cast<uint16_t>(places.size());
  superblock.volume_bytes = volume_bytes;
  if (::getrandom(superblock.set_uuid.data(), superblock.set_uuid.size(), 0) !=
      static_cast<ssize_t>(superblock.set_uuid.size())) {
    return device_error(errno, "getrandom");
  }
  const uint64_t all_bytes = volume_bytes * places.size();
  for (size_t i = 0; i < places.size(); ++i) {
    superblock.volume_index = static_cast<uint16_t>(i);
    const auto progress = [&](uint64_t bytes) {
      if (options.progress) options.progress(i * volume_bytes + bytes, all_bytes);
    };
    if (Status status = format_volume(places[i], superblock, options, progress); !status.is_ok()) {
      for (size_t j = 0; j <= i; ++j) ::unlink(places[j].path(kUnfinishedName).c_str());
      return status;
    }
  }
  // Only when all are complete: what a crash leaves from here on, finish_unfinished() completes.
  for (Place& place : places) {
    if (Status status = finish_volume(place); !status.is_ok()) return status;
  }
  return Status::ok();
}

/// A refusal leaves nothing behind where there is no volume.
void remove_locks(const std::vector<Place>& places) {
  for (const Place& place : places) {
    if (place.lock.is_open() && !place.has_volume) ::unlink(place.path(kLockName).c_str());
  }
}

/// A crash between two renames left a complete volume under its temporary name: nothing was ever
/// committed to it.
Status finish_unfinished(Place& place,
                         const Superblock& set,
                         const VolumeSetOptions& options,
                         std::chrono::steady_clock::time_point deadline) {
  struct stat unfinished{};
  if (::stat(place.path(kUnfinishedName).c_str(), &unfinished) == 0) {
    if (Status status = open_volume(place, kUnfinishedName, options, deadline);
        status.is_ok() && place.superblock.set_uuid == set.set_uuid) {
      return finish_volume(place);
    }
  }
  return error(
      StatusCode::invalid_argument,
      "volume ",
      place.path(kVolumeName),
      " is missing, the set's other volumes exist; restore it, or move them away to start empty");
}

Status check_set(const std::vector<Place>& places, uint64_t volume_bytes) {
  const Superblock& first = places.front().superblock;
  std::set<uint16_t> indexes;
  for (const Place& place : places) {
    const std::string path = place.path(kVolumeName);
    const Superblock& superblock = place.superblock;
    if (superblock.set_uuid != first.set_uuid) {
      return error(StatusCode::invalid_argument,
                   path,
                   " and ",
                   places.front().path(kVolumeName),
                   " belong to different sets; configure the directories of one set");
    }
    if (superblock.volume_count != places.size()) {
      return error(StatusCode::invalid_argument,
                   path,
                   " belongs to a set of other directories; configure all of them and no others: "
                   "the set has ",
                   superblock.volume_count,
                   ", configured are ",
                   places.size());
    }
    if (!indexes.insert(superblock.volume_index).second) {
      return error(StatusCode::invalid_argument,
                   path,
                   " is a copy of another volume of its set: two have index ",
                   superblock.volume_index);
    }
    if (place.file_bytes != volume_bytes) {
      return error(StatusCode::invalid_argument,
                   path,
                   " has another size than the one configured; set nvme to ",
                   place.file_bytes * places.size(),
                   ", or move it away to start empty: has ",
                   place.file_bytes,
                   " bytes, configured ",
                   volume_bytes);
    }
  }
  return Status::ok();
}

Status open_places(std::vector<Place>& places,
                   uint64_t volume_bytes,
                   const VolumeSetOptions& options,
                   VolumeSet& set) {
  for (Place& place : places) {
    if (Status status = check_directory(place); !status.is_ok()) return status;
  }
  for (size_t i = 0; i < places.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (places[i].stat.st_dev == places[j].stat.st_dev &&
          places[i].stat.st_ino == places[j].stat.st_ino) {
        return error(StatusCode::invalid_argument,
                     "data directory ",
                     places[i].directory,
                     " is named twice; name it once");
      }
    }
  }
  const auto has_volume = [](const Place& place) { return place.has_volume; };
  // Before the first file is created, so that a refusal changes nothing.
  if (std::none_of(places.begin(), places.end(), has_volume)) {
    if (Status status = check_space(places, volume_bytes); !status.is_ok()) return status;
  }
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(options.lock_wait_ms);
  for (Place& place : places) {
    if (Status status = lock_directory(place, deadline); !status.is_ok()) {
      place.lock.reset();
      return status;
    }
    // Its holder may have formatted it meanwhile.
    if (Status status = check_directory(place); !status.is_ok()) return status;
  }

  const Place* existing = nullptr;
  for (Place& place : places) {
    if (!place.has_volume) continue;
    if (Status status = open_volume(place, kVolumeName, options, deadline); !status.is_ok()) {
      return status;
    }
    existing = &place;
  }
  for (const Place& place : places) {
    if (Status status = write_pid(place); !status.is_ok()) return status;
  }
  if (existing == nullptr) {
    const auto started = std::chrono::steady_clock::now();
    if (Status status = format_set(places, volume_bytes, options); !status.is_ok()) return status;
    set.formatted = true;
    set.format_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  } else {
    for (Place& place : places) {
      if (place.has_volume) continue;
      if (Status status = finish_unfinished(place, existing->superblock, options, deadline);
          !status.is_ok()) {
        return status;
      }
    }
  }
  return check_set(places, volume_bytes);
}

}  // namespace

std::array<uint64_t, 2> superblock_pair_offsets(uint64_t sequence, uint64_t volume_bytes) {
  const uint64_t copy = sequence % 2 * kCopyStrideBytes;
  return {copy, volume_bytes - kSuperblockSpaceBytes + copy};
}

std::array<std::byte, kSuperblockBytes> encode_superblock(const Superblock& superblock,
                                                          uint64_t offset_bytes) {
  std::vector<std::byte> out;
  out.reserve(kSuperblockBytes);
  FieldWriter writer(out);
  writer.put_bytes(kMagic.data(), kMagic.size());
  writer.put(static_cast<uint16_t>(kFormatMajor));
  writer.put(static_cast<uint16_t>(kFormatMinor));
  writer.put(uint32_t{0});
  writer.put(uint64_t{kSuperblockBytes});
  writer.put(uint64_t{0});  // features: incompatible
  writer.put(uint64_t{0});  // read-only compatible
  writer.put(uint64_t{0});  // compatible
  writer.put(offset_bytes);
  writer.put(superblock.sequence);
  writer.put_bytes(superblock.set_uuid.data(), superblock.set_uuid.size());
  writer.put(superblock.volume_index);
  writer.put(superblock.volume_count);
  writer.put(uint32_t{0});
  writer.put(superblock.volume_bytes);
  writer.put(superblock.root_bytes);
  writer.put(superblock.root);
  out.resize(kChecksumOffset);
  writer.put(hash_record(out));
  std::array<std::byte, kSuperblockBytes> block{};
  MEMD_CHECK_EQ(out.size(), block.size());
  copy_bytes(block.data(), out.data(), out.size());
  return block;
}

Result<Superblock> decode_superblock(std::span<const std::byte> block,
                                     uint64_t offset_bytes,
                                     FormatUse use) {
  const auto damaged = [offset_bytes](const auto&... parts) {
    return error(
        StatusCode::integrity, "the superblock at ", offset_bytes, " is damaged: ", parts...);
  };
  if (block.size() != kSuperblockBytes) return damaged("length: ", block.size(), " bytes");
  FieldReader reader(block);
  if (reader.get_text(kMagic.size()) != kMagic) return damaged("it does not begin with ", kMagic);
  if (FieldReader(block.subspan(kChecksumOffset)).get<uint64_t>() !=
      hash_record(block.first(kChecksumOffset))) {
    return damaged("its checksum does not match");
  }
  FormatHeader header;
  header.major = reader.get<uint16_t>();
  header.minor = reader.get<uint16_t>();
  reader.get<uint32_t>();
  const auto length_bytes = reader.get<uint64_t>();
  header.incompatible = reader.get<uint64_t>();
  header.read_only_compatible = reader.get<uint64_t>();
  header.compatible = reader.get<uint64_t>();
  if (Status status = check_format(header, use); !status.is_ok()) return status;
  if (length_bytes != kSuperblockBytes) return damaged("length field: ", length_bytes, " bytes");
  const auto own_offset_bytes = reader.get<uint64_t>();
  if (own_offset_bytes != offset_bytes) return damaged("it was written for ", own_offset_bytes);
  Superblock superblock;
  superblock.format = header;
  superblock.sequence = reader.get<uint64_t>();
  const auto uuid = reader.get_bytes(superblock.set_uuid.size());
  copy_bytes(superblock.set_uuid.data(), uuid.data(), uuid.size());
  superblock.volume_index = reader.get<uint16_t>();
  superblock.volume_count = reader.get<uint16_t>();
  reader.get<uint32_t>();
  superblock.volume_bytes = reader.get<uint64_t>();
  superblock.root_bytes = reader.get<uint64_t>();
  superblock.root = reader.get_extent();
  if (superblock.volume_index >= superblock.volume_count) {
    return damaged("volume ", superblock.volume_index, " of ", superblock.volume_count);
  }
  if (superblock.volume_bytes < kVolumeBytesMin ||
      !is_aligned(superblock.volume_bytes, kCopyStrideBytes)) {
    return damaged("volume bytes: ", superblock.volume_bytes);
  }
  const ExtentRecord& root = superblock.root;
  if (!is_aligned(root.length_bytes, kBlockBytes) ||
      !is_aligned(root.address.offset_bytes, kBlockBytes) ||
      root.address.device >= superblock.volume_count ||
      root.exists() != (superblock.root_bytes != 0) || superblock.root_bytes > root.length_bytes) {
    return damaged("root: ", superblock.root_bytes, " bytes in ", root.length_bytes);
  }
  return superblock;
}

namespace {

struct ReadPair {
  std::optional<Superblock> newest;
  Status damaged;  // of a copy that is torn or none of ours; a newer format before all else
  Status unread;   // of a copy that could not be read
};

ReadPair read_pair(uint64_t pair,
                   uint64_t volume_bytes,
                   std::span<std::byte> block,
                   const std::function<Status(std::span<std::byte>, uint64_t)>& read_block) {
  ReadPair out;
  for (const uint64_t offset_bytes : superblock_pair_offsets(pair, volume_bytes)) {
    if (Status status = read_block(block, offset_bytes); !status.is_ok()) {
      if (out.unread.is_ok()) out.unread = status;
      continue;
    }
    const auto decoded = decode_superblock(block, offset_bytes);
    if (decoded.is_ok() && decoded.value().sequence % 2 == pair) {
      if (!out.newest || decoded.value().sequence > out.newest->sequence)
        out.newest = decoded.value();
      continue;
    }
    Status status = decoded.is_ok() ? error(StatusCode::integrity,
                                            "a superblock lies in the other pair's place")
                                    : decoded.status();
    if (out.damaged.is_ok() || status.code() == StatusCode::not_yet)
      out.damaged = std::move(status);
  }
  return out;
}

}  // namespace

Result<Superblock> newest_superblock(
    uint64_t volume_bytes,
    const std::string& path,
    const std::function<Status(std::span<std::byte>, uint64_t)>& read_block) {
  const AlignedBytes memory = aligned_bytes(kSuperblockBytes);
  const std::span<std::byte> block(memory.get(), kSuperblockBytes);
  std::optional<Superblock> newest;
  Status reason;
  for (const uint64_t pair : {0, 1}) {
    ReadPair read = read_pair(pair, volume_bytes, block, read_block);
    if (!read.newest && !read.unread.is_ok()) {
      read = read_pair(pair, volume_bytes, block, read_block);
    }
    if (read.damaged.code() == StatusCode::not_yet) {
      return error(StatusCode::not_yet, path, ": ", read.damaged.message());
    }
    if (!read.newest && !read.unread.is_ok()) {
      // It may hold the last commit that was acknowledged, which the next one would write over.
      return Status(StatusCode::device,
                    concat(path,
                           ": the newest superblock could not be read; look at the device, then "
                           "start again: ",
                           read.unread.message()),
                    read.unread.error_number());
    }
    if (read.newest && (!newest || read.newest->sequence > newest->sequence)) newest = read.newest;
    if (reason.is_ok()) reason = read.damaged;
  }
  if (newest) return *newest;
  return error(
      StatusCode::integrity,
      path,
      " has no valid superblock; it is not touched: restore it, or move it away to start empty: ",
      reason.message());
}

Result<Superblock> durable_superblock(
    uint64_t volume_bytes,
    const std::string& path,
    const std::function<Status()>& flush,
    const std::function<Status(std::span<std::byte>, uint64_t)>& read_block) {
  if (!MEMD_PLANTED("volume.not_flushed_at_start")) {
    if (const Status flushed = flush(); !flushed.is_ok()) {
      return Status(flushed.code(),
                    concat(path,
                           " may hold a commit that the next power cut takes away, because the "
                           "device can't make it durable; nothing was read or written: look at the "
                           "device (dmesg), then start again: ",
                           flushed.message()),
                    flushed.error_number());
    }
  }
  return newest_superblock(volume_bytes, path, read_block);
}

Result<InspectedCopy> inspect_copy(std::span<const std::byte> block,
                                   uint64_t offset_bytes,
                                   uint64_t pair) {
  InspectedCopy found{
      .copy = {.offset_bytes = offset_bytes, .state = CopyState::damaged, .reason = {}},
      .superblock = std::nullopt};
  auto decoded = decode_superblock(block, offset_bytes, FormatUse::read_only);
  if (decoded.status().code() == StatusCode::not_yet) return decoded.status();
  if (!decoded.is_ok()) {
    const bool is_zero = std::all_of(
        block.begin(), block.end(), [](std::byte each) { return each == std::byte{0}; });
    if (is_zero) found.copy.state = CopyState::unwritten;
    found.copy.reason = decoded.status().message();
  } else if (decoded.value().sequence % 2 != pair) {
    found.copy.reason = concat("the superblock at ", offset_bytes, " belongs to the other pair");
  } else {
    found.copy.state = CopyState::valid;
    found.superblock = std::move(decoded).value();
  }
  return found;
}

void judge_unwritten(std::array<SuperblockCopy, 4>& copies, const Superblock& newest) {
  // The second pair is written by the first commit; only the lead volume is ever committed to.
  const bool other_pair_was_written = newest.volume_index == 0 && newest.sequence > 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    SuperblockCopy& copy = copies.at(i);
    if (copy.state == CopyState::unwritten && (i < 2 || other_pair_was_written)) {
      copy.state = CopyState::damaged;
    }
    if (copy.state != CopyState::damaged) copy.reason.clear();
  }
}

Result<InspectedVolume> inspect_volume(const std::string& directory,
                                       uint32_t lock_wait_ms,
                                       const std::function<int(int file)>& flush_file) {
  struct stat stat{};
  const std::string who = "data directory " + directory;
  if (::stat(directory.c_str(), &stat) != 0) {
    if (errno != ENOENT) return device_error(errno, who);
    return error(StatusCode::not_found, who, " does not exist; name the folder of a memd.volume");
  }
  if (!S_ISDIR(stat.st_mode)) {
    return error(StatusCode::invalid_argument, who, " is not a directory; name one");
  }
  InspectedVolume volume;
  volume.directory = directory;
  volume.path = concat(directory, "/", kVolumeName);
  const char* const path = volume.path.c_str();
  volume.file = OwnedFd(::open(path, O_RDONLY | O_DIRECT | O_CLOEXEC));
  // A copy on a file system without direct I/O is as good to look at.
  if (!volume.file.is_open() && errno == EINVAL) {
    volume.file = OwnedFd(::open(path, O_RDONLY | O_CLOEXEC));
  }
  if (!volume.file.is_open()) {
    if (errno == ENOENT) {
      return error(StatusCode::not_found,
                   who,
                   " holds no volume; the first start of a daemon makes one there, and so does "
                   "`memd volume format`");
    }
    if (errno == EACCES || errno == EPERM) {
      return error(StatusCode::permission_denied,
                   volume.path,
                   " may not be read; run this as root or as the daemon's user");
    }
    return device_error(errno, "open " + volume.path);
  }
  if (::fstat(volume.file.get(), &stat) != 0) return device_error(errno, volume.path);
  volume.bytes = static_cast<uint64_t>(stat.st_size);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(lock_wait_ms);
  const int failed = lock_until(volume.file.get(), deadline, LOCK_SH);
  if (failed != 0 && failed != EWOULDBLOCK) return cannot_lock(volume.path, failed);
  if (failed == EWOULDBLOCK) {
    const OwnedFd lock(::open(concat(directory, "/", kLockName).c_str(), O_RDONLY | O_CLOEXEC));
    volume.holder = lock.is_open() ? holder(lock.get()) : "another process";
  } else {
    volume.flushed = flush_cache(volume.file.get(), flush_file, volume.path);
  }
  if (!S_ISREG(stat.st_mode) || volume.bytes < 2 * kSuperblockSpaceBytes) {
    return error(StatusCode::integrity,
                 volume.path,
                 " is no memd volume, or was cut; restore it or move it away: ",
                 volume.bytes,
                 " bytes");
  }
  const AlignedBytes memory = aligned_bytes(kSuperblockBytes);
  const std::span<std::byte> block(memory.get(), kSuperblockBytes);
  std::optional<Superblock> newest;
  size_t index = 0;
  for (const uint64_t pair : {0, 1}) {
    for (const uint64_t offset_bytes :
         superblock_pair_offsets(pair, align_down(volume.bytes, kBlockBytes))) {
      SuperblockCopy& copy = volume.copies.at(index++);
      copy.offset_bytes = offset_bytes;
      if (Status read = read_all(volume.file.get(), block, offset_bytes, volume.path);
          !read.is_ok()) {
        copy.reason = read.message();
        continue;
      }
      auto inspected = inspect_copy(block, offset_bytes, pair);
      if (!inspected.is_ok()) {
        return error(inspected.status().code(), volume.path, ": ", inspected.status().message());
      }
      copy = inspected.value().copy;
      const auto& superblock = inspected.value().superblock;
      if (superblock && (!newest || superblock->sequence > newest->sequence)) newest = superblock;
    }
  }
  if (!newest) {
    return error(StatusCode::integrity,
                 volume.path,
                 " has no valid superblock; restore it, or move it away to start empty: ",
                 volume.copies.front().reason);
  }
  volume.superblock = *newest;
  judge_unwritten(volume.copies, *newest);
  if (volume.bytes != newest->volume_bytes) {
    return error(StatusCode::integrity,
                 volume.path,
                 " was cut or grown; restore it: formatted with ",
                 newest->volume_bytes,
                 " bytes, has ",
                 volume.bytes);
  }
  return volume;
}

Status remove_volumes(const std::vector<std::string>& directories,
                      const std::array<uint8_t, 16>& uuid,
                      uint32_t lock_wait_ms) {
  std::vector<Place> places(directories.size());
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(lock_wait_ms);
  for (size_t i = 0; i < places.size(); ++i) {
    Place& place = places[i];
    place.directory = directories[i];
    if (Status status = check_directory(place); !status.is_ok()) return status;
    if (Status status = lock_directory(place, deadline); !status.is_ok()) return status;
    if (!place.has_volume) continue;
    if (Status status = open_volume(place, kVolumeName, {}, deadline); !status.is_ok())
      return status;
    if (place.superblock.set_uuid != uuid) {
      return error(StatusCode::invalid_argument,
                   place.path(kVolumeName),
                   " is not of the set that was to be removed; nothing was removed");
    }
  }
  for (const Place& place : places) {
    if (!place.has_volume) continue;
    if (::unlink(place.path(kVolumeName).c_str()) != 0) {
      return device_error(errno, "remove " + place.path(kVolumeName));
    }
    if (Status status = sync_directory(place.directory); !status.is_ok()) return status;
  }
  return Status::ok();
}

Result<VolumeSet> VolumeSet::open(const VolumeSetOptions& options) {
  if (options.directories.empty() || options.directories.size() > UINT16_MAX) {
    return error(StatusCode::invalid_argument,
                 "name 1 to 65535 data directories; configured are ",
                 options.directories.size());
  }
  const uint64_t volume_bytes =
      align_down(options.bytes / options.directories.size(), kCopyStrideBytes);
  if (volume_bytes < kVolumeBytesMin) {
    return error(StatusCode::invalid_argument,
                 "nvme is too small; a volume has at least ",
                 kVolumeBytesMin,
                 " bytes: configured ",
                 options.bytes,
                 " for ",
                 options.directories.size(),
                 " data directories");
  }
  std::vector<Place> places(options.directories.size());
  for (size_t i = 0; i < places.size(); ++i) places[i].directory = options.directories[i];

  VolumeSet set;
  if (Status status = open_places(places, volume_bytes, options, set); !status.is_ok()) {
    remove_locks(places);
    return status;
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.superblock.volume_index < b.superblock.volume_index;
  });
  set.superblock = places.front().superblock;
  for (Place& place : places) {
    set.volumes.push_back({.directory = place.directory,
                           .path = place.path(kVolumeName),
                           .file = std::move(place.file),
                           .bytes = place.file_bytes,
                           .data_begin_bytes = kSuperblockSpaceBytes,
                           .data_end_bytes = place.file_bytes - kSuperblockSpaceBytes});
  }
  return set;
}

}  // namespace memd
