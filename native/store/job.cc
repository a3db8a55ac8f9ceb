#include "store/job.h"

#include <algorithm>
#include <array>
#include <set>
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

uint64_t parameter_stride_bytes(DType dtype) { return kTileElements * dtype_bytes(dtype); }

}  // namespace

std::optional<uint64_t> tensor_bytes(const std::vector<uint64_t>& shape, DType dtype) {
  uint64_t bytes = dtype_bytes(dtype);
  for (const uint64_t size : shape) {
    if (size != 0 && bytes > (uint64_t{1} << 48) / size) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += concat(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

std::optional<uint32_t> PinIndexes::take(uint32_t count) {
  if (auto& free = free_[count]; !free.empty()) {
    const uint32_t first = free.back();
    free.pop_back();
    return first;
  }
  if (kPinCount - next_ < count) return std::nullopt;
  return std::exchange(next_, next_ + count);
}

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
  changed = true;
  return shard_id;
}

Entry* Job::add_entry(const Entry::Shape& shape) {
  Entry* const entry = entries.add(shape);
  entry_bytes_ += align_up(shape.bytes, kBlockBytes);
  largest_entry_bytes_ = std::max(largest_entry_bytes_, shape.bytes);
  return entry;
}

void Job::close_bucket(DType dtype,
                       uint64_t elements,
                       const std::vector<uint32_t>& shard_ids_in_bucket) {
  const auto index = static_cast<uint32_t>(buckets.size());
  Bucket bucket;
  bucket.dtype = dtype;
  bucket.element_count = align_up(elements, kElementAlignment);
  bucket.shards = ShardIds(shard_ids_in_bucket);
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
  for (uint32_t i = 0; i < bucket.shards.size(); ++i) {
    Shard& shard = shards[bucket.shards[i]];
    shard.bucket = index;
    shard.index_in_bucket = i;
    shard.value = bucket.value;
  }
  buckets.push_back(std::move(bucket));
}

void Job::add_parameters(const std::vector<const ShardSpec*>& specs) {
  struct Open {
    uint64_t element_count = 0;
    std::vector<uint32_t> shards;
  };
  std::unordered_map<uint8_t, Open> open;  // one for each dtype
  const auto close = [this](DType dtype, Open& it) {
    if (!it.shards.empty()) close_bucket(dtype, it.element_count, it.shards);
    it = {};
  };
  for (const ShardSpec* spec : specs) {
    const uint32_t shard_id = add_shard(*spec);
    Shard& shard = shards[shard_id];
    element_count += shard.element_count();
    if (shard.element_count() >= kTileElements) {
      close_bucket(spec->dtype, shard.element_count(), {shard_id});
      continue;
    }
    Open& it = open[static_cast<uint8_t>(spec->dtype)];
    if (it.element_count + shard.element_count() > kTileElements) close(spec->dtype, it);
    shard.element_offset = it.element_count;
    it.element_count = align_up(it.element_count + shard.element_count(), kElementAlignment);
    it.shards.push_back(shard_id);
  }
  for (auto& [dtype, it] : open) close(static_cast<DType>(dtype), it);
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
}

void Job::expect_memory() {
  if (memory != nullptr) memory->expect_arena_bytes(entry_bytes_);
}

Result<std::vector<ShardInfo>> Job::declare(const std::vector<ShardSpec>& specs) {
  std::vector<const ShardSpec*> parameters;
  std::vector<const ShardSpec*> bytes;
  std::set<std::string> names;
  for (const ShardSpec& spec : specs) {
    if (Status status = check(spec); !status.is_ok()) return status;
    if (!names.insert(spec.name).second) {
      return error(
          StatusCode::invalid_argument, "shard ", name, "/", spec.name, " is declared twice");
    }
    if (shard_ids.contains(spec.name)) continue;
    (spec.kind == ShardKind::parameter ? parameters : bytes).push_back(&spec);
  }
  // Each has a row in the shard table.
  const size_t shard_count = shard_ids.size() + parameters.size() + bytes.size();
  if (shard_count > kTableRows) {
    return error(StatusCode::capacity,
                 "job ",
                 name,
                 " would have more shards than a job can have; make fewer and larger ones: ",
                 shard_count,
                 ", at most ",
                 kTableRows);
  }
  make_room_for(shards, parameters.size() + bytes.size());
  add_parameters(parameters);
  for (const ShardSpec* spec : bytes) add_bytes(*spec);
  if (!parameters.empty() || !bytes.empty()) note_layout();
  expect_memory();
  std::vector<ShardInfo> infos;
  infos.reserve(specs.size());
  for (const ShardSpec& spec : specs) infos.push_back(info(shard_ids.at(spec.name)));
  return infos;
}

ShardInfo Job::info(uint32_t shard_id) const {
  const Shard& shard = shards[shard_id];
  return {.shard_id = shard_id,
          .spec = shard.spec(),
          .generation = shard.generation,
          .written = shard.written,
          .bytes = shard.bytes,
          .lost = lost.contains(shard_id)};
}

JobInfo Job::job_info() const {
  return {.job_id = job_id,
          .name = name,
          .uid = uid,
          .created = false,
          .committed_step = committed_step,
          .durable_step = durable_step,
          .durability = durability.text(),
          .session_count = static_cast<uint32_t>(sessions.size()),
          .host_bytes = memory == nullptr ? 0 : memory->bytes(),
          .host_bytes_used = memory == nullptr ? 0
                                               : memory->arena().used_bytes() +
                                                     memory->private_side().used_bytes(),
          .nvme_bytes = nvme_bytes,
          .nvme_bytes_used = nvme_bytes_used,
          .shard_count = static_cast<uint32_t>(shard_ids.size()),
          .element_count = element_count,
          .lease_count = lease_count(),
          .lost_shards = lost.names()};
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
  return encode(now);
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
                   .step = committed_step,
                   .host_bytes = host_bytes,
                   .nvme_bytes = nvme_bytes,
                   .shards = {},
                   .buckets = {},
                   .durability = durability.code(),
                   .undurable_since = undurable_since};
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
  job->committed_step = record.step;
  job->durability = Durability::of_code(record.durability);
  job->undurable_since = record.undurable_since;
  if (record.undurable_since == 0) {
    job->durable_step = record.step;
  } else {
    job->stopped = error(StatusCode::integrity,
                         "job ",
                         record.name,
                         " ran on without durability since step ",
                         record.undurable_since,
                         ", and its memory is gone: what is on disk is no step; start over with "
                         "connect(fresh=True), or drop it with `memd job drop`");
  }
  job->host_bytes = record.host_bytes;
  job->nvme_bytes = record.nvme_bytes;
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
    // Pin counters are counted in the order of declaration, and clients hold pins: ids that were
    // used again are in another one. An empty tensor lies before the one that shares its offset.
    std::stable_sort(shards_of[i].begin(), shards_of[i].end(), [&job](uint32_t a, uint32_t b) {
      const Shard& left = job->shards[a];
      const Shard& right = job->shards[b];
      return std::pair(left.element_offset, left.element_count()) <
             std::pair(right.element_offset, right.element_count());
    });
    job->close_bucket(in.dtype, in.element_count, shards_of[i]);
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
  job->for_each_replica([&job](Replica& replica) { job->nvme_bytes_used += replica.length_bytes; });
  job->set_durable(record);
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

void Job::move(Entry& entry, Residency from, Residency to) {
  const bool stays = to == Residency::clean || to == Residency::dirty;
  if (!stays) withdraw(entry);
  move_untold(entry, from, to);
  note(entry);
  // The ledger comes first: it says of no slot that is leased that it is nobody's.
  if (stays) publish(entry);
}

void Job::move_untold(Entry& entry, Residency from, Residency to) {
  entry.move(from, to);
  if (entry.is_resident() && entry.pending == nullptr) policy.used(entry.id, entry.price());
  if (!entry.is_resident() && early_slot(entry) == nullptr) policy.forget(entry.id);
  if (to == Residency::absent) end_prefetch(entry);
}

// ---- The shard table ----------------------------------------------------------------------------

template <typename Visit>
void Job::for_each_shard(const Entry& entry, const Visit& visit) const {
  if (entry.kind == EntryKind::gradient) return;
  if (entry.kind == EntryKind::bytes) return visit(entry.owner, 0);
  const ShardIds& ids = buckets[entry.owner].shards;
  for (uint32_t index = 0; index < ids.size(); ++index) visit(ids[index], index);
}

ShardRow* Job::row_of(uint32_t shard_id) {
  if (shard_id >= kTableRows) return nullptr;
  return &reinterpret_cast<TableLayout*>(table.data())->rows[shard_id];
}

bool Job::can_publish(const Entry& entry) const {
  // Of what a writer fills, of what may take another one's place with a step, and of what a job
  // that is stopped has, each lease is the store's to decide.
  return may_publish && stopped.is_ok() && entry.kind != EntryKind::gradient &&
         (entry.is_ahead ? entry.audience >= kFirstTag : entry.steps_before == 0) &&
         entry.is_resident() && entry.slot != nullptr && entry.pending == nullptr &&
         entry.owner == entry.kept_owner;
}

bool Job::can_publish(const Entry& entry, uint32_t shard_id, uint32_t index) const {
  const Shard& shard = shards[shard_id];
  return shard.written && shard.value == &entry && shard.bytes != 0 && shard_id < kTableRows &&
         withheld_shard != shard_id && pins(*entry.slot, index).writers == 0;
}

void Job::publish_shard(const Entry& entry, uint32_t shard_id, uint32_t index) {
  Shard& shard = shards[shard_id];
  if (!can_publish(entry) || !can_publish(entry, shard_id, index)) return withdraw_shard(shard_id);
  // Whatever it says is right: what changes it withdraws it before.
  if (shard.is_published) return;
  memd::publish(*row_of(shard_id),
                {.pin = entry.slot->pin_first + index,
                 .offset_bytes = entry.slot->offset_bytes +
                                 (entry.kind == EntryKind::bytes ? 0 : shard.offset_bytes()),
                 .length_bytes = shard.bytes,
                 .generation = shard.leased_generation()},
                entry.is_ahead ? entry.audience : kEverybody);
  shard.is_published = true;
  entry.slot->is_published = true;
}

void Job::publish(const Entry& entry) {
  for_each_shard(entry,
                 [&](uint32_t shard_id, uint32_t index) { publish_shard(entry, shard_id, index); });
}

void Job::publish_shard(uint32_t shard_id) {
  const Shard& shard = shards[shard_id];
  if (shard.deleted) return;
  const bool in_bucket = shard.kind == ShardKind::parameter;
  publish_shard(*shard.value, shard_id, in_bucket ? shard.index_in_bucket : 0);
}

void Job::publish_all() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) publish(*entry);
  }
}

