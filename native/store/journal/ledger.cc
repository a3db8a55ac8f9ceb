#include "store/journal/ledger.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/memory_orders.h"
#include "base/units.h"
#include "store/journal/ledger_layout.h"

namespace memd {
namespace {

// Beside the session id of a seat: SeatRecord::has_notice.
constexpr uint64_t kSeatNotice = uint64_t{1} << 63;
// A layout is written anew when its changes are longer than itself, and than this.
constexpr uint64_t kLayoutChangesBytesMin = 64_KiB;

void raise_to(std::atomic<uint64_t>& end, uint64_t value) {
  if (end.load(std::memory_order_relaxed) < value) end.store(value, kRelease);
}

/// The record is one that this daemon wrote.
uint64_t sequence_of(const RecordPlace& place) {
  return place.sequence.load(std::memory_order_relaxed);
}

uint64_t slot_state(const SlotRecord& slot) {
  return uint64_t{static_cast<uint8_t>(slot.role)} << 56 |
         uint64_t{static_cast<uint8_t>(slot.residency)} << 48 |
         uint64_t{static_cast<uint8_t>(slot.kind)} << 40 |
         uint64_t{slot.has_service_writer ? 1u : 0u} << 32 | slot.owner;
}

}  // namespace

Ledger::Ledger(SharedMemory memory)
    : memory_(std::move(memory)),
      layout_(reinterpret_cast<LedgerLayout*>(memory_.data())),
      shards_(*layout_),
      loose_(*layout_, sequence_next_) {}

Result<std::unique_ptr<Ledger>> Ledger::create(uint64_t job_id, uint64_t segment_bytes) {
  auto memory = SharedMemory::create("memd-ledger", sizeof(LedgerLayout));
  if (!memory.is_ok()) return memory.status();
  std::unique_ptr<Ledger> ledger(new Ledger(std::move(memory).value()));
  ledger->layout_->magic = kLedgerMagic;
  ledger->layout_->version = kLedgerVersion;
  ledger->layout_->job_id = job_id;
  ledger->layout_->segment_bytes = segment_bytes;
  return ledger;
}

Result<std::unique_ptr<Ledger>> Ledger::adopt(OwnedFd fd, uint64_t job_id) {
  auto memory = SharedMemory::adopt("a ledger", std::move(fd), sizeof(LedgerLayout));
  if (!memory.is_ok()) return memory.status();
  std::unique_ptr<Ledger> ledger(new Ledger(std::move(memory).value()));
  const LedgerLayout& layout = *ledger->layout_;
  if (layout.magic != kLedgerMagic || layout.version != kLedgerVersion) {
    return error(StatusCode::not_yet,
                 "the ledger of job ",
                 job_id,
                 " is of another version: ",
                 layout.version,
                 ", here ",
                 kLedgerVersion);
  }
  if (layout.job_id != job_id) return damaged("that of job ", job_id, " names ", layout.job_id);
  return ledger;
}

void Ledger::give_up() { layout_->given_up.store(1, kRelease); }
bool Ledger::is_given_up() const { return layout_->given_up.load(kAcquire) != 0; }

void Ledger::note_tile_words() { layout_->has_tile_words.store(1, kRelease); }
bool Ledger::has_tile_words() const { return layout_->has_tile_words.load(kAcquire) != 0; }

// ---- Segments ----------------------------------------------------------------------------------

Status Ledger::claim(uint64_t segment_id, Side side, uint32_t index) {
  const auto known = claim_of_.find(segment_id);
  auto at = static_cast<uint32_t>(claim_of_.size());
  if (known != claim_of_.end()) at = known->second;
  if (at >= kClaimsMax) {
    return error(StatusCode::capacity, "a job has at most ", kClaimsMax, " segments of memory");
  }
  ClaimWords& words = layout_->claims[at];
  words.place.store(uint64_t{static_cast<uint8_t>(side)} << 32 | index, kRelease);
  if (known == claim_of_.end()) {
    words.segment_id.store(segment_id, kRelease);
    claim_of_[segment_id] = at;
    raise_to(layout_->claim_end, at + 1);
  }
  return Status::ok();
}

Result<std::vector<SegmentClaim>> Ledger::claims() const {
  const uint64_t end = layout_->claim_end.load(kAcquire);
  if (end > kClaimsMax) return damaged("claims of ", end, " segments");
  std::vector<SegmentClaim> claims;
  for (uint64_t at = 0; at < end; ++at) {
    const uint64_t place = layout_->claims[at].place.load(kAcquire);
    const uint64_t side = place >> 32;
    if (side > static_cast<uint64_t>(Side::host_side)) return damaged("a segment's side");
    claims.push_back({.id = layout_->claims[at].segment_id.load(kAcquire),
                      .side = static_cast<Side>(side),
                      .index = static_cast<uint32_t>(place)});
  }
  return claims;
}

// ---- Shards and slots --------------------------------------------------------------------------

Status Ledger::write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids) {
  const Owed owed(OwedPlace::journal_written);
  const std::vector<std::byte> bytes = encode_layout(record, shard_ids);
  const size_t place = older_of(layout_->layout_places);
  // Before the record is the newest, so that it never is with changes of another one.
  layout_->layout_ends[place].store(bytes.size(), kRelease);
  layout_at_.reset();
  record_bytes_written_ += bytes.size();
  Status written = write_older(
      layout_->layout_places, layout_->layouts[0], kRecordBytesMax, bytes, record.job_id);
  if (written.is_ok()) layout_at_ = place;
  return written;
}

