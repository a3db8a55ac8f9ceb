#include "store/job.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {
namespace {

// Every shard of a bucket starts on kViewAlignmentBytes in the narrowest dtype, so that one number
// serves parameter, gradient and moments.
constexpr uint64_t kElementAlignment = kViewAlignmentBytes / 2;

std::string dtype_name(DType dtype) {
  constexpr std::array<const char*, 11> names{"unspecified",
                                              "float32",
                                              "bfloat16",
                                              "float16",
                                              "float64",
                                              "int8",
                                              "int16",
                                              "int32",
                                              "int64",
                                              "uint8",
                                              "bool"};
  const auto index = static_cast<size_t>(dtype);
  return index < names.size() ? names[index] : concat("dtype ", index);
}

/// A model is declared at once: what it takes is kept and no more. Where shards come one by one, a
/// quarter more each time, so that a declaration costs the same however many there are.
template <typename T>
void make_room_for(std::vector<T>& items, size_t more) {
  const size_t count = items.size() + more;
  if (count > items.capacity()) items.reserve(std::max(count, items.size() + items.size() / 4));
}

// A JobRecord without its name, buckets and shards; catalogue_test.cc compares.
constexpr uint64_t kJobRecordBytes = 114;

constexpr uint64_t kRecordMemoryBytesMin = 16_MiB;

/// What is had in one piece is had in many a moment later: only the server thread allocates so
/// much. Nothing that is made of it has to be undone then.
bool can_allocate(uint64_t bytes) {
  const std::unique_ptr<std::byte[]> piece(new (std::nothrow) std::byte[bytes]);
  return piece != nullptr;
}

uint64_t parameter_stride_bytes(DType dtype) { return kTileElements * dtype_bytes(dtype); }

}  // namespace

