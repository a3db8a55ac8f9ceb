#include "store/cache/shards.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "store/cache/scratch_names.h"

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

const char* tier_name(Tier tier) { return tier == Tier::host ? "host" : "nvme"; }

/// A model is declared at once: what it takes is kept and no more. Where shards come one by one, a
/// quarter more each time, so that a declaration costs the same however many there are.
template <typename T>
void make_room_for(std::vector<T>& items, size_t more) {
  const size_t count = items.size() + more;
  if (count > items.capacity()) items.reserve(std::max(count, items.size() + items.size() / 4));
}

uint64_t parameter_stride_bytes(DType dtype) { return kTileElements * dtype_bytes(dtype); }

bool keeps_maximum(const ShardSpec& spec) {
  return spec.kind == ShardKind::parameter && !spec.value_only && spec.keeps_maximum;
}

/// Small parameters of one dtype and tier share a bucket, and a large one has its own.
std::vector<Declaration::PlannedBucket> plan_buckets(const std::vector<const ShardSpec*>& specs) {
  std::vector<Declaration::PlannedBucket> plan;
  std::map<std::pair<DType, Tier>, Declaration::PlannedBucket> open;
  const auto close = [&plan](Declaration::PlannedBucket& bucket) {
    if (!bucket.specs.empty()) plan.push_back(std::move(bucket));
    bucket = {};
  };
  const auto put = [](Declaration::PlannedBucket& bucket, const ShardSpec& spec) {
    bucket.dtype = spec.dtype;
    bucket.tier = spec.tier;
    bucket.is_updated |= !spec.value_only;
    bucket.needs_maxima |= keeps_maximum(spec);
    bucket.specs.push_back(&spec);
    bucket.element_offsets.push_back(bucket.element_count);
  };
  for (const ShardSpec* spec : specs) {
    const uint64_t element_count =
        *tensor_bytes(spec->shape, spec->dtype) / dtype_bytes(spec->dtype);
    if (element_count >= kTileElements) {
      Declaration::PlannedBucket alone;
      put(alone, *spec);
      alone.element_count = element_count;
      plan.push_back(std::move(alone));
      continue;
    }
    Declaration::PlannedBucket& bucket = open[{spec->dtype, spec->tier}];
    if (bucket.element_count + element_count > kTileElements) close(bucket);
    put(bucket, *spec);
    bucket.element_count = align_up(bucket.element_count + element_count, kElementAlignment);
  }
  for (auto& [kind, bucket] : open) close(bucket);
  return plan;
}

struct HeldParameter {
  uint32_t shard_id;
  const Shard& shard;
  const Bucket& bucket;
};

/// A parameter that the job has, and that steps will update from now on.
void plan_held(const HeldParameter& held, const ShardSpec& spec, Declaration& planned) {
  const uint32_t index = held.shard.bucket;
  if (!held.bucket.is_updated) planned.updates_begun.insert(index);
  if (held.shard.was_updated() || held.shard.keeps_maximum == spec.keeps_maximum) return;
  planned.maxima_changed[held.shard_id] = spec.keeps_maximum;
  if (spec.keeps_maximum && !held.bucket.needs_maxima) planned.maxima_begun.insert(index);
}

/// The shard's part of a catalogue and of the records.
DeclaredSpace::Label space_label(const ShardSpec& spec) {
  const bool is_parameter = spec.kind == ShardKind::parameter;
  const uint64_t bytes = is_parameter ? 0 : *tensor_bytes(spec.shape, spec.dtype);
  return {.name_bytes = spec.name.size(),
          .dimension_count = spec.shape.size(),
          .is_parameter = is_parameter,
          .extent_count = divide_up(bytes, kBlobExtentBytes)};
}

}  // namespace

