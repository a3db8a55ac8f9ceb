#include "store/journal/job_layout.h"

#include <algorithm>
#include <concepts>
#include <iterator>
#include <utility>

#include "base/bulk_bytes.h"
#include "store/format/encoding.h"
#include "store/journal/ledger_layout.h"

namespace memd {
namespace {

/// Stands before each change of a layout, which follow it one after the other.
struct ChangeHeader {
  uint64_t sequence;  // of the layout that it changes
  uint64_t length_bytes;
  uint64_t checksum;
};

/// Stands where another change has the number of shards that it removes.
constexpr uint32_t kFacts = ~uint32_t{0};

/// The shards of a layout, in any order, and its buckets while its changes are applied to it.
class LayoutShards {
 public:
  Status add(uint32_t shard_id, ShardRecord shard) {
    if (shard_id >= kShardsMax || place_of_[shard_id] != 0) return damaged("shard id ", shard_id);
    ids_.push_back(shard_id);
    shards_.push_back(std::move(shard));
    place_of_[shard_id] = static_cast<uint32_t>(ids_.size());
    return Status::ok();
  }
  Status remove(uint32_t shard_id) {
    if (shard_id >= kShardsMax || place_of_[shard_id] == 0) {
      return damaged("shard id ", shard_id, " is removed, and is not there");
    }
    if (shards_[place_of_[shard_id] - 1].kind == ShardKind::parameter) {
      return damaged("parameter ", shard_id, " is removed");
    }
    const uint32_t at = std::exchange(place_of_[shard_id], 0) - 1;
    if (at + 1 != ids_.size()) {
      ids_[at] = ids_.back();
      shards_[at] = std::move(shards_.back());
      place_of_[ids_[at]] = at + 1;
    }
    ids_.pop_back();
    shards_.pop_back();
    return Status::ok();
  }
  /// Takes the record's shards, and its buckets, which follow those of before.
  Status take(JobRecord& record, const std::vector<uint32_t>& ids) {
    const auto bucket_begin = static_cast<uint32_t>(buckets_.size());
    std::move(record.buckets.begin(), record.buckets.end(), std::back_inserter(buckets_));
    for (size_t i = 0; i < ids.size(); ++i) {
      ShardRecord& shard = record.shards[i];
      if (shard.kind == ShardKind::parameter) shard.bucket += bucket_begin;
      if (Status added = add(ids[i], std::move(shard)); !added.is_ok()) return added;
    }
    return Status::ok();
  }
  Status set_keeps_maximum(uint32_t shard_id, bool keeps) {
    if (shard_id >= kShardsMax || place_of_[shard_id] == 0) {
      return damaged("shard id ", shard_id, " has a maximum, and is not there");
    }
    ShardRecord& shard = shards_[place_of_[shard_id] - 1];
    if (shard.kind != ShardKind::parameter) {
      return damaged("shard id ", shard_id, " has a maximum, and is no parameter");
    }
    shard.keeps_maximum = keeps;
    return Status::ok();
  }
  Status set_keeps_maxima(uint32_t bucket) {
    if (bucket >= buckets_.size()) {
      return damaged("bucket ", bucket, " has maxima, and is not there");
    }
    buckets_[bucket].keeps_maxima = true;
    return Status::ok();
  }
  void move_into(JobLayout& layout) {
    layout.shard_ids = std::move(ids_);
    layout.record.shards = std::move(shards_);
    layout.record.buckets = std::move(buckets_);
  }