Result<std::unique_ptr<Job>> Job::create(Identity identity) {
  auto table = SharedMemory::create("memd-table", sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  return std::unique_ptr<Job>(new Job(std::move(identity), std::move(table).value()));
}

Status Job::check(const ShardSpec& spec) const {
  if (spec.name.empty() || spec.name.size() > ShardLabel::kNameBytesMax) {
    return error(StatusCode::invalid_argument,
                 "a shard's name has 1 to ",
                 ShardLabel::kNameBytesMax,
                 " bytes; this one has ",
                 spec.name.size());
  }
  const std::string who = concat("shard ", name, "/", spec.name, ": ");
  if (dtype_bytes(spec.dtype) == 0) {
    return error(StatusCode::invalid_argument, who, "memd knows no ", dtype_name(spec.dtype));
  }
  if (spec.kind == ShardKind::unspecified || spec.kind > ShardKind::buffer) {
    return error(StatusCode::invalid_argument, who, "unknown kind ", static_cast<int>(spec.kind));
  }
  if (spec.tier == Tier::unspecified || spec.tier > Tier::nvme) {
    return error(StatusCode::invalid_argument, who, "unknown tier ", static_cast<int>(spec.tier));
  }
  if (spec.shape.size() > ShardLabel::kDimensionsMax) {
    return error(StatusCode::invalid_argument,
                 who,
                 spec.shape.size(),
                 " dimensions; at most ",
                 ShardLabel::kDimensionsMax);
  }
  const auto bytes = tensor_bytes(spec.shape, spec.dtype);
  if (!bytes) {
    return error(StatusCode::invalid_argument, who, "shape ", shape_text(spec.shape), " overflows");
  }
  if (spec.kind == ShardKind::parameter) {
    if (spec.dtype != DType::float32 && spec.dtype != DType::bfloat16) {
      return error(
          spec.dtype == DType::float16 ? StatusCode::not_yet : StatusCode::invalid_argument,
          who,
          "parameters are float32 or bfloat16; convert it: ",
          dtype_name(spec.dtype));
    }
    if (spec.tier == Tier::host) {
      return error(
          StatusCode::not_yet, who, "parameters in tier=\"host\" come later; use tier=\"nvme\"");
    }
  }
  if (const auto found = shard_ids.find(spec.name)) {
    const ShardSpec held = shards[*found].spec();
    if (held.kind != spec.kind || held.dtype != spec.dtype || held.shape != spec.shape) {
      return error(StatusCode::already_exists,
                   who,
                   "the job holds it with another shape or dtype; use another name, delete it, or "
                   "start over with ",
                   "connect(fresh=True): held ",
                   shape_text(held.shape),
                   " ",
                   dtype_name(held.dtype),
                   ", given ",
                   shape_text(spec.shape),
                   " ",
                   dtype_name(spec.dtype));
    }
  } else if (memory != nullptr && *bytes > memory->arena_bytes_max()) {
    return error(StatusCode::capacity,
                 who,
                 "larger than the job's memory; raise host_bytes: ",
                 *bytes,
                 " bytes, the arena has at most ",
                 memory->arena_bytes_max());
  }
  return Status::ok();
}

uint32_t Job::add_shard(const ShardSpec& spec) {
  auto shard_id = static_cast<uint32_t>(shards.size());
  if (free_shard_ids_.empty()) {
    shards.emplace_back();
  } else {
    shard_id = free_shard_ids_.back();
    free_shard_ids_.pop_back();
  }
  Shard shard;
  shard.label = ShardLabel(spec.name, spec.shape);
  shard.kind = spec.kind;
  shard.dtype = spec.dtype;
  shard.tier = spec.tier;
  shard.bytes = *tensor_bytes(spec.shape, spec.dtype);
  shards[shard_id] = std::move(shard);
  if (ledger != nullptr) ledger->reset_shard(shard_id);
  shard_ids.insert(shard_id);
  declared_.add_label(space_label(spec));
  changed = true;
  return shard_id;
}

Entry* Job::add_entry(const Entry::Shape& shape) {
  Entry* const entry = entries.add(shape);
  entry_bytes_ += align_up(shape.bytes, kBlockBytes);
  largest_entry_bytes_ = std::max(largest_entry_bytes_, shape.bytes);
  return entry;
}

void Job::close_bucket(DType dtype, uint64_t elements, std::vector<uint32_t> ids, bool is_updated) {
  // A shard's pin counter is its place among the bucket's, clients hold pins, and a daemon that
  // reads of the shards does so in another order: of tensors at one offset all but one are empty,
  // and their ids decide.
  std::sort(ids.begin(), ids.end(), [this](uint32_t a, uint32_t b) {
    const auto key = [this](uint32_t id) {
      return std::tuple(shards[id].element_offset, shards[id].element_count(), id);
    };
    return key(a) < key(b);
  });
  const auto index = static_cast<uint32_t>(buckets.size());
  Bucket bucket;
  bucket.dtype = dtype;
  bucket.element_count = align_up(elements, kElementAlignment);
  bucket.is_updated = is_updated;
  declared_.add_bucket(dtype, bucket.element_count, is_updated);
  bucket.shards = ShardIds(ids);
  bucket.rest = ReplicaList(divide_up(bucket.element_count, kTileElements));
  Entry::Shape shape{.id = 0,
                     .kind = EntryKind::parameter,
                     .bytes = bucket.element_count * dtype_bytes(bucket.dtype),
                     .stride_bytes = parameter_stride_bytes(bucket.dtype),
                     .owner = index,
                     .tier = Tier::nvme};
  bucket.value = add_entry(shape);
  shape.kind = EntryKind::gradient;
  bucket.gradient = add_entry(shape);
  gradient_bytes_ += align_up(shape.bytes, kBlockBytes);
  largest_gradient_bytes_ = std::max(largest_gradient_bytes_, align_up(shape.bytes, kBlockBytes));
  for (uint32_t i = 0; i < bucket.shards.size(); ++i) {
    Shard& shard = shards[bucket.shards[i]];
    shard.bucket = index;
    shard.index_in_bucket = i;
    shard.value = bucket.value;
  }
  buckets.push_back(std::move(bucket));
}

std::vector<Job::PlannedBucket> Job::plan_buckets(const std::vector<const ShardSpec*>& specs) {
  std::vector<PlannedBucket> plan;
  std::unordered_map<uint8_t, PlannedBucket> open;  // one for each dtype
  const auto close = [&plan](PlannedBucket& bucket) {
    if (!bucket.specs.empty()) plan.push_back(std::move(bucket));
    bucket = {};
  };
  const auto put = [](PlannedBucket& bucket, const ShardSpec& spec) {
    bucket.dtype = spec.dtype;
    bucket.is_updated |= !spec.value_only;
    bucket.specs.push_back(&spec);
    bucket.element_offsets.push_back(bucket.element_count);
  };
  for (const ShardSpec* spec : specs) {
    const uint64_t element_count =
        *tensor_bytes(spec->shape, spec->dtype) / dtype_bytes(spec->dtype);
    if (element_count >= kTileElements) {
      PlannedBucket alone;
      put(alone, *spec);
      alone.element_count = element_count;
      plan.push_back(std::move(alone));
      continue;
    }
    PlannedBucket& bucket = open[static_cast<uint8_t>(spec->dtype)];
    if (bucket.element_count + element_count > kTileElements) close(bucket);
    put(bucket, *spec);
    bucket.element_count = align_up(bucket.element_count + element_count, kElementAlignment);
  }
  for (auto& [dtype, bucket] : open) close(bucket);
  return plan;
}

void Job::add_parameters(const std::vector<const ShardSpec*>& specs,
                         const std::vector<PlannedBucket>& plan) {
  for (const ShardSpec* spec : specs) element_count += shards[add_shard(*spec)].element_count();
  for (const PlannedBucket& bucket : plan) {
    std::vector<uint32_t> ids;
    ids.reserve(bucket.specs.size());
    for (size_t i = 0; i < bucket.specs.size(); ++i) {
      ids.push_back(shard_ids.at(bucket.specs[i]->name));
      shards[ids.back()].element_offset = bucket.element_offsets[i];
    }
    close_bucket(bucket.dtype, bucket.element_count, std::move(ids), bucket.is_updated);
  }
}

void Job::add_bytes(const ShardSpec& spec) {
  const uint32_t shard_id = add_shard(spec);
  Shard& shard = shards[shard_id];
  shard.value = add_entry({.id = 0,
                           .kind = EntryKind::bytes,
                           .bytes = shard.bytes,
                           .stride_bytes = kBlobExtentBytes,
                           .owner = shard_id,
                           .tier = spec.tier});
  if (shard.tier == Tier::nvme) declared_.add_blob(shard.bytes);
}

void Job::expect_memory() {
  if (memory != nullptr) memory->expect_arena_bytes(entry_bytes_);
}

Result<std::vector<ShardInfo>> Job::declare(const std::vector<ShardSpec>& specs) {
  std::vector<const ShardSpec*> parameters;
  std::vector<const ShardSpec*> bytes;
  std::set<std::string> names;
  std::set<uint32_t> updates_begun;
  for (const ShardSpec& spec : specs) {
    if (Status status = check(spec); !status.is_ok()) return status;
    if (!names.insert(spec.name).second) {
      return error(
          StatusCode::invalid_argument, "shard ", name, "/", spec.name, " is declared twice");
    }
    if (const auto held = shard_ids.find(spec.name)) {
      const bool may_begin = spec.kind == ShardKind::parameter && !spec.value_only;
      if (may_begin && !buckets[shards[*held].bucket].is_updated) {
        updates_begun.insert(shards[*held].bucket);
      }
      continue;
    }
    (spec.kind == ShardKind::parameter ? parameters : bytes).push_back(&spec);
  }
  // Each has a row in the shard table, and pin counters for all its slots.
  const size_t shard_count = shard_ids.size() + parameters.size() + bytes.size();
  const bool is_more = !parameters.empty() || !bytes.empty();
  if (is_more && shard_count > kShardCountMax) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would have more shards than a job can have; make fewer and larger ones: ",
                 shard_count,
                 ", at most ",
                 kShardCountMax);
  }
  const std::vector<PlannedBucket> plan = plan_buckets(parameters);
  DeclaredSpace wanted = declared_;
  for (const ShardSpec* spec : parameters) wanted.add_label(space_label(*spec));
  for (const PlannedBucket& bucket : plan) {
    wanted.add_bucket(
        bucket.dtype, align_up(bucket.element_count, kElementAlignment), bucket.is_updated);
  }
  for (const ShardSpec* spec : bytes) {
    wanted.add_label(space_label(*spec));
    if (spec->tier == Tier::nvme) wanted.add_blob(*tensor_bytes(spec->shape, spec->dtype));
  }
  bool asks_for_more = is_more;
  for (const uint32_t index : updates_begun) {
    wanted.begin_updates(buckets[index].dtype, buckets[index].element_count);
    asks_for_more |= index >= restored_bucket_count_;
  }
  if (asks_for_more) {
    if (Status room = check_space(wanted); !room.is_ok()) return room;
  }
  for (const uint32_t index : updates_begun) begin_updates(buckets[index]);
  make_room_for(shards, parameters.size() + bytes.size());
  add_parameters(parameters, plan);
  for (const ShardSpec* spec : bytes) add_bytes(*spec);
  reserve_metadata();
  if (!parameters.empty()) {
    note_layout();
  } else if (!bytes.empty()) {
    LayoutChange change;
    for (const ShardSpec* spec : bytes) change.added_ids.push_back(shard_ids.at(spec->name));
    note_layout_change(std::move(change));
  }
  expect_memory();
  std::vector<ShardInfo> infos;
  infos.reserve(specs.size());
  for (const ShardSpec& spec : specs) infos.push_back(info(shard_ids.at(spec.name)));
  return infos;
}

