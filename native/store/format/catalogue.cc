#include "store/format/catalogue.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_set>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/units.h"
#include "store/format/durability.h"
#include "store/format/encoding.h"
#include "store/format/tile_rest.h"
#include "store/format/volume.h"

namespace memd {

namespace {

using Magic = std::array<char, 8>;
constexpr Magic kJobMagic{'m', 'e', 'm', 'd', '-', 'j', 'o', 'b'};
constexpr Magic kRootMagic{'m', 'e', 'm', 'd', 'r', 'o', 'o', 't'};

// Magic, major, minor, zero, length, three feature words. Its layout, and the checksum in the last
// 8 bytes of the record, are the same in every version, so that a flipped bit is never mistaken
// for a newer format.
constexpr size_t kHeaderBytes = 48;
constexpr size_t kLengthOffset = 16;
constexpr size_t kIncompatibleOffset = 24;
constexpr size_t kChecksumBytes = 8;

// The least that one item costs: counts are checked against it before memory is set aside.
constexpr size_t kShardBytesMin = 18;
constexpr size_t kBucketBytesMin = 13;  // and its tiles
constexpr size_t kRootEntryBytesMin = 20;
constexpr size_t kSnapshotBytesMin = kRootEntryBytesMin + 3 * sizeof(uint64_t) + sizeof(uint16_t);
constexpr size_t kTileBytes = 2 * kExtentEncodedBytes;

// As in memory: views of shards in a bucket start on kViewAlignmentBytes in either dtype.
constexpr uint64_t kElementAlignment = kViewAlignmentBytes / 2;
constexpr uint64_t kShardBytesMax = uint64_t{1} << 48;

// In the byte of a bucket's dtype.
constexpr uint8_t kKeepsMaxima = 0x80;
// In the byte that says whether a parameter was written.
constexpr uint8_t kWritten = 1;
constexpr uint8_t kKeepsMaximum = 2;

template <typename... Parts>
Status malformed(const Parts&... parts) {
  return error(StatusCode::integrity, "the catalogue is damaged: ", parts...);
}

std::vector<std::byte> begin_record(const Magic& magic, size_t bytes_expected) {
  std::vector<std::byte> out;
  out.reserve(bytes_expected);
  FieldWriter writer(out);
  writer.put_bytes(magic.data(), magic.size());
  writer.put(static_cast<uint16_t>(kFormatMajor));
  writer.put(static_cast<uint16_t>(kFormatMinor));
  writer.put(uint32_t{0});
  writer.put(uint64_t{0});  // length: finish_record() knows it
  writer.put(uint64_t{0});  // features: incompatible
  writer.put(uint64_t{0});  // read-only compatible
  writer.put(uint64_t{0});  // compatible
  MEMD_CHECK_EQ(out.size(), kHeaderBytes);
  return out;
}

void finish_record(std::vector<std::byte>& out) {
  const uint64_t length_bytes = out.size() + kChecksumBytes;
  copy_bytes(out.data() + kLengthOffset, &length_bytes, sizeof(length_bytes));
  FieldWriter(out).put(hash_record(out));
}

struct Body {
  std::span<const std::byte> bytes;
  uint16_t minor = 0;
};

Result<Body> open_record(std::span<const std::byte> bytes, const Magic& magic, FormatUse use) {
  if (bytes.size() < kHeaderBytes + kChecksumBytes) {
    return malformed("too short for a record: ", bytes.size(), " bytes");
  }
  FieldReader reader(bytes);
  if (reader.get_text(magic.size()) != std::string_view(magic.data(), magic.size())) {
    return malformed("it does not begin with ", std::string_view(magic.data(), magic.size()));
  }
  FormatHeader header;
  header.major = reader.get<uint16_t>();
  header.minor = reader.get<uint16_t>();
  const auto zero = reader.get<uint32_t>();
  const auto length_bytes = reader.get<uint64_t>();
  header.incompatible = reader.get<uint64_t>();
  header.read_only_compatible = reader.get<uint64_t>();
  header.compatible = reader.get<uint64_t>();
  if (length_bytes != bytes.size()) {
    return malformed("length: ", length_bytes, " bytes, there are ", bytes.size());
  }
  const auto covered = bytes.first(bytes.size() - kChecksumBytes);
  if (FieldReader(bytes.last(kChecksumBytes)).get<uint64_t>() != hash_record(covered)) {
    return malformed("its checksum does not match");
  }
  if (Status status = check_format(header, use); !status.is_ok()) return status;
  if (zero != 0) return malformed("reserved header field: ", zero);
  return Body{.bytes = covered.subspan(kHeaderBytes), .minor = header.minor};
}

/// A newer minor version may have appended fields, which we need not know.
Status close_record(const FieldReader& reader, uint16_t minor) {
  if (reader.overrun()) return malformed("it ends before its last field");
  if (minor <= kFormatMinor && reader.remaining_bytes() != 0) {
    return malformed(reader.remaining_bytes(), " bytes after its last field");
  }
  return Status::ok();
}

/// `wanted_bytes` is what the extent must hold; it is whole blocks on disk.
template <typename... Owner>
Status check_extent(const ExtentRecord& extent, uint64_t wanted_bytes, const Owner&... owner) {
  const ExtentAddress& address = extent.address;
  if (!is_aligned(address.offset_bytes, kBlockBytes)) {
    return malformed(owner..., ": extent offset: not a whole block: ", address.offset_bytes);
  }
  if (extent.length_bytes != align_up(wanted_bytes, kBlockBytes)) {
    return malformed(
        owner..., ": extent length: ", extent.length_bytes, " bytes for ", wanted_bytes);
  }
  if (address.offset_bytes > UINT64_MAX - extent.length_bytes) {
    return malformed(owner..., ": extent offset overflows: ", address.offset_bytes);
  }
  return Status::ok();
}

bool is_all_zero(const ExtentRecord& extent) {
  return extent.address.device == 0 && extent.address.offset_bytes == 0 && extent.checksum == 0;
}

/// Extents of kBlobExtentBytes, the last one shorter, that hold `bytes` together.
template <typename... Owner>
Status check_extents(const std::vector<ExtentRecord>& extents,
                     uint64_t bytes,
                     const Owner&... owner) {
  if (extents.size() != divide_up(bytes, kBlobExtentBytes)) {
    return malformed(owner..., ": extent count: ", extents.size(), " for ", bytes, " bytes");
  }
  for (const ExtentRecord& extent : extents) {
    const uint64_t wanted_bytes = std::min<uint64_t>(bytes, kBlobExtentBytes);
    if (Status status = check_extent(extent, wanted_bytes, owner...); !status.is_ok()) {
      return status;
    }
    bytes -= wanted_bytes;
  }
  return Status::ok();
}

/// An empty vector where `count` does not fit into what is left: check overrun() of the reader.
std::vector<ExtentRecord> get_extents(FieldReader& reader, uint32_t count) {
  FieldReader fields(reader.get_bytes(uint64_t{count} * kExtentEncodedBytes));
  std::vector<ExtentRecord> extents;
  extents.reserve(fields.remaining_bytes() / kExtentEncodedBytes);
  while (fields.remaining_bytes() > 0) extents.push_back(fields.get_extent());
  return extents;
}

void put_extents(FieldWriter& writer, const std::vector<ExtentRecord>& extents) {
  writer.put(static_cast<uint32_t>(extents.size()));
  for (const ExtentRecord& extent : extents) writer.put(extent);
}

void put_text(FieldWriter& writer, const std::string& text) {
  MEMD_CHECK_LE(text.size(), size_t{UINT16_MAX});
  writer.put(static_cast<uint16_t>(text.size()));
  writer.put_bytes(text.data(), text.size());
}

void put_shard(FieldWriter& writer, const ShardRecord& shard, uint32_t extent_count) {
  put_text(writer, shard.name);
  writer.put(static_cast<uint8_t>(shard.kind));
  writer.put(static_cast<uint8_t>(shard.dtype));
  writer.put(static_cast<uint8_t>(shard.tier));
  MEMD_CHECK_LE(shard.shape.size(), size_t{UINT8_MAX});
  writer.put(static_cast<uint8_t>(shard.shape.size()));
  for (const uint64_t size : shard.shape) writer.put(size);
  writer.put(shard.generation);
  if (shard.kind == ShardKind::parameter) {
    writer.put(shard.bucket);
    writer.put(shard.element_offset);
    writer.put(static_cast<uint8_t>((shard.written ? kWritten : 0) |
                                    (shard.keeps_maximum ? kKeepsMaximum : 0)));
  } else {
    writer.put(extent_count);
  }
}

ShardRecord get_shard(FieldReader& reader) {
  ShardRecord shard;
  shard.name = reader.get_text(reader.get<uint16_t>());
  shard.kind = static_cast<ShardKind>(reader.get<uint8_t>());
  shard.dtype = static_cast<DType>(reader.get<uint8_t>());
  shard.tier = static_cast<Tier>(reader.get<uint8_t>());
  shard.shape.resize(reader.get<uint8_t>());
  for (uint64_t& size : shard.shape) size = reader.get<uint64_t>();
  shard.generation = reader.get<uint64_t>();
  if (shard.kind == ShardKind::parameter) {
    shard.bucket = reader.get<uint32_t>();
    shard.element_offset = reader.get<uint64_t>();
    const auto flags = reader.get<uint8_t>();
    shard.written = (flags & kWritten) != 0;
    shard.keeps_maximum = (flags & kKeepsMaximum) != 0;
  } else {
    shard.extents = get_extents(reader, reader.get<uint32_t>());
  }
  return shard;
}

Result<uint64_t> shard_bytes(const ShardRecord& shard) {
  uint64_t bytes = dtype_bytes(shard.dtype);
  if (bytes == 0) {
    return malformed("shard ", shard.name, ": dtype: ", static_cast<unsigned>(shard.dtype));
  }
  for (const uint64_t size : shard.shape) {
    if (size != 0 && bytes > kShardBytesMax / size) {
      return malformed("shard ", shard.name, ": shape overflows");
    }
    bytes *= size;
  }
  return bytes;
}

Status check_parameter(const ShardRecord& shard, uint64_t bytes, const JobRecord& job) {
  if (shard.bucket >= job.buckets.size()) {
    return malformed("shard ", shard.name, ": bucket: ", shard.bucket, " of ", job.buckets.size());
  }
  const BucketRecord& bucket = job.buckets[shard.bucket];
  if (shard.dtype != bucket.dtype) {
    return malformed("shard ", shard.name, ": dtype is not that of bucket ", shard.bucket);
  }
  const uint64_t elements = bytes / dtype_bytes(shard.dtype);
  if (!is_aligned(shard.element_offset, kElementAlignment) ||
      shard.element_offset > bucket.element_count ||
      elements > bucket.element_count - shard.element_offset) {
    return malformed("shard ",
                     shard.name,
                     ": element range: ",
                     elements,
                     " elements at ",
                     shard.element_offset,
                     " of a bucket of ",
                     bucket.element_count);
  }
  return Status::ok();
}

Status check_shard(const ShardRecord& shard, const JobRecord& job) {
  if (shard.kind == ShardKind::unspecified || shard.kind > ShardKind::buffer) {
    return malformed("shard ", shard.name, ": kind: ", static_cast<unsigned>(shard.kind));
  }
  if (shard.tier == Tier::unspecified || shard.tier > Tier::nvme) {
    return malformed("shard ", shard.name, ": tier: ", static_cast<unsigned>(shard.tier));
  }
  const auto bytes = shard_bytes(shard);
  if (!bytes.is_ok()) return bytes.status();
  if (shard.kind == ShardKind::parameter) return check_parameter(shard, bytes.value(), job);
  if (shard.extents.empty()) return Status::ok();  // never written
  return check_extents(shard.extents, bytes.value(), "shard ", shard.name);
}

Status check_bucket(const BucketRecord& bucket, size_t index) {
  if (bucket.dtype != DType::float32 && bucket.dtype != DType::bfloat16) {
    return malformed("bucket ", index, ": dtype: ", static_cast<unsigned>(bucket.dtype));
  }
  if (bucket.element_count > kShardBytesMax ||
      !is_aligned(bucket.element_count, kElementAlignment) ||
      bucket.tiles.size() != divide_up(bucket.element_count, kTileElements)) {
    return malformed("bucket ",
                     index,
                     ": tile count: ",
                     bucket.tiles.size(),
                     " for ",
                     bucket.element_count,
                     " elements");
  }
  uint64_t elements_left = bucket.element_count;
  for (const TileRecord& tile : bucket.tiles) {
    const uint64_t elements = std::min(elements_left, kTileElements);
    elements_left -= elements;
    if (tile.parameter.exists() != bucket.tiles.front().parameter.exists()) {
      return malformed("bucket ", index, ": some of its tiles have parameters, some have none");
    }
    // Written before the bucket kept maxima, it ends before them.
    const uint32_t narrow_bytes = rest_bytes_of(bucket.dtype, elements, false);
    const bool is_narrow = tile.rest.length_bytes == narrow_bytes;
    const uint32_t rest_bytes =
        is_narrow ? narrow_bytes : rest_bytes_of(bucket.dtype, elements, bucket.keeps_maxima);
    for (const auto& [extent, bytes] :
         {std::pair(&tile.parameter, elements * dtype_bytes(bucket.dtype)),
          std::pair(&tile.rest, uint64_t{rest_bytes})}) {
      if (!extent->exists()) {
        if (!is_all_zero(*extent)) return malformed("bucket ", index, ": extent without length");
        continue;
      }
      if (Status status = check_extent(*extent, bytes, "bucket ", index); !status.is_ok()) {
        return status;
      }
    }
  }
  return Status::ok();
}

void put_root_entry(FieldWriter& writer, const RootEntry& entry) {
  writer.put(entry.job_id);
  writer.put(entry.catalogue_bytes);
  put_extents(writer, entry.catalogue);
}

RootEntry get_root_entry(FieldReader& reader) {
  RootEntry entry;
  entry.job_id = reader.get<uint64_t>();
  entry.catalogue_bytes = reader.get<uint64_t>();
  entry.catalogue = get_extents(reader, reader.get<uint32_t>());
  return entry;
}

SnapshotEntry get_snapshot(FieldReader& reader) {
  SnapshotEntry snapshot;
  snapshot.job = get_root_entry(reader);
  snapshot.step = reader.get<uint64_t>();
  snapshot.created_s = reader.get<uint64_t>();
  snapshot.number = reader.get<uint64_t>();
  snapshot.name = reader.get_text(reader.get<uint16_t>());
  return snapshot;
}

Status check_root_entry(const RootEntry& entry) {
  if (entry.catalogue_bytes == 0) return malformed("job ", entry.job_id, ": no catalogue");
  // Kept below what align_up and divide_up can hold.
  if (entry.catalogue_bytes > kShardBytesMax) {
    return malformed("job ", entry.job_id, ": catalogue bytes: ", entry.catalogue_bytes);
  }
  return check_extents(entry.catalogue, entry.catalogue_bytes, "job ", entry.job_id);
}

Status check_snapshots(const RootRecord& root, const std::unordered_set<uint64_t>& job_ids) {
  std::map<uint64_t, std::set<std::string_view>> names;  // by job
  for (const SnapshotEntry& snapshot : root.snapshots) {
    const uint64_t job_id = snapshot.job.job_id;
    if (!job_ids.contains(job_id))
      return malformed("a snapshot of job ", job_id, ", which is none");
    if (snapshot.name.empty() || snapshot.name.size() > kSnapshotNameBytesMax) {
      return malformed("job ", job_id, ": a snapshot's name of ", snapshot.name.size(), " bytes");
    }
    std::set<std::string_view>& of_job = names[job_id];
    if (!of_job.insert(snapshot.name).second) {
      return malformed("job ", job_id, ": two snapshots named ", snapshot.name);
    }
    // Snapshots of one step share their catalogue: so many times at most it is read at a start.
    if (of_job.size() > kSnapshotsOfJobMax) return malformed("job ", job_id, ": snapshot count");
    if (Status status = check_root_entry(snapshot.job); !status.is_ok()) return status;
  }
  return Status::ok();
}

}  // namespace

Status check_shards_together(const JobRecord& job) {
  std::unordered_set<std::string_view> names;
  names.reserve(job.shards.size());
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> ranges;  // bucket, begin, end
  for (const ShardRecord& shard : job.shards) {
    if (!names.insert(shard.name).second) return malformed("two shards named ", shard.name);
    if (shard.kind != ShardKind::parameter) continue;
    const uint64_t elements = shard_bytes(shard).value() / dtype_bytes(shard.dtype);
    ranges.emplace_back(shard.bucket, shard.element_offset, shard.element_offset + elements);
  }
  std::sort(ranges.begin(), ranges.end());
  size_t bucket_count = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto& [bucket, begin, end] = ranges[i];
    if (i == 0 || std::get<0>(ranges[i - 1]) != bucket) {
      ++bucket_count;
    } else if (begin < std::get<2>(ranges[i - 1])) {
      return malformed("bucket ", bucket, ": two shards share element ", begin);
    }
  }
  if (bucket_count != job.buckets.size()) return malformed("a bucket without a shard");
  return Status::ok();
}

