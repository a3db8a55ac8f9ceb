#include "store/recovery/remembered_job.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/failpoint.h"
#include "store/cache/shard.h"
#include "store/journal/ledger_records.h"

namespace memd {
namespace {

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
    for (const uint32_t shard_id : group.shard_ids) contents.shards[shard_id].contributors = {};
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
    // If the staged bytes are in no slot, they became the buffer's already, or lie on disk.
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

/// The base says where the step's buffers lie. The ledger names the places of before the
/// step, or the same.
void forget_loose_of_buffers(LedgerContents& contents, const ClosedStep& step, JobLedger& ledger) {
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

}  // namespace

Status RememberedJob::read(uint64_t segment_bytes, Inheritance& kept, Keepsakes& keepsakes) {
  if (Status status = read_ledger(segment_bytes); !status.is_ok()) return status;
  if (Status status = read_tile_words(kept); !status.is_ok()) return status;
  if (Status status = check_steps(); !status.is_ok()) return status;
  sort_steps();
  if (Status status = take_sessions(kept, keepsakes); !status.is_ok()) return status;
  undo_grant();
  settle_gradients();
  return merge();
}

Status RememberedJob::read_ledger(uint64_t segment_bytes) {
  if (ledger_.is_given_up())
    return error(StatusCode::fenced, "it was given up by the daemon before");
  auto read = ledger_.read(tag_);
  if (!read.is_ok()) return read.status();
  contents_ = std::move(read).value();
  if (contents_.segment_bytes != segment_bytes) {
    return error(StatusCode::invalid_argument,
                 "its segments have ",
                 contents_.segment_bytes,
                 " bytes, those of the pool ",
                 segment_bytes);
  }
  auto remembered = ledger_.read_record(tag_);
  if (!remembered.is_ok()) return remembered.status();
  in_memory_ = std::move(remembered).value();
  if (in_memory_ && in_memory_->step < disk_.step) in_memory_.reset();
  return Status::ok();
}

Status RememberedJob::read_tile_words(Inheritance& kept) {
  auto fd = kept.take_tiles(disk_.job_id);
  if (!fd) {
    if (!ledger_.has_tile_words()) return Status::ok();
    return error(StatusCode::fenced, "nobody kept what is said of its tiles");
  }
  auto adopted = TileWords::adopt(std::move(*fd), disk_.job_id);
  if (!adopted.is_ok()) return adopted.status();
  tile_words_ = std::move(adopted).value();
  auto found = tile_words_->read(tag_);
  if (!found.is_ok()) return found.status();
  tiles_ = std::move(found).value();
  return Status::ok();
}

Status RememberedJob::check_steps() const {
  for (const ClosedStep& step : contents_.steps) {
    for (const StepGroup& group : step.request.groups) {
      for (const uint32_t shard_id : group.shard_ids) {
        if (!contents_.shards.contains(shard_id))
          return damaged("a closed step's shard ", shard_id);
      }
    }
    for (const auto& [staged, buffer] : step.request.staged_buffers) {
      if (!contents_.shards.contains(staged) || !contents_.shards.contains(buffer))
        return damaged("a closed step's buffer ", buffer);
    }
  }
  return Status::ok();
}

void RememberedJob::sort_steps() {
  std::vector<ClosedStep> to_do;
  for (const ClosedStep& step : contents_.steps) {
    if (step.number != 0 && step.number <= base().step) {
      finish_made_step(contents_, step, base());
      forget_loose_of_buffers(contents_, step, ledger_);
    } else {
      to_do.push_back(step);
    }
  }
  // A step that is made now is one that the ledger no longer holds.
  made_ = std::exchange(contents_.steps, std::move(to_do));
  std::erase_if(made_, [&](const ClosedStep& step) {
    return std::any_of(contents_.steps.begin(), contents_.steps.end(), [&](const auto& other) {
      return other.place == step.place;
    });
  });
}

/// Sessions need their rings, or the job is not what its trainers think it is.
Status RememberedJob::take_sessions(Inheritance& kept, Keepsakes& keepsakes) {
  for (const SessionRecord& record : contents_.sessions) {
    auto left = kept.take_session(record.session_id);
    if (!left) {
      keepsakes.forget_session(record.session_id);
      return error(StatusCode::fenced, "nobody kept session ", record.session_id);
    }
    auto ring = ServerRing::adopt(std::move(left->memory), std::move(left->doorbell));
    if (!ring.is_ok()) {
      const bool was_ended = ring.status().code() == StatusCode::fenced;
      // In order, and a session that the ledger names is kept.
      if (was_ended) ledger_.forget_session(record.session_id);
      keepsakes.forget_session(record.session_id);
      if (!was_ended) return ring.status();
      continue;
    }
    MEMD_FAILPOINT("adoption.session_taken");
    sessions_.push_back(std::make_shared<Session>(Session{.session_id = record.session_id,
                                                          .job_id = disk_.job_id,
                                                          .ring = std::move(ring).value(),
                                                          .request_count_open = 0,
                                                          .owner = record.owner,
                                                          .step_committed = record.step_committed,
                                                          .plan = nullptr}));
  }
  return Status::ok();
}

const Session* RememberedJob::find_session(uint64_t session_id) const {
  for (const auto& session : sessions_) {
    if (session->session_id == session_id) return session.get();
  }
  return nullptr;
}

void RememberedJob::undo_grant() {
  if (!contents_.grant) return;
  const GrantRecord& grant = *contents_.grant;
  const Session* const session = find_session(grant.session_id);
  const auto shard = contents_.shards.find(grant.shard_id);
  if (shard == contents_.shards.end()) return;
  if (session != nullptr && session->ring.completion_tail() != grant.completion_tail) return;
  untold_pin_ = grant.pin_index;
  if (grant.part == Part::gradient) {
    shard->second.contributors = grant.contributors;
  } else if (grant.part == Part::value && !grant.was_written) {
    shard->second.written = false;
  }
}

void RememberedJob::settle_gradients() {
  std::set<uint32_t> sealed;
  for (const ClosedStep& step : contents_.steps) {
    for (const StepGroup& group : step.request.groups)
      sealed.insert(group.shard_ids.begin(), group.shard_ids.end());
  }
  for (auto& [shard_id, state] : contents_.shards) {
    if (sealed.contains(shard_id) && !MEMD_PLANTED("adoption.sealed_gradients_dropped")) {
      state.contributors = Contributors::sealed();
    } else if (!are_there(state.contributors)) {
      note_void(state.contributors);
      state.contributors = {};
    }
  }
}

bool RememberedJob::are_there(const Contributors& contributors) const {
  for (size_t seat = 0; seat < contents_.seats.size(); ++seat) {
    const bool is_one = (contributors.seats() >> seat & 1) != 0;
    if (is_one && find_session(contents_.seats[seat].session_id) == nullptr) return false;
  }
  return contributors.seats() != 0 || find_session(contributors.only()) != nullptr;
}

/// One of several contributors ended, and the daemon died before the others were told.
void RememberedJob::note_void(const Contributors& contributors) {
  for (size_t seat = 0; seat < contents_.seats.size(); ++seat) {
    if ((contributors.seats() >> seat & 1) != 0) contents_.seats[seat].has_notice = true;
  }
}

/// The shards that memory knows, with the bytes that the last commit has of them.
Status RememberedJob::merge() {
  JobRecord merged = contents_.layout;
  merged.step = base().step;
  merged.undurable_since = base().undurable_since;
  if (merged.uid != base().uid || merged.name != base().name)
    return damaged("it is of another job");
  if (base().buckets.size() > merged.buckets.size()) return damaged("buckets are missing");
  for (size_t i = 0; i < base().buckets.size(); ++i) {
    if (merged.buckets[i].dtype != base().buckets[i].dtype ||
        merged.buckets[i].element_count != base().buckets[i].element_count) {
      return damaged("bucket ", i, " is another one on disk");
    }
    // The layout is written before a tile has them; a commit may be older.
    const bool keeps_maxima = merged.buckets[i].keeps_maxima || base().buckets[i].keeps_maxima;
    merged.buckets[i] = base().buckets[i];
    merged.buckets[i].keeps_maxima = keeps_maxima;
  }
  std::map<std::string, const ShardRecord*> on_disk;
  for (const ShardRecord& shard : base().shards) on_disk[shard.name] = &shard;
  for (size_t i = 0; i < merged.shards.size(); ++i) {
    ShardRecord& shard = merged.shards[i];
    const ShardState& state = contents_.shards.at(contents_.shard_ids[i]);
    const auto found = on_disk.find(shard.name);
    // A shard that was deleted and came back under its name has none of the old bytes.
    if (found != on_disk.end() && !state.is_new && is_same_shard(shard, *found->second)) {
      shard.generation = found->second->generation;
      if (state.written) shard.extents = found->second->extents;
    }
    if (state.generation) shard.generation = *state.generation;
    shard.written = state.written;
  }
  record_ = std::move(merged);
  return Status::ok();
}

}  // namespace memd
