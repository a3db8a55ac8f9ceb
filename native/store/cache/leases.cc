#include "store/cache/leases.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

void Leases::acquire(const LeaseRequest& request, LeaseReply reply) {
  LeaseRequest bounded = request;
  bounded.timeout_ns = std::min(request.timeout_ns, kTimeoutNsMax);
  const uint64_t now_ns = parts_.clock.now_ns();
  // An answer may be what asks.
  const bool was_room_wanted = std::exchange(is_room_wanted_, parts_.waiters.any_for_room());
  LeaseWaiter& waiter = parts_.waiters.add({bounded, std::move(reply), now_ns});
  MEMD_FAILPOINT("lease.asked");
  // A lease that waits for room goes first; resident bytes go to anyone.
  const Grant grant = try_grant(waiter);
  is_room_wanted_ = was_room_wanted;
  if (grant == Grant::done) return parts_.waiters.remove(waiter);
  parts_.waiters.hang(waiter);
}

bool Leases::advance(TurnBudget& turn) {
  if (const LeaseWaiter* const first = parts_.waiters.first_for_room(); first != nullptr) {
    room_.look_for_releases();
    // Others gave back what its own session holds as well: it is told so.
    const bool nothing_moves = !parts_.activities.any() && !parts_.gates.is_operating();
    if (nothing_moves && parts_.slots.pinned_by_others(first->request().session_id) == false)
      parts_.waits.wake_first_for_room();
  }
  return try_waiting(turn);
}

bool Leases::grant_filled() {
  if (!fills_.has_ready()) return false;
  TurnBudget without_bound;
  try_waiting(without_bound);
  fills_.give_up_rest();
  return true;
}

bool Leases::try_waiting(TurnBudget& turn) {
  return parts_.waiters.advance([this](LeaseWaiter& waiter) { return try_again(waiter); },
                                [this](const LeaseWaiter& waiter) { return overdue(waiter); },
                                turn);
}

LeaseWaiters::Verdict Leases::try_again(LeaseWaiter& waiter) {
  parts_.waiters.count_wait(waiter);
  // The first to come gets room first; resident bytes go to anyone.
  is_room_wanted_ = parts_.waiters.is_behind_for_room(waiter);
  const bool is_behind = is_room_wanted_ && waiter.waits_for() == WaitsFor::room;
  if (is_behind || is_on_its_way(waiter)) return {};
  if (try_grant(waiter) == Grant::done) return {.stays = false};
  if (waiter.waits_for() != WaitsFor::room || is_room_wanted_ || !room_.has_looked_at_all())
    return {};
  Status refusal = check_room_can_come(waiter);
  if (refusal.is_ok()) return {};
  if (!move_old_bytes(waiter)) return {.stays = false, .refusal = std::move(refusal)};
  return {.stays = try_grant(waiter) != Grant::done};
}

bool Leases::is_on_its_way(const LeaseWaiter& waiter) const {
  const WaitsFor what = waiter.waits_for();
  if (what != WaitsFor::filling && what != WaitsFor::reading && what != WaitsFor::zeroing &&
      what != WaitsFor::draining)
    return false;
  if (!parts_.progress.stopped().is_ok()) return false;
  const Entry* const entry = find_entry(parts_.shards, waiter.request());
  return entry != nullptr &&
         (entry->residency() == Residency::filling || entry->residency() == Residency::draining);
}

Leases::Grant Leases::wait(LeaseWaiter& waiter, WaitsFor what, uint32_t writer_index) {
  waiter.put_off(what, writer_index);
  return Grant::waiting;
}

Leases::Grant Leases::refuse(LeaseWaiter& waiter, const Status& status) {
  waiter.refuse(status);
  return Grant::done;
}