DeclaredSpace::Label Job::space_label(const ShardSpec& spec) {
  const bool is_parameter = spec.kind == ShardKind::parameter;
  const uint64_t bytes = is_parameter ? 0 : *tensor_bytes(spec.shape, spec.dtype);
  return {.name_bytes = spec.name.size(),
          .dimension_count = spec.shape.size(),
          .is_parameter = is_parameter,
          .extent_count = divide_up(bytes, kBlobExtentBytes)};
}

void Job::begin_updates(Bucket& bucket) {
  if (std::exchange(bucket.is_updated, true)) return;
  declared_.begin_updates(bucket.dtype, bucket.element_count);
  reserve_metadata();
}

uint64_t Job::catalogue_bytes(const DeclaredSpace& declared) const {
  const uint64_t bytes = kJobRecordBytes + name.size() + declared.catalogue_bytes();
  return align_up(bytes, kBlockBytes);
}

SpaceNeeded Job::space_needed(const DeclaredSpace& declared) const {
  const uint64_t arena_bytes =
      memory == nullptr ? std::numeric_limits<uint64_t>::max() : memory->arena_bytes_max();
  SpaceNeeded needed = declared.needed(durability, arena_bytes, kTilesInFlight);
  needed.catalogue_bytes = 2 * catalogue_bytes(declared);
  return needed;
}