bool is_same_shard(const ShardRecord& a, const ShardRecord& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.shape == b.shape &&
         (a.kind != ShardKind::parameter ||
          (a.bucket == b.bucket && a.element_offset == b.element_offset));
}

bool JobRecord::names_extents() const {
  const auto in_bytes = [](const ShardRecord& shard) { return !shard.extents.empty(); };
  const auto in_tile = [](const TileRecord& tile) {
    return tile.parameter.exists() || tile.rest.exists();
  };
  return std::any_of(shards.begin(), shards.end(), in_bytes) ||
         std::any_of(buckets.begin(), buckets.end(), [&](const BucketRecord& bucket) {
           return std::any_of(bucket.tiles.begin(), bucket.tiles.end(), in_tile);
         });
}

JobRecord JobRecord::without_extents() const {
  JobRecord bare = *this;
  for (ShardRecord& shard : bare.shards) {
    shard.extents.clear();
    shard.written = false;
  }
  for (BucketRecord& bucket : bare.buckets) {
    for (TileRecord& tile : bucket.tiles) tile = {};
  }
  return bare;
}

Status check_identity(const RootEntry& entry, const JobRecord& job, std::set<std::string>& names) {
  if (job.job_id != entry.job_id) {
    return malformed("it is that of job ", job.job_id, ", and named as job ", entry.job_id);
  }
  if (!names.insert(job.name).second) return malformed("two jobs are named ", job.name);
  return Status::ok();
}