Leases::Grant Leases::try_grant(LeaseWaiter& waiter) {
  ++try_count_;
  const uint32_t shard_id = waiter.request().shard_id;
  if (waiter.request().part != Part::value) return grant_or_wait(waiter);
  // A writer must see every reader, and a reader that comes now waits for the answer.
  if (waiter.request().mode != LeaseMode::read) parts_.table.withhold(shard_id);
  const Grant grant = grant_or_wait(waiter);
  parts_.table.end_withholding();
  // Neither a writer that waits nor one that has gone keeps others from reading.
  parts_.table.publish_shard(shard_id);
  return grant;
}

Leases::Grant Leases::grant_or_wait(LeaseWaiter& waiter) {
  const LeaseRequest& request = waiter.request();
  Entry* const found = find_entry(parts_.shards, request);
  if (found == nullptr) {
    return refuse(waiter,
                  error(StatusCode::not_found, "the shard was deleted: ", request.shard_id));
  }
  const Try asked{.waiter = waiter,
                  .request = request,
                  .shard = parts_.shards[request.shard_id],
                  .entry = *found,
                  .reads = request.mode == LeaseMode::read};
  if (const Outcome outcome = check_call(asked)) return *outcome;
  if (const Outcome outcome = check_notice(asked)) return *outcome;
  parts_.residencies.settle_pending(*found);
  if (const Outcome outcome = check_written(asked)) return *outcome;
  if (const Outcome outcome = check_steps(asked)) return *outcome;
  if (const Outcome outcome = check_contributors(asked)) return *outcome;
  if (!asked.reads) parts_.gates.discard_early(*found, request.shard_id);
  if (const Outcome outcome = check_moving(asked)) return *outcome;
  if (!asked.reads) {
    if (const Outcome outcome = check_writer(asked)) return *outcome;
  }
  return found->is_resident() ? grant_resident(asked) : bring_up(asked);
}

Leases::Outcome Leases::check_call(const Try& asked) const {
  const LeaseRequest& request = asked.request;
  if (request.for_service || request.after_call == 0) return std::nullopt;
  const Session& session = *parts_.session(request.session_id);
  if (request.after_call == session.call_failed) return refuse(asked.waiter, session.call_failure);
  if (request.after_call > session.call_seen) return wait(asked.waiter, WaitsFor::earlier_step);
  return std::nullopt;
}

Leases::Outcome Leases::check_notice(const Try& asked) const {
  // Nobody waits for the answer to one that is asked for ahead.
  if (asked.request.part == Part::value || asked.request.is_expected) return std::nullopt;
  if (const Ranks& ranks = parts_.group.ranks(); ranks.rank_of(asked.request.session_id)) {
    Status whole = ranks.check_whole(parts_.job_name);
    if (!whole.is_ok()) return refuse(asked.waiter, whole);
  }
  if (asked.request.part == Part::rank_sum) return std::nullopt;
  const auto notice = parts_.group.take_notice(asked.request.session_id);
  if (!notice) return std::nullopt;
  return refuse(asked.waiter, *notice);
}

Leases::Outcome Leases::check_written(const Try& asked) const {
  const Entry& entry = asked.entry;
  // A staged buffer and the one whose place it takes: which of them it is, its commit says.
  if (entry.is_exchanged()) return wait(asked.waiter, WaitsFor::step);
  if (!asked.reads) return std::nullopt;
  if (has_bytes(asked)) return std::nullopt;
  if (entry.pending() != nullptr) return wait(asked.waiter, WaitsFor::first_writer);
  return refuse(
      asked.waiter,
      error(StatusCode::not_found,
            "shard ",
            parts_.job_name,
            "/",
            asked.shard.name(),
            asked.request.part == Part::value ? " was declared but never written; put it first"
                                              : " has no gradient; run backward first"));
}

bool Leases::has_bytes(const Try& asked) const {
  const auto& [waiter, request, shard, entry, reads] = asked;
  switch (request.part) {
    case Part::value:
      return shard.written;
    case Part::gradient:
      // Those of a closed step go with the update.
      if (shard.contributors.is_sealed()) return entry.slot() != nullptr || entry.has_replica();
      return !shard.contributors.empty();
    case Part::rank_sum:
      return parts_.shards.rank_sums().has(request.rank, shard.bucket, request.shard_id);
  }
  return false;
}