void Job::withdraw_shard(uint32_t shard_id) {
  if (!shards[shard_id].is_published) return;
  memd::withdraw(*row_of(shard_id));
  shards[shard_id].is_published = false;
}

void Job::withdraw(const Entry& entry) {
  if (entry.slot == nullptr || !entry.slot->is_published) return;
  for_each_shard(entry, [&](uint32_t shard_id, uint32_t) { withdraw_shard(shard_id); });
  entry.slot->is_published = false;
}

void Job::withdraw_all() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) withdraw(*entry);
  }
}

void Job::clear_table() {
  for (uint32_t shard_id = 0; shard_id < shards.size(); ++shard_id) {
    if (ShardRow* const row = row_of(shard_id)) memd::withdraw(*row);
  }
}

bool Job::take_away(const Entry& entry) {
  return take_slot_away(
      [&] { withdraw(entry); }, [&] { return is_pinned(*entry.slot); }, [&] { publish(entry); });
}

const Slot* Job::early_slot(const Entry& entry) const {
  if (entry.kind != EntryKind::parameter) return nullptr;
  const auto found = early.by_bucket.find(entry.owner);
  return found == early.by_bucket.end() ? nullptr : found->second->shadow.get();
}

void Job::end_prefetch(Entry& entry, bool is_used) {
  const Prefetched was = entry.prefetched;
  entry.prefetched = Prefetched::no;
  if (was == Prefetched::no) return;
  ahead_bytes -= entry.bytes;
  if (was == Prefetched::late) return;
  if (is_used) {
    ++counters.prefetch_hits;
  } else {
    counters.prefetch_unused_bytes += entry.bytes;
  }
}