bool Ledger::change_layout(const LayoutChange& change) {
  const Owed owed(OwedPlace::journal_written);
  if (!layout_at_) return false;
  return append_to_layout(encode_change(change, sequence_of(layout_->layout_places[*layout_at_])));
}

bool Ledger::change_facts(const LayoutFacts& facts) {
  const Owed owed(OwedPlace::journal_written);
  if (!layout_at_) return false;
  return append_to_layout(encode_facts(facts, sequence_of(layout_->layout_places[*layout_at_])));
}

bool Ledger::append_to_layout(std::span<const std::byte> bytes) {
  const uint64_t record_bytes = layout_->layout_places[*layout_at_].length_bytes;
  const uint64_t end = layout_->layout_ends[*layout_at_].load(std::memory_order_relaxed);
  const uint64_t changes_bytes_max = std::max(record_bytes, kLayoutChangesBytesMin);
  if (end - record_bytes + bytes.size() > changes_bytes_max) return false;
  if (end + bytes.size() > kRecordBytesMax) return false;
  copy_bytes(layout_->layouts[*layout_at_] + end, bytes.data(), bytes.size());
  MEMD_FAILPOINT("ledger.layout_change_not_published");
  layout_->layout_ends[*layout_at_].store(end + bytes.size(), kRelease);
  record_bytes_written_ += bytes.size();
  return true;
}

void Ledger::note_slot(const SlotRecord& slot) {
  MEMD_CHECK_LT(slot.pin_first, kPinCount);
  SlotWords& words = layout_->slots[slot.pin_first];
  const auto role_before = static_cast<SlotRole>(words.state.load(std::memory_order_relaxed) >> 56);
  if (role_before == SlotRole::none) {
    words.offset_bytes = slot.offset_bytes;
    words.bytes = slot.bytes;
    words.pin_count.store(slot.pin_count, kRelease);
    raise_to(layout_->pin_end, slot.pin_first + slot.pin_count);
  }
  words.pending_session.store(slot.pending_session, kRelease);
  // Only who becomes current is newer: who leaves still seems to be current until the last store.
  if (role_before != slot.role && slot.role == SlotRole::current)
    words.sequence.store(sequence_next_++, kRelease);
  words.state.store(slot_state(slot), kRelease);
}

// ---- Extents that only memory knows ------------------------------------------------------------

void Ledger::note_loose(const LooseKey& key, const ExtentRecord& extent) {
  // The job would be wrong without it: the next daemon starts it from disk.
  if (!loose_.note(key, extent, base())) give_up();
}

void Ledger::rebase(uint64_t tag) {
  loose_.rebase(base(), tag);
  shards_.end_commit(tag);
}

// ---- Sessions and their grants -----------------------------------------------------------------

Status Ledger::note_session(const SessionRecord& session) {
  const auto known = session_place_of_.find(session.session_id);
  uint32_t at = 0;
  if (known != session_place_of_.end()) {
    at = known->second;
  } else {
    while (at < kSessionsMax && layout_->sessions[at].session_id.load(kAcquire) != 0) ++at;
    if (at == kSessionsMax) {
      return error(StatusCode::capacity, "a job has at most ", kSessionsMax, " sessions");
    }
  }
  SessionWords& words = layout_->sessions[at];
  words.step_committed.store(session.step_committed, kRelease);
  if (known != session_place_of_.end()) return Status::ok();
  words.start_time = session.owner.start_time;
  words.pid = session.owner.pid;
  words.uid = session.owner.uid;
  raise_to(layout_->session_end, at + 1);
  words.session_id.store(session.session_id, kRelease);
  session_place_of_[session.session_id] = at;
  return Status::ok();
}

void Ledger::forget_session(uint64_t session_id) {
  const auto known = session_place_of_.find(session_id);
  if (known == session_place_of_.end()) return;
  layout_->sessions[known->second].session_id.store(0, kRelease);
  session_place_of_.erase(known);
}