Leases::Outcome Leases::check_steps(const Try& asked) const {
  const auto& [waiter, request, shard, entry, reads] = asked;
  if (const Status& stopped = parts_.progress.stopped(); !stopped.is_ok())
    return refuse(waiter, stopped);
  if (entry.kind() == EntryKind::parameter) {
    if (const auto before = parts_.gates.step_before(request, entry)) return wait(waiter, *before);
  }
  if (!reads && request.part == Part::gradient && shard.contributors.is_sealed())
    return wait(waiter, WaitsFor::gradient_step);
  if (request.is_expected && !shard.contributors.empty()) {
    // It is in a step that is not closed yet, or was made meanwhile: a pin on it would stand in the
    // way of that step, and what overwrites reads nothing that was spilled.
    return refuse(
        waiter,
        error(
            StatusCode::deadline, "there is a gradient already: ", parts_.shards.describe(entry)));
  }
  return std::nullopt;
}

Leases::Outcome Leases::check_contributors(const Try& asked) const {
  const auto& [waiter, request, shard, entry, reads] = asked;
  if (request.part != Part::gradient) return std::nullopt;
  if (request.is_expected) {
    if (!parts_.group.is_shared_by(request.session_id)) return std::nullopt;
    // Another member would add to a slot that may never be written.
    return refuse(waiter, error(StatusCode::deadline, "members take a gradient's slot in turn"));
  }
  if (const Outcome outcome = check_rank(asked)) return *outcome;
  const Contributors& contributors = shard.contributors;
  if (reads || contributors.empty()) return std::nullopt;
  const bool is_added_to = request.mode == LeaseMode::write;
  const bool is_shared = parts_.group.are_all_with(contributors, request.session_id);
  if (is_added_to == is_shared || contributors.only() == request.session_id) return std::nullopt;
  return refuse(asked.waiter,
                error(StatusCode::invalid_argument,
                      "shard ",
                      parts_.job_name,
                      "/",
                      shard.name(),
                      is_added_to ? " has a gradient of a session that does not train with this "
                                    "one; run backward anew when that one has stepped or ended"
                                  : " has a gradient that others of this training group made; add "
                                    "to it"));
}

// Ranks add to a sum in rank order. Only when the sum is complete may one of them change it.
Leases::Outcome Leases::check_rank(const Try& asked) const {
  const Ranks& ranks = parts_.group.ranks();
  const auto rank = ranks.rank_of(asked.request.session_id);
  if (asked.reads || !rank || ranks.have_all_ended_gradients()) return std::nullopt;
  const Contributors& contributors = asked.shard.contributors;
  if (ranks.has_ended_gradients(*rank) ||
      parts_.group.has(contributors, asked.request.session_id)) {
    return refuse(asked.waiter,
                  error(StatusCode::invalid_argument,
                        "shard ",
                        parts_.job_name,
                        "/",
                        asked.shard.name(),
                        ": a rank adds one gradient to each sum of a step"));
  }
  if (parts_.group.rank_before(contributors, *rank)) return wait(asked.waiter, WaitsFor::rank);
  return std::nullopt;
}

Leases::Outcome Leases::check_moving(const Try& asked) {
  Entry& entry = asked.entry;
  if (entry.residency() == Residency::filling) {
    if (!asked.request.prefetch) {
      parts_.window.note_asked(entry);
      // Once: whoever waits is asked again in every turn.
      if (asked.waiter.raises_prefetch()) fetches_.raise(entry);
    }
    return wait(asked.waiter, entry.is_backed() ? WaitsFor::filling : WaitsFor::zeroing);
  }
  // A finished overwrite takes the place of these bytes once they are copied.
  const bool is_behind = entry.pending() != nullptr && parts_.residencies.is_awaited(entry);
  if (entry.residency() == Residency::draining || is_behind)
    return wait(asked.waiter, WaitsFor::draining);
  return std::nullopt;
}