// ---- What the ledger is told -------------------------------------------------------------------

namespace {

SlotRecord slot_record(const Slot& slot, SlotRole role) {
  SlotRecord record;
  record.role = role;
  record.offset_bytes = slot.offset_bytes;
  record.bytes = slot.bytes;
  record.pin_first = slot.pin_first;
  record.pin_count = slot.pin_count();
  return record;
}

SlotRecord slot_record(const Entry& entry, const Slot& slot, SlotRole role) {
  SlotRecord record = slot_record(slot, role);
  record.residency = entry.residency();
  // The next daemon makes the update again, and must not take these bytes for those of the step
  // before.
  if (entry.is_ahead && entry.is_resident()) record.residency = Residency::filling;
  record.kind = entry.kind;
  record.owner = entry.kept_owner;
  record.has_service_writer = std::any_of(slot.service_pins.begin(),
                                          slot.service_pins.end(),
                                          [](uint32_t pins) { return pin_writers(pins) != 0; });
  if (role == SlotRole::pending) record.pending_session = slot.pending_session;
  return record;
}

}  // namespace

void Job::note(const Entry& entry) {
  if (ledger == nullptr) return;
  if (entry.slot != nullptr) ledger->note_slot(slot_record(entry, *entry.slot, SlotRole::current));
  if (entry.pending != nullptr)
    ledger->note_slot(slot_record(entry, *entry.pending, SlotRole::pending));
}

