// ShardStore's leases: who gets which bytes, and the room, the fetches and the spills that this
// takes.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "arena/room_search.h"
#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/shard_store.h"

namespace memd {
void ShardStore::lease(const LeaseRequest& request, LeaseReply reply) {
  if (request.part > Part::gradient || request.mode > LeaseMode::overwrite) {
    return reply(error(StatusCode::invalid_argument, "unknown part or mode of a lease"), {});
  }
  const auto job = job_of(request.session_id);
  if (!job.is_ok()) return reply(job.status(), {});
  if (!job.value()->progress.stopped().is_ok()) return reply(job.value()->progress.stopped(), {});
  const Entry* const entry = job.value()->shards().find_entry(request.shard_id, request.part);
  if (entry == nullptr) {
    return reply(error(StatusCode::not_found,
                       "job ",
                       job.value()->name,
                       " has no such shard, or it has no gradient; declare it first: shard ",
                       request.shard_id),
                 {});
  }
  LeaseRequest bounded = request;
  bounded.timeout_ns = std::min(request.timeout_ns, kTimeoutNsMax);
  LeaseWaiters& waiters = job.value()->waiters;
  const uint64_t now_ns = clock_.now_ns();
  LeaseWaiter& waiter = waiters.add(
      {.request = bounded, .reply = std::move(reply), .started_ns = now_ns, .counted_ns = now_ns});
  MEMD_FAILPOINT("lease.asked");
  // Those before it go first only where they wait for room.
  if (try_grant(*job.value(), waiter) == Grant::done) waiters.remove_newest();
}

void ShardStore::reply_granted(Job& job, LeaseWaiter& waiter, Slot& slot) {
  const LeaseRequest& request = waiter.request;
  Shard& shard = job.shards()[request.shard_id];
  const bool in_bucket = shard.kind == ShardKind::parameter;
  LeaseGrant grant{.slot = &slot,
                   .index = in_bucket ? shard.index_in_bucket : 0,
                   .pin = request.mode == LeaseMode::read ? kReaderPin : kWriterPin,
                   .offset_bytes = slot.offset_bytes + (in_bucket ? shard.offset_bytes() : 0),
                   .length_bytes = shard.bytes,
                   .generation = shard.leased_generation(),
                   .data = nullptr,
                   .wait_ns = 0,
                   .wait_reason = LeaseWait::disk};
  waiter.note_waited(grant);
  grant.data = job.memory->arena().at(grant.offset_bytes);
  const bool writes = request.mode != LeaseMode::read;
  const Entry* const entry = job.shards().find_entry(request.shard_id, request.part);
  // A reader's pin is given back by its client if it never hears of it. A writer that never hears
  // of its grant has written nothing: what is noted below must not look as if it had.
  const bool is_told_ledger = job.ledger != nullptr && writes && !request.for_service;
  if (is_told_ledger) {
    job.ledger->begin_grant(
        {.session_id = request.session_id,
         .shard_id = request.shard_id,
         .pin_index = slot.pin_first + grant.index,
         .completion_tail = sessions_.at(request.session_id)->ring.completion_tail(),
         .part = request.part,
         .was_written = shard.written,
         .gradient_session = shard.gradient_session});
    MEMD_FAILPOINT("ledger.grant_begun");
  }
  MEMD_FAILPOINT("lease.before_pin");
  if (request.for_service) {
    job.slots().pin_for_service(slot, grant.index, grant.pin);
  } else if (!request.prefetch) {
    sessions_.at(request.session_id)->ring.add_pin(slot.pin_first + grant.index, grant.pin);
  }
  if (writes) {
    if (request.part == Part::gradient) {
      shard.is_gradient_unsure = request.is_ahead && shard.gradient_session == 0;
      shard.gradient_session = request.session_id;
      job.note_shard(request.shard_id);
    } else if (in_bucket) {
      job.note_written(request.shard_id);
    }
    job.slots().note(*entry);  // a pending slot, and who writes it
  }
  if (!request.prefetch) {
    ++(waiter.counted_as_miss ? job.counters.lease_misses : job.counters.lease_hits);
    if (waiter.counted_as_miss) job.counters.lease_wait_ns += clock_.now_ns() - waiter.started_ns;
  }
  // Before the answer: who has read a shard by request finds it in the table from then on.
  if (!writes && request.part == Part::value) job.table().publish_shard(request.shard_id);
  MEMD_FAILPOINT("lease.before_reply");
  MEMD_FAILPOINT("ledger.grant_not_told");
  const LeaseReply reply = std::move(waiter.reply);
  reply(Status::ok(), grant);
  if (is_told_ledger) job.ledger->end_grant();
}

ShardStore::Grant ShardStore::try_grant(Job& job, LeaseWaiter& waiter) {
  const uint32_t shard_id = waiter.request.shard_id;
  if (waiter.request.part != Part::value) return grant_or_wait(job, waiter);
  // Who is to write must see every reader, and a reader that comes now waits for the answer.
  if (waiter.request.mode != LeaseMode::read) {
    job.table().withhold(shard_id);
  }
  const Grant grant = grant_or_wait(job, waiter);
  job.table().end_withholding();
  // A writer that still waits keeps nobody from reading, and one that is gone no more.
  job.table().publish_shard(shard_id);
  return grant;
}

ShardStore::Grant ShardStore::grant_or_wait(Job& job, LeaseWaiter& waiter) {
  const LeaseRequest& request = waiter.request;
  Shard& shard = job.shards()[request.shard_id];
  Entry* const found = job.shards().find_entry(request.shard_id, request.part);
  const auto refuse = [&](const Status& status) {
    waiter.refuse(status);
    return Grant::done;
  };
  const auto wait = [&](LeaseWait reason, std::string what) {
    return put_off(waiter, reason, std::move(what));
  };
  if (found == nullptr) {
    return refuse(error(StatusCode::not_found, "the shard was deleted: ", request.shard_id));
  }
  Entry& entry = *found;
  if (!request.for_service && request.after_call != 0) {
    const Session& session = *sessions_.at(request.session_id);
    if (request.after_call == session.call_failed) return refuse(session.call_failure);
    if (request.after_call > session.call_seen) {
      return wait(
          LeaseWait::step,
          concat("the step before it, which has not come yet: ", job.shards().describe(entry)));
    }
  }
  job.residencies().settle_pending(entry);
  const uint32_t index = entry.kind == EntryKind::bytes ? 0 : shard.index_in_bucket;
  const bool reads = request.mode == LeaseMode::read;

  if (entry.owner != entry.kept_owner) {
    // A staged buffer and the one whose place it takes: which of them it is, its commit says.
    return wait(LeaseWait::step, concat("a step that uses ", job.shards().describe(entry)));
  }
  if (reads) {
    const bool written =
        request.part == Part::gradient ? shard.gradient_session != 0 : shard.written;
    if (!written && entry.pending == nullptr) {
      return refuse(error(StatusCode::not_found,
                          "shard ",
                          job.name,
                          "/",
                          shard.name(),
                          request.part == Part::gradient
                              ? " has no gradient; run backward first"
                              : " was declared but never written; put it first"));
    }
    if (!written)
      return wait(LeaseWait::writer, concat("its first writer: ", job.shards().describe(entry)));
  }
  if (!job.progress.stopped().is_ok()) return refuse(job.progress.stopped());
  if (entry.kind == EntryKind::parameter) {
    if (auto before = update_before(job, request, entry)) {
      return wait(before->first, std::move(before->second));
    }
  }
  if (!reads && request.part == Part::gradient && shard.gradient_session == kSealedGradient) {
    return wait(LeaseWait::gradient, concat("the step that uses ", job.shards().describe(entry)));
  }
  if (request.is_ahead && shard.gradient_session != 0) {
    // It is in a step that is not closed yet, or was made meanwhile: a pin on it would stand in the
    // way of that step, and what overwrites reads nothing that was spilled.
    return refuse(
        error(StatusCode::deadline, "there is a gradient already: ", job.shards().describe(entry)));
  }
  if (!reads && entry.kind == EntryKind::gradient) early_.forget_gradient(job, request.shard_id);
  if (!reads && entry.kind == EntryKind::parameter)
    early_.discard(job, entry.owner, EarlyDiscard::state);
  if (entry.residency() == Residency::filling) {
    if (!request.prefetch) {
      job.prefetch_window().note_asked(entry);
      // Once: whoever waits is asked again in every turn.
      if (!std::exchange(waiter.has_raised, true)) {
        extents_.io().raise(
            JobId{job.job_id},
            {job.memory->arena().at(entry.slot->offset_bytes), align_up(entry.bytes, kBlockBytes)});
      }
    }
    return wait(LeaseWait::disk,
                concat("the disk or an update: ", job.shards().describe(entry), " is filling"));
  }
  if (entry.residency() == Residency::draining) {
    return wait(LeaseWait::disk,
                concat("the disk: ", job.shards().describe(entry), " is draining"));
  }
  if (!reads && entry.kind == EntryKind::parameter && job.operations.holds_writers()) {
    return wait(LeaseWait::step,
                concat("a step or sync that writes back ", job.shards().describe(entry)));
  }
  if (!reads && entry.kind == EntryKind::bytes) {
    const bool keeps_old_bytes = request.mode == LeaseMode::write && shard.written;
    if (entry.is_resident() || !keeps_old_bytes) {
      return grant_bytes_writer(job, waiter, entry, keeps_old_bytes);
    }
  }
  if (!reads && entry.kind == EntryKind::parameter &&
      job.has_dirty_tile(job.shards().bucket(entry.owner))) {
    // The writer's values are merged with what is on disk.
    ask_for_flush(job, entry.owner);
    return wait(
        LeaseWait::disk,
        concat("the disk: the update of ", job.shards().describe(entry), " is being written"));
  }
  if (entry.is_resident()) {
    const PinCount pins = job.slots().pins(*entry.slot, index);
    if (pins.writers != 0)
      return wait(LeaseWait::writer, concat("another writer of ", job.shards().describe(entry)));
    if (!reads && pins.readers != 0) {
      // A live view is never written: the writer gets a copy, and the old slot lives until its last
      // lease ends.
      if (job.slots().has_writer(*entry.slot)) {
        return wait(LeaseWait::writer, concat("another writer of ", job.shards().describe(entry)));
      }
      if (entry.task_count != 0)
        return wait(LeaseWait::update, concat("an update of ", job.shards().describe(entry)));
      // Its readers may let go meanwhile: bytes that are to be copied must not make room for
      // themselves.
      ++entry.task_count;
      auto copy = make_room(job, entry.bytes, job.shards().shard_count(entry), true);
      --entry.task_count;
      if (copy == nullptr) return wait(LeaseWait::room, "room in the arena");
      Arena& arena = job.memory->arena();
      const Owed owed(OwedPlace::lease_slot_copied);
      copy_bytes(arena.at(copy->offset_bytes), arena.at(entry.slot->offset_bytes), entry.bytes);
      MEMD_FAILPOINT("lease.slot_copied");
      job.table().withdraw(entry);
      std::unique_ptr<Slot> old = std::exchange(entry.slot, std::move(copy));
      job.slots().note(entry);
      job.slots().retire(std::move(old));
      job.table().publish(entry);
    }
    if (!reads) {
      if (entry.task_count != 0)
        return wait(LeaseWait::update, concat("an update of ", job.shards().describe(entry)));
      if (entry.residency() == Residency::clean)
        job.residencies().move(entry, Residency::clean, Residency::dirty);
      if (entry.kind == EntryKind::parameter)
        job.drop_cached_tiles(job.shards().bucket(entry.owner));
      // What another step left there is no gradient to add to.
      if (entry.kind == EntryKind::gradient && shard.gradient_session == 0 &&
          request.mode == LeaseMode::write) {
        std::byte* const slot = job.memory->arena().at(entry.slot->offset_bytes);
        const Owed owed(OwedPlace::lease_gradient_zeroed);
        zero_bytes(slot + shard.offset_bytes(), shard.bytes);
      }
    }
    const uint32_t own_pins =
        request.for_service
            ? entry.slot->service_pins[index]
            : sessions_.at(request.session_id)->ring.pins(entry.slot->pin_first + index);
    if (reads && !request.prefetch && pin_readers(own_pins) == kPinReadersMax) {
      return refuse(error(StatusCode::capacity,
                          "shard ",
                          job.name,
                          "/",
                          shard.name(),
                          " is leased too often; let go of views you hold: ",
                          kPinReadersMax,
                          " times by this session"));
    }
    job.policy().used(entry.id, entry.price());
    reply_granted(job, waiter, *entry.slot);
    return Grant::done;
  }

  // Absent. While a step replaces what lies on disk, nothing is fetched from there.
  if (entry.task_count != 0) {
    EarlyUpdates::pause(job, entry);
    return wait(LeaseWait::update, concat("an update of ", job.shards().describe(entry)));
  }
  // A bucket of several shards keeps the bytes of the others.
  const bool needs_bytes =
      reads || request.mode == LeaseMode::write || job.shards().shard_count(entry) > 1;
  auto slot = make_room(job, entry.bytes, job.shards().shard_count(entry), !request.prefetch);
  if (slot == nullptr) {
    if (request.prefetch) return refuse(error(StatusCode::capacity, "no room for a prefetch"));
    return wait(LeaseWait::room, "room in the arena");
  }
  entry.slot = std::move(slot);
  job.residencies().move(entry, Residency::absent, Residency::filling);
  if (needs_bytes && entry.has_replica()) {
    const auto priority = request.prefetch ? IoPriority::prefetch : IoPriority::demand;
    fetch(job, entry, priority, [](const Status&) {});
    return wait(LeaseWait::disk, concat("the disk: ", job.shards().describe(entry), " is filling"));
  }
  if (needs_bytes || job.shards().shard_count(entry) > 1) {
    const Owed owed(OwedPlace::lease_slot_zeroed);
    zero_bytes(job.memory->arena().at(entry.slot->offset_bytes), entry.bytes);
  }
  job.residencies().move(entry, Residency::filling, Residency::clean);
  return grant_or_wait(job, waiter);
}

ShardStore::Grant ShardStore::grant_bytes_writer(Job& job,
                                                 LeaseWaiter& waiter,
                                                 Entry& entry,
                                                 bool keeps_old_bytes) {
  const auto wait = [&](LeaseWait reason, std::string what) {
    return put_off(waiter, reason, std::move(what));
  };
  if (entry.pending != nullptr) {
    return wait(LeaseWait::writer, concat("another writer of ", job.shards().describe(entry)));
  }
  if (entry.task_count != 0) {
    return wait(LeaseWait::step, concat("a step that uses ", job.shards().describe(entry)));
  }
  // Bytes that are to be copied must not make room for themselves.
  if (keeps_old_bytes) ++entry.task_count;
  auto slot = make_room(job, entry.bytes, 1, true);
  if (keeps_old_bytes) --entry.task_count;
  if (slot == nullptr) return wait(LeaseWait::room, "room in the arena");
  Arena& arena = job.memory->arena();
  std::byte* const into = arena.at(slot->offset_bytes);
  if (keeps_old_bytes) {
    const Owed owed(OwedPlace::lease_writer_filled);
    copy_bytes(into, arena.at(entry.slot->offset_bytes), entry.bytes);
  } else if (waiter.request.mode == LeaseMode::write) {
    const Owed owed(OwedPlace::lease_writer_filled);
    zero_bytes(into, entry.bytes);
  }
  MEMD_FAILPOINT("blob.before_pending");
  slot->pending_session = waiter.request.session_id;
  job.residencies().set_pending(entry, std::move(slot));
  reply_granted(job, waiter, *entry.pending);
  return Grant::done;
}

ShardStore::Grant ShardStore::put_off(LeaseWaiter& waiter, LeaseWait reason, std::string what) {
  waiter.put_off(reason, std::move(what));
  return reason == LeaseWait::room ? Grant::waiting_for_space : Grant::waiting;
}

void ShardStore::count_wait(Job& job, LeaseWaiter& waiter) {
  const uint64_t now_ns = clock_.now_ns();
  const uint64_t since_ns = now_ns - std::exchange(waiter.counted_ns, now_ns);
  // Nobody stands still for a prefetch.
  if (waiter.waits_on.empty() || waiter.request.prefetch) return;
  const auto reason = static_cast<size_t>(waiter.reason);
  waiter.waited_ns[reason] += since_ns;
  job.counters.lease_wait_reason_ns[reason] += since_ns;
  if (waiter.reason == LeaseWait::room) room_wait_ns_ += since_ns;
}

bool ShardStore::advance_leases(Job& job) {
  bool space_wanted = false;
  return job.waiters.advance([&](LeaseWaiter& waiter) -> LeaseWaiters::Verdict {
    count_wait(job, waiter);
    // Who came first gets room first; what is resident goes to anyone.
    Grant grant = Grant::waiting_for_space;
    if (!space_wanted || waiter.reason != LeaseWait::room) grant = try_grant(job, waiter);
    if (grant == Grant::done) return {.stays = false};
    Status refusal;
    if (grant == Grant::waiting_for_space) {
      if (!space_wanted) refusal = check_room_can_come(job, waiter);
      if (!refusal.is_ok() && move_old_bytes(job, waiter)) {
        if (try_grant(job, waiter) == Grant::done) return {.stays = false};
        refusal = Status::ok();
      }
      space_wanted = true;
    }
    if (refusal.is_ok()) refusal = check_deadline(job, waiter);
    const bool stays = refusal.is_ok();
    return {.stays = stays, .refusal = std::move(refusal)};
  });
}

bool ShardStore::move_old_bytes(Job& job, LeaseWaiter& waiter) {
  const Entry& entry = *job.shards().find_entry(waiter.request.shard_id, waiter.request.part);
  const bool are_copied = entry.kind == EntryKind::bytes &&
                          waiter.request.mode == LeaseMode::write && entry.is_resident();
  if (!are_copied || waiter.has_moved_old_bytes) return false;
  if (entry.task_count != 0 || job.slots().is_pinned(*entry.slot)) return false;
  auto both = make_room(job, 2 * align_up(entry.bytes, kBlockBytes), 1, true);
  if (both == nullptr) return job.activity_count != 0;
  waiter.has_moved_old_bytes = true;
  job.slots().free(std::move(both));
  return true;
}

Status ShardStore::check_room_can_come(const Job& job, const LeaseWaiter& waiter) {
  const bool nothing_moves = job.activity_count == 0 && !job.operations.is_running();
  if (!nothing_moves || job.slots().pinned_by_others(waiter.request.session_id))
    return Status::ok();
  return error(StatusCode::capacity,
               "no room for shard ",
               job.name,
               "/",
               job.shards()[waiter.request.shard_id].name(),
               ": let go of views you hold, or raise host_bytes: ",
               job.shards().find_entry(waiter.request.shard_id, waiter.request.part)->bytes,
               " bytes wanted; ",
               job.describe_holders(),
               "; the arena has at most ",
               job.memory->arena_bytes_max());
}

Status ShardStore::check_deadline(const Job& job, const LeaseWaiter& waiter) const {
  if (clock_.now_ns() < waiter.deadline_ns()) return Status::ok();
  return error(StatusCode::deadline,
               "a lease of shard ",
               job.name,
               "/",
               job.shards()[waiter.request.shard_id].name(),
               " waited too long on ",
               waiter.waits_on,
               "; ",
               job.describe_holders(),
               ": ",
               waiter.request.timeout_ns / 1'000'000,
               " ms");
}

std::unique_ptr<Slot> ShardStore::make_room(Job& job,
                                            uint64_t bytes,
                                            uint32_t pin_count,
                                            bool may_spill) {
  for (;;) {
    if (auto slot = job.slots().make(bytes, pin_count)) return slot;
    job.slots().free_retired();
    if (auto slot = job.slots().make(bytes, pin_count)) return slot;
    if (job.memory->grow_arena()) continue;
    if (evict_for(job, bytes)) continue;
    if (job.activity_count == 0 && shrink_private(job, may_spill)) continue;
    if (may_spill) spill(job, bytes);
    return nullptr;
  }
}

bool ShardStore::shrink_private(Job& job, bool may_flush) {
  if (!job.memory->can_shrink_private()) return false;
  // Tiles lie anywhere: those that are dirty may lie in the last segment, whatever else is free.
  job.drop_clean_tiles();
  if (job.memory->shrink_private()) return true;
  if (may_flush && job.tiles.has_dirty()) ask_for_flush(job, std::nullopt);
  return false;
}

bool ShardStore::evict_for(Job& job,
                           uint64_t bytes,
                           uint64_t distance_min,
                           uint64_t evicted_bytes_max) {
  const bool ignores_pins = MEMD_PLANTED("evict.leased_slot");
  RoomSearch search(job.memory->arena(), bytes);
  std::map<uint64_t, Entry*> candidates;  // by the offset of their slot
  // There whatever goes first goes: what is taken from the front keeps small slots together.
  const bool is_tight = job.is_tight();
  bool is_enough = false;
  const auto offer = [&](const Slot& slot, Entry* entry) {
    candidates[slot.offset_bytes] = entry;
    is_enough = is_tight || search.offer(slot.offset_bytes);
    return is_enough;
  };
  const auto may_go = [&](const Entry& entry) {
    if (entry.residency() != Residency::clean || entry.task_count != 0) return false;
    if (entry.pending != nullptr || (job.slots().is_pinned(*entry.slot) && !ignores_pins))
      return false;
    // A shard without bytes on disk has nowhere to go but away: empty tensors, and those of tier
    // "host" once they were read.
    return entry.has_replica();
  };
  job.policy().in_order([&](uint32_t entry_id, uint64_t distance) {
    if (distance < distance_min) return false;
    Entry* const entry = job.shards().entry(entry_id);
    if (may_go(*entry) && offer(*entry->slot, entry)) return false;
    const Slot* const early_slot = EarlyUpdates::slot_to_spare(job, *entry);
    return early_slot == nullptr || !offer(*early_slot, entry);
  });
  if (!is_enough) return false;
  const auto is_early = [](const auto& victim) {
    const auto& [offset_bytes, entry] = victim;
    return entry->slot == nullptr || entry->slot->offset_bytes != offset_bytes;
  };
  std::vector<std::pair<uint64_t, Entry*>> victims;
  if (is_tight) victims.push_back(*candidates.begin());
  for (const uint64_t offset_bytes : search.chosen())
    victims.emplace_back(offset_bytes, candidates.at(offset_bytes));
  uint64_t evicted_bytes = 0;
  for (const auto& victim : victims) evicted_bytes += victim.second->bytes;
  if (evicted_bytes > evicted_bytes_max) return false;
  for (const auto& victim : victims) {
    Entry& entry = *victim.second;
    if (is_early(victim)) {
      job.counters.evicted_bytes += entry.bytes;
      EarlyUpdates::free_slot(job, entry);
      continue;
    }
    // Who leased it without a request since we looked is seen now: whoever asks again finds it
    // pinned.
    if (!job.table().take_away(entry) && !ignores_pins) continue;
    MEMD_FAILPOINT("evict.chosen");
    job.counters.evicted_bytes += entry.bytes;
    job.policy().look_again_at(entry.id);
    job.residencies().move(entry, Residency::clean, Residency::absent);
    job.slots().free(std::move(entry.slot));
  }
  return true;
}

bool ShardStore::spill(Job& job, uint64_t bytes) {
  // A finished overwrite takes the place of what was there before either is written back.
  job.residencies().settle_all_pending();
  uint64_t draining_bytes = job.residencies().draining_bytes();
  uint64_t quota_bytes = 0;
  // While a step or sync runs, what its catalogue will name stays where it is; gradients are in no
  // catalogue.
  const bool gradients_only = job.operations.is_running();
  std::vector<Entry*> victims;
  job.policy().in_order([&](uint32_t entry_id, uint64_t) {
    if (draining_bytes >= bytes) return false;
    Entry* const entry = job.shards().entry(entry_id);
    if (entry->residency() != Residency::dirty || entry->task_count != 0) return true;
    if (gradients_only && entry->kind != EntryKind::gradient) return true;
    if (entry->tier != Tier::nvme || entry->pending != nullptr) return true;
    if (entry->replicas.empty() || job.slots().is_pinned(*entry->slot)) return true;
    // What is promised to the step that runs is free again after it.
    const uint64_t spilled_bytes = align_up(entry->bytes, kBlockBytes);
    if (!job.space.keeps_promise(quota_bytes + spilled_bytes)) return true;
    quota_bytes += spilled_bytes;
    victims.push_back(entry);
    draining_bytes += entry->bytes;
    return true;
  });
  for (Entry* const entry : victims) {
    MEMD_FAILPOINT("spill.started");
    job.counters.spilled_bytes += entry->bytes;
    write_back(
        job, *entry, std::make_shared<StepReport>(), [this, &job, entry](const Status& status) {
          MEMD_FAILPOINT("spill.finished");
          if (status.is_ok()) return;
          fail_waiters(job, *entry, status);
          // Trying again at once would end the same way.
          fail_waiters(
              job, [](const LeaseWaiter& it) { return it.reason == LeaseWait::room; }, status);
        });
  }
  return !victims.empty();
}

void ShardStore::fetch(Job& job, Entry& entry, IoPriority priority, Done done) {
  ++job.activity_count;
  ++entry.task_count;
  MEMD_FAILPOINT("fetch.started");
  job.counters.fetched_bytes += entry.bytes;
  auto join = Join::start([this, &job, &entry, done = std::move(done)](const Status& status) {
    --job.activity_count;
    --entry.task_count;
    MEMD_FAILPOINT("fetch.finished");
    if (status.is_ok()) {
      job.residencies().move(entry, Residency::filling, Residency::clean);
      return done(status);
    }
    job.residencies().move(entry, Residency::filling, Residency::absent);
    job.slots().free(std::move(entry.slot));
    done(status);
    fail_waiters(job, entry, status);
  });
  std::byte* const data = job.memory->arena().at(entry.slot->offset_bytes);
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    if (job.is_tile_dirty(entry, i)) {
      // The disk has older bytes.
      TileTask task;
      task.job = &job;
      task.entry = &entry;
      task.bucket = &job.shards().bucket(entry.owner);
      task.index = i;
      task.reads_value = true;
      task.reads_rest = true;
      task.work = [](const TileBytes& bytes) {
        copy_bytes(bytes.arena_value, bytes.value, bytes.value_bytes);
      };
      task.done = join->branch();
      tiles_.submit(std::move(task));
      continue;
    }
    const std::span<std::byte> into(data + i * entry.stride_bytes(), entry.replica_bytes(i));
    extents_.read(
        entry.replicas[i].extent(),
        into,
        {.job = JobId{job.job_id}, .priority = priority},
        concat("shard ", job.shards().describe(entry, i), ", step ", job.progress.committed_step()),
        [&job, &entry, i, done = join->branch()](const Status& status) {
          MEMD_FAILPOINT("fetch.extent_verified");
          if (status.code() == StatusCode::integrity) job.lose(entry, i, status);
          done(status);
        });
  }
  join->finish(Status::ok());
}