Leases::Outcome Leases::check_writer(const Try& asked) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  if (entry.kind() == EntryKind::parameter) {
    if (parts_.gates.holds_writers()) return wait(waiter, WaitsFor::step_or_sync);
    // The writer's values are merged with what is on disk.
    if (parts_.gates.flush_tiles(entry.owner())) return wait(waiter, WaitsFor::tile_writes);
  }
  if (entry.kind() != EntryKind::bytes) return std::nullopt;
  const bool keeps_old_bytes = request.mode == LeaseMode::write && shard.written;
  if (!entry.is_resident() && keeps_old_bytes) return std::nullopt;
  return grant_bytes_writer(asked, keeps_old_bytes);
}

Leases::Grant Leases::grant_bytes_writer(const Try& asked, bool keeps_old_bytes) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  if (entry.pending() != nullptr) return wait(waiter, WaitsFor::writer);
  if (entry.task_count() != 0) return wait(waiter, WaitsFor::step);
  if (auto prepared = fills_.take_pending(entry)) return grant_pending(asked, std::move(prepared));
  // Bytes that are to be copied must not make room for themselves.
  if (keeps_old_bytes) entry.add_task();
  auto slot = make_room(entry, true);
  if (keeps_old_bytes) entry.remove_task();
  if (slot == nullptr) return wait(waiter, WaitsFor::room);
  if (request.mode == LeaseMode::overwrite) return grant_pending(asked, std::move(slot));
  fills_.prepare_pending(entry, std::move(slot), keeps_old_bytes);
  return wait(waiter, WaitsFor::copy);
}

Leases::Grant Leases::grant_pending(const Try& asked, std::unique_ptr<Slot> slot) {
  Entry& entry = asked.entry;
  MEMD_FAILPOINT("blob.before_pending");
  slot->pending_session = asked.request.session_id;
  parts_.residencies.set_pending(entry, std::move(slot));
  reply_granted(asked, *entry.pending());
  return Grant::done;
}

Leases::Grant Leases::grant_resident(const Try& asked) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  const uint32_t index = entry.kind() == EntryKind::bytes ? 0 : shard.index_in_bucket;
  const PinCount pins = parts_.slots.pins(*entry.slot(), index);
  if (pins.has_writers()) return wait(waiter, WaitsFor::writer, index);
  if (reads && fills_.is_for_writer(entry)) return wait(waiter, WaitsFor::writer);
  if (!reads) {
    if (pins.has_readers()) return copy_for_writer(asked, index);
    if (const Outcome outcome = begin_writing(asked)) return *outcome;
  }
  if (const Outcome outcome = check_pin_count(asked, index)) return *outcome;
  parts_.policy.used(entry.id(), price_of(entry));
  reply_granted(asked, *entry.slot());
  return Grant::done;
}

Leases::Grant Leases::copy_for_writer(const Try& asked, uint32_t index) {
  Entry& entry = asked.entry;
  if (parts_.slots.has_writer(*entry.slot())) return wait(asked.waiter, WaitsFor::writer);
  if (entry.task_count() != 0) return wait(asked.waiter, WaitsFor::update);
  // Its readers may end meanwhile: bytes that are about to be copied must not be evicted to make
  // room for their own copy.
  entry.add_task();
  auto copy = make_room(entry, true);
  entry.remove_task();
  if (copy == nullptr) return wait(asked.waiter, WaitsFor::room, index);
  fills_.replace(entry, std::move(copy));
  return wait(asked.waiter, WaitsFor::copy);
}

Leases::Outcome Leases::begin_writing(const Try& asked) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  if (entry.task_count() != 0) return wait(waiter, WaitsFor::update);
  if (parts_.residencies.is_awaited(entry)) return wait(waiter, WaitsFor::draining);
  // Bytes that another step left there are no gradient to add to.
  if (request.part != Part::value && !has_bytes(asked) && request.mode == LeaseMode::write &&
      !fills_.take_zeroed(entry, request.shard_id)) {
    fills_.zero(entry, request.shard_id);
    return wait(waiter, WaitsFor::copy);
  }
  if (entry.residency() == Residency::clean)
    parts_.residencies.move(entry, Residency::clean, Residency::dirty);
  if (entry.kind() == EntryKind::parameter) parts_.gates.drop_cached_tiles(entry);
  return std::nullopt;
}