void Ledger::note_seat(size_t seat, const SeatRecord& record) {
  layout_->group_seats[seat].store(record.session_id | (record.has_notice ? kSeatNotice : 0),
                                   kRelease);
}

void Ledger::begin_grant(const GrantRecord& grant) {
  LedgerLayout& layout = *layout_;
  layout.grant_shard = grant.shard_id;
  layout.grant_pin = grant.pin_index;
  layout.grant_tail = grant.completion_tail;
  layout.grant_flags =
      static_cast<uint32_t>(grant.part) << 1 | static_cast<uint32_t>(grant.was_written);
  layout.grant_contributors = grant.contributors.word();
  layout.grant_session.store(grant.session_id, kRelease);
}

void Ledger::end_grant() { layout_->grant_session.store(0, kRelease); }

// ---- Closed steps ------------------------------------------------------------------------------

Result<size_t> Ledger::close_step(const StepRequest& request) {
  const Owed owed(OwedPlace::journal_written);
  for (size_t at = 0; at < kStepsMax; ++at) {
    StepPlace& place = layout_->step_places[at];
    if (place.record.sequence.load(std::memory_order_relaxed) != 0) continue;
    place.number.store(0, kRelease);
    const std::vector<std::byte> encoded = encode_step(request);
    record_bytes_written_ += encoded.size();
    if (Status written =
            write_at(place.record, layout_->steps[at], kStepBytesMax, encoded, 0, sequence_next_++);
        !written.is_ok()) {
      return written;
    }
    return at;
  }
  return error(StatusCode::unavailable,
               "too many steps of one job wait to be made; wait for the earlier ones: ",
               kStepsMax);
}

void Ledger::note_committing(size_t place, uint64_t number) {
  layout_->step_places[place].number.store(number, kRelease);
}

void Ledger::forget_step(size_t place) {
  layout_->step_places[place].record.sequence.store(0, kRelease);
}

// ---- Commits in memory -------------------------------------------------------------------------

Result<std::span<std::byte>> Ledger::open_record(size_t bytes) {
  if (Status fits = check_fits(bytes, kRecordBytesMax); !fits.is_ok()) return fits;
  const size_t place = older_of(layout_->job_places);
  open(layout_->job_places[place]);
  return std::span(layout_->job_records[place], bytes);
}

void Ledger::publish_record(size_t bytes, uint64_t checksum, uint64_t base) {
  record_bytes_written_ += bytes;
  const uint64_t sequence = next_sequence(layout_->job_places);
  publish(layout_->job_places[older_of(layout_->job_places)],
          {.tag = base, .length_bytes = bytes, .checksum = checksum, .sequence = sequence});
  shards_.end_commit(shards_.base());
}

Result<std::optional<JobRecord>> Ledger::read_record(uint64_t base) const {
  const auto newest_place = newest(layout_->job_places, layout_->job_records[0], kRecordBytesMax);
  if (!newest_place.is_ok()) return newest_place.status();
  const auto place = newest_place.value();
  if (!place || layout_->job_places[*place].tag != base) return std::optional<JobRecord>();
  auto record =
      decode_job({layout_->job_records[*place], layout_->job_places[*place].length_bytes});
  if (!record.is_ok()) return damaged("its last commit in memory: ", record.status().message());
  return std::optional(std::move(record).value());
}

// ---- Reading what another daemon left ----------------------------------------------------------

Status Ledger::read_layout(LedgerContents& contents) {
  const auto newest_place = newest(layout_->layout_places, layout_->layouts[0], kRecordBytesMax);
  if (!newest_place.is_ok()) return newest_place.status();
  const auto place = newest_place.value();
  if (!place) return damaged("it does not say which shards the job has");
  const uint64_t sequence = layout_->layout_places[*place].sequence.load(kAcquire);
  const uint64_t record_bytes = layout_->layout_places[*place].length_bytes;
  const uint64_t end = layout_->layout_ends[*place].load(kAcquire);
  if (end < record_bytes || end > kRecordBytesMax) return damaged("its shards end at ", end);
  auto layout =
      decode_layout({layout_->layouts[*place], end}, record_bytes, sequence, layout_->job_id);
  if (!layout.is_ok()) return layout.status();
  contents.layout = std::move(layout.value().record);
  contents.shard_ids = std::move(layout.value().shard_ids);
  for (const uint32_t shard_id : contents.shard_ids) {
    contents.shards[shard_id] = shards_.adopt(shard_id);
  }
  return Status::ok();
}