SpaceNeeded Job::space_needed() const { return space_needed(declared_); }

uint64_t Job::metadata_bytes() const {
  // Of shards that were deleted the one on disk may be larger than the next.
  const uint64_t next_bytes = catalogue_bytes(declared_);
  return next_bytes + std::max({next_bytes, durable_catalogue_bytes_, committing_catalogue_bytes_});
}

void Job::reserve_metadata() {
  const bool is_within = space_needed().total() <= space.quota_bytes();
  space.set_metadata_bytes(is_within ? metadata_bytes() : 0);
}

Status Job::check_space(const DeclaredSpace& wanted) const {
  // A job without memory is in nobody's use: it is being made from what was accepted before.
  if (memory == nullptr) return Status::ok();
  if (const SpaceNeeded needed = space_needed(wanted); needed.total() > space.quota_bytes()) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would need more than its disk quota; declare less, or start it anew with a "
                 "larger nvme_bytes: ",
                 needed.total(),
                 " bytes = ",
                 needed.text(),
                 "; nvme_bytes ",
                 space.quota_bytes());
  }
  // Records lie outside the pool: each job has room for a model of some ten thousand shards, and
  // more where it was admitted to more memory.
  const uint64_t memory_bytes_max = kRecordMemoryBytesMin + host_bytes / 2;
  const uint64_t memory_bytes = wanted.memory_bytes();
  if (memory_bytes > memory_bytes_max) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would have more shards than the daemon keeps records of; make fewer and larger "
                 "ones, or start it anew with a larger host_bytes: ",
                 memory_bytes,
                 " bytes of records, at most ",
                 kRecordMemoryBytesMin,
                 " + half of host_bytes (",
                 host_bytes,
                 ")");
  }
  const uint64_t more_bytes = memory_bytes - std::min(memory_bytes, declared_.memory_bytes());
  if (!can_allocate(more_bytes)) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 ": the daemon has no memory for records of these shards; declare fewer, or give "
                 "its process more: ",
                 more_bytes,
                 " bytes");
  }
  return Status::ok();
}