Leases::Outcome Leases::check_pin_count(const Try& asked, uint32_t index) const {
  const LeaseRequest& request = asked.request;
  if (!asked.reads || request.prefetch) return std::nullopt;
  const Slot& slot = *asked.entry.slot();
  const uint32_t own_pins =
      request.for_service ? slot.service_pins[index]
                          : parts_.session(request.session_id)->ring.pins(slot.pin_first + index);
  if (pin_readers(own_pins) != kPinReadersMax) return std::nullopt;
  return refuse(asked.waiter,
                error(StatusCode::capacity,
                      "shard ",
                      parts_.job_name,
                      "/",
                      asked.shard.name(),
                      " is leased too often; let go of views you hold: ",
                      kPinReadersMax,
                      " times by this session"));
}

Leases::Grant Leases::bring_up(const Try& asked) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  // While a step replaces what lies on disk, nothing is fetched from there.
  if (entry.task_count() != 0) {
    parts_.gates.pause_early(entry);
    return wait(waiter, WaitsFor::update);
  }
  auto slot = make_room(entry, !request.prefetch);
  if (slot == nullptr) {
    if (request.prefetch && (is_room_wanted_ || room_.has_looked_at_all()))
      return refuse(waiter, error(StatusCode::capacity, "no room for a prefetch"));
    return wait(waiter, WaitsFor::room);
  }
  // A bucket of several shards keeps the bytes of the others.
  const bool needs_bytes =
      reads || request.mode == LeaseMode::write || parts_.shards.shard_count(entry) > 1;
  entry.place(std::move(slot));
  parts_.residencies.move(entry, Residency::absent, Residency::filling);
  if (needs_bytes && entry.is_backed()) {
    const auto priority = request.prefetch ? IoPriority::prefetch : IoPriority::demand;
    fetches_.fetch(entry, priority, [](const Status&) {});
    return wait(waiter, WaitsFor::reading);
  }
  if (needs_bytes) {
    fetches_.zero(entry);
    return wait(waiter, WaitsFor::zeroing);
  }
  parts_.residencies.move(entry, Residency::filling, Residency::clean);
  return grant_or_wait(waiter);
}

std::unique_ptr<Slot> Leases::make_room(const Entry& entry, bool may_spill) {
  if (is_room_wanted_) return nullptr;
  auto slot =
      room_.make(Room::Asker::lease, entry.bytes(), parts_.shards.shard_count(entry), may_spill);
  // Its own bytes need no protection any more.
  parts_.policy.put_back(entry.id());
  return slot;
}

LeaseGrant Leases::grant_of(const Try& asked, Slot& slot) const {
  const Shard& shard = asked.shard;
  const bool in_bucket = shard.kind == ShardKind::parameter;
  LeaseGrant grant{.slot = &slot,
                   .index = in_bucket ? shard.index_in_bucket : 0,
                   .entry_id = asked.entry.id(),
                   .pin = asked.reads ? kReaderPin : kWriterPin,
                   .offset_bytes = slot.offset_bytes + (in_bucket ? shard.offset_bytes() : 0),
                   .length_bytes = shard.bytes,
                   .generation = shard.leased_generation(),
                   .data = nullptr,
                   .wait_ns = 0,
                   .wait_reason = LeaseWait::disk};
  asked.waiter.note_waited(grant);
  grant.data = parts_.memory->arena().at(grant.offset_bytes);
  return grant;
}