void JobEncoder::begin(const JobRecord& job, uint32_t bucket_count, size_t bytes_expected) {
  out_ = begin_record(kJobMagic, bytes_expected);
  FieldWriter writer(out_);
  writer.put(job.job_id);
  writer.put(job.uid);
  writer.put(job.step);
  writer.put(job.host_bytes);
  writer.put(job.nvme_bytes);
  put_text(writer, job.name);
  writer.put(bucket_count);
}

void JobEncoder::need_maxima_feature() { out_[kIncompatibleOffset] |= std::byte{kMaximaFeature}; }

void JobEncoder::begin_bucket(const BucketRecord& bucket, uint32_t tile_count) {
  if (bucket.keeps_maxima) need_maxima_feature();
  FieldWriter writer(out_);
  const uint8_t flags = bucket.keeps_maxima ? kKeepsMaxima : 0;
  writer.put(static_cast<uint8_t>(static_cast<uint8_t>(bucket.dtype) | flags));
  writer.put(bucket.element_count);
  writer.put(tile_count);
}

void JobEncoder::put(const TileRecord& tile) {
  put(tile.parameter);
  put(tile.rest);
}

void JobEncoder::put(const ExtentRecord& extent) { FieldWriter(out_).put(extent); }

void JobEncoder::begin_shards(uint32_t shard_count) { FieldWriter(out_).put(shard_count); }