void Job::note_shard(uint32_t shard_id) {
  if (ledger == nullptr) return;
  ledger->note_shard(shard_id, shards[shard_id].written, shards[shard_id].gradient_session);
}

void Job::note_layout() {
  if (ledger == nullptr) return;
  JobRecord layout = record();
  const std::vector<uint32_t> ids = shard_ids_in_order();
  // What lies where is the catalogue's to say, and the loose extents'.
  for (ShardRecord& shard : layout.shards) {
    shard.extents.clear();
    shard.generation = 0;
    shard.written = false;
  }
  for (BucketRecord& bucket : layout.buckets) {
    for (TileRecord& tile : bucket.tiles) tile = {};
  }
  // Without its shards nobody could go on with the job: the next daemon starts it from disk.
  if (const Status written = ledger->write_layout(layout, ids); !written.is_ok()) ledger->give_up();
}

void Job::note_value_extent(const Entry& entry, size_t index) {
  if (ledger == nullptr) return;
  using Kind = LooseKey::Kind;
  const bool gradient = entry.kind == EntryKind::gradient;
  if (is_updating_ && !gradient) return;
  const Kind kind = gradient                             ? Kind::gradient
                    : entry.kind == EntryKind::parameter ? Kind::value
                                                         : Kind::bytes;
  ledger->note_loose(
      {.kind = kind, .owner = entry.kept_owner, .index = static_cast<uint32_t>(index)},
      entry.replicas[index].extent());
}

void Job::note_rest_extent(const Bucket& bucket, size_t tile) {
  if (ledger == nullptr || is_updating_) return;
  ledger->note_loose({.kind = LooseKey::Kind::rest,
                      .owner = bucket.value->owner,
                      .index = static_cast<uint32_t>(tile)},
                     bucket.rest[tile].extent());
}