ShardInfo Job::info(uint32_t shard_id) const {
  const Shard& shard = shards[shard_id];
  return {.shard_id = shard_id,
          .spec = shard.spec(),
          .generation = shard.generation,
          .written = shard.written,
          .bytes = shard.bytes,
          .lost = lost.contains(shard_id),
          .unreadable = false};
}

void Job::set_weight(JobWeight weight) {
  weight_ = weight;
  changed = true;
  note_layout();
}

JobInfo Job::job_info() const {
  return {.job_id = job_id,
          .name = name,
          .uid = uid,
          .created = false,
          .committed_step = progress.committed_step(),
          .durable_step = progress.durable_step(),
          .durability = durability.text(),
          .weight = weight_.value(),
          .session_count = static_cast<uint32_t>(sessions.size()),
          .host_bytes = memory == nullptr ? 0 : memory->bytes(),
          .host_bytes_used = memory == nullptr ? 0
                                               : memory->arena().used_bytes() +
                                                     memory->private_side().used_bytes(),
          .nvme_bytes = space.quota_bytes(),
          .nvme_bytes_used = space.used_bytes(),
          .metadata_bytes = metadata_bytes(),
          .shard_count = static_cast<uint32_t>(shard_ids.size()),
          .element_count = element_count,
          .lease_count = slots_.lease_count(),
          .lost_shards = lost.names(),
          .unreadable_shards = {}};
}

ShardRecord Job::label_record(const Shard& shard) const {
  return {.name = std::string(shard.name()),
          .kind = shard.kind,
          .dtype = shard.dtype,
          .tier = shard.tier,
          .shape = shard.label.shape(),
          .generation = 0,
          .bucket = shard.bucket,
          .element_offset = shard.element_offset,
          .written = false,
          .extents = {}};
}

std::vector<uint32_t> Job::shard_ids_in_order() const {
  std::vector<uint32_t> ids;
  ids.reserve(shard_ids.size());
  for (uint32_t id = 0; id < shards.size(); ++id) {
    if (!shards[id].deleted) ids.push_back(id);
  }
  return ids;
}

std::vector<std::byte> Job::begin_commit() {
  const JobRecord now = record();
  committing_ = DurableJob(now, shard_ids_in_order());
  std::vector<std::byte> encoded = encode(now);
  committing_catalogue_bytes_ = align_up(encoded.size(), kBlockBytes);
  reserve_metadata();
  return encoded;
}

void Job::set_durable(const JobRecord& on_disk) {
  std::vector<uint32_t> ids;
  ids.reserve(on_disk.shards.size());
  for (const ShardRecord& shard : on_disk.shards) {
    const auto found = shard_ids.find(shard.name);
    const bool is_same = found && is_same_shard(label_record(shards[*found]), shard);
    ids.push_back(is_same ? *found : DurableJob::kNoId);
  }
  durable = DurableJob(on_disk, ids);
}

JobRecord Job::record() const {
  JobRecord record{.job_id = job_id,
                   .uid = uid,
                   .name = name,
                   .step = progress.committed_step(),
                   .host_bytes = host_bytes,
                   .nvme_bytes = space.quota_bytes(),
                   .shards = {},
                   .buckets = {},
                   .durability = durability.code(),
                   .undurable_since = progress.undurable_since(),
                   .weight = weight_.code()};
  record.shards.reserve(shard_ids.size());
  record.buckets.reserve(buckets.size());
  for (const Shard& shard : shards) {
    if (shard.deleted) continue;
    ShardRecord out = label_record(shard);
    out.generation = shard.generation;
    out.written = shard.written && (shard.value->bytes == 0 || shard.value->has_replica());
    if (shard.kind != ShardKind::parameter && shard.written && shard.value->has_replica()) {
      for (const Replica& replica : shard.value->replicas) out.extents.push_back(replica.extent());
    }
    record.shards.push_back(std::move(out));
  }
  for (const Bucket& bucket : buckets) {
    BucketRecord out{.dtype = bucket.dtype, .element_count = bucket.element_count, .tiles = {}};
    // Of a first writeback that is half done there is no value on disk yet.
    const bool is_on_disk = bucket.value->has_replica();
    out.tiles.reserve(bucket.tile_count());
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
      out.tiles.push_back(
          {.parameter = is_on_disk ? bucket.value->replicas[tile].extent() : ExtentRecord{},
           .rest = bucket.rest[tile].extent()});
    }
    record.buckets.push_back(std::move(out));
  }
  return record;
}