void JobEncoder::begin_shard(const ShardRecord& shard, uint32_t extent_count) {
  if (shard.keeps_maximum) need_maxima_feature();
  FieldWriter writer(out_);
  put_shard(writer, shard, extent_count);
}

void JobEncoder::end(const JobRecord& job) {
  FieldWriter writer(out_);
  writer.put(job.durability);
  writer.put(job.undurable_since);
  writer.put(job.weight);
}

void JobEncoder::seal(std::vector<std::byte>& encoded) { finish_record(encoded); }

std::vector<std::byte> encode(const JobRecord& job) {
  JobEncoder encoder;
  encoder.begin(job, static_cast<uint32_t>(job.buckets.size()), 0);
  for (const BucketRecord& bucket : job.buckets) {
    encoder.begin_bucket(bucket, static_cast<uint32_t>(bucket.tiles.size()));
    for (const TileRecord& tile : bucket.tiles) encoder.put(tile);
  }
  encoder.begin_shards(static_cast<uint32_t>(job.shards.size()));
  for (const ShardRecord& shard : job.shards) {
    encoder.begin_shard(shard, static_cast<uint32_t>(shard.extents.size()));
    if (shard.kind == ShardKind::parameter) continue;
    for (const ExtentRecord& extent : shard.extents) encoder.put(extent);
  }
  encoder.end(job);
  std::vector<std::byte> encoded = encoder.take();
  JobEncoder::seal(encoded);
  return encoded;
}