std::optional<uint32_t> Job::tile_record(uint64_t key) {
  if (tile_words == nullptr) return std::nullopt;
  const auto record = tile_words->record_of(key);
  // The job would be wrong without it: the next daemon starts it from disk.
  if (!record) ledger->give_up();
  return record;
}

std::optional<uint64_t> Job::half_made_piece(uint64_t key) const {
  const auto made = made_tiles.find(key);
  if (made == made_tiles.end() || made->second.is_whole) return std::nullopt;
  return made->second.element_first / kPieceElements;
}

void Job::note_tile(const Bucket& bucket,
                    size_t tile,
                    uint64_t step,
                    std::optional<uint64_t> piece_next) {
  if (is_updating_) return;
  const auto record = tile_record(tile_key(bucket.value->owner, tile));
  if (!record) return;
  tile_words->publish(*record,
                      {.step = step,
                       .private_offset_bytes = std::nullopt,
                       .value = bucket.value->replicas[tile].extent(),
                       .rest = bucket.rest[tile].extent()},
                      ledger->base(),
                      piece_next);
}

void Job::note_shards() {
  note_layout();
  for (uint32_t id = 0; id < shards.size(); ++id) {
    if (!shards[id].deleted) note_shard(id);
  }
}

void Job::note_slots() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) note(*entry);
  }
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
    if (entry == nullptr || entry->slot == nullptr || !is_pinned(*entry->slot)) continue;
    held.push_back(entry);
    bytes += entry->slot->bytes;
  }
  for (const auto& slot : retired) bytes += slot->bytes;
  std::sort(
      held.begin(), held.end(), [](const Entry* a, const Entry* b) { return a->bytes > b->bytes; });
  std::string text = concat(bytes, " bytes are leased");
  for (size_t i = 0; i < std::min(held.size(), kNamed); ++i) {
    text += concat(i == 0 ? ", most by " : ", ", describe(*held[i]), " (", held[i]->bytes, ")");
  }
  return text;
}

PinCount Job::pins(const Slot& slot, uint32_t index) const {
  PinCount sum;
  sum.add(slot.service_pins[index]);
  for (const auto& session : sessions) sum.add(session->ring.pins(slot.pin_first + index));
  return sum;
}

bool Job::is_pinned(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).all() != 0) return true;
  }
  return false;
}

bool Job::has_writer(const Slot& slot) const {
  for (uint32_t i = 0; i < slot.pin_count(); ++i) {
    if (pins(slot, i).writers != 0) return true;
  }
  return false;
}

bool Job::pinned_by_others(uint64_t session_id) const {
  const auto held = [&](const Slot& slot) {
    for (uint32_t i = 0; i < slot.pin_count(); ++i) {
      if (slot.service_pins[i] != 0) return true;
      for (const auto& session : sessions) {
        if (session->session_id != session_id && session->ring.pins(slot.pin_first + i) != 0)
          return true;
      }
    }
    return false;
  };
  for (Entry* const entry : entries) {
    if (entry == nullptr) continue;
    if (entry->slot != nullptr && held(*entry->slot)) return true;
    if (entry->pending != nullptr && held(*entry->pending)) return true;
  }
  return std::any_of(retired.begin(), retired.end(), [&](const auto& slot) { return held(*slot); });
}

uint32_t Job::lease_count() const {
  uint64_t count = 0;
  const auto add = [&](const Slot* slot) {
    if (slot == nullptr) return;
    for (uint32_t i = 0; i < slot->pin_count(); ++i) count += pins(*slot, i).all();
  };
  for (Entry* const entry : entries) {
    if (entry == nullptr) continue;
    add(entry->slot.get());
    add(entry->pending.get());
  }
  for (const auto& slot : retired) add(slot.get());
  return static_cast<uint32_t>(count);
}