void ShardStore::fail_waiters(Job& job, const LeaseWaiters::Chosen& chosen, const Status& status) {
  for (LeaseWaiter& waiter : job.waiters.take(chosen)) {
    count_wait(job, waiter);
    waiter.refuse(status);
  }
}

void ShardStore::fail_waiters(Job& job, const Entry& entry, const Status& status) {
  const auto waits_for_it = [&](const LeaseWaiter& waiter) {
    return job.shards().find_entry(waiter.request.shard_id, waiter.request.part) == &entry;
  };
  fail_waiters(job, waits_for_it, status);
}

void ShardStore::release_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard) {
  Job* const job = find(job_id);
  MEMD_CHECK(job != nullptr);  // a job with service leases is not dropped
  const auto give_back = [job, grant] {
    job->slots().release_service(*grant.slot, grant.index, grant.pin);
  };
  const auto written = std::find_if(
      job->shards().entries().begin(), job->shards().entries().end(), [&](const Entry* entry) {
        return entry != nullptr && pin_writers(grant.pin) != 0 &&
               (entry->pending.get() == grant.slot || entry->slot.get() == grant.slot);
      });
  if (written == job->shards().entries().end()) return give_back();
  Entry& entry = **written;
  if (discard && entry.kind == EntryKind::parameter) {
    // A daemon that takes over before its bytes are whole again finds the writer.
    return discard_torn(*job, entry, {grant.index}, [job, &entry, give_back](const Status&) {
      give_back();
      job->slots().note(entry);
      job->slots().free_retired();
    });
  }
  give_back();
  if (discard && entry.pending.get() == grant.slot) {
    job->slots().retire(std::move(entry.pending));
  } else {
    job->slots().note(entry);
  }
}

}  // namespace memd