Result<JobRecord> decode_job(std::span<const std::byte> bytes, FormatUse use) {
  const auto body = open_record(bytes, kJobMagic, use);
  if (!body.is_ok()) return body.status();
  FieldReader reader(body.value().bytes);
  JobRecord job;
  job.job_id = reader.get<uint64_t>();
  job.uid = reader.get<uint32_t>();
  job.step = reader.get<uint64_t>();
  job.host_bytes = reader.get<uint64_t>();
  job.nvme_bytes = reader.get<uint64_t>();
  job.name = reader.get_text(reader.get<uint16_t>());

  const auto bucket_count = reader.get<uint32_t>();
  if (bucket_count > reader.remaining_bytes() / kBucketBytesMin) {
    return malformed("bucket count: ", bucket_count);
  }
  job.buckets.resize(bucket_count);
  for (BucketRecord& bucket : job.buckets) {
    const auto dtype_and_flags = reader.get<uint8_t>();
    bucket.dtype = static_cast<DType>(dtype_and_flags & ~kKeepsMaxima);
    bucket.keeps_maxima = (dtype_and_flags & kKeepsMaxima) != 0;
    bucket.element_count = reader.get<uint64_t>();
    const auto tile_count = reader.get<uint32_t>();
    if (tile_count > reader.remaining_bytes() / kTileBytes) {
      return malformed("tile count: ", tile_count);
    }
    bucket.tiles.resize(tile_count);
    for (TileRecord& tile : bucket.tiles) {
      tile.parameter = reader.get_extent();
      tile.rest = reader.get_extent();
    }
  }

  const auto shard_count = reader.get<uint32_t>();
  if (shard_count > reader.remaining_bytes() / kShardBytesMin) {
    return malformed("shard count: ", shard_count);
  }
  job.shards.reserve(shard_count);
  for (uint32_t i = 0; i < shard_count && !reader.overrun(); ++i) {
    job.shards.push_back(get_shard(reader));
  }
  if (body.value().minor >= 1) {
    job.durability = reader.get<uint32_t>();
    job.undurable_since = reader.get<uint64_t>();
    if (!Durability::is_code(job.durability)) return malformed("durability: ", job.durability);
  }
  if (body.value().minor >= 2) {
    job.weight = reader.get<uint32_t>();
    if (!JobWeight::is_code(job.weight)) return malformed("weight: ", job.weight);
  }
  if (Status status = close_record(reader, body.value().minor); !status.is_ok()) return status;

  for (size_t i = 0; i < job.buckets.size(); ++i) {
    if (Status status = check_bucket(job.buckets[i], i); !status.is_ok()) return status;
  }
  for (const ShardRecord& shard : job.shards) {
    if (Status status = check_shard(shard, job); !status.is_ok()) return status;
  }
  if (Status status = check_shards_together(job); !status.is_ok()) return status;
  return job;
}