 private:
  std::vector<uint32_t> ids_;
  std::vector<ShardRecord> shards_;
  std::vector<BucketRecord> buckets_;
  std::vector<uint32_t> place_of_ = std::vector<uint32_t>(kShardsMax);  // from 1
};

/// Ids that are counted first.
template <std::unsigned_integral Count>
Result<std::vector<uint32_t>> read_ids(FieldReader& reader) {
  const auto count = reader.get<Count>();
  if (count > kShardsMax) return damaged(count, " shards");
  std::vector<uint32_t> ids;
  for (Count i = 0; i < count && !reader.overrun(); ++i) ids.push_back(reader.get<uint32_t>());
  if (reader.overrun()) return damaged("the shards' ids");
  return ids;
}

/// The rest of `reader`: a record of the job, of the shards with these ids.
Result<JobRecord> read_shards(FieldReader& reader,
                              const std::vector<uint32_t>& ids,
                              uint64_t job_id) {
  auto record = decode_job(reader.get_bytes(reader.remaining_bytes()));
  if (!record.is_ok()) return record.status();
  if (record.value().job_id != job_id || record.value().shards.size() != ids.size()) {
    return damaged("its shards are of another job, or of another number");
  }
  if (record.value().names_extents()) return damaged("its shards have extents");
  return record;
}

Status apply_facts(FieldReader& reader, uint64_t job_id, LayoutShards& shards, JobRecord& job) {
  const auto maximum_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < maximum_count; ++i) {
    const auto shard_id = reader.get<uint32_t>();
    const auto keeps = reader.get<uint8_t>();
    if (reader.overrun() || keeps > 1) return damaged("which shards have a maximum");
    if (Status set = shards.set_keeps_maximum(shard_id, keeps == 1); !set.is_ok()) return set;
  }
  const auto buckets = read_ids<uint32_t>(reader);
  if (!buckets.is_ok()) return buckets.status();
  for (const uint32_t bucket : buckets.value()) {
    if (Status set = shards.set_keeps_maxima(bucket); !set.is_ok()) return set;
  }
  if (reader.remaining_bytes() == 0) return Status::ok();
  auto record = read_shards(reader, {}, job_id);
  if (!record.is_ok()) return record.status();
  if (!record.value().buckets.empty()) return damaged("buckets without a shard");
  job = std::move(record).value();
  return Status::ok();
}

/// `job`: what the layout says of it, apart from its shards and buckets.
Status apply_change(std::span<const std::byte> bytes,
                    uint64_t job_id,
                    LayoutShards& shards,
                    JobRecord& job) {
  FieldReader reader(bytes);
  FieldReader facts(bytes);
  if (facts.get<uint32_t>() == kFacts) return apply_facts(facts, job_id, shards, job);
  const auto removed = read_ids<uint32_t>(reader);
  if (!removed.is_ok()) return removed.status();
  for (const uint32_t shard_id : removed.value()) {
    if (Status status = shards.remove(shard_id); !status.is_ok()) return status;
  }
  const auto added = read_ids<uint32_t>(reader);
  if (!added.is_ok()) return added.status();
  auto record = read_shards(reader, added.value(), job_id);
  if (!record.is_ok()) return record.status();
  JobRecord taken = std::move(record).value();
  return shards.take(taken, added.value());
}

/// All of `changes`, one after the other.
Status apply_changes(
    FieldReader changes, uint64_t sequence, uint64_t job_id, LayoutShards& shards, JobRecord& job) {
  while (changes.remaining_bytes() != 0) {
    const auto changed_sequence = changes.get<uint64_t>();
    const auto length_bytes = changes.get<uint64_t>();
    const auto checksum = changes.get<uint64_t>();
    const auto change = changes.get_bytes(length_bytes);
    if (changes.overrun() || changed_sequence != sequence || hash_record(change) != checksum) {
      return damaged("a change of its shards");
    }
    if (Status applied = apply_change(change, job_id, shards, job); !applied.is_ok())
      return applied;
  }
  return Status::ok();
}

void put_ids(FieldWriter& writer, const std::vector<uint32_t>& shard_ids) {
  for (const uint32_t shard_id : shard_ids) writer.put(shard_id);
}

/// Writes the header of a change, for which `bytes` begin with room.
void seal_change(std::vector<std::byte>& bytes, uint64_t sequence) {
  const std::span<const std::byte> body = std::span(bytes).subspan(sizeof(ChangeHeader));
  const ChangeHeader header{
      .sequence = sequence, .length_bytes = body.size(), .checksum = hash_record(body)};
  copy_bytes(bytes.data(), &header, sizeof(header));
}

}  // namespace

std::vector<std::byte> encode_layout(const JobRecord& record,
                                     const std::vector<uint32_t>& shard_ids) {
  std::vector<std::byte> bytes;
  FieldWriter writer(bytes);
  writer.put(uint64_t{shard_ids.size()});
  put_ids(writer, shard_ids);
  const std::vector<std::byte> encoded = encode(record);
  writer.put_bytes(encoded.data(), encoded.size());
  return bytes;
}

std::vector<std::byte> encode_change(const LayoutChange& change, uint64_t sequence) {
  std::vector<std::byte> bytes(sizeof(ChangeHeader));
  FieldWriter writer(bytes);
  writer.put(static_cast<uint32_t>(change.removed.size()));
  put_ids(writer, change.removed);
  writer.put(static_cast<uint32_t>(change.added_ids.size()));
  put_ids(writer, change.added_ids);
  const std::vector<std::byte> added = encode(change.added);
  writer.put_bytes(added.data(), added.size());
  seal_change(bytes, sequence);
  return bytes;
}

std::vector<std::byte> encode_facts(const LayoutFacts& facts, uint64_t sequence) {
  std::vector<std::byte> bytes(sizeof(ChangeHeader));
  FieldWriter writer(bytes);
  writer.put(kFacts);
  writer.put(static_cast<uint32_t>(facts.maxima.size()));
  for (const auto& [shard_id, keeps] : facts.maxima) {
    writer.put(shard_id);
    writer.put(static_cast<uint8_t>(keeps));
  }
  writer.put(static_cast<uint32_t>(facts.buckets_with_maxima.size()));
  put_ids(writer, facts.buckets_with_maxima);
  if (facts.job) {
    const std::vector<std::byte> job = encode(*facts.job);
    writer.put_bytes(job.data(), job.size());
  }
  seal_change(bytes, sequence);
  return bytes;
}

Result<JobLayout> decode_layout(std::span<const std::byte> bytes,
                                uint64_t record_bytes,
                                uint64_t sequence,
                                uint64_t job_id) {
  LayoutShards shards;
  FieldReader reader(bytes.first(record_bytes));
  const auto ids = read_ids<uint64_t>(reader);
  if (!ids.is_ok()) return ids.status();
  auto record = read_shards(reader, ids.value(), job_id);
  if (!record.is_ok()) return record.status();
  JobLayout layout{.record = std::move(record).value(), .shard_ids = {}};
  if (Status taken = shards.take(layout.record, ids.value()); !taken.is_ok()) return taken;
  const FieldReader changes(bytes.subspan(record_bytes));
  if (Status applied = apply_changes(changes, sequence, job_id, shards, layout.record);
      !applied.is_ok())
    return applied;
  shards.move_into(layout);
  if (Status status = check_shards_together(layout.record); !status.is_ok()) return status;
  return layout;
}

}  // namespace memd