std::unique_ptr<Slot> Job::make_slot(uint64_t bytes, uint32_t pin_count) {
  const auto offset_bytes = memory->arena().allocate(std::max<uint64_t>(bytes, 1));
  if (!offset_bytes) return nullptr;
  const auto pin_first = pin_indexes.take(pin_count);
  if (!pin_first) {
    memory->arena().free(*offset_bytes);
    return nullptr;
  }
  auto slot = std::make_unique<Slot>();
  slot->offset_bytes = *offset_bytes;
  slot->bytes = bytes;
  slot->pin_first = *pin_first;
  slot->service_pins.assign(pin_count, 0);
  if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::made));
  return slot;
}

void Job::free_slot(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::none));
  memory->arena().free(slot->offset_bytes);
  pin_indexes.give_back(slot->pin_first, slot->pin_count());
}

std::unique_ptr<Slot> Job::take_slot(Entry& entry) {
  if (!take_away(entry)) return nullptr;
  move(entry, Residency::clean, Residency::absent);
  // The ledger comes first: from here on these are no bytes of the entry.
  if (ledger != nullptr) ledger->note_slot(slot_record(*entry.slot, SlotRole::made));
  return std::move(entry.slot);
}

void Job::retire_slot(std::unique_ptr<Slot> slot) {
  MEMD_CHECK(!slot->is_published);
  if (is_pinned(*slot)) {
    if (ledger != nullptr) ledger->note_slot(slot_record(*slot, SlotRole::retired));
    retired.push_back(std::move(slot));
  } else {
    free_slot(std::move(slot));
  }
}

void Job::free_retired() {
  for (auto it = retired.begin(); it != retired.end();) {
    if (is_pinned(**it)) {
      ++it;
      continue;
    }
    free_slot(std::move(*it));
    it = retired.erase(it);
  }
}

void Job::settle_pending(Entry& entry) {
  // Nobody reads there: a reader's pin is one that looks for another slot, and goes again.
  if (entry.pending == nullptr || has_writer(*entry.pending)) return;
  // A spill of the old bytes is in flight: they are still being copied.
  if (entry.residency() == Residency::draining || entry.residency() == Residency::filling) return;
  MEMD_FAILPOINT("blob.before_swap");
  withdraw(entry);
  std::unique_ptr<Slot> old = std::move(entry.slot);
  entry.slot = std::move(entry.pending);
  entry.slot->pending_session = 0;
  if (ledger != nullptr) {
    // In one store the new bytes are the entry's; only then does the old slot go.
    SlotRecord record = slot_record(entry, *entry.slot, SlotRole::current);
    record.residency = Residency::dirty;
    ledger->note_slot(record);
    MEMD_FAILPOINT("ledger.pending_settled");
  }
  if (old != nullptr) retire_slot(std::move(old));
  if (entry.residency() == Residency::absent) {
    move_untold(entry, Residency::absent, Residency::filling);
    move_untold(entry, Residency::filling, Residency::clean);
  }
  if (entry.residency() == Residency::clean) move(entry, Residency::clean, Residency::dirty);
  shards[entry.owner].written = true;
  note_shard(entry.owner);
  changed = true;
  publish(entry);
  MEMD_FAILPOINT("blob.swapped");
}

void Job::replace(Replica& place, const ExtentRecord& extent, ExtentStore& extents) {
  MEMD_FAILPOINT("extent.before_supersede");
  release(place, extents);
  place = Replica(extent, false);
}

void Job::take_quota(const Entry& entry, uint64_t bytes) {
  nvme_bytes_used += bytes;
  if (entry.kind == EntryKind::gradient && nvme_bytes_promised != 0) nvme_bytes_promised += bytes;
}

void Job::give_back_quota(const Entry& entry, uint64_t bytes) {
  nvme_bytes_used -= bytes;
  if (entry.kind == EntryKind::gradient && nvme_bytes_promised != 0) nvme_bytes_promised -= bytes;
}

void Job::replace_gradient(Entry& entry,
                           size_t index,
                           const ExtentRecord& extent,
                           ExtentStore& extents) {
  Replica& place = entry.replicas[index];
  if (place.exists()) {
    give_back_quota(entry, place.length_bytes);
    extents.release(place.extent());
  }
  place = Replica(extent, false);
}