void Leases::note_grant(const Try& asked, const Slot& slot, const LeaseGrant& grant) const {
  const LeaseRequest& request = asked.request;
  parts_.ledger.begin_grant(
      {.session_id = request.session_id,
       .shard_id = request.shard_id,
       .pin_index = slot.pin_first + grant.index,
       .completion_tail = parts_.session(request.session_id)->ring.completion_tail(),
       .part = request.part,
       .was_written = asked.shard.written,
       .contributors = asked.shard.contributors});
  MEMD_FAILPOINT("ledger.grant_begun");
}

void Leases::note_writer(const Try& asked) {
  const LeaseRequest& request = asked.request;
  Shard& shard = asked.shard;
  if (request.part == Part::gradient) {
    shard.is_gradient_unsure = request.is_expected && shard.contributors.empty();
    shard.contributors = parts_.group.with(shard.contributors, request.session_id);
    parts_.gradient_buckets.add(shard.bucket);
    parts_.waits.wake(asked.entry);
    parts_.note_shard(request.shard_id);
  } else if (request.part == Part::rank_sum) {
    parts_.shards.rank_sums().begin(request.rank, shard.bucket, request.shard_id);
  } else if (shard.kind == ShardKind::parameter) {
    parts_.residencies.note_written(request.shard_id);
  }
  parts_.slots.note(asked.entry);  // a pending slot, and who writes it
}

void Leases::reply_granted(const Try& asked, Slot& slot) {
  const auto& [waiter, request, shard, entry, reads] = asked;
  const LeaseGrant grant = grant_of(asked, slot);
  // A reader's pin is given back by its client if it never hears of it. A writer that never hears
  // of its grant has written nothing: what is noted below must not look as if it had.
  const bool is_noted =
      parts_.ledger.is_open() && !reads && !request.for_service && request.part != Part::rank_sum;
  if (is_noted) note_grant(asked, slot, grant);
  MEMD_FAILPOINT("lease.before_pin");
  if (!reads) parts_.slots.note_writer(entry);
  if (request.for_service) {
    parts_.slots.pin_for_service(slot, grant.index, grant.pin);
  } else if (!request.prefetch) {
    parts_.session(request.session_id)->ring.add_pin(slot.pin_first + grant.index, grant.pin);
  }
  if (!reads) note_writer(asked);
  if (!request.prefetch) {
    JobCounters& counters = parts_.counters;
    ++(waiter.is_miss() ? counters.lease_misses : counters.lease_hits);
    if (waiter.is_miss()) counters.lease_wait_ns += parts_.clock.now_ns() - waiter.started_ns();
  }
  // Before the answer: who has read a shard by request finds it in the table from then on.
  if (reads && request.part == Part::value) parts_.table.publish_shard(request.shard_id);
  MEMD_FAILPOINT("lease.before_reply");
  MEMD_FAILPOINT("ledger.grant_not_told");
  waiter.grant(grant);
  if (is_noted) parts_.ledger.end_grant();
  // Values and blobs that are written one after the other. A step's gradients are updated soon.
  const bool is_large = request.part == Part::value && entry.bytes() >= kBlobExtentBytes;
  if (request.mode == LeaseMode::overwrite && is_large) room_.write_ahead(entry.bytes());
}

void Leases::release_service(const LeaseGrant& grant, bool discard) {
  const auto give_back = [this, grant] {
    parts_.slots.release_service(*grant.slot, grant.index, grant.pin);
  };
  // It may be gone by now, and its slot retired or another's.
  Entry* const written =
      pin_writers(grant.pin) != 0 ? parts_.shards.entry(grant.entry_id) : nullptr;
  const bool is_its_slot =
      written != nullptr && (written->pending() == grant.slot || written->slot() == grant.slot);
  if (!is_its_slot) return give_back();
  Entry& entry = *written;
  if (discard && entry.kind() == EntryKind::parameter) {
    // A daemon that takes over before its bytes are whole again finds the writer.
    return half_written_.discard(entry, {grant.index}, [this, &entry, give_back](const Status&) {
      give_back();
      parts_.slots.note(entry);
      parts_.slots.free_retired();
    });
  }
  give_back();
  if (discard && entry.pending() == grant.slot) {
    parts_.slots.retire(entry.take_pending());
  } else {
    parts_.slots.note(entry);
  }
  parts_.residencies.note_changed(entry);
}

