// The record of a commit: which shards a job has, and where every byte of its state lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/job_weight.h"
#include "base/status.h"
#include "store/format/encoding.h"
#include "store/format/extent_record.h"

namespace memd {

/// The purpose of a shard. Stored: append, never renumber.
enum class ShardKind : uint8_t { unspecified = 0, parameter = 1, blob = 2, buffer = 3 };

/// The home of bytes that nobody uses. Stored: append, never renumber.
enum class Tier : uint8_t { unspecified = 0, host = 1, nvme = 2 };

struct ShardRecord {
  std::string name;
  ShardKind kind = ShardKind::unspecified;
  DType dtype = DType::unspecified;
  Tier tier = Tier::nvme;
  std::vector<uint64_t> shape;
  uint64_t generation = 0;            // parameter: updates so far, Adam's t
  uint32_t bucket = 0;                // parameter: index into JobRecord::buckets
  uint64_t element_offset = 0;        // parameter: first element in its bucket
  bool written = false;               // parameter: its bucket's extents hold a value of it
  bool keeps_maximum = false;         // parameter: its optimizer state has max_exp_avg_sq
  std::vector<ExtentRecord> extents;  // blob, buffer: kBlobExtentBytes each but the last
};

/// 256 Ki elements of a bucket: the parameter (fp32, or the bf16 half), and the rest: exp_avg,
/// exp_avg_sq, for bf16 the remainder, and max_exp_avg_sq where the bucket keeps it, one after the
/// other, each starting on kViewAlignmentBytes. A rest that was never updated has no extent and is
/// zero; one that was written before the bucket kept maxima ends before them, and they are zero.
struct TileRecord {
  ExtentRecord parameter;
  ExtentRecord rest;
};

/// Shards of one dtype that are fetched and updated together. A shard of at least kTileElements has
/// a bucket of its own.
struct BucketRecord {
  DType dtype = DType::float32;
  uint64_t element_count = 0;
  bool keeps_maxima = false;  // a place for that of each shard; never unset
  std::vector<TileRecord> tiles;
};

/// Whether they are one shard at two times, where both have the same name.
bool is_same_shard(const ShardRecord& a, const ShardRecord& b);

struct JobRecord {
  uint64_t job_id = 0;
  uint32_t uid = 0;
  std::string name;
  uint64_t step = 0;        // last committed
  uint64_t host_bytes = 0;  // admitted
  uint64_t nvme_bytes = 0;  // admitted
  std::vector<ShardRecord> shards;
  std::vector<BucketRecord> buckets;
  uint32_t durability = 0;  // Durability::code()
  /// 0, or the first step that was made without durability: the extents that the record names are
  /// free to be overwritten since, by anybody, and mean something only to who knows the memory.
  uint64_t undurable_since = 0;
  uint32_t weight = JobWeight::kOne;  // JobWeight::code()

  bool names_extents() const;
  /// Its shards, none of them written.
  JobRecord without_extents() const;
};

/// Names are unique, no element of a bucket belongs to two shards, and each bucket has a shard: of
/// each shard alone decode_job() has checked what it says.
Status check_shards_together(const JobRecord& job);

/// A job as the root names it: enough to list jobs and to find the catalogue.
struct RootEntry {
  uint64_t job_id = 0;
  uint64_t catalogue_bytes = 0;         // of the encoded JobRecord, without padding
  std::vector<ExtentRecord> catalogue;  // kBlobExtentBytes each but the last
};

/// A job's catalogue that outlives the commits after it, and with it all that it names.
struct SnapshotEntry {
  RootEntry job;     // as the root named it when the snapshot was made
  std::string name;  // unique in its job, 1 to kSnapshotNameBytesMax bytes
  uint64_t step = 0;
  uint64_t created_s = 0;  // since 1970, for people
  uint64_t number = 0;     // that the caller drew: the same request again makes no second snapshot
};

/// Whether a session has made the snapshot of this name before it loads a checkpoint: while the
/// root lists it, its job is half loaded. load/20261126T092228Z-0123456789ab; a user of an earlier
/// version may have chosen another name that begins so.
bool is_load_name(std::string_view name);

inline constexpr size_t kSnapshotNameBytesMax = 128;
inline constexpr size_t kSnapshotsOfJobMax = 64;

/// A copy shares its entries until one of both is edited: each commit copies the root, and a daemon
/// may have thousands of snapshots.
class SnapshotEntries {
 public:
  auto begin() const { return all_->begin(); }
  auto end() const { return all_->end(); }
  size_t size() const { return all_->size(); }
  bool empty() const { return all_->empty(); }
  const SnapshotEntry& operator[](size_t index) const { return (*all_)[index]; }
  const SnapshotEntry& at(size_t index) const { return all_->at(index); }
  /// Entries of this copy alone.
  std::vector<SnapshotEntry>& edit() {
    if (all_.use_count() > 1) all_ = std::make_shared<std::vector<SnapshotEntry>>(*all_);
    return *all_;
  }

