#include "store/recovery/adoption.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/failpoint.h"
#include "base/units.h"
#include "ring/shared_memory.h"
#include "store/journal/ledger_records.h"

namespace memd {
namespace {

bool starts_on_block(const ExtentRecord& extent) {
  return is_aligned(extent.address.offset_bytes, kBlockBytes);
}

/// `into` has those that were found, also where one is missing.
Status take_claimed(const std::vector<SegmentClaim>& claims, Pool& pool, JobMemory::Sides& into) {
  std::map<Side, std::map<uint32_t, Segment>> by_index;
  Status status;
  for (const SegmentClaim& claim : claims) {
    auto segment = pool.take_kept(claim.id);
    if (!segment) {
      status = error(StatusCode::fenced, "nobody kept segment ", claim.id);
      continue;
    }
    MEMD_FAILPOINT("adoption.segment_taken");
    if (claim.side == Side::unassigned) {
      into.unassigned.push_back(std::move(*segment));
      continue;
    }
    auto& side = by_index[claim.side];
    if (side.contains(claim.index)) {
      status = damaged("two segments in one place");
      into.unassigned.push_back(std::move(*segment));
    } else {
      side.emplace(claim.index, std::move(*segment));
    }
  }
  for (auto [side, segments] : {std::pair{Side::arena, &into.arena},
                                std::pair{Side::private_side, &into.private_side},
                                std::pair{Side::host_side, &into.host_side}}) {
    for (auto& [index, segment] : by_index[side]) {
      if (index != segments->size()) status = damaged("a segment is missing on its side");
      segments->push_back(std::move(segment));
    }
  }
  return status;
}

/// If the kernel has no memory for a fresh segment, the pool is smaller from now on; its report
/// shows that.
void give_back_to(Pool& pool, std::vector<Segment>& segments) {
  for (Segment& segment : segments) {
    [[maybe_unused]] const Status status = pool.give_back(std::move(segment));
  }
}

}  // namespace

Status Adoption::run(Inheritance& kept) {
  begin_shards();
  if (Status taken = take_table(kept); !taken.is_ok()) return taken;
  if (Status taken = take_segments(); !taken.is_ok()) return taken;
  if (Status taken = take_state(); !taken.is_ok()) {
    give_back();
    return taken;
  }
  settle_values();
  MEMD_FAILPOINT("ledger.adopted");
  job_.ledger = std::move(remembered_.ledger());
  job_.kept.memory()->claim_in(job_.ledger);
  tell_ledger();
  job_.durable.note_change();
  job_.table.end_adoption();
  return Status::ok();
}

void Adoption::begin_shards() {
  const JobRecord& disk = remembered_.disk();
  job_.progress.go_on();
  job_.durable.restore(disk);
  job_.progress.restore(job_.progress.committed_step(),
                        disk.undurable_since == 0 ? disk.step : 0,
                        job_.progress.undurable_since());
  for (const auto& [shard_id, state] : remembered_.contents().shards) {
    job_.shards[shard_id].contributors = state.contributors;
    if (!state.contributors.empty()) job_.gradient_buckets.add(job_.shards[shard_id].bucket);
    job_.shards[shard_id].written = state.written;
  }
}

Status Adoption::take_table(Inheritance& kept) {
  auto fd = kept.take_table(remembered_.disk().job_id);
  if (!fd) return error(StatusCode::fenced, "nobody kept its shard table");
  auto table = SharedMemory::adopt("a shard table", std::move(*fd), sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  job_.sessions.adopt(remembered_.sessions());
  // Trainers go on leasing what the daemon before has published. From here on they begin none, and
  // each pin that counts is seen by whoever is to free its slot.
  job_.table.adopt(std::move(table).value());
  job_.group.adopt(remembered_.contents().seats);
  MEMD_FAILPOINT("adoption.table_cleared");
  return Status::ok();
}

Status Adoption::take_segments() {
  const auto claims = remembered_.ledger().claims();
  if (!claims.is_ok()) return claims.status();
  const uint64_t segment_bytes = parts_.pool.segment_bytes();
  JobMemory::Sides claimed;
  Status status = take_claimed(claims.value(), parts_.pool, claimed);
  if (claims.value().size() < JobMemory::segment_count_min(segment_bytes))
    status = damaged("it claims too few segments");
  if (status.is_ok()) {
    auto memory = JobMemory::adopt(claimed, segment_bytes, parts_.io, &remembered_.ledger());
    status = memory.status();
    if (memory.is_ok()) job_.kept.adopt(std::move(memory).value());
  }
  if (!status.is_ok()) {
    for (auto* const segments :
         {&claimed.arena, &claimed.private_side, &claimed.host_side, &claimed.unassigned})
      give_back_to(parts_.pool, *segments);
    return status;
  }
  job_.kept.expect_shards();
  return Status::ok();
}

Status Adoption::take_state() {
  Status status = take_slots();
  if (status.is_ok()) status = place_loose_extents();
  if (status.is_ok()) status = place_tile_extents();
  if (status.is_ok()) status = reserve_extents();
  job_.tiles.set_words(remembered_.take_tile_words());
  if (status.is_ok()) status = take_tiles();
  if (status.is_ok()) status = check_steps_can_be_made();
  return status;
}

void Adoption::give_back() {
  for (const ExtentRecord& extent : reserved_) parts_.extents.release(extent);
  job_.sessions.clear();
  job_.kept.free_all();
  std::vector<Segment> segments = job_.kept.memory()->take_segments();
  give_back_to(parts_.pool, segments);
  for (const auto& session : remembered_.sessions()) {
    session->ring.end();
    parts_.keepsakes.forget_session(session->session_id);
  }
}

// ---- Slots --------------------------------------------------------------------------------------

Status Adoption::take_slots() {
  const std::vector<SlotRecord>& slots = remembered_.contents().slots;
  for (const SlotRecord& record : slots) {
    const Entry* const entry = find_entry(record);
    if (record.role == SlotRole::current && entry != nullptr)
      newest_[entry] = std::max(newest_[entry], record.sequence);
  }
  uint32_t pin_end = 0;
  for (const SlotRecord& record : slots) {
    pin_end = record.pin_first + record.pin_count;
    if (record.role == SlotRole::none || record.role == SlotRole::made) {
      job_.slots.adopt_free(record);
    } else if (Status taken = take_slot(record); !taken.is_ok()) {
      return taken;
    }
  }
  job_.slots.end_adoption(pin_end);
  return Status::ok();
}

Status Adoption::take_slot(const SlotRecord& record) {
  std::unique_ptr<Slot> slot = job_.slots.adopt(record);
  if (slot == nullptr) {
    return damaged("a slot of ",
                   record.bytes,
                   " bytes at ",
                   record.offset_bytes,
                   " is outside of the arena, or in another one");
  }
  MEMD_FAILPOINT("adoption.slot_taken");
  Entry* const entry = find_entry(record);
  if (entry != nullptr && !fits(record, *entry) && record.role != SlotRole::retired) {
    job_.slots.free(std::move(slot));
    return damaged("a slot of ", job_.shards.describe(*entry), " has ", record.bytes, " bytes");
  }
  place_slot(record, entry, std::move(slot));
  return Status::ok();
}

void Adoption::place_slot(const SlotRecord& record, Entry* entry, std::unique_ptr<Slot> slot) {
  if (entry != nullptr && may_be_pending(record, *entry)) {
    slot->pending_session = record.pending_session;
    job_.residencies.set_pending(*entry, std::move(slot));
    return;
  }
  if (entry != nullptr && may_be_current(record, *entry)) {
    entry->place(std::move(slot));
    job_.residencies.move(*entry, Residency::absent, Residency::filling);
    job_.residencies.move(*entry, Residency::filling, Residency::clean);
    // A writeback that was under way did not happen.
    if (record.residency != Residency::clean)
      job_.residencies.move(*entry, Residency::clean, Residency::dirty);
    return;
  }
  // A stream of the daemon's own, which died with it, may have been writing there.
  if (entry != nullptr && entry->kind() == EntryKind::gradient && record.has_service_writer) {
    for (const uint32_t shard_id : job_.shards.bucket(entry->owner()).shards)
      job_.shards[shard_id].contributors = {};
  }
  job_.slots.retire(std::move(slot));
}

bool Adoption::may_be_pending(const SlotRecord& record, const Entry& entry) const {
  const std::optional<uint32_t>& untold_pin = remembered_.untold_pin();
  const bool is_untold = untold_pin && *untold_pin >= record.pin_first &&
                         *untold_pin - record.pin_first < record.pin_count;
  return record.role == SlotRole::pending && fits(record, entry) && !record.has_service_writer &&
         !is_untold && entry.pending() == nullptr;
}

bool Adoption::may_be_current(const SlotRecord& record, const Entry& entry) const {
  const bool is_held =
      record.residency == Residency::clean || record.residency == Residency::dirty ||
      record.residency == Residency::draining ||
      (MEMD_PLANTED("adoption.filling_slot_trusted") && record.residency == Residency::filling);
  return record.role == SlotRole::current && fits(record, entry) && is_held &&
         entry.slot() == nullptr && !record.has_service_writer &&
         record.sequence == newest_.at(&entry) &&
         (entry.kind() != EntryKind::gradient || has_gradient(job_.shards.bucket(entry.owner())));
}

Entry* Adoption::find_entry(const SlotRecord& record) const {
  if (record.kind == EntryKind::bytes) {
    if (record.owner >= job_.shards.size()) return nullptr;
    const Shard& shard = job_.shards[record.owner];
    return shard.deleted || shard.kind == ShardKind::parameter ? nullptr : shard.value;
  }
  if (record.owner >= job_.shards.buckets().size()) return nullptr;
  const Bucket& bucket = job_.shards.bucket(record.owner);
  return record.kind == EntryKind::gradient ? bucket.gradient : bucket.value;
}

bool Adoption::fits(const SlotRecord& record, const Entry& entry) const {
  return record.bytes == entry.bytes() && record.pin_count == job_.shards.shard_count(entry);
}

bool Adoption::has_gradient(const Bucket& bucket) const {
  return std::any_of(bucket.shards.begin(), bucket.shards.end(), [this](uint32_t shard_id) {
    return !job_.shards[shard_id].contributors.empty();
  });
}

// ---- Extents ------------------------------------------------------------------------------------

Status Adoption::place_loose_extents() {
  for (const auto& [key, extent] : remembered_.contents().loose) {
    const Place place = find_place(key);
    if (!place.replica) {
      remembered_.ledger().note_loose(key, {});
      continue;
    }
    if (!place.may_be(extent.length_bytes) || !starts_on_block(extent)) {
      return damaged("an extent of ", extent.length_bytes, " bytes for ", place.length_bytes);
    }
    JobSpace::adopt(*place.replica, extent, job_.space.epoch());
    MEMD_FAILPOINT("adoption.extent_placed");
  }
  return Status::ok();
}

Adoption::Place Adoption::find_place(const LooseKey& key) {
  if (key.kind == LooseKey::Kind::rest) {
    if (key.owner >= job_.shards.buckets().size()) return {};
    Bucket& bucket = job_.shards.bucket(key.owner);
    if (key.index >= bucket.tile_count()) return {};
    return {.replica = bucket.rest.place(key.index),
            .length_bytes = bucket.rest_bytes(key.index),
            .length_bytes_narrow = bucket.rest_bytes_narrow(key.index)};
  }
  Entry* const entry = find_loose_entry(key);
  if (entry == nullptr || key.index >= entry->replicas().size()) return {};
  const uint32_t length_bytes = entry->replica_bytes(key.index);
  return {.replica = entry->replica_place(key.index),
          .length_bytes = length_bytes,
          .length_bytes_narrow = length_bytes};
}

Entry* Adoption::find_loose_entry(const LooseKey& key) {
  if (key.kind == LooseKey::Kind::bytes) {
    if (key.owner >= job_.shards.size()) return nullptr;
    const Shard& shard = job_.shards[key.owner];
    const bool is_known = !shard.deleted && shard.kind != ShardKind::parameter && shard.written;
    return is_known ? shard.value : nullptr;
  }
  if (key.owner >= job_.shards.buckets().size()) return nullptr;
  const Bucket& bucket = job_.shards.bucket(key.owner);
  if (key.kind == LooseKey::Kind::gradient) return has_gradient(bucket) ? bucket.gradient : nullptr;
  for (const uint32_t id : bucket.shards) job_.shards[id].is_on_disk = job_.shards[id].written;
  return bucket.value;
}

Status Adoption::place_tile_extents() {
  const auto fits = [](const ExtentRecord& extent, bool has_length) {
    return !extent.exists() || (has_length && starts_on_block(extent));
  };
  for (const KeptTile& tile : remembered_.tiles()) {
    const uint64_t owner = tile.key >> 32;
    const auto index = tile_of(tile.key);
    if (owner >= job_.shards.buckets().size() || index >= job_.shards.bucket(owner).tile_count())
      return damaged("a tile of bucket ", owner);
    Bucket& bucket = job_.shards.bucket(owner);
    const ExtentRecord& value = tile.state.value;
    const ExtentRecord& rest = tile.state.rest;
    if (!fits(value, value.length_bytes == bucket.value->replica_bytes(index)) ||
        !fits(rest, bucket.may_have_rest(index, rest.length_bytes))) {
      return damaged("a tile's extents");
    }
    JobSpace::adopt(value_place(bucket, index), value, job_.space.epoch());
    JobSpace::adopt(rest_place(bucket, index), rest, job_.space.epoch());
  }
  return Status::ok();
}

Status Adoption::reserve_extents() {
  std::map<ExtentAddress, ExtentRecord> unused;
  if (remembered_.disk().undurable_since == 0) {
    for (const ExtentRecord& extent : all_extents(remembered_.disk()))
      unused[extent.address] = extent;
  }
  Status status;
  job_.space.count([](const auto&) {});
  const auto adopt = [&](ReplicaPlace place) {
    if (!status.is_ok()) return;
    job_.space.count(place);
    const ExtentRecord extent = place->extent();
    const bool is_on_disk = unused.erase(extent.address) == 1;
    JobSpace::adopt(place, extent, is_on_disk ? JobSpace::kOnDisk : job_.space.epoch());
    if (is_on_disk) return;
    status = parts_.extents.reserve(extent);
    if (status.is_ok()) reserved_.push_back(extent);
  };
  job_.shards.for_each_replica(adopt);
  for (Bucket& bucket : job_.shards.buckets()) {
    Entry& gradient = *bucket.gradient;
    for (size_t i = 0; i < gradient.replicas().size(); ++i) {
      if (gradient.replicas()[i].exists()) adopt(gradient.replica_place(i));
    }
  }
  if (!status.is_ok()) return damaged("an extent: ", status.message());
  std::vector<ExtentRecord> superseded;
  for (const auto& [address, extent] : unused) superseded.push_back(extent);
  job_.space.add_superseded(superseded);
  return Status::ok();
}

// ---- Tiles --------------------------------------------------------------------------------------

Status Adoption::take_tiles() {
  for (const KeptTile& tile : remembered_.tiles()) {
    if (Status checked = check_tile(tile); !checked.is_ok()) return checked;
    if (tile.state.step > job_.progress.committed_step()) {
      job_.tiles.set_made(tile.key, {.piece = 0, .is_whole = true, .scratch = std::nullopt});
    }
    if (tile.update) {
      job_.tiles.set_made(
          tile.key,
          {.piece = tile.update->piece, .is_whole = false, .scratch = tile.update->scratch});
    }
    if (Status taken = take_private_tile(tile); !taken.is_ok()) return taken;
  }
  return Status::ok();
}

Status Adoption::check_tile(const KeptTile& tile) const {
  const bool has_closed_step = !remembered_.contents().steps.empty();
  const uint64_t committed_step = job_.progress.committed_step();
  const bool is_made = tile.state.step > committed_step;
  if (is_made && (tile.state.step != committed_step + 1 || !has_closed_step)) {
    return damaged("a tile is at step ", tile.state.step);
  }
  if ((is_made || tile.update) && !job_.durability.is_in_memory())
    return damaged("a tile is updated in place");
  if (!tile.update) return Status::ok();
  const Bucket& bucket = job_.shards.bucket(bucket_of(tile.key));
  if (!has_closed_step || is_made ||
      tile.update->piece * piece_elements(bucket.keeps_maxima) >=
          bucket.tile_elements(tile_of(tile.key))) {
    return damaged("an update of no step");
  }
  return Status::ok();
}

Status Adoption::take_private_tile(const KeptTile& tile) {
  if (job_.shards.bucket(bucket_of(tile.key)).is_host()) return take_host_tile(tile);
  if (!tile.state.private_offset_bytes) return Status::ok();
  const Bucket& bucket = job_.shards.bucket(bucket_of(tile.key));
  const auto index = tile_of(tile.key);
  const uint64_t offset_bytes = *tile.state.private_offset_bytes;
  const uint64_t value_bytes = bucket.value->replica_bytes(index);
  Arena& side = job_.kept.memory()->private_side();
  if (offset_bytes % kBlockBytes != 0 || tile.state.host_bytes != 0 ||
      !side.reserve(offset_bytes, value_bytes + bucket.rest_bytes(index))) {
    return damaged("a tile at ", offset_bytes, " is outside of private memory, or in another");
  }
  job_.tiles.put(tile.key, offset_bytes);
  job_.tiles.set_dirty(tile.key);
  restore_piece(tile, side.at(offset_bytes));
  return Status::ok();
}

Status Adoption::take_host_tile(const KeptTile& tile) {
  const Bucket& bucket = job_.shards.bucket(bucket_of(tile.key));
  const auto index = tile_of(tile.key);
  const uint64_t value_bytes = bucket.value->replica_bytes(index);
  const uint64_t bytes = tile.state.host_bytes;
  const bool is_known = bytes == value_bytes ||
                        bytes == value_bytes + bucket.rest_bytes_narrow(index) ||
                        bytes == value_bytes + bucket.rest_bytes(index);
  if (!tile.state.private_offset_bytes || !is_known)
    return damaged("a tile of tier host has ", bytes, " bytes");
  // Longer places come before a step begins.
  if (tile.update && bytes != value_bytes + bucket.rest_bytes(index))
    return damaged("an update in a place of ", bytes, " bytes");
  const uint64_t offset_bytes = *tile.state.private_offset_bytes;
  Arena& side = job_.kept.memory()->host_side();
  if (!side.reserve(offset_bytes, bytes)) {
    return damaged("a tile at ", offset_bytes, " is outside of tier host, or in another");
  }
  job_.host_tiles.put(tile.key, {.offset_bytes = offset_bytes, .bytes = bytes});
  if (job_.host_tiles.contains_all(bucket)) bucket.value->set_in_host_tiles();
  restore_piece(tile, side.at(offset_bytes));
  MEMD_FAILPOINT("adoption.host_tile_taken");
  return Status::ok();
}

void Adoption::restore_piece(const KeptTile& tile, std::byte* value) const {
  if (!tile.update) return;
  const Bucket& bucket = job_.shards.bucket(bucket_of(tile.key));
  const auto index = tile_of(tile.key);
  job_.tiles.words()->restore_piece({.dtype = bucket.dtype,
                                     .elements = bucket.tile_elements(index),
                                     .keeps_maxima = bucket.keeps_maxima,
                                     .value = value,
                                     .rest = value + bucket.value->replica_bytes(index)},
                                    *tile.update);
  MEMD_FAILPOINT("ledger.piece_restored");
}

// ---- What the job goes on with ------------------------------------------------------------------

/// All tiles of the bucket are updated, and its gradient may have gone with that.
bool Adoption::is_made(uint32_t bucket) const {
  for (size_t tile = 0; tile < job_.shards.bucket(bucket).tile_count(); ++tile) {
    const MadeTile* const made = job_.tiles.made(tile_key(bucket, tile));
    if (made == nullptr || !made->is_whole) return false;
  }
  return true;
}

Status Adoption::check_steps_can_be_made() const {
  for (const ClosedStep& step : remembered_.contents().steps) {
    for (const StepGroup& group : step.request.groups) {
      for (const uint32_t shard_id : group.shard_ids) {
        const Entry* const gradient = job_.shards.find_entry(shard_id, Part::gradient);
        if (gradient == nullptr) return damaged("a closed step of a shard that is no parameter");
        const bool has_bytes = gradient->slot() != nullptr || gradient->has_replica();
        if (gradient->bytes() != 0 && !has_bytes && !is_made(gradient->owner())) {
          return damaged("a closed step has no gradient of ", job_.shards.describe(*gradient));
        }
      }
    }
    if (Status staged = job_.check_staged(step.request); !staged.is_ok())
      return damaged("a closed step: ", staged.message());
  }
  return Status::ok();
}

void Adoption::settle_values() {
  for (Shard& shard : job_.shards) {
    if (shard.deleted) continue;
    const Entry& value = *shard.value;
    const bool has_bytes = value.slot() != nullptr || value.is_backed() || value.bytes() == 0;
    // New bytes of a blob took their place, and the daemon died before it could say so.
    if (shard.kind != ShardKind::parameter && value.residency() == Residency::dirty)
      shard.written = true;
    if (!has_bytes) shard.written = false;
  }
}

/// The ledger says again what is true; nothing that this daemon freed is anybody's.
void Adoption::tell_ledger() {
  JobLedger& ledger = job_.ledger;
  // Slots that are free go first: an old one that was still current beside its successor would be
  // taken for it, should this daemon die here. Before them the shards, or a gradient that was
  // dropped would seem to be there and have no bytes.
  job_.journal.note_shards();
  note_freed_slots();
  MEMD_FAILPOINT("adoption.slots_noted");
  job_.slots.note_all();
  ledger.end_grant();
  std::set<uint64_t> session_ids;
  for (const auto& session : remembered_.sessions()) {
    session_ids.insert(session->session_id);
    parts_.sessions.adopt(session);
    parts_.sessions.note(ledger, *session);
  }
  job_.group.note_all();
  job_.shards.note_given_ids(ledger.given_ids_end(static_cast<uint32_t>(job_.shards.size())));
  job_.shards.free_ids().rest_all(session_ids);
  MEMD_FAILPOINT("ledger.adoption_noted");
  for (const ClosedStep& step : remembered_.made_steps()) ledger.forget_step(step.place);
}

void Adoption::note_freed_slots() {
  std::set<uint32_t> in_use;
  for (const Entry* const entry : job_.shards.entries()) {
    if (entry == nullptr) continue;
    if (entry->slot() != nullptr) in_use.insert(entry->slot()->pin_first);
    if (entry->pending() != nullptr) in_use.insert(entry->pending()->pin_first);
  }
  std::set<uint32_t> retired;
  for (const auto& slot : job_.slots.retired()) retired.insert(slot->pin_first);
  for (SlotRecord slot : remembered_.contents().slots) {
    if (slot.role == SlotRole::none || in_use.contains(slot.pin_first)) continue;
    slot.role = retired.contains(slot.pin_first) ? SlotRole::retired : SlotRole::none;
    job_.ledger.note_slot(slot);
  }
}

}  // namespace memd