bool Leases::move_old_bytes(LeaseWaiter& waiter) {
  const Entry& entry = *find_entry(parts_.shards, waiter.request());
  const bool are_copied = entry.kind() == EntryKind::bytes &&
                          waiter.request().mode == LeaseMode::write && entry.is_resident();
  if (!are_copied || waiter.has_moved_old_bytes()) return false;
  if (entry.task_count() != 0 || parts_.slots.is_pinned(*entry.slot())) return false;
  auto both = room_.make(Room::Asker::copy, 2 * align_up(entry.bytes(), kBlockBytes), 1, true);
  if (both == nullptr) return parts_.activities.any() || !room_.has_looked_at_all();
  waiter.note_moved_old_bytes();
  parts_.slots.free(std::move(both));
  return true;
}

Status Leases::check_room_can_come(const LeaseWaiter& waiter) const {
  const LeaseRequest& request = waiter.request();
  if (parts_.activities.any() || parts_.gates.is_operating()) return Status::ok();
  const auto is_held = parts_.slots.pinned_by_others(request.session_id);
  if (!is_held) parts_.waits.wake_first_for_room();
  if (is_held.value_or(true)) return Status::ok();
  return error(StatusCode::capacity,
               "no room for shard ",
               parts_.job_name,
               "/",
               parts_.shards[request.shard_id].name(),
               ": let go of views you hold, or raise host_bytes: ",
               find_entry(parts_.shards, request)->bytes(),
               " bytes wanted; ",
               describe_holders(),
               "; the arena has at most ",
               parts_.memory->arena_bytes_max());
}

Status Leases::overdue(const LeaseWaiter& waiter) const {
  return error(StatusCode::deadline,
               "a lease of shard ",
               parts_.job_name,
               "/",
               parts_.shards[waiter.request().shard_id].name(),
               " waited too long on ",
               parts_.waiters.describe(waiter),
               describe_rank_before(waiter),
               "; ",
               describe_holders(),
               ": ",
               waiter.request().timeout_ns / 1'000'000,
               " ms");
}

std::string Leases::describe_rank_before(const LeaseWaiter& waiter) const {
  if (waiter.waits_for() != WaitsFor::rank) return {};
  const Ranks& ranks = parts_.group.ranks();
  const auto rank = ranks.rank_of(waiter.request().session_id);
  if (!rank) return {};
  const Contributors& contributors = parts_.shards[waiter.request().shard_id].contributors;
  const auto before = parts_.group.rank_before(contributors, *rank);
  return before ? concat(": ", ranks.describe(*before)) : std::string();
}

std::string Leases::describe_holders() const {
  constexpr size_t kNamed = 3;
  // In the order of their ids: nobody waits for an error's text.
  constexpr size_t kLookedAtMax = 2048;
  std::vector<const Entry*> held;
  uint64_t bytes = 0;
  size_t looked_at_count = 0;
  for (const Entry* const entry : parts_.shards.entries()) {
    if (entry == nullptr || entry->slot() == nullptr) continue;
    if (++looked_at_count > kLookedAtMax) break;
    if (!parts_.slots.is_pinned(*entry->slot())) continue;
    held.push_back(entry);
    bytes += entry->slot()->bytes;
  }
  for (const auto& slot : parts_.slots.retired()) bytes += slot->bytes;
  std::sort(held.begin(), held.end(), [](const Entry* a, const Entry* b) {
    return a->bytes() > b->bytes();
  });
  std::string text =
      concat(looked_at_count > kLookedAtMax ? "at least " : "", bytes, " bytes are leased");
  for (size_t i = 0; i < std::min(held.size(), kNamed); ++i) {
    text += concat(i == 0 ? ", most by " : ", ",
                   parts_.shards.describe(*held[i]),
                   " (",
                   held[i]->bytes(),
                   ")");
  }
  return text;
}

}  // namespace memd