 private:
  std::shared_ptr<std::vector<SnapshotEntry>> all_ = std::make_shared<std::vector<SnapshotEntry>>();
};

/// The whole set: what the superblock points to.
struct RootRecord {
  uint64_t job_id_next = 1;
  std::vector<RootEntry> jobs;
  SnapshotEntries snapshots{};  // of these jobs
};

inline constexpr uint32_t kBlobExtentBytes = 1024 * 1024;

/// The shards that have elements in that tile of that bucket.
std::vector<std::string> names_in_tile(const JobRecord& record, uint32_t bucket, size_t tile);

/// Every extent of the job's state that the record names.
std::vector<ExtentRecord> all_extents(const JobRecord& record);

/// Checks a catalogue that was just read: it must be of the job that `entry` names, and its name
/// not in `names`, those of the jobs before it. An integrity error, or ok and its name is added.
Status check_identity(const RootEntry& entry, const JobRecord& job, std::set<std::string>& names);

/// Little-endian, with magic, version, length and a checksum of its own. decode() accepts any bytes
/// and never reads past them: what is malformed is StatusCode::integrity naming the field; a newer
/// version is StatusCode::not_yet naming both versions.
std::vector<std::byte> encode(const JobRecord& job);
std::vector<std::byte> encode(const RootRecord& root);
/// Bytes that encode() makes.
size_t encoded_bytes(const RootRecord& root);

/// Encodes a job's record piece by piece. The calls come in the order of the fields: begin(), each
/// bucket and its tiles, begin_shards(), each shard and its extents, end(); and last, which may be
/// on another thread, seal().
class JobEncoder {
 public:
  /// `job`: its fields, without shards and buckets. `bytes_expected` is set aside at once.
  void begin(const JobRecord& job, uint32_t bucket_count, size_t bytes_expected);
  /// `bucket`: its fields, without tiles.
  void begin_bucket(const BucketRecord& bucket, uint32_t tile_count);
  void put(const TileRecord& tile);
  void begin_shards(uint32_t shard_count);
  /// Without its extents: `extent_count` of them follow, if it is no parameter.
  void begin_shard(const ShardRecord& shard, uint32_t extent_count);
  void put(const ExtentRecord& extent);
  void end(const JobRecord& job);
  size_t size() const { return out_.size(); }
  /// The record without length and checksum, for seal().
  std::vector<std::byte> take() { return std::move(out_); }
  /// Adds length and checksum.
  static void seal(std::vector<std::byte>& encoded);
  static constexpr size_t kSealBytes = 8;

 private:
  void need_maxima_feature();

  std::vector<std::byte> out_;
};
Result<JobRecord> decode_job(std::span<const std::byte> bytes, FormatUse use = FormatUse::write);
Result<RootRecord> decode_root(std::span<const std::byte> bytes, FormatUse use = FormatUse::write);

}  // namespace memd
