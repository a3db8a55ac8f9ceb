// The files that hold a daemon's disk tier: one preallocated, pre-written file in each data
// directory, and their superblocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "store/format/encoding.h"
#include "store/format/extent_record.h"

namespace memd {

inline constexpr uint32_t kSuperblockBytes = 4096;
inline constexpr uint32_t kFormatMajor = 1;
inline constexpr uint32_t kFormatMinor = 3;  // 1: durability of a job, 2: its weight, 3: snapshots

/// The content of a superblock. Each file has four copies, at 0, 1 MiB, end - 2 MiB and end - 1
/// MiB; a commit writes only the pair `sequence mod 2` (0: first and third, 1: second and fourth)
/// of the lead volume, so that the other pair stays valid whatever happens to this write.
struct Superblock {
  uint64_t sequence = 0;
  std::array<uint8_t, 16> set_uuid{};
  uint16_t volume_index = 0;
  uint16_t volume_count = 0;
  uint64_t volume_bytes = 0;
  uint64_t root_bytes = 0;  // of the encoded RootRecord without padding; 0: an empty set
  ExtentRecord root;
  FormatHeader format;  // of what was decoded; encoding writes that of this memd
};

/// One block, ready to write at each offset of its pair; the copy's own offset is inside what its
/// checksum covers.
std::array<std::byte, kSuperblockBytes> encode_superblock(const Superblock& superblock,
                                                          uint64_t offset_bytes);
Result<Superblock> decode_superblock(std::span<const std::byte> block,
                                     uint64_t offset_bytes,
                                     FormatUse use = FormatUse::write);
std::array<uint64_t, 2> superblock_pair_offsets(uint64_t sequence, uint64_t volume_bytes);

/// The newest valid one of the four copies in a volume of `volume_bytes`. `read_block` reads one of
/// them at the offset it is given; `path` is for messages. A pair that is torn gives way to the
/// other one: its commit was never acknowledged. Refused: a pair without a valid copy of which one
/// could not be read, twice; no valid copy at all; a copy of a newer format.
Result<Superblock> newest_superblock(
    uint64_t volume_bytes,
    const std::string& path,
    const std::function<Status(std::span<std::byte> block, uint64_t offset_bytes)>& read_block);

/// The same for a daemon that starts: `flush` makes durable what the drive's cache still holds, and
/// only then is anything read. A superblock out of that cache may be gone after a power cut, when
/// the daemon has already written over what the one before it names. Refused where `flush` fails.
Result<Superblock> durable_superblock(
    uint64_t volume_bytes,
    const std::string& path,
    const std::function<Status()>& flush,
    const std::function<Status(std::span<std::byte> block, uint64_t offset_bytes)>& read_block);

struct VolumeSetOptions {
  std::vector<std::string> directories;  // one volume file "memd.volume" in each
  uint64_t bytes = 0;                    // of all volumes together
  /// Called while files are pre-written, with bytes done and bytes in all.
  std::function<void(uint64_t, uint64_t)> progress;
  /// How long to wait for a daemon that just ended: the kernel keeps its files open a moment
  /// longer.
  uint32_t lock_wait_ms = 5000;
  /// open(2) of a volume file; a test puts a file system without O_DIRECT here.
  std::function<int(const char* path, int flags)> open_file;
  /// fdatasync(2) of a volume that exists; a test puts a device that fails here.
  std::function<int(int file)> flush_file;
};

struct Volume {
  std::string directory;
  std::string path;
  OwnedFd file;  // O_DIRECT, read and write, locked with flock: a second daemon is refused
  uint64_t bytes = 0;
  uint64_t data_begin_bytes = 0;  // extents lie between these two
  uint64_t data_end_bytes = 0;
};

/// Opened, or formatted where a directory is empty. Refused, each with a sentence that says what to
/// do: a directory that is missing, not writable, on tmpfs or ramfs (by statfs: it accepts
/// O_DIRECT) or on a file system without O_DIRECT, too little free space, a file that another
/// daemon holds (waits 5 s; the message names its process), a device that cannot flush its cache,
/// volumes of different sets, a newer format, a size other than the one configured.
struct VolumeSet {
  std::vector<Volume> volumes;
  Superblock superblock;   // the valid one with the highest sequence
  bool formatted = false;  // the set was made just now
  double format_seconds = 0;

  static Result<VolumeSet> open(const VolumeSetOptions& options);
};

/// `unwritten`: zeros where no commit has written yet.
enum class CopyState : uint8_t { valid, unwritten, damaged };

/// One of the four places of a superblock, as it was found.
struct SuperblockCopy {
  uint64_t offset_bytes = 0;
  CopyState state = CopyState::damaged;
  std::string reason;  // of damage
};

struct InspectedCopy {
  SuperblockCopy copy;
  std::optional<Superblock> superblock;  // where it is valid
};
/// Reads the block at `offset_bytes`, one of pair `pair`. An error only if its format is newer.
Result<InspectedCopy> inspect_copy(std::span<const std::byte> block,
                                   uint64_t offset_bytes,
                                   uint64_t pair);
/// `copies`: a volume's four, in the order of pairs. An unwritten one where there must be one
/// counts as damaged.
void judge_unwritten(std::array<SuperblockCopy, 4>& copies, const Superblock& newest);

/// A volume as who only looks at it sees it. Nothing is written, not even the lock's file.
struct InspectedVolume {
  std::string directory;
  std::string path;
  OwnedFd file;  // for reading; O_DIRECT where the file system has it
  uint64_t bytes = 0;
  /// Its holder, such as "process 12"; empty if the shared lock is ours: for as long as `file`
  /// is open no daemon starts on it.
  std::string holder;
  /// ok, or why the drive's cache could not be flushed before anything was read: what was read may
  /// be gone after a power cut. Nobody asks a volume that a daemon holds.
  Status flushed;
  std::array<SuperblockCopy, 4> copies;
  Superblock superblock;  // the valid one with the highest sequence
};

/// Any thread; waits for the disk, and up to `lock_wait_ms` for a daemon that just ended.
/// `flush_file` as in VolumeSetOptions. Refused,
/// each with a sentence that says what to do: a directory that is missing or without a volume, a
/// file that may not be read or is none of ours, a newer format.
Result<InspectedVolume> inspect_volume(const std::string& directory,
                                       uint32_t lock_wait_ms,
                                       const std::function<int(int file)>& flush_file = {});
/// Removes a set's volumes, for who formats anew; refused where a daemon holds one, or where the
/// uuid of one is not `uuid`.
Status remove_volumes(const std::vector<std::string>& directories,
                      const std::array<uint8_t, 16>& uuid,
                      uint32_t lock_wait_ms = 5000);

}  // namespace memd