Status Ledger::read_slots(LedgerContents& contents) const {
  const uint64_t end = layout_->pin_end.load(kAcquire);
  if (end > kPinCount) return damaged("pin counters in use: ", end);
  for (uint64_t at = 0; at < end;) {
    const SlotWords& words = layout_->slots[at];
    const uint64_t pin_count = words.pin_count.load(kAcquire);
    const uint64_t state = words.state.load(kAcquire);
    if (pin_count == 0 || pin_count > end - at) return damaged("a slot's pin counters at ", at);
    SlotRecord slot{.role = static_cast<SlotRole>(state >> 56),
                    .residency = static_cast<Residency>(state >> 48 & 0xff),
                    .kind = static_cast<EntryKind>(state >> 40 & 0xff),
                    .has_service_writer = (state >> 32 & 0xff) != 0,
                    .owner = static_cast<uint32_t>(state),
                    .offset_bytes = words.offset_bytes,
                    .bytes = words.bytes,
                    .pin_first = static_cast<uint32_t>(at),
                    .pin_count = static_cast<uint32_t>(pin_count),
                    .pending_session = words.pending_session.load(kAcquire),
                    .sequence = words.sequence.load(kAcquire)};
    if (slot.role > SlotRole::retired || slot.residency > Residency::draining ||
        slot.kind > EntryKind::bytes) {
      return damaged("a slot's state at ", at);
    }
    contents.slots.push_back(slot);
    at += pin_count;
  }
  return Status::ok();
}

Status Ledger::read_steps(LedgerContents& contents) {
  for (size_t at = 0; at < kStepsMax; ++at) {
    const StepPlace& place = layout_->step_places[at];
    const uint64_t sequence = place.record.sequence.load(kAcquire);
    if (sequence == 0) continue;
    if (!is_whole(place.record, layout_->steps[at], kStepBytesMax))
      return damaged("a closed step's checksum does not match");
    auto request = decode_step({layout_->steps[at], place.record.length_bytes});
    if (!request.is_ok()) return request.status();
    contents.steps.push_back({.place = at,
                              .sequence = sequence,
                              .number = place.number.load(kAcquire),
                              .request = std::move(request).value()});
    sequence_next_ = std::max(sequence_next_, sequence + 1);
  }
  std::sort(contents.steps.begin(), contents.steps.end(), [](const auto& a, const auto& b) {
    return a.sequence < b.sequence;
  });
  return Status::ok();
}

Result<LedgerContents> Ledger::read(uint64_t base) {
  shards_.end_commit(base);
  LedgerContents contents;
  contents.segment_bytes = layout_->segment_bytes;
  const uint64_t session_end = layout_->session_end.load(kAcquire);
  if (session_end > kSessionsMax) return damaged("sessions: ", session_end);
  for (uint32_t at = 0; at < session_end; ++at) {
    const SessionWords& words = layout_->sessions[at];
    const uint64_t session_id = words.session_id.load(kAcquire);
    if (session_id == 0) continue;
    if (!session_place_of_.emplace(session_id, at).second) return damaged("two sessions in one");
    contents.sessions.push_back(
        {.session_id = session_id,
         .owner = {.pid = words.pid, .start_time = words.start_time, .uid = words.uid},
         .step_committed = words.step_committed.load(kAcquire)});
  }
  for (size_t seat = 0; seat < kTrainingGroupMax; ++seat) {
    const uint64_t word = layout_->group_seats[seat].load(kAcquire);
    contents.seats[seat] = {.session_id = word & ~kSeatNotice,
                            .has_notice = (word & kSeatNotice) != 0};
  }
  if (const uint64_t session_id = layout_->grant_session.load(kAcquire); session_id != 0) {
    const uint32_t part = layout_->grant_flags >> 1;
    if (part > static_cast<uint32_t>(Part::rank_sum)) return damaged("a grant's part");
    contents.grant =
        GrantRecord{.session_id = session_id,
                    .shard_id = layout_->grant_shard,
                    .pin_index = layout_->grant_pin,
                    .completion_tail = layout_->grant_tail,
                    .part = static_cast<Part>(part),
                    .was_written = (layout_->grant_flags & 1) != 0,
                    .contributors = Contributors::from_word(layout_->grant_contributors)};
  }
  const auto claimed = claims();
  if (!claimed.is_ok()) return claimed.status();
  for (const SegmentClaim& claim : claimed.value()) {
    const auto at = static_cast<uint32_t>(claim_of_.size());
    if (!claim_of_.emplace(claim.id, at).second) return damaged("a segment is claimed twice");
  }
  if (Status status = read_layout(contents); !status.is_ok()) return status;
  if (Status status = read_slots(contents); !status.is_ok()) return status;
  auto loose = loose_.read(base);
  if (!loose.is_ok()) return loose.status();
  contents.loose = std::move(loose).value();
  if (Status status = read_steps(contents); !status.is_ok()) return status;
  for (const SlotRecord& slot : contents.slots)
    sequence_next_ = std::max(sequence_next_, slot.sequence + 1);
  return contents;
}

}  // namespace memd