Status Shards::check(const ShardSpec& spec, uint64_t bytes_max) const {
  if (spec.name.empty() || spec.name.size() > ShardLabel::kNameBytesMax) {
    return error(StatusCode::invalid_argument,
                 "a shard's name has 1 to ",
                 ShardLabel::kNameBytesMax,
                 " bytes; this one has ",
                 spec.name.size());
  }
  // Only where it is refused: a declaration has as many as the model.
  const auto who = [&] { return concat("shard ", job_name_, "/", spec.name, ": "); };
  if (dtype_bytes(spec.dtype) == 0) {
    return error(StatusCode::invalid_argument, who(), "memd knows no ", dtype_name(spec.dtype));
  }
  if (spec.kind == ShardKind::unspecified || spec.kind > ShardKind::buffer) {
    return error(StatusCode::invalid_argument, who(), "unknown kind ", static_cast<int>(spec.kind));
  }
  if (spec.tier == Tier::unspecified || spec.tier > Tier::nvme) {
    return error(StatusCode::invalid_argument, who(), "unknown tier ", static_cast<int>(spec.tier));
  }
  if (spec.shape.size() > ShardLabel::kDimensionsMax) {
    return error(StatusCode::invalid_argument,
                 who(),
                 spec.shape.size(),
                 " dimensions; at most ",
                 ShardLabel::kDimensionsMax);
  }
  const auto bytes = tensor_bytes(spec.shape, spec.dtype);
  if (!bytes) {
    return error(
        StatusCode::invalid_argument, who(), "shape ", shape_text(spec.shape), " overflows");
  }
  if (spec.kind == ShardKind::parameter) {
    if (spec.dtype != DType::float32 && spec.dtype != DType::bfloat16) {
      return error(
          spec.dtype == DType::float16 ? StatusCode::not_yet : StatusCode::invalid_argument,
          who(),
          "parameters are float32 or bfloat16; convert it: ",
          dtype_name(spec.dtype));
    }
  }
  if (const auto found = names_.find(spec.name)) {
    const ShardSpec held = shards_[*found].spec();
    if (held.kind != spec.kind || held.dtype != spec.dtype || held.shape != spec.shape) {
      return error(StatusCode::already_exists,
                   who(),
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
    if (spec.kind == ShardKind::parameter && held.tier != spec.tier) {
      return error(StatusCode::already_exists,
                   who(),
                   "the job holds it in tier \"",
                   tier_name(held.tier),
                   "\", where it stays; ask for that, or start over with connect(fresh=True): "
                   "given \"",
                   tier_name(spec.tier),
                   "\"");
    }
  } else if (*bytes > bytes_max) {
    return error(StatusCode::capacity,
                 who(),
                 "larger than the job's memory; raise host_bytes: ",
                 *bytes,
                 " bytes, the arena has at most ",
                 bytes_max)
        .about({"host_bytes", bytes_max});
  }
  return Status::ok();
}

uint32_t Shards::add_shard(const ShardSpec& spec, ShardLabel label) {
  const auto free_id = free_ids_.take();
  if (!free_id) shards_.emplace_back();
  const uint32_t shard_id = free_id.value_or(static_cast<uint32_t>(shards_.size() - 1));
  Shard shard;
  shard.label = std::move(label);
  shard.kind = spec.kind;
  shard.dtype = spec.dtype;
  shard.tier = spec.tier;
  shard.bytes = *tensor_bytes(spec.shape, spec.dtype);
  shard.keeps_maximum = keeps_maximum(spec);
  shards_[shard_id] = std::move(shard);
  names_.insert(shard_id);
  declared_.add_label(space_label(spec));
  return shard_id;
}

Entry* Shards::add_entry(const Entry::Shape& shape) {
  Entry* const entry = entries_.add(shape);
  sums_.add_entry(shape.bytes);
  return entry;
}

void Shards::close_bucket(Bucket bucket, ShardIds ids) {
  // A shard's pin counter is its place among the bucket's, clients hold pins, and a daemon that
  // reads of the shards does so in another order: of tensors at one offset all but one are empty,
  // and their ids decide.
  ids.sort([this](uint32_t a, uint32_t b) {
    const auto key = [this](uint32_t id) {
      return std::tuple(shards_[id].element_offset, shards_[id].element_count(), id);
    };
    return key(a) < key(b);
  });
  const auto index = static_cast<uint32_t>(buckets_.size());
  bucket.element_count = align_up(bucket.element_count, kElementAlignment);
  declared_.add_bucket(bucket.dtype, bucket.element_count, bucket.is_updated, bucket.tier);
  bucket.shards = std::move(ids);
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
  sums_.add_gradient(shape.bytes);
  for (uint32_t i = 0; i < bucket.shards.size(); ++i) {
    Shard& shard = shards_[bucket.shards[i]];
    shard.bucket = index;
    shard.index_in_bucket = i;
    shard.value = bucket.value;
  }
  buckets_.push_back(std::move(bucket));
}

void Shards::add_parameters(const Declaration& declaration, LabelledSpecs& declared) {
  for (const ShardSpec* spec : declaration.parameters) {
    const uint32_t shard_id = add_shard(*spec, declared.take_label(*spec));
    sums_.add_elements(shards_[shard_id].element_count());
  }
  for (const Declaration::PlannedBucket& bucket : declaration.plan) {
    ShardIds ids(bucket.specs.size());
    for (size_t i = 0; i < bucket.specs.size(); ++i) {
      const uint32_t shard_id = names_.at(bucket.specs[i]->name);
      ids.set(i, shard_id);
      shards_[shard_id].element_offset = bucket.element_offsets[i];
    }
    Bucket made;
    made.element_count = bucket.element_count;
    made.dtype = bucket.dtype;
    made.tier = bucket.tier;
    made.is_updated = bucket.is_updated;
    close_bucket(std::move(made), std::move(ids));
    if (bucket.needs_maxima) begin_updates(buckets_.back(), true);
  }
}

void Shards::add_bytes(const ShardSpec& spec, ShardLabel label) {
  const uint32_t shard_id = add_shard(spec, std::move(label));
  Shard& shard = shards_[shard_id];
  shard.value =
      add_entry({.id = 0,
                 .kind = EntryKind::bytes,
                 .bytes = shard.bytes,
                 .stride_bytes = kBlobExtentBytes,
                 .owner = shard_id,
                 .tier = spec.tier,
                 .life = is_scratch_name(spec.name) ? EntryLife::session : EntryLife::job});
  if (shard.tier == Tier::nvme) declared_.add_blob(shard.bytes);
}

void Shards::for_each_replica(const JobSpace::Visit& visit) {
  const auto visit_held = [&visit](ReplicaPlace place) {
    if (place->exists()) visit(place);
  };
  for (Entry* const entry : entries_) {
    if (entry == nullptr || entry->kind() != EntryKind::bytes) continue;
    for (size_t i = 0; i < entry->replicas().size(); ++i) visit_held(entry->replica_place(i));
  }
  for (Bucket& bucket : buckets_) {
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
      visit_held(value_place(bucket, tile));
      visit_held(rest_place(bucket, tile));
    }
  }
}

Entry* Shards::find_entry(uint32_t shard_id, Part part, uint32_t rank) const {
  if (shard_id >= shards_.size() || shards_[shard_id].deleted) return nullptr;
  const Shard& shard = shards_[shard_id];
  if (part == Part::value) return shard.value;
  if (shard.kind != ShardKind::parameter) return nullptr;
  return part == Part::gradient ? buckets_[shard.bucket].gradient
                                : rank_sums_.find(rank, shard.bucket);
}

uint32_t Shards::shard_count(const Entry& entry) const {
  return entry.kind() == EntryKind::bytes
             ? 1
             : static_cast<uint32_t>(buckets_[entry.owner()].shards.size());
}

std::string Shards::describe(const Entry& entry) const {
  const uint32_t shard_id =
      entry.kind() == EntryKind::bytes ? entry.owner() : buckets_[entry.owner()].shards.front();
  return concat(job_name_,
                "/",
                shards_[shard_id].name(),
                is_rank_sum(entry)                    ? " gradient of a rank"
                : entry.kind() == EntryKind::gradient ? " gradient"
                                                      : "");
}

std::vector<uint32_t> Shards::shards_in(const Entry& entry, size_t replica) const {
  if (entry.kind() == EntryKind::bytes) return {entry.owner()};
  const uint64_t begin = replica * kTileElements;
  const uint64_t end = begin + kTileElements;
  std::vector<uint32_t> inside;
  for (const uint32_t shard_id : buckets_[entry.owner()].shards) {
    const Shard& shard = shards_[shard_id];
    const uint64_t shard_end = shard.element_offset + shard.element_count();
    if (shard.element_offset < end && begin < shard_end) inside.push_back(shard_id);
  }
  return inside;
}

std::string Shards::describe(const Entry& entry, size_t replica) const {
  const std::vector<uint32_t> inside = shards_in(entry, replica);
  if (inside.empty()) return describe(entry);
  std::string text = concat(job_name_, "/", shards_[inside.front()].name());
  if (entry.kind() == EntryKind::gradient) text += " gradient";
  if (inside.size() > 1) text += concat(" and ", inside.size() - 1, " more");
  return text;
}

std::vector<uint32_t> Shards::ids_in_order() const {
  std::vector<uint32_t> ids;
  ids.reserve(count());
  for (uint32_t id = 0; id < shards_.size(); ++id) {
    if (!shards_[id].deleted) ids.push_back(id);
  }
  return ids;
}

Result<Declaration> Shards::plan(const std::vector<ShardSpec>& specs, uint64_t bytes_max) const {
  Declaration planned;
  std::unordered_set<std::string_view> names;
  for (const ShardSpec& spec : specs) {
    if (Status status = check(spec, bytes_max); !status.is_ok()) return status;
    if (!names.insert(spec.name).second) {
      return error(
          StatusCode::invalid_argument, "shard ", job_name_, "/", spec.name, " is declared twice");
    }
    if (const auto held = names_.find(spec.name)) {
      const Shard& shard = shards_[*held];
      if (spec.kind == ShardKind::parameter && !spec.value_only)
        plan_held({*held, shard, buckets_[shard.bucket]}, spec, planned);
      continue;
    }
    (spec.kind == ShardKind::parameter ? planned.parameters : planned.bytes).push_back(&spec);
  }
  // Each has a row in the shard table, and pin counters for all its slots.
  const size_t shard_count = count() + planned.parameters.size() + planned.bytes.size();
  const bool is_more = !planned.parameters.empty() || !planned.bytes.empty();
  if (is_more && shard_count > kShardCountMax) {
    return error(StatusCode::capacity,
                 "job ",
                 job_name_,
                 " would have more shards than a job can have; make fewer and larger ones: ",
                 shard_count,
                 ", at most ",
                 kShardCountMax);
  }
  // Each id has a row as well.
  if (is_more && shard_count + free_ids_.resting_count() > kTableRows) {
    return error(StatusCode::capacity,
                 "job ",
                 job_name_,
                 " has deleted more shards than can be kept apart while other sessions that may "
                 "know them are attached; end those sessions, or let them connect again: ",
                 free_ids_.resting_count(),
                 " deleted");
  }
  planned.plan = plan_buckets(planned.parameters);
  planned.wanted = declared_;
  for (const ShardSpec* spec : planned.parameters) planned.wanted.add_label(space_label(*spec));
  for (const Declaration::PlannedBucket& bucket : planned.plan) {
    const uint64_t element_count = align_up(bucket.element_count, kElementAlignment);
    planned.wanted.add_bucket(bucket.dtype, element_count, bucket.is_updated, bucket.tier);
    if (bucket.needs_maxima) planned.wanted.begin_maxima(bucket.dtype, element_count, bucket.tier);
  }
  for (const ShardSpec* spec : planned.bytes) {
    planned.wanted.add_label(space_label(*spec));
    if (spec->tier == Tier::nvme) planned.wanted.add_blob(*tensor_bytes(spec->shape, spec->dtype));
  }
  planned.asks_for_more = is_more;
  for (const uint32_t index : planned.updates_begun) {
    const Bucket& bucket = buckets_[index];
    planned.wanted.begin_updates(bucket.dtype, bucket.element_count, bucket.tier);
    // No earlier daemon has asked the host quota for it.
    planned.asks_for_more |= index >= restored_bucket_count_ || bucket.is_host();
  }
  for (const uint32_t index : planned.maxima_begun) {
    const Bucket& bucket = buckets_[index];
    planned.wanted.begin_maxima(bucket.dtype, bucket.element_count, bucket.tier);
    planned.asks_for_more = true;
  }
  return planned;
}

void Shards::add(const Declaration& declaration, LabelledSpecs& declared) {
  for (const uint32_t index : declaration.updates_begun) begin_updates(buckets_[index]);
  for (const uint32_t index : declaration.maxima_begun) begin_updates(buckets_[index], true);
  make_room_for(shards_, declaration.parameters.size() + declaration.bytes.size());
  add_parameters(declaration, declared);
  for (const ShardSpec* spec : declaration.bytes) add_bytes(*spec, declared.take_label(*spec));
}

bool Shards::begin_updates(Bucket& bucket, bool with_maxima) {
  const bool begins = !std::exchange(bucket.is_updated, true);
  if (begins) declared_.begin_updates(bucket.dtype, bucket.element_count, bucket.tier);
  if (!with_maxima || std::exchange(bucket.needs_maxima, true)) return begins;
  declared_.begin_maxima(bucket.dtype, bucket.element_count, bucket.tier);
  return true;
}

void Shards::restore(const JobRecord& record, const std::vector<uint32_t>& given_ids) {
  if (!given_ids.empty()) {
    MEMD_CHECK_EQ(given_ids.size(), record.shards.size());
    const uint32_t id_max = *std::max_element(given_ids.begin(), given_ids.end());
    shards_.resize(uint64_t{id_max} + 1);
    for (Shard& shard : shards_) shard.deleted = true;
  }
  std::vector<std::vector<uint32_t>> shards_of(record.buckets.size());
  size_t given_count = 0;
  for (const ShardRecord& in : record.shards) {
    // add_shard() takes the last of these.
    if (!given_ids.empty()) free_ids_.add(given_ids[given_count++]);
    restore_shard(in, shards_of);
  }
  for (size_t i = 0; i < record.buckets.size(); ++i)
    restore_bucket(record.buckets[i], std::move(shards_of[i]));
  if (!given_ids.empty()) {
    for (uint32_t id = 0; id < shards_.size(); ++id) {
      if (shards_[id].deleted) free_ids_.add(id);
    }
  }
  restored_bucket_count_ = buckets_.size();
}

void Shards::note_given_ids(uint32_t end) {
  while (shards_.size() < end) {
    free_ids_.add(static_cast<uint32_t>(shards_.size()));
    shards_.emplace_back().deleted = true;
  }
}

void Shards::restore_shard(const ShardRecord& in, std::vector<std::vector<uint32_t>>& shards_of) {
  const ShardSpec spec{
      .name = in.name, .kind = in.kind, .dtype = in.dtype, .tier = in.tier, .shape = in.shape};
  if (in.kind == ShardKind::parameter) {
    const uint32_t shard_id = add_shard(spec, ShardLabel(in.name, in.shape));
    Shard& shard = shards_[shard_id];
    shard.generation = in.generation;
    shard.element_offset = in.element_offset;
    shard.written = in.written;
    shard.is_on_disk = in.written;
    shard.keeps_maximum = in.keeps_maximum;
    sums_.add_elements(shard.element_count());
    shards_of[in.bucket].push_back(shard_id);
    return;
  }
  add_bytes(spec, ShardLabel(in.name, in.shape));
  Shard& shard = shards_[names_.at(spec.name)];
  shard.generation = in.generation;
  shard.written = !in.extents.empty() || shard.bytes == 0;
  for (size_t i = 0; i < in.extents.size(); ++i)
    JobSpace::adopt(shard.value->replica_place(i), in.extents[i], JobSpace::kOnDisk);
}

void Shards::restore_bucket(const BucketRecord& in, std::vector<uint32_t> ids) {
  const bool was_updated = std::any_of(
      ids.begin(), ids.end(), [this](uint32_t id) { return shards_[id].generation != 0; });
  Bucket restored;
  restored.element_count = in.element_count;
  restored.dtype = in.dtype;
  restored.tier = ids.empty() ? Tier::nvme : shards_[ids.front()].tier;
  restored.is_updated = was_updated;
  close_bucket(std::move(restored), ShardIds(ids));
  Bucket& made = buckets_.back();
  made.keeps_maxima = in.keeps_maxima;
  const bool needs_maxima =
      in.keeps_maxima ||
      std::any_of(made.shards.begin(), made.shards.end(), [this](uint32_t shard_id) {
        return shards_[shard_id].keeps_maximum;
      });
  if (needs_maxima) begin_updates(made, true);
  for (size_t tile = 0; tile < in.tiles.size(); ++tile) {
    const TileRecord& extents = in.tiles[tile];
    JobSpace::adopt(value_place(made, tile), extents.parameter, JobSpace::kOnDisk);
    JobSpace::adopt(rest_place(made, tile), extents.rest, JobSpace::kOnDisk);
  }
}

void Shards::remove(uint32_t shard_id, std::set<uint64_t> known_to) {
  Shard& shard = shards_[shard_id];
  const Entry& entry = *shard.value;
  MEMD_CHECK(entry.slot() == nullptr && entry.pending() == nullptr);
  names_.erase(shard_id);
  declared_.remove_label(space_label(shard.spec()));
  if (shard.tier == Tier::nvme) declared_.remove_blob(shard.bytes);
  sums_.remove_entry(entry.bytes());
  entries_.remove(entry.id());
  shard = {};
  shard.deleted = true;
  free_ids_.rest(shard_id, std::move(known_to));
}

void Shards::write(JobRecord& into) const {
  into.shards.reserve(count());
  into.buckets.reserve(buckets_.size());
  for (const Shard& shard : shards_) {
    if (!shard.deleted) into.shards.push_back(shard.record());
  }
  for (const Bucket& bucket : buckets_) {
    BucketRecord out = bucket.record();
    // A first writeback that is half done leaves no value on disk yet.
    const bool is_on_disk = bucket.value->has_replica();
    out.tiles.reserve(bucket.tile_count());
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
      out.tiles.push_back(
          {.parameter = is_on_disk ? bucket.value->replicas()[tile].extent() : ExtentRecord{},
           .rest = bucket.rest[tile].extent()});
    }
    into.buckets.push_back(std::move(out));
  }
}

}  // namespace memd