std::vector<std::string> names_in_tile(const JobRecord& record, uint32_t bucket, size_t tile) {
  const uint64_t begin = tile * kTileElements;
  std::vector<std::string> names;
  for (const ShardRecord& shard : record.shards) {
    if (shard.kind != ShardKind::parameter || shard.bucket != bucket) continue;
    uint64_t elements = 1;
    for (const uint64_t size : shard.shape) elements *= size;
    if (shard.element_offset < begin + kTileElements && shard.element_offset + elements > begin)
      names.push_back(shard.name);
  }
  return names;
}

std::vector<ExtentRecord> all_extents(const JobRecord& record) {
  std::vector<ExtentRecord> extents;
  for (const ShardRecord& shard : record.shards)
    extents.insert(extents.end(), shard.extents.begin(), shard.extents.end());
  for (const BucketRecord& bucket : record.buckets) {
    for (const TileRecord& tile : bucket.tiles) {
      for (const ExtentRecord& extent : {tile.parameter, tile.rest}) {
        if (extent.exists()) extents.push_back(extent);
      }
    }
  }
  return extents;
}

bool is_load_name(std::string_view name) {
  constexpr std::string_view kForm = "load/00000000T000000Z-xxxxxxxxxxxx";
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return std::equal(name.begin(), name.end(), kForm.begin(), kForm.end(), [&](char c, char form) {
    if (form == '0') return is_digit(c);
    return form == 'x' ? is_digit(c) || (c >= 'a' && c <= 'f') : c == form;
  });
}