Result<std::unique_ptr<Job>> Job::restore(const JobRecord& record,
                                          const std::vector<uint32_t>& given_ids) {
  if (record.undurable_since != 0 && given_ids.empty() && record.names_extents()) {
    return restore(record.without_extents());
  }
  auto created = create({.job_id = record.job_id, .name = record.name, .uid = record.uid});
  if (!created.is_ok()) return created.status();
  std::unique_ptr<Job> job = std::move(created).value();
  job->durability = Durability::of_code(record.durability);
  job->weight_ = JobWeight::of_code(record.weight);
  const bool is_durable = record.undurable_since == 0;
  job->progress.restore(record.step, is_durable ? record.step : 0, record.undurable_since);
  if (!is_durable) {
    job->progress.stop(
        error(StatusCode::integrity,
              "job ",
              record.name,
              " ran on without durability since step ",
              record.undurable_since,
              ", and its memory is gone: what is on disk is no step; start over with "
              "connect(fresh=True), or drop it with `memd job drop`"));
  }
  job->host_bytes = record.host_bytes;
  job->space.set_quota_bytes(record.nvme_bytes);
  std::vector<std::vector<uint32_t>> shards_of(record.buckets.size());
  if (!given_ids.empty()) {
    MEMD_CHECK_EQ(given_ids.size(), record.shards.size());
    const uint32_t id_max = *std::max_element(given_ids.begin(), given_ids.end());
    job->shards.resize(uint64_t{id_max} + 1);
    for (Shard& shard : job->shards) shard.deleted = true;
  }
  size_t given_count = 0;
  for (const ShardRecord& in : record.shards) {
    // add_shard() takes the last of these.
    if (!given_ids.empty()) job->free_shard_ids_.push_back(given_ids[given_count++]);
    const ShardSpec spec{
        .name = in.name, .kind = in.kind, .dtype = in.dtype, .tier = in.tier, .shape = in.shape};
    if (in.kind == ShardKind::parameter) {
      const uint32_t shard_id = job->add_shard(spec);
      Shard& shard = job->shards[shard_id];
      shard.generation = in.generation;
      shard.element_offset = in.element_offset;
      shard.written = in.written;
      shard.is_on_disk = in.written;
      job->element_count += shard.element_count();
      shards_of[in.bucket].push_back(shard_id);
      continue;
    }
    job->add_bytes(spec);
    Shard& shard = job->shards[job->shard_ids.at(spec.name)];
    shard.generation = in.generation;
    shard.written = !in.extents.empty() || shard.bytes == 0;
    for (size_t i = 0; i < in.extents.size(); ++i) {
      shard.value->replicas[i] = Replica(in.extents[i], true);
    }
  }
  for (size_t i = 0; i < record.buckets.size(); ++i) {
    const BucketRecord& in = record.buckets[i];
    const bool was_updated =
        std::any_of(shards_of[i].begin(), shards_of[i].end(), [&job](uint32_t shard_id) {
          return job->shards[shard_id].generation != 0;
        });
    job->close_bucket(in.dtype, in.element_count, std::move(shards_of[i]), was_updated);
    Bucket& made = job->buckets.back();
    for (size_t tile = 0; tile < in.tiles.size(); ++tile) {
      made.value->replicas[tile] = Replica(in.tiles[tile].parameter, true);
      made.rest[tile] = Replica(in.tiles[tile].rest, true);
    }
  }
  if (!given_ids.empty()) {
    for (uint32_t id = 0; id < job->shards.size(); ++id) {
      if (job->shards[id].deleted) job->free_shard_ids_.push_back(id);
    }
  }
  job->space.count(job->each_replica());
  job->set_durable(record);
  job->restored_bucket_count_ = job->buckets.size();
  job->durable_catalogue_bytes_ = job->catalogue_bytes(job->declared_);
  job->reserve_metadata();
  job->changed = false;
  return job;
}