std::vector<ExtentRecord> Job::take_extents() {
  std::vector<ExtentRecord> extents;
  const auto take = [&extents](ReplicaList& replicas) {
    for (Replica& replica : replicas) {
      if (replica.exists()) extents.push_back(replica.extent());
      replica = {};
    }
  };
  for (Entry* const entry : entries) {
    if (entry != nullptr) take(entry->replicas);
  }
  for (Bucket& bucket : buckets) take(bucket.rest);
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) extents.push_back(old.extent);
  }
  superseded_.clear();
  return extents;
}

void Job::release(Replica& place, ExtentStore& extents) {
  if (!place.exists()) {
    // Rolling back means that there is no extent again.
    if (is_updating_) superseded_.push_back({.place = &place, .extent = {}});
    return;
  }
  if (place.referenced && !MEMD_PLANTED("extent.released_before_the_commit")) {
    superseded_.push_back({.place = &place, .extent = place.extent()});
  } else {
    nvme_bytes_used -= place.length_bytes;
    extents.release(place.extent());
  }
  place = {};
}

void Job::begin_update() {
  MEMD_FAILPOINT("update.begun");
  is_updating_ = true;
  for_each_replica([](Replica& replica) { replica.referenced = true; });
  update_begin_ = superseded_.size();
}

void Job::add_superseded(const std::vector<ExtentRecord>& extents) {
  for (const ExtentRecord& extent : extents) {
    superseded_.push_back({.place = nullptr, .extent = extent});
    nvme_bytes_used += extent.length_bytes;
  }
}

void Job::roll_back(ExtentStore& extents) {
  is_updating_ = false;
  std::vector<Superseded> undone(superseded_.begin() + static_cast<ptrdiff_t>(update_begin_),
                                 superseded_.end());
  superseded_.resize(update_begin_);
  committing_count_ = 0;
  MEMD_FAILPOINT("rollback.begun");
  if (MEMD_PLANTED("rollback.forgets_a_replica") && !undone.empty()) undone.pop_back();
  // Backwards, so that a place that was replaced twice ends with what it held first.
  for (auto it = undone.rbegin(); it != undone.rend(); ++it) {
    if (it->place == nullptr) {
      // A shard that was deleted meanwhile stays deleted; the last catalogue still names its bytes.
      if (it->extent.exists()) superseded_.push_back(*it);
      continue;
    }
    if (it->place->exists() && !it->place->referenced) {
      nvme_bytes_used -= it->place->length_bytes;
      extents.release(it->place->extent());
    }
    *it->place = Replica(it->extent, it->extent.exists());
  }
}

std::vector<ExtentRecord> Job::mark_committing() {
  for_each_replica([](Replica& replica) { replica.referenced = true; });
  std::vector<ExtentRecord> releasable;
  for (const Superseded& old : superseded_) {
    if (old.extent.exists()) releasable.push_back(old.extent);
  }
  committing_count_ = superseded_.size();
  changed = false;
  return releasable;
}

void Job::committed(uint64_t catalogue_tag) {
  is_updating_ = false;
  durable = std::move(committing_);
  durable_step = durable.undurable_since() == 0 ? durable.step() : 0;
  disk_error = Status::ok();
  if (durable.undurable_since() != 0) {
    // Nothing on disk is gone back to: each extent is free as soon as another takes its place.
    for_each_replica([](Replica& replica) { replica.referenced = false; });
  }
  if (ledger != nullptr) ledger->rebase(catalogue_tag);
  superseded_.erase(superseded_.begin(),
                    superseded_.begin() + static_cast<ptrdiff_t>(committing_count_));
  committing_count_ = 0;
}

void Job::drop_cached_tiles(const Bucket& bucket) {
  for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
    const uint64_t key = tile_key(bucket.value->owner, tile);
    MEMD_CHECK(!dirty_tiles.contains(key));
    const auto found = cached_tiles.find(key);
    if (found == cached_tiles.end()) continue;
    memory->private_side().free(found->second);
    cached_tiles.erase(found);
  }
}

