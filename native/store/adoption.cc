// ShardStore at start: jobs from disk, and from the memory that outlived the daemon before.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/shard_store.h"

namespace memd {
namespace {

template <typename... Parts>
Status damaged(const Parts&... parts) {
  return error(StatusCode::integrity, "the ledger is damaged: ", parts...);
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

std::pair<uint16_t, uint64_t> address_of(const ExtentRecord& extent) {
  return {extent.address.device, extent.address.offset_bytes};
}

SlotRecord* find_current(LedgerContents& contents, uint32_t shard_id) {
  SlotRecord* found = nullptr;
  for (SlotRecord& slot : contents.slots) {
    if (slot.role != SlotRole::current || slot.kind != EntryKind::bytes || slot.owner != shard_id)
      continue;
    if (found == nullptr || slot.sequence > found->sequence) found = &slot;
  }
  return found;
}

/// The step is in the catalogue on disk, and its daemon died before it could say so: what
/// ShardStore does after a commit.
void finish_made_step(LedgerContents& contents, const ClosedStep& step, const JobRecord& base) {
  for (const StepGroup& group : step.request.groups) {
    for (const uint32_t shard_id : group.shard_ids) contents.shards[shard_id].gradient_session = 0;
  }
  for (const auto& [staged_id, buffer_id] : step.request.staged_buffers) {
    SlotRecord* const staged = find_current(contents, staged_id);
    SlotRecord* const old = find_current(contents, buffer_id);
    bool is_on_disk = false;
    for (size_t i = 0; i < contents.shard_ids.size(); ++i) {
      if (contents.shard_ids[i] != buffer_id) continue;
      const std::string& name = contents.layout.shards[i].name;
      is_on_disk = std::any_of(base.shards.begin(), base.shards.end(), [&](const auto& shard) {
        return shard.name == name && !shard.extents.empty();
      });
    }
    // Where the staged bytes are in no slot, they became the buffer's already, or lie on disk.
    if (old != nullptr && (staged != nullptr || is_on_disk)) old->role = SlotRole::retired;
    if (staged != nullptr) staged->owner = buffer_id;
    contents.shards[buffer_id].written = true;
    contents.shards[staged_id].written = false;
  }
  for (SessionRecord& session : contents.sessions) {
    if (session.session_id == step.request.session_id)
      session.step_committed = std::max(session.step_committed, step.request.step);
  }
}

/// The base says where the step's buffers lie. What the ledger says of them is of before the step,
/// or the same.
void forget_loose_of_buffers(LedgerContents& contents, const ClosedStep& step, Ledger& ledger) {
  std::set<uint32_t> ids;
  for (const auto& [staged_id, buffer_id] : step.request.staged_buffers)
    ids.insert({staged_id, buffer_id});
  std::erase_if(contents.loose, [&](const auto& each) {
    const LooseKey& key = each.first;
    if (key.kind != LooseKey::Kind::bytes || !ids.contains(key.owner)) return false;
    ledger.note_loose(key, {});
    return true;
  });
}

/// The shards that memory knows, with the bytes that `base` has of them.
Result<JobRecord> merge(const LedgerContents& contents, const JobRecord& base) {
  JobRecord merged = contents.layout;
  merged.step = base.step;
  merged.undurable_since = base.undurable_since;
  if (merged.uid != base.uid || merged.name != base.name) return damaged("it is of another job");
  if (base.buckets.size() > merged.buckets.size()) return damaged("buckets are missing");
  for (size_t i = 0; i < base.buckets.size(); ++i) {
    if (merged.buckets[i].dtype != base.buckets[i].dtype ||
        merged.buckets[i].element_count != base.buckets[i].element_count) {
      return damaged("bucket ", i, " is another one on disk");
    }
    merged.buckets[i] = base.buckets[i];
  }
  std::map<std::string, const ShardRecord*> on_disk;
  for (const ShardRecord& shard : base.shards) on_disk[shard.name] = &shard;
  for (size_t i = 0; i < merged.shards.size(); ++i) {
    ShardRecord& shard = merged.shards[i];
    const ShardState& state = contents.shards.at(contents.shard_ids[i]);
    const auto found = on_disk.find(shard.name);
    // A shard that was deleted and came back under its name has none of the old bytes.
    if (found != on_disk.end() && !state.is_new && is_same_shard(shard, *found->second)) {
      shard.generation = found->second->generation;
      if (state.written) shard.extents = found->second->extents;
    }
    if (state.generation) shard.generation = *state.generation;
    shard.written = state.written;
  }
  return merged;
}

}  // namespace

Status ShardStore::load(const std::function<Status()>& turn, KeptDescriptors* kept_descriptors) {
  end_turns();  // of another store that this thread has had
  auto records = commits_.load(turn);
  if (!records.is_ok()) return records.status();
  // First what is on disk: where memory claims the same bytes, memory is wrong.
  for (const JobRecord& record : records.value()) {
    MEMD_FAILPOINT("load.before_job");
    // Another job's by now, maybe; memory knows which are still its own.
    if (record.undurable_since != 0) continue;
    for (const ExtentRecord& extent : all_extents(record)) {
      if (Status reserved = extents_.reserve(extent); !reserved.is_ok()) return reserved;
    }
    MEMD_FAILPOINT("load.extents_reserved");
  }
  Inheritance kept(kept_descriptors);
  std::map<uint64_t, std::unique_ptr<Ledger>> ledgers;
  bool some_claims_unknown = false;
  sessions_.begin_ids(kept.session_id_max());
  while (auto left = kept.take_ledger()) {
    auto ledger = Ledger::adopt(std::move(left->fd), left->job_id);
    const Status readable = ledger.is_ok() ? ledger.value()->check_claims() : ledger.status();
    if (readable.is_ok()) {
      ledgers[left->job_id] = std::move(ledger).value();
      continue;
    }
    load_notes_.push_back(concat(
        "job ", left->job_id, " starts from disk, its memory is lost: ", readable.message()));
    some_claims_unknown = true;
    keepsakes_.forget_ledger(left->job_id);
  }
  struct Adopted {
    Job* job;
    LedgerContents contents;
  };
  std::vector<Adopted> adopted;
  for (const JobRecord& record : records.value()) {
    std::unique_ptr<Job> job;
    LedgerContents contents;
    if (const auto found = ledgers.find(record.job_id); found != ledgers.end()) {
      auto result = adopt(record, found->second, contents, kept);
      if (result.is_ok()) {
        job = std::move(result).value();
        ledgers.erase(found);
      } else {
        load_notes_.push_back(concat("job ",
                                     record.name,
                                     " starts from disk, at step ",
                                     record.step,
                                     "; its memory is lost: ",
                                     result.status().message()));
        // Those that were taken already are nobody's any more.
        for (const SessionRecord& session : contents.sessions)
          keepsakes_.forget_session(session.session_id);
      }
    }
    if (job == nullptr) {
      auto restored = Job::restore(record);
      if (!restored.is_ok()) return restored.status();
      job = std::move(restored).value();
    }
    connect(*job);
    Job& known = jobs_.put(std::move(job));
    apply_weight(record.job_id, known.weight());
    if (known.journal().ledger() != nullptr) adopted.push_back({&known, std::move(contents)});
  }
  // What is left is of jobs that the disk does not know, or that start from disk.
  for (const auto& [job_id, ledger] : ledgers) {
    destroy_claimed(*ledger);
    kept.take_table(job_id);
    kept.take_tiles(job_id);
    keepsakes_.forget_ledger(job_id);
    keepsakes_.forget_table(job_id);
    keepsakes_.forget_tiles(job_id);
  }
  if (some_claims_unknown) destroy_unclaimed();
  for (const Adopted& each : adopted) go_on(*each.job, each.contents);
  return Status::ok();
}

void ShardStore::destroy_claimed(const Ledger& ledger) {
  const auto claims = ledger.claims();
  MEMD_CHECK(claims.is_ok());  // checked when it was adopted
  for (const SegmentClaim& claim : claims.value()) {
    if (auto segment = pool_.take_kept(claim.id)) add_to_pool(std::move(*segment));
  }
}

void ShardStore::destroy_unclaimed() {
  for (const uint64_t id : pool_.kept_ids()) add_to_pool(std::move(*pool_.take_kept(id)));
}

// ---- One job ------------------------------------------------------------------------------------

Result<std::unique_ptr<Job>> ShardStore::adopt(const JobRecord& disk,
                                               std::unique_ptr<Ledger>& ledger,
                                               LedgerContents& contents,
                                               Inheritance& kept) {
  if (ledger->is_given_up())
    return error(StatusCode::fenced, "it was given up by the daemon before");
  const uint64_t tag = commits_.catalogue_tag(disk.job_id);
  auto read = ledger->read(tag);
  if (!read.is_ok()) return read.status();
  contents = std::move(read).value();
  if (contents.segment_bytes != pool_.segment_bytes()) {
    return error(StatusCode::invalid_argument,
                 "its segments have ",
                 contents.segment_bytes,
                 " bytes, those of the pool ",
                 pool_.segment_bytes());
  }
  const auto remembered = ledger->read_record(tag);
  if (!remembered.is_ok()) return remembered.status();
  const auto& in_memory = remembered.value();
  const bool is_ahead = in_memory && in_memory->step >= disk.step;
  const JobRecord& base = is_ahead ? *in_memory : disk;
  std::unique_ptr<TileWords> tile_words;
  std::vector<KeptTile> tiles;
  if (auto fd = kept.take_tiles(disk.job_id)) {
    auto adopted = TileWords::adopt(std::move(*fd), disk.job_id);
    if (!adopted.is_ok()) return adopted.status();
    tile_words = std::move(adopted).value();
    auto found = tile_words->read(tag);
    if (!found.is_ok()) return found.status();
    tiles = std::move(found).value();
  } else if (ledger->has_tile_words()) {
    return error(StatusCode::fenced, "nobody kept what is said of its tiles");
  }

  for (const ClosedStep& step : contents.steps) {
    for (const StepGroup& group : step.request.groups) {
      for (const uint32_t shard_id : group.shard_ids) {
        if (!contents.shards.contains(shard_id)) return damaged("a closed step's shard ", shard_id);
      }
    }
    for (const auto& [staged, buffer] : step.request.staged_buffers) {
      if (!contents.shards.contains(staged) || !contents.shards.contains(buffer))
        return damaged("a closed step's buffer ", buffer);
    }
  }
  std::set<uint32_t> sealed;
  std::vector<ClosedStep> to_do;
  for (const ClosedStep& step : contents.steps) {
    if (step.number != 0 && step.number <= base.step) {
      finish_made_step(contents, step, base);
      forget_loose_of_buffers(contents, step, *ledger);
      continue;
    }
    to_do.push_back(step);
    for (const StepGroup& group : step.request.groups)
      sealed.insert(group.shard_ids.begin(), group.shard_ids.end());
  }
  // A step that is made now is one that the ledger no longer holds.
  std::vector<ClosedStep> made = std::exchange(contents.steps, std::move(to_do));
  std::erase_if(made, [&](const ClosedStep& step) {
    return std::any_of(contents.steps.begin(), contents.steps.end(), [&](const ClosedStep& other) {
      return other.place == step.place;
    });
  });

  // Sessions: their rings, or the job is not what its trainers think it is.
  std::vector<std::shared_ptr<Session>> sessions;
  for (const SessionRecord& record : contents.sessions) {
    auto left = kept.take_session(record.session_id);
    if (!left) {
      keepsakes_.forget_session(record.session_id);
      return error(StatusCode::fenced, "nobody kept session ", record.session_id);
    }
    auto ring = ServerRing::adopt(std::move(left->memory), std::move(left->doorbell));
    if (!ring.is_ok()) {
      const bool was_ended = ring.status().code() == StatusCode::fenced;
      // In order, and a session that the ledger names is kept.
      if (was_ended) ledger->forget_session(record.session_id);
      keepsakes_.forget_session(record.session_id);
      if (!was_ended) return ring.status();
      continue;
    }
    MEMD_FAILPOINT("adoption.session_taken");
    sessions.push_back(std::make_shared<Session>(Session{.session_id = record.session_id,
                                                         .job_id = disk.job_id,
                                                         .ring = std::move(ring).value(),
                                                         .request_count_open = 0,
                                                         .owner = record.owner,
                                                         .step_committed = record.step_committed,
                                                         .plan = nullptr}));
  }
  const auto find_session = [&sessions](uint64_t session_id) -> const Session* {
    for (const auto& session : sessions) {
      if (session->session_id == session_id) return session.get();
    }
    return nullptr;
  };
  std::optional<uint32_t> untold_pin;
  if (contents.grant) {
    const GrantRecord& grant = *contents.grant;
    const Session* const session = find_session(grant.session_id);
    const auto shard = contents.shards.find(grant.shard_id);
    if (shard != contents.shards.end() &&
        (session == nullptr || session->ring.completion_tail() == grant.completion_tail)) {
      untold_pin = grant.pin_index;
      if (grant.part == Part::gradient) {
        shard->second.gradient_session = grant.gradient_session;
      } else if (!grant.was_written) {
        shard->second.written = false;
      }
    }
  }
  for (auto& [shard_id, state] : contents.shards) {
    if (sealed.contains(shard_id) && !MEMD_PLANTED("adoption.sealed_gradients_dropped")) {
      state.gradient_session = kSealedGradient;
    } else if (find_session(state.gradient_session) == nullptr) {
      state.gradient_session = 0;
    }
  }

  const auto merged = merge(contents, base);
  if (!merged.is_ok()) return merged.status();
  auto restored = Job::restore(merged.value(), contents.shard_ids);
  if (!restored.is_ok()) return restored.status();
  std::unique_ptr<Job> job = std::move(restored).value();
  job->progress.go_on();
  job->durable().restore(disk);
  job->progress.restore(job->progress.committed_step(),
                        disk.undurable_since == 0 ? disk.step : 0,
                        job->progress.undurable_since());
  for (const auto& [shard_id, state] : contents.shards) {
    job->shards()[shard_id].gradient_session = state.gradient_session;
    job->shards()[shard_id].written = state.written;
  }
  auto table_fd = kept.take_table(disk.job_id);
  if (!table_fd) return error(StatusCode::fenced, "nobody kept its shard table");
  auto table = SharedMemory::adopt("a shard table", std::move(*table_fd), sizeof(TableLayout));
  if (!table.is_ok()) return table.status();
  job->sessions = sessions;
  Sessions::keep_tags(job->sessions);
  // Trainers go on leasing what the daemon before has published. From here on they begin none, and
  // each pin that counts is seen by whoever is to free its slot.
  job->table().adopt(std::move(table).value());
  MEMD_FAILPOINT("adoption.table_cleared");

  if (Status taken = adopt_segments(*job, *ledger); !taken.is_ok()) return taken;
  Status status = adopt_slots(*job, contents, untold_pin);
  std::vector<ExtentRecord> reserved;
  if (status.is_ok()) status = adopt_extents(*job, contents, tiles, *ledger, disk, reserved);
  job->tiles.set_words(std::move(tile_words));
  if (status.is_ok()) status = adopt_tiles(*job, tiles, !contents.steps.empty());
  if (status.is_ok()) status = check_steps_can_be_made(*job, contents);
  if (!status.is_ok()) {
    for (const ExtentRecord& extent : reserved) extents_.release(extent);
    job->sessions.clear();
    free_slots(*job);
    for (Segment& segment : job->memory->take_segments()) add_to_pool(std::move(segment));
    for (const auto& session : sessions) {
      session->ring.end();
      keepsakes_.forget_session(session->session_id);
    }
    return status;
  }
  settle_values(*job);
  MEMD_FAILPOINT("ledger.adopted");

  // The ledger says again what is true; nothing that this daemon freed is anybody's.
  job->journal().open(std::move(ledger));
  // Slots that are free go first: an old one that was still current beside its successor would be
  // taken for it, should this daemon die here. Before them the shards, or a gradient that was
  // dropped would seem to be there and have no bytes.
  job->journal().note_shards();
  std::set<uint32_t> in_use;
  for (Entry* const entry : job->shards().entries()) {
    if (entry == nullptr) continue;
    if (entry->slot != nullptr) in_use.insert(entry->slot->pin_first);
    if (entry->pending != nullptr) in_use.insert(entry->pending->pin_first);
  }
  for (const auto& slot : job->slots().retired()) in_use.insert(slot->pin_first);
  for (SlotRecord slot : contents.slots) {
    if (slot.role == SlotRole::none) continue;
    const bool is_retired = std::any_of(job->slots().retired().begin(),
                                        job->slots().retired().end(),
                                        [&](auto& it) { return it->pin_first == slot.pin_first; });
    if (in_use.contains(slot.pin_first) && !is_retired) continue;
    slot.role = is_retired ? SlotRole::retired : SlotRole::none;
    job->journal().ledger()->note_slot(slot);
  }
  MEMD_FAILPOINT("adoption.slots_noted");
  job->slots().note_all();
  job->journal().ledger()->end_grant();
  for (const auto& session : sessions) {
    job->plans().begin(*session);
    sessions_.adopt(session);
    sessions_.note(job->journal().ledger().get(), *session);
  }
  MEMD_FAILPOINT("ledger.adoption_noted");
  for (const ClosedStep& step : made) job->journal().ledger()->forget_step(step.place);
  job->durable().note_change();
  job->table().end_adoption();
  return job;
}

Status ShardStore::adopt_segments(Job& job, Ledger& ledger) {
  const auto claims = ledger.claims();
  if (!claims.is_ok()) return claims.status();
  std::map<uint32_t, Segment> sides[2];
  std::vector<Segment> unassigned;
  Status status;
  for (const SegmentClaim& claim : claims.value()) {
    auto segment = pool_.take_kept(claim.id);
    if (!segment) {
      status = error(StatusCode::fenced, "nobody kept segment ", claim.id);
      continue;
    }
    MEMD_FAILPOINT("adoption.segment_taken");
    if (claim.side == Side::unassigned) {
      unassigned.push_back(std::move(*segment));
      continue;
    }
    auto& side = sides[claim.side == Side::arena ? 0 : 1];
    if (side.contains(claim.index)) {
      status = damaged("two segments in one place");
      unassigned.push_back(std::move(*segment));
    } else {
      side.emplace(claim.index, std::move(*segment));
    }
  }
  std::vector<Segment> in_order[2];
  for (const int i : {0, 1}) {
    for (auto& [index, segment] : sides[i]) {
      if (index != in_order[i].size()) status = damaged("a segment is missing on its side");
      in_order[i].push_back(std::move(segment));
    }
  }
  const uint64_t segment_bytes = pool_.segment_bytes();
  if (claims.value().size() < JobMemory::segment_count_min(segment_bytes))
    status = damaged("it claims too few segments");
  if (status.is_ok()) {
    auto memory =
        JobMemory::adopt(in_order[0], in_order[1], unassigned, segment_bytes, io_, &ledger);
    if (memory.is_ok()) {
      job.memory = std::move(memory).value();
    } else {
      status = memory.status();
    }
  }
  if (!status.is_ok()) {
    for (auto* const segments : {&in_order[0], &in_order[1], &unassigned}) {
      for (Segment& segment : *segments) add_to_pool(std::move(segment));
    }
    return status;
  }
  job.expect_memory();
  return Status::ok();
}

Status ShardStore::adopt_slots(Job& job,
                               const LedgerContents& contents,
                               std::optional<uint32_t> untold_pin) {
  const auto find_entry = [&job](const SlotRecord& record) -> Entry* {
    if (record.kind == EntryKind::bytes) {
      const bool known = record.owner < job.shards().size() &&
                         !job.shards()[record.owner].deleted &&
                         job.shards()[record.owner].kind != ShardKind::parameter;
      return known ? job.shards()[record.owner].value : nullptr;
    }
    if (record.owner >= job.shards().buckets().size()) return nullptr;
    Bucket& bucket = job.shards().bucket(record.owner);
    return record.kind == EntryKind::gradient ? bucket.gradient : bucket.value;
  };
  const auto has_gradient = [&job](const Entry& entry) {
    const auto& ids = job.shards().bucket(entry.owner).shards;
    return std::any_of(ids.begin(), ids.end(), [&](uint32_t shard_id) {
      return job.shards()[shard_id].gradient_session != 0;
    });
  };
  std::map<const Entry*, uint64_t> newest;
  for (const SlotRecord& record : contents.slots) {
    Entry* const entry = find_entry(record);
    if (record.role == SlotRole::current && entry != nullptr)
      newest[entry] = std::max(newest[entry], record.sequence);
  }
  uint32_t pin_end = 0;
  for (const SlotRecord& record : contents.slots) {
    pin_end = record.pin_first + record.pin_count;
    if (record.role == SlotRole::none || record.role == SlotRole::made) {
      job.slots().adopt_free(record);
      continue;
    }
    std::unique_ptr<Slot> slot = job.slots().adopt(record);
    if (slot == nullptr) {
      return damaged("a slot of ",
                     record.bytes,
                     " bytes at ",
                     record.offset_bytes,
                     " is outside of the arena, or in another one");
    }
    MEMD_FAILPOINT("adoption.slot_taken");
    Entry* const entry = find_entry(record);
    const bool fits = entry != nullptr && record.bytes == entry->bytes &&
                      record.pin_count == job.shards().shard_count(*entry);
    if (entry != nullptr && !fits && record.role != SlotRole::retired) {
      job.slots().free(std::move(slot));
      return damaged("a slot of ", job.shards().describe(*entry), " has ", record.bytes, " bytes");
    }
    const bool is_untold = untold_pin && *untold_pin >= record.pin_first &&
                           *untold_pin - record.pin_first < record.pin_count;
    const bool is_held =
        record.residency == Residency::clean || record.residency == Residency::dirty ||
        record.residency == Residency::draining ||
        (MEMD_PLANTED("adoption.filling_slot_trusted") && record.residency == Residency::filling);
    if (record.role == SlotRole::pending && fits && !record.has_service_writer && !is_untold &&
        entry->pending == nullptr) {
      slot->pending_session = record.pending_session;
      job.residencies().set_pending(*entry, std::move(slot));
    } else if (record.role == SlotRole::current && fits && is_held && entry->slot == nullptr &&
               !record.has_service_writer && record.sequence == newest[entry] &&
               (entry->kind != EntryKind::gradient || has_gradient(*entry))) {
      entry->slot = std::move(slot);
      job.residencies().move(*entry, Residency::absent, Residency::filling);
      job.residencies().move(*entry, Residency::filling, Residency::clean);
      // A writeback that was under way did not happen.
      if (record.residency != Residency::clean)
        job.residencies().move(*entry, Residency::clean, Residency::dirty);
    } else {
      // A stream of the daemon's own, which died with it, may have been writing there.
      if (entry != nullptr && entry->kind == EntryKind::gradient && record.has_service_writer) {
        for (const uint32_t shard_id : job.shards().bucket(entry->owner).shards)
          job.shards()[shard_id].gradient_session = 0;
      }
      job.slots().retire(std::move(slot));
    }
  }
  job.slots().end_adoption(pin_end);
  return Status::ok();
}

Status ShardStore::adopt_extents(Job& job,
                                 const LedgerContents& contents,
                                 const std::vector<KeptTile>& tiles,
                                 Ledger& ledger,
                                 const JobRecord& disk,
                                 std::vector<ExtentRecord>& reserved) {
  for (const auto& [key, extent] : contents.loose) {
    Replica* place = nullptr;
    uint32_t length_bytes = 0;
    const auto in_entry = [&](Entry* entry) {
      if (entry == nullptr || key.index >= entry->replicas.size()) return;
      place = &entry->replicas[key.index];
      length_bytes = entry->replica_bytes(key.index);
    };
    Bucket* const bucket =
        key.owner < job.shards().buckets().size() ? &job.shards().bucket(key.owner) : nullptr;
    switch (key.kind) {
      case LooseKey::Kind::value:
        if (bucket == nullptr) break;
        in_entry(bucket->value);
        for (const uint32_t id : bucket->shards) {
          job.shards()[id].is_on_disk = job.shards()[id].written;
        }
        break;
      case LooseKey::Kind::gradient:
        if (bucket != nullptr &&
            std::any_of(bucket->shards.begin(), bucket->shards.end(), [&](uint32_t shard_id) {
              return job.shards()[shard_id].gradient_session != 0;
            })) {
          in_entry(bucket->gradient);
        }
        break;
      case LooseKey::Kind::rest:
        if (bucket != nullptr && key.index < bucket->tile_count()) {
          place = &bucket->rest[key.index];
          length_bytes = bucket->rest_bytes(key.index);
        }
        break;
      case LooseKey::Kind::bytes:
        if (key.owner < job.shards().size() && !job.shards()[key.owner].deleted &&
            job.shards()[key.owner].kind != ShardKind::parameter &&
            job.shards()[key.owner].written) {
          in_entry(job.shards()[key.owner].value);
        }
        break;
    }
    if (place == nullptr) {
      // Of a shard or a gradient that was dropped.
      ledger.note_loose(key, {});
      continue;
    }
    if (extent.length_bytes != length_bytes) {
      return damaged("an extent of ", extent.length_bytes, " bytes for ", length_bytes);
    }
    *place = Replica(extent, false);
    MEMD_FAILPOINT("adoption.extent_placed");
  }

  for (const KeptTile& tile : tiles) {
    const uint64_t owner = tile.key >> 32;
    const auto index = tile_of(tile.key);
    if (owner >= job.shards().buckets().size() || index >= job.shards().bucket(owner).tile_count())
      return damaged("a tile of bucket ", owner);
    Bucket& bucket = job.shards().bucket(owner);
    const auto fits = [](const ExtentRecord& extent, uint64_t bytes) {
      return !extent.exists() || extent.length_bytes == bytes;
    };
    if (!fits(tile.state.value, bucket.value->replica_bytes(index)) ||
        !fits(tile.state.rest, bucket.rest_bytes(index))) {
      return damaged("a tile's extents");
    }
    bucket.value->replicas[index] = Replica(tile.state.value, false);
    bucket.rest[index] = Replica(tile.state.rest, false);
  }

  std::map<std::pair<uint16_t, uint64_t>, ExtentRecord> unused;
  if (disk.undurable_since == 0) {
    for (const ExtentRecord& extent : all_extents(disk)) unused[address_of(extent)] = extent;
  }
  Status status;
  job.space.count([](const auto&) {});
  const auto adopt = [&](Replica& replica) {
    if (!status.is_ok()) return;
    job.space.count(replica);
    replica.referenced = unused.erase(address_of(replica.extent())) == 1;
    if (replica.referenced) return;
    status = extents_.reserve(replica.extent());
    if (status.is_ok()) reserved.push_back(replica.extent());
  };
  job.shards().for_each_replica(adopt);
  for (Bucket& bucket : job.shards().buckets()) {
    for (Replica& replica : bucket.gradient->replicas) {
      if (replica.exists()) adopt(replica);
    }
  }
  if (!status.is_ok()) return damaged("an extent: ", status.message());
  std::vector<ExtentRecord> superseded;
  for (const auto& [address, extent] : unused) superseded.push_back(extent);
  job.space.add_superseded(superseded);
  return Status::ok();
}

Status ShardStore::adopt_tiles(Job& job, const std::vector<KeptTile>& tiles, bool has_closed_step) {
  for (const KeptTile& tile : tiles) {
    const Bucket& bucket = job.shards().bucket(bucket_of(tile.key));
    const auto index = tile_of(tile.key);
    const bool is_made = tile.state.step > job.progress.committed_step();
    if (is_made && (tile.state.step != job.progress.committed_step() + 1 || !has_closed_step)) {
      return damaged("a tile is at step ", tile.state.step);
    }
    if ((is_made || tile.update) && !job.durability.is_in_memory())
      return damaged("a tile is updated in place");
    if (is_made) {
      job.tiles.set_made(tile.key, {.element_first = 0, .is_whole = true, .scratch = std::nullopt});
    }
    if (tile.update) {
      if (!has_closed_step || is_made ||
          tile.update->piece * kPieceElements >= bucket.tile_elements(index)) {
        return damaged("an update of no step");
      }
      job.tiles.set_made(tile.key,
                         {.element_first = tile.update->piece * kPieceElements,
                          .is_whole = false,
                          .scratch = tile.update->scratch});
    }
    if (!tile.state.private_offset_bytes) continue;
    const uint64_t offset_bytes = *tile.state.private_offset_bytes;
    const uint64_t value_bytes = bucket.value->replica_bytes(index);
    Arena& side = job.memory->private_side();
    if (offset_bytes % kBlockBytes != 0 ||
        !side.reserve(offset_bytes, value_bytes + bucket.rest_bytes(index))) {
      return damaged("a tile at ", offset_bytes, " is outside of private memory, or in another");
    }
    job.tiles.put(tile.key, offset_bytes);
    job.tiles.set_dirty(tile.key);
    if (!tile.update) continue;
    job.tiles.words()->restore_piece({.dtype = bucket.dtype,
                                      .elements = bucket.tile_elements(index),
                                      .value = side.at(offset_bytes),
                                      .rest = side.at(offset_bytes) + value_bytes},
                                     *tile.update);
    MEMD_FAILPOINT("ledger.piece_restored");
  }
  return Status::ok();
}

void ShardStore::settle_values(Job& job) {
  for (Shard& shard : job.shards()) {
    if (shard.deleted) continue;
    const Entry& value = *shard.value;
    const bool has_bytes = value.slot != nullptr || value.has_replica() || value.bytes == 0;
    // New bytes of a blob took their place, and the daemon died before it could say so.
    if (shard.kind != ShardKind::parameter && value.residency() == Residency::dirty)
      shard.written = true;
    if (!has_bytes) shard.written = false;
  }
}

Status ShardStore::check_steps_can_be_made(const Job& job, const LedgerContents& contents) const {
  for (const ClosedStep& step : contents.steps) {
    for (const StepGroup& group : step.request.groups) {
      for (const uint32_t shard_id : group.shard_ids) {
        const Entry* const gradient = job.shards().find_entry(shard_id, Part::gradient);
        if (gradient == nullptr) return damaged("a closed step of a shard that is no parameter");
        if (gradient->bytes != 0 && gradient->slot == nullptr && !gradient->has_replica()) {
          return damaged("a closed step has no gradient of ", job.shards().describe(*gradient));
        }
      }
    }
    if (Status staged = check_staged(job, step.request); !staged.is_ok())
      return damaged("a closed step: ", staged.message());
  }
  return Status::ok();
}

void ShardStore::go_on(Job& job, const LedgerContents& contents) {
  for (const ClosedStep& step : contents.steps) {
    MEMD_FAILPOINT("adoption.before_redo");
    // Who asked is told when it asks again.
    accept_step(job, step.request, step.place, [](const Status&, const StepReport&) {}, true);
  }
}

// ---- What is written for the next daemon --------------------------------------------------------

Status ShardStore::open_ledger(Job& job) {
  if (!keepsakes_.has_keeper()) return Status::ok();
  auto ledger = Ledger::create(job.job_id, pool_.segment_bytes());
  if (!ledger.is_ok()) return ledger.status();
  job.journal().open(std::move(ledger).value());
  job.journal().ledger()->rebase(commits_.catalogue_tag(job.job_id));
  if (Status opened = open_tile_words(job); !opened.is_ok()) return opened;
  job.journal().note_shards();
  job.slots().note_all();
  return Status::ok();
}

void ShardStore::keep_memory(Job& job) {
  if (job.journal().ledger() == nullptr) return;
  MEMD_FAILPOINT("ledger.before_kept");
  keep_tile_words(job);
  keepsakes_.keep_job(job.job_id, job.table().memory().fd(), job.journal().ledger()->fd());
}

void ShardStore::keep_tile_words(Job& job) {
  if (job.journal().ledger() == nullptr || job.tiles.words() == nullptr) return;
  keepsakes_.keep_tiles(job.job_id, job.tiles.words()->fd());
  job.journal().ledger()->note_tile_words();
}

Status ShardStore::open_tile_words(Job& job) {
  if (job.journal().ledger() == nullptr || job.tiles.words() != nullptr ||
      !job.durability.is_in_memory())
    return Status::ok();
  auto words = TileWords::create(job.job_id);
  if (!words.is_ok()) return words.status();
  job.tiles.set_words(std::move(words).value());
  return Status::ok();
}

}  // namespace memd