void Job::for_each_replica(const std::function<void(Replica&)>& visit) {
  const auto visit_all = [&visit](ReplicaList& replicas) {
    for (Replica& replica : replicas) {
      if (replica.exists()) visit(replica);
    }
  };
  for (Entry* const entry : entries) {
    if (entry != nullptr && entry->kind != EntryKind::gradient) visit_all(entry->replicas);
  }
  for (Bucket& bucket : buckets) visit_all(bucket.rest);
}

const Slot* Job::early_slot(const Entry& entry) const {
  if (entry.kind != EntryKind::parameter) return nullptr;
  const auto found = early.by_bucket.find(entry.owner);
  return found == early.by_bucket.end() ? nullptr : found->second->shadow.get();
}

void Job::note_written(uint32_t shard_id) {
  shards[shard_id].written = true;
  changed = true;
  note_shard(shard_id);
}

Entry* Job::find_entry(uint32_t shard_id, Part part) const {
  if (shard_id >= shards.size() || shards[shard_id].deleted) return nullptr;
  const Shard& shard = shards[shard_id];
  if (part == Part::value) return shard.value;
  return shard.kind == ShardKind::parameter ? buckets[shard.bucket].gradient : nullptr;
}

uint32_t Job::shard_count(const Entry& entry) const {
  return entry.kind == EntryKind::bytes ? 1
                                        : static_cast<uint32_t>(buckets[entry.owner].shards.size());
}

std::string Job::describe(const Entry& entry) const {
  const uint32_t shard_id =
      entry.kind == EntryKind::bytes ? entry.owner : buckets[entry.owner].shards.front();
  return concat(
      name, "/", shards[shard_id].name(), entry.kind == EntryKind::gradient ? " gradient" : "");
}

std::vector<uint32_t> Job::shards_in(const Entry& entry, size_t replica) const {
  if (entry.kind == EntryKind::bytes) return {entry.owner};
  const uint64_t begin = replica * kTileElements;
  const uint64_t end = begin + kTileElements;
  std::vector<uint32_t> inside;
  for (const uint32_t shard_id : buckets[entry.owner].shards) {
    const Shard& shard = shards[shard_id];
    const uint64_t shard_end = shard.element_offset + shard.element_count();
    if (shard.element_offset < end && begin < shard_end) inside.push_back(shard_id);
  }
  return inside;
}

std::string Job::describe(const Entry& entry, size_t replica) const {
  const std::vector<uint32_t> inside = shards_in(entry, replica);
  if (inside.empty()) return describe(entry);
  std::string text = concat(name, "/", shards[inside.front()].name());
  if (entry.kind == EntryKind::gradient) text += " gradient";
  if (inside.size() > 1) text += concat(" and ", inside.size() - 1, " more");
  return text;
}

std::vector<std::string> Job::shard_names(const Entry& entry, size_t replica) const {
  std::vector<std::string> names;
  for (const uint32_t shard_id : shards_in(entry, replica)) {
    names.emplace_back(shards[shard_id].name());
  }
  return names;
}

void Job::lose(const Entry& entry, size_t replica, const Status& why) {
  if (entry.kind == EntryKind::gradient) return;
  for (const uint32_t shard_id : shards_in(entry, replica)) {
    lost.add(shard_id, std::string(shards[shard_id].name()), why);
  }
}

std::set<uint32_t> Job::unreadable_shards(const ExtentStore& extents) const {
  std::set<uint32_t> all;
  if (!extents.has_unreadable()) return all;
  const auto look = [&](const Entry& entry, const auto& replicas) {
    for (size_t i = 0; i < replicas.size(); ++i) {
      const Replica& replica = replicas[i];
      if (!replica.exists() || !extents.is_unreadable(replica.extent())) continue;
      const std::vector<uint32_t> inside = shards_in(entry, i);
      all.insert(inside.begin(), inside.end());
    }
  };
  for (const Entry* const entry : entries) {
    if (entry != nullptr) look(*entry, entry->replicas);
  }
  for (const Bucket& bucket : buckets) look(*bucket.value, bucket.rest);
  return all;
}

bool Job::is_lost(const Entry& entry) const {
  if (lost.count() == 0 || entry.kind == EntryKind::gradient) return false;
  if (entry.kind == EntryKind::bytes) return lost.contains(entry.owner);
  const ShardIds& held = buckets[entry.owner].shards;
  return std::any_of(held.begin(), held.end(), [this](uint32_t id) { return lost.contains(id); });
}