bool Job::has_dirty_tile(const Bucket& bucket) const {
  if (dirty_tiles.empty()) return false;
  for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
    if (dirty_tiles.contains(tile_key(bucket.value->owner, tile))) return true;
  }
  return false;
}

void Job::drop_clean_tiles() {
  for (auto it = cached_tiles.begin(); it != cached_tiles.end();) {
    if (dirty_tiles.contains(it->first)) {
      ++it;
      continue;
    }
    memory->private_side().free(it->second);
    it = cached_tiles.erase(it);
  }
  while (drop_early_memory()) {
  }
}

bool Job::drop_early_memory() {
  for (const auto& [bucket, made] : early.by_bucket) {
    for (auto& tile : made->tiles) {
      if (!tile || !tile->private_offset_bytes) continue;
      memory->private_side().free(*std::exchange(tile->private_offset_bytes, std::nullopt));
      return true;
    }
  }
  return false;
}

void Job::drop_all_cached_tiles() {
  for (const auto& [key, offset_bytes] : cached_tiles) memory->private_side().free(offset_bytes);
  cached_tiles.clear();
  dirty_tiles.clear();
}

void Job::remove(uint32_t shard_id, ExtentStore& extents) {
  Shard& shard = shards[shard_id];
  Entry& entry = *shard.value;
  MEMD_CHECK_EQ(entry.task_count, 0u);
  withdraw(entry);
  // From here on it has no bytes, whoever reads the ledger.
  if (ledger != nullptr) ledger->reset_shard(shard_id);
  if (entry.is_resident()) move(entry, entry.residency(), Residency::absent);
  MEMD_CHECK(entry.residency() == Residency::absent);
  if (entry.slot != nullptr) retire_slot(std::move(entry.slot));
  if (entry.pending != nullptr) retire_slot(std::move(entry.pending));
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    if (entry.replicas[i].exists()) release(entry.replicas[i], extents);
    // During an update too, whatever becomes of it: the next shard with this id is another one.
    if (ledger != nullptr) {
      ledger->note_loose({.kind = LooseKey::Kind::bytes,
                          .owner = entry.kept_owner,
                          .index = static_cast<uint32_t>(i)},
                         {});
    }
  }
  const Replica* first = entry.replicas.data();
  for (Superseded& old : superseded_) {
    if (old.place >= first && old.place < first + entry.replicas.size()) old.place = nullptr;
  }
  // The disk has it until the next commit.
  durable.keep(shard_id, label_record(shard));
  committing_.keep(shard_id, label_record(shard));
  shard_ids.erase(shard_id);
  lost.remove(shard_id);
  const uint32_t entry_id = entry.id;
  entry_bytes_ -= align_up(entry.bytes, kBlockBytes);
  shard = {};
  shard.deleted = true;
  entries.remove(entry_id);
  free_shard_ids_.push_back(shard_id);
  changed = true;
  note_layout();
}

bool Job::is_tight() const {
  constexpr uint64_t kLargestEntries = 4;
  return memory->arena_bytes_max() < kLargestEntries * largest_entry_bytes_;
}

bool Job::gradients_fit() const {
  if (memory == nullptr) return true;
  uint64_t bytes = 0;
  uint64_t largest_bytes = 0;
  for (const Bucket& bucket : buckets) {
    const uint64_t padded = align_up(bucket.gradient->bytes, kBlockBytes);
    bytes += padded;
    largest_bytes = std::max(largest_bytes, padded);
  }
  return bytes + largest_bytes <= memory->arena_bytes_max();
}

void Job::drop_gradient(Bucket& bucket, ExtentStore& extents) {
  Entry& entry = *bucket.gradient;
  MEMD_FAILPOINT("gradient.before_drop");
  if (entry.is_resident()) move(entry, entry.residency(), Residency::absent);
  if (entry.slot != nullptr) retire_slot(std::move(entry.slot));
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    replace_gradient(entry, i, {}, extents);
    note_value_extent(entry, i);
  }
}

}  // namespace memd