size_t encoded_bytes(const RootRecord& root) {
  size_t bytes = kHeaderBytes + sizeof(uint64_t) + 2 * sizeof(uint32_t) + kChecksumBytes;
  for (const RootEntry& entry : root.jobs)
    bytes += kRootEntryBytesMin + entry.catalogue.size() * kExtentEncodedBytes;
  for (const SnapshotEntry& snapshot : root.snapshots) {
    bytes += kSnapshotBytesMin + snapshot.name.size() +
             snapshot.job.catalogue.size() * kExtentEncodedBytes;
  }
  return bytes;
}

std::vector<std::byte> encode(const RootRecord& root) {
  const size_t bytes_expected = encoded_bytes(root);
  std::vector<std::byte> out = begin_record(kRootMagic, bytes_expected);
  FieldWriter writer(out);
  writer.put(root.job_id_next);
  writer.put(static_cast<uint32_t>(root.jobs.size()));
  for (const RootEntry& entry : root.jobs) put_root_entry(writer, entry);
  writer.put(static_cast<uint32_t>(root.snapshots.size()));
  for (const SnapshotEntry& snapshot : root.snapshots) {
    put_root_entry(writer, snapshot.job);
    writer.put(snapshot.step);
    writer.put(snapshot.created_s);
    writer.put(snapshot.number);
    put_text(writer, snapshot.name);
  }
  // A daemon that does not know them would give their extents away.
  if (!root.snapshots.empty()) out[kIncompatibleOffset] |= std::byte{kSnapshotsFeature};
  // And would take half a load for the job.
  const bool has_load =
      std::any_of(root.snapshots.begin(), root.snapshots.end(), [](const SnapshotEntry& each) {
        return is_load_name(each.name);
      });
  if (has_load) out[kIncompatibleOffset] |= std::byte{kLoadsFeature};
  finish_record(out);
  MEMD_CHECK_EQ(out.size(), bytes_expected);
  return out;
}

Result<RootRecord> decode_root(std::span<const std::byte> bytes, FormatUse use) {
  const auto body = open_record(bytes, kRootMagic, use);
  if (!body.is_ok()) return body.status();
  FieldReader reader(body.value().bytes);
  RootRecord root;
  root.job_id_next = reader.get<uint64_t>();
  const auto job_count = reader.get<uint32_t>();
  if (job_count > reader.remaining_bytes() / kRootEntryBytesMin) {
    return malformed("job count: ", job_count);
  }
  root.jobs.resize(job_count);
  for (RootEntry& entry : root.jobs) entry = get_root_entry(reader);
  if (body.value().minor >= 3) {
    const auto snapshot_count = reader.get<uint32_t>();
    if (snapshot_count > reader.remaining_bytes() / kSnapshotBytesMin) {
      return malformed("snapshot count: ", snapshot_count);
    }
    std::vector<SnapshotEntry>& snapshots = root.snapshots.edit();
    snapshots.resize(snapshot_count);
    for (SnapshotEntry& snapshot : snapshots) snapshot = get_snapshot(reader);
  }
  if (Status status = close_record(reader, body.value().minor); !status.is_ok()) return status;

  std::unordered_set<uint64_t> job_ids;
  for (const RootEntry& entry : root.jobs) {
    // 0 is nobody's: the root's own catalogue goes by it.
    if (entry.job_id == 0 || entry.job_id >= root.job_id_next ||
        !job_ids.insert(entry.job_id).second) {
      return malformed("job id: ", entry.job_id, " is named twice or was never given");
    }
    if (Status status = check_root_entry(entry); !status.is_ok()) return status;
  }
  if (Status status = check_snapshots(root, job_ids); !status.is_ok()) return status;
  return root;
}

}  // namespace memd