std::string Job::describe_holders() const {
  constexpr size_t kNamed = 3;
  std::vector<const Entry*> held;
  uint64_t bytes = 0;
  for (Entry* const entry : entries) {
    if (entry == nullptr || entry->slot == nullptr || !slots_.is_pinned(*entry->slot)) continue;
    held.push_back(entry);
    bytes += entry->slot->bytes;
  }
  for (const auto& slot : slots_.retired()) bytes += slot->bytes;
  std::sort(
      held.begin(), held.end(), [](const Entry* a, const Entry* b) { return a->bytes > b->bytes; });
  std::string text = concat(bytes, " bytes are leased");
  for (size_t i = 0; i < std::min(held.size(), kNamed); ++i) {
    text += concat(i == 0 ? ", most by " : ", ", describe(*held[i]), " (", held[i]->bytes, ")");
  }
  return text;
}

void Job::drop_cached_tiles(const Bucket& bucket) {
  for (size_t tile = 0; tile < bucket.tile_count(); ++tile)
    tiles.drop(tile_key(bucket.value->owner, tile), memory->private_side());
}

bool Job::has_dirty_tile(const Bucket& bucket) const {
  return tiles.has_dirty(bucket.value->owner, bucket.tile_count());
}

void Job::drop_clean_tiles() {
  Arena& side = memory->private_side();
  tiles.drop_clean(side);
  while (early.drop_memory(side)) {
  }
}

void Job::remove(uint32_t shard_id, ExtentStore& extents) {
  Shard& shard = shards[shard_id];
  Entry& entry = *shard.value;
  MEMD_CHECK_EQ(entry.task_count, 0u);
  table_.withdraw(entry);
  // From here on it has no bytes, whoever reads the ledger.
  if (ledger != nullptr) ledger->reset_shard(shard_id);
  if (entry.is_resident()) residencies_.move(entry, entry.residency(), Residency::absent);
  MEMD_CHECK(entry.residency() == Residency::absent);
  if (entry.slot != nullptr) slots_.retire(std::move(entry.slot));
  if (entry.pending != nullptr) slots_.retire(std::move(entry.pending));
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    if (entry.replicas[i].exists()) space.release(entry.replicas[i], extents);
    // During an update too, whatever becomes of it: the next shard with this id is another one.
    if (ledger != nullptr) {
      ledger->note_loose({.kind = LooseKey::Kind::bytes,
                          .owner = entry.kept_owner,
                          .index = static_cast<uint32_t>(i)},
                         {});
    }
  }
  space.forget(entry.replicas);
  // The disk has it until the next commit.
  durable.keep(shard_id, label_record(shard));
  committing_.keep(shard_id, label_record(shard));
  shard_ids.erase(shard_id);
  lost.remove(shard_id);
  const uint32_t entry_id = entry.id;
  declared_.remove_label(space_label(shard.spec()));
  if (shard.tier == Tier::nvme) declared_.remove_blob(shard.bytes);
  reserve_metadata();
  entry_bytes_ -= align_up(entry.bytes, kBlockBytes);
  shard = {};
  shard.deleted = true;
  entries.remove(entry_id);
  free_shard_ids_.push_back(shard_id);
  changed = true;
  note_layout_change({.removed = {shard_id}, .added = {}, .added_ids = {}});
}

bool Job::is_tight() const {
  constexpr uint64_t kLargestEntries = 4;
  return memory->arena_bytes_max() < kLargestEntries * largest_entry_bytes_;
}

bool Job::gradients_fit() const {
  if (memory == nullptr) return true;
  return gradient_bytes_ + largest_gradient_bytes_ <= memory->arena_bytes_max();
}

void Job::drop_gradient(Bucket& bucket, ExtentStore& extents) {
  Entry& entry = *bucket.gradient;
  MEMD_FAILPOINT("gradient.before_drop");
  if (entry.is_resident()) residencies_.move(entry, entry.residency(), Residency::absent);
  if (entry.slot != nullptr) slots_.retire(std::move(entry.slot));
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    space.replace_gradient(entry.replicas[i], {}, extents);
    note_value_extent(entry, i);
  }
}

}  // namespace memd
