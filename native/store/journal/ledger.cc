#include "store/journal/ledger.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <concepts>
#include <cstddef>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/encoding.h"

namespace memd {
namespace {

constexpr uint64_t kLedgerMagic = 0x3130'676c'646d'656d;  // "memdlg01"
constexpr uint32_t kLedgerVersion = 6;

// Sparse: pages that nobody touched cost nothing.
constexpr uint32_t kClaimsMax = 1u << 16;
constexpr uint32_t kSessionsMax = 1u << 12;
constexpr uint32_t kShardsMax = 1u << 20;
constexpr uint32_t kLooseMax = 1u << 21;
constexpr uint32_t kStepsMax = 16;
// Beside the session id of a seat: SeatRecord::has_notice.
constexpr uint64_t kSeatNotice = uint64_t{1} << 63;
constexpr uint64_t kStepBytesMax = 16_MiB;
constexpr uint64_t kRecordBytesMax = 256_MiB;
// A layout is written anew when its changes are longer than itself, and than this.
constexpr uint64_t kLayoutChangesBytesMin = 64_KiB;

constexpr auto kRelease = std::memory_order_release;
constexpr auto kAcquire = std::memory_order_acquire;

struct ClaimWords {
  std::atomic<uint64_t> segment_id;  // 0: none
  std::atomic<uint64_t> place;       // side << 32 | index
};

struct SessionWords {
  std::atomic<uint64_t> session_id;  // 0: none; stored last
  uint64_t start_time;
  uint32_t pid;
  uint32_t uid;
  std::atomic<uint64_t> step_committed;
};

struct ShardWords {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> contributors;
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> generation_commit;  // stored after it; the commit that it builds on
  std::atomic<uint64_t> reset_commit;       // the last one when the shard with this id came or went
};

/// At the index of its first pin counter, which no other slot has.
struct SlotWords {
  // role, residency, kind, service writer: 8 bits each; owner: 32. Stored last.
  std::atomic<uint64_t> state;
  uint64_t offset_bytes;
  uint64_t bytes;
  std::atomic<uint64_t> pin_count;
  std::atomic<uint64_t> pending_session;
  std::atomic<uint64_t> sequence;
};

struct LooseWords {
  std::atomic<uint64_t> sequence;  // 0: none; stored last
  uint64_t base;                   // 0 for gradients: they build on no catalogue
  uint64_t kind_and_index;         // kind << 32 | index
  uint64_t owner;
  uint64_t offset_bytes;
  uint64_t extent_checksum;
  uint64_t device_and_length;  // device << 32 | length
  uint64_t checksum;           // of the six before it
};
static_assert(sizeof(LooseWords) == 64);

/// A record of any length. `sequence` is stored last, and 0 while the bytes change.
struct RecordPlace {
  std::atomic<uint64_t> sequence;
  uint64_t tag;
  uint64_t length_bytes;
  uint64_t checksum;  // of the bytes
};

/// Stands before each change of a layout, which follow it one after the other.
struct ChangeHeader {
  uint64_t sequence;  // of the layout that it changes
  uint64_t length_bytes;
  uint64_t checksum;
};

struct StepPlace {
  RecordPlace record;
  std::atomic<uint64_t> number;
};

}  // namespace

struct LedgerLayout {
  uint64_t magic;
  uint32_t version;
  std::atomic<uint32_t> has_tile_words;
  uint64_t job_id;
  uint64_t segment_bytes;
  std::atomic<uint64_t> given_up;
  // Nothing was ever written at or beyond these.
  std::atomic<uint64_t> claim_end;
  std::atomic<uint64_t> session_end;
  std::atomic<uint64_t> pin_end;
  std::atomic<uint64_t> loose_end;

  // The grant under way.
  alignas(64) std::atomic<uint64_t> grant_session;  // 0: none; stored last
  uint32_t grant_shard;
  uint32_t grant_pin;
  uint32_t grant_tail;
  uint32_t grant_flags;  // part, was written
  uint64_t grant_contributors;

  alignas(64) RecordPlace layout_places[2];
  std::atomic<uint64_t> layout_ends[2];  // of the record and what has changed since; stored last
  alignas(64) RecordPlace job_places[2];
  alignas(64) StepPlace step_places[kStepsMax];
  // Daemons that knew no training groups left 0 here.
  alignas(64) std::atomic<uint64_t> group_seats[kTrainingGroupMax];
  alignas(4096) ClaimWords claims[kClaimsMax];
  alignas(4096) SessionWords sessions[kSessionsMax];
  alignas(4096) ShardWords shards[kShardsMax];
  alignas(4096) SlotWords slots[kPinCount];
  alignas(4096) LooseWords loose[kLooseMax];
  alignas(4096) std::byte steps[kStepsMax][kStepBytesMax];
  alignas(4096) std::byte layouts[2][kRecordBytesMax];
  alignas(4096) std::byte job_records[2][kRecordBytesMax];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
// Everything from here on keeps its place in ledgers of this version.
static_assert(offsetof(LedgerLayout, claims) == 4096);

namespace {

template <typename... Parts>
Status damaged(const Parts&... parts) {
  return error(StatusCode::integrity, "the ledger is damaged: ", parts...);
}

bool is_whole(const RecordPlace& place, const std::byte* bytes, uint64_t bytes_max) {
  const uint64_t length_bytes = place.length_bytes;
  return place.sequence.load(kAcquire) != 0 && length_bytes <= bytes_max &&
         hash_record({bytes, length_bytes}) == place.checksum;
}

/// The place of the newest record, or nothing. A write that was cut off has left no sequence
/// number: a record that has one and is not whole was damaged, and the one before it is not what
/// the rest of the ledger goes with.
Result<std::optional<size_t>> newest(const RecordPlace (&places)[2],
                                     const std::byte* bytes,
                                     uint64_t bytes_max) {
  const uint64_t first = places[0].sequence.load(kAcquire);
  const uint64_t second = places[1].sequence.load(kAcquire);
  if (first == 0 && second == 0) return std::optional<size_t>();
  const size_t found = first > second ? 0 : 1;
  if (!is_whole(places[found], bytes + found * bytes_max, bytes_max)) {
    return damaged("a record's bytes are not those that were written");
  }
  return std::optional(found);
}

Status check_fits(size_t bytes, uint64_t bytes_max) {
  if (bytes <= bytes_max) return Status::ok();
  return error(StatusCode::capacity,
               "a job has more to remember than its ledger holds: ",
               bytes,
               " > ",
               bytes_max,
               " bytes");
}

/// Its bytes may change from here on.
void open(RecordPlace& place) {
  place.sequence.store(0, kRelease);
  // Stores that follow stay behind that one: the next daemon finds no half record that seems whole.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

struct RecordHead {
  uint64_t tag;
  uint64_t length_bytes;
  uint64_t checksum;
  uint64_t sequence;
};

void publish(RecordPlace& place, const RecordHead& head) {
  place.tag = head.tag;
  place.length_bytes = head.length_bytes;
  place.checksum = head.checksum;
  MEMD_FAILPOINT("ledger.record_not_published");
  place.sequence.store(head.sequence, kRelease);
}

Status write_at(RecordPlace& place,
                std::byte* into,
                uint64_t bytes_max,
                std::span<const std::byte> record,
                uint64_t tag,
                uint64_t sequence) {
  if (Status fits = check_fits(record.size(), bytes_max); !fits.is_ok()) return fits;
  open(place);
  copy_bytes(into, record.data(), record.size());
  publish(place,
          {.tag = tag,
           .length_bytes = record.size(),
           .checksum = hash_record(record),
           .sequence = sequence});
  return Status::ok();
}

/// The mark of a shard that came or went while a commit was made: it comes after the one before,
/// and after this one too.
constexpr uint64_t kInCommit = ~uint64_t{0};

/// Tells a commit from every other one: the catalogue on disk, and the record in memory on it; 0 is
/// none. Never 0 or kInCommit.
uint64_t commit_mark(uint64_t base, uint64_t record_sequence) {
  const uint64_t words[2] = {base, record_sequence};
  return std::clamp<uint64_t>(hash_record(std::as_bytes(std::span(words))), 1, kInCommit - 1);
}

size_t older_of(const RecordPlace (&places)[2]) {
  return places[0].sequence.load(std::memory_order_relaxed) <=
                 places[1].sequence.load(std::memory_order_relaxed)
             ? 0
             : 1;
}

/// For the record that takes the older one's place.
uint64_t next_sequence(const RecordPlace (&places)[2]) {
  return places[1 - older_of(places)].sequence.load(std::memory_order_relaxed) + 1;
}

Status write_older(RecordPlace (&places)[2],
                   std::byte* bytes,
                   uint64_t bytes_max,
                   std::span<const std::byte> record,
                   uint64_t tag) {
  const size_t older = older_of(places);
  return write_at(
      places[older], bytes + older * bytes_max, bytes_max, record, tag, next_sequence(places));
}

void raise_to(std::atomic<uint64_t>& end, uint64_t value) {
  if (end.load(std::memory_order_relaxed) < value) end.store(value, kRelease);
}

uint64_t slot_state(const SlotRecord& slot) {
  return uint64_t{static_cast<uint8_t>(slot.role)} << 56 |
         uint64_t{static_cast<uint8_t>(slot.residency)} << 48 |
         uint64_t{static_cast<uint8_t>(slot.kind)} << 40 |
         uint64_t{slot.has_service_writer ? 1u : 0u} << 32 | slot.owner;
}

uint64_t loose_checksum(const LooseWords& words) {
  const uint64_t fields[6] = {words.base,
                              words.kind_and_index,
                              words.owner,
                              words.offset_bytes,
                              words.extent_checksum,
                              words.device_and_length};
  return hash_record(std::as_bytes(std::span(fields)));
}

template <typename Id>
void put_counted(FieldWriter& writer, const std::vector<Id>& ids) {
  writer.put(static_cast<uint32_t>(ids.size()));
  for (const Id id : ids) writer.put(id);
}

template <typename Id>
std::vector<Id> get_counted(FieldReader& reader) {
  std::vector<Id> ids;
  const auto count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < count && !reader.overrun(); ++i) ids.push_back(reader.get<Id>());
  return ids;
}

std::vector<std::byte> encode_step(const StepRequest& request) {
  static_assert(sizeof(StepRequest) == 96, "a field was added: write and read it here");
  std::vector<std::byte> out;
  FieldWriter writer(out);
  writer.put(request.session_id);
  writer.put(request.step);
  writer.put(request.call);
  writer.put(static_cast<uint32_t>(request.groups.size()));
  for (const StepGroup& group : request.groups) {
    const AdamSettings& settings = group.settings;
    for (const double value :
         {settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay}) {
      writer.put(std::bit_cast<uint64_t>(value));
    }
    writer.put(static_cast<uint8_t>(settings.decoupled));
    put_counted(writer, group.shard_ids);
  }
  writer.put(static_cast<uint32_t>(request.staged_buffers.size()));
  for (const auto& [staged, buffer] : request.staged_buffers) {
    writer.put(staged);
    writer.put(buffer);
  }
  writer.put(static_cast<uint32_t>(request.summed.size()));
  for (const SummedGradients& sum : request.summed) {
    put_counted(writer, sum.session_ids);
    put_counted(writer, sum.shard_ids);
  }
  return out;
}

Result<StepRequest> decode_step(std::span<const std::byte> bytes) {
  FieldReader reader(bytes);
  StepRequest request;
  request.session_id = reader.get<uint64_t>();
  request.step = reader.get<uint64_t>();
  request.call = reader.get<uint64_t>();
  const auto group_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < group_count && !reader.overrun(); ++i) {
    StepGroup group;
    AdamSettings& settings = group.settings;
    for (double* value :
         {&settings.lr, &settings.beta1, &settings.beta2, &settings.eps, &settings.weight_decay}) {
      *value = std::bit_cast<double>(reader.get<uint64_t>());
    }
    settings.decoupled = reader.get<uint8_t>() != 0;
    group.shard_ids = get_counted<uint32_t>(reader);
    request.groups.push_back(std::move(group));
  }
  const auto staged_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < staged_count && !reader.overrun(); ++i) {
    const auto staged = reader.get<uint32_t>();
    request.staged_buffers.emplace_back(staged, reader.get<uint32_t>());
  }
  const auto sum_count = reader.get<uint32_t>();
  for (uint32_t i = 0; i < sum_count && !reader.overrun(); ++i) {
    auto session_ids = get_counted<uint64_t>(reader);
    request.summed.push_back(
        {.session_ids = std::move(session_ids), .shard_ids = get_counted<uint32_t>(reader)});
  }
  if (reader.overrun() || reader.remaining_bytes() != 0) return damaged("a closed step");
  return request;
}

}  // namespace

Ledger::Ledger(SharedMemory memory)
    : memory_(std::move(memory)), layout_(reinterpret_cast<LedgerLayout*>(memory_.data())) {}

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
    if (side > static_cast<uint64_t>(Side::private_side)) return damaged("a segment's side");
    claims.push_back({.id = layout_->claims[at].segment_id.load(kAcquire),
                      .side = static_cast<Side>(side),
                      .index = static_cast<uint32_t>(place)});
  }
  return claims;
}

Status Ledger::check_claims() const {
  const auto claimed = claims();
  return claimed.is_ok() ? Status::ok() : claimed.status();
}

// ---- Shards and slots --------------------------------------------------------------------------

Status Ledger::write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids) {
  const Owed owed(OwedPlace::journal_written);
  std::vector<std::byte> bytes;
  FieldWriter writer(bytes);
  writer.put(uint64_t{shard_ids.size()});
  for (const uint32_t shard_id : shard_ids) writer.put(shard_id);
  const std::vector<std::byte> encoded = encode(record);
  writer.put_bytes(encoded.data(), encoded.size());
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
  std::vector<std::byte> bytes(sizeof(ChangeHeader));
  FieldWriter writer(bytes);
  writer.put(static_cast<uint32_t>(change.removed.size()));
  for (const uint32_t shard_id : change.removed) writer.put(shard_id);
  writer.put(static_cast<uint32_t>(change.added_ids.size()));
  for (const uint32_t shard_id : change.added_ids) writer.put(shard_id);
  const std::vector<std::byte> added = encode(change.added);
  writer.put_bytes(added.data(), added.size());
  const std::span<const std::byte> body = std::span(bytes).subspan(sizeof(ChangeHeader));
  const RecordPlace& place = layout_->layout_places[*layout_at_];
  const ChangeHeader header{.sequence = place.sequence.load(std::memory_order_relaxed),
                            .length_bytes = body.size(),
                            .checksum = hash_record(body)};
  copy_bytes(bytes.data(), &header, sizeof(header));

  const uint64_t record_bytes = place.length_bytes;
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

void Ledger::note_shard(uint32_t shard_id, bool written, Contributors contributors) {
  if (shard_id >= kShardsMax) return;  // Job::declare() refuses it
  ShardWords& words = layout_->shards[shard_id];
  words.contributors.store(contributors.word(), kRelease);
  words.written.store(written ? 1 : 0, kRelease);
}

void Ledger::note_generation(uint32_t shard_id, uint64_t generation) {
  if (shard_id >= kShardsMax) return;
  layout_->shards[shard_id].generation.store(generation, kRelease);
  layout_->shards[shard_id].generation_commit.store(last_commit_, kRelease);
}

void Ledger::reset_shard(uint32_t shard_id) {
  if (shard_id >= kShardsMax) return;
  note_shard(shard_id, false, {});
  layout_->shards[shard_id].generation_commit.store(0, kRelease);
  layout_->shards[shard_id].reset_commit.store(is_committing_ ? kInCommit : last_commit_, kRelease);
  if (is_committing_) reset_ids_.push_back(shard_id);
}

uint32_t Ledger::given_ids_end(uint32_t from) const {
  // Ids are given without gaps, and each leaves a mark: the ledger's commit is never 0.
  while (from < kShardsMax && layout_->shards[from].reset_commit.load(kAcquire) != 0) ++from;
  return from;
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
  const auto known = loose_place_of_.find(key);
  std::optional<uint32_t> old;
  if (known != loose_place_of_.end()) old = known->second;
  if (extent.exists()) {
    uint32_t at = 0;
    if (!free_loose_places_.empty()) {
      at = free_loose_places_.back();
      free_loose_places_.pop_back();
    } else {
      at = static_cast<uint32_t>(layout_->loose_end.load(std::memory_order_relaxed));
      // The job would be wrong without it: the next daemon starts it from disk.
      if (at >= kLooseMax) return give_up();
      layout_->loose_end.store(at + 1, kRelease);
    }
    LooseWords& words = layout_->loose[at];
    words.base = key.kind == LooseKey::Kind::gradient ? 0 : base_;
    words.kind_and_index = uint64_t{static_cast<uint8_t>(key.kind)} << 32 | key.index;
    words.owner = key.owner;
    words.offset_bytes = extent.address.offset_bytes;
    words.extent_checksum = extent.checksum;
    words.device_and_length = uint64_t{extent.address.device} << 32 | extent.length_bytes;
    words.checksum = loose_checksum(words);
    words.sequence.store(sequence_next_++, kRelease);
    loose_place_of_[key] = at;
  } else if (old) {
    loose_place_of_.erase(key);
  }
  if (old) {
    layout_->loose[*old].sequence.store(0, kRelease);
    free_loose_places_.push_back(*old);
  }
}

void Ledger::begin_commit() {
  // Those of a commit of which nothing came are in this one.
  settle_marks();
  is_committing_ = true;
}

void Ledger::rebase(uint64_t tag) {
  const Owed owed(OwedPlace::journal_written);
  base_ = tag;
  mark_commit();
  for (auto it = loose_place_of_.begin(); it != loose_place_of_.end();) {
    if (it->first.kind == LooseKey::Kind::gradient) {
      ++it;
      continue;
    }
    layout_->loose[it->second].sequence.store(0, kRelease);
    free_loose_places_.push_back(it->second);
    it = loose_place_of_.erase(it);
  }
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
  mark_commit();
}

uint64_t Ledger::record_sequence() const {
  const RecordPlace& newest_place = layout_->job_places[1 - older_of(layout_->job_places)];
  return newest_place.tag == base_ ? newest_place.sequence.load(std::memory_order_relaxed) : 0;
}

void Ledger::mark_commit() {
  last_commit_ = commit_mark(base_, record_sequence());
  is_committing_ = false;
  settle_marks();
}

void Ledger::settle_marks() {
  for (const uint32_t shard_id : std::exchange(reset_ids_, {})) {
    layout_->shards[shard_id].reset_commit.store(last_commit_, kRelease);
  }
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

namespace {

/// The shards of a layout while its changes are applied to it, in any order.
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
  void move_into(LedgerContents& contents) {
    contents.shard_ids = std::move(ids_);
    contents.layout.shards = std::move(shards_);
  }

 private:
  std::vector<uint32_t> ids_;
  std::vector<ShardRecord> shards_;
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

Status add_shards(JobRecord& record, const std::vector<uint32_t>& ids, LayoutShards& shards) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (Status added = shards.add(ids[i], std::move(record.shards[i])); !added.is_ok())
      return added;
  }
  return Status::ok();
}

Status apply_change(std::span<const std::byte> bytes, uint64_t job_id, LayoutShards& shards) {
  FieldReader reader(bytes);
  const auto removed = read_ids<uint32_t>(reader);
  if (!removed.is_ok()) return removed.status();
  for (const uint32_t shard_id : removed.value()) {
    if (Status status = shards.remove(shard_id); !status.is_ok()) return status;
  }
  const auto added = read_ids<uint32_t>(reader);
  if (!added.is_ok()) return added.status();
  auto record = read_shards(reader, added.value(), job_id);
  if (!record.is_ok()) return record.status();
  // Buckets are those of the layout that is changed, with all that they hold.
  if (!record.value().buckets.empty()) return damaged("a change with a parameter");
  return add_shards(record.value(), added.value(), shards);
}

}  // namespace

Status Ledger::read_layout(LedgerContents& contents) const {
  const auto newest_place = newest(layout_->layout_places, layout_->layouts[0], kRecordBytesMax);
  if (!newest_place.is_ok()) return newest_place.status();
  const auto place = newest_place.value();
  if (!place) return damaged("it does not say which shards the job has");
  const uint64_t sequence = layout_->layout_places[*place].sequence.load(kAcquire);
  const uint64_t record_bytes = layout_->layout_places[*place].length_bytes;
  const uint64_t end = layout_->layout_ends[*place].load(kAcquire);
  if (end < record_bytes || end > kRecordBytesMax) return damaged("its shards end at ", end);
  const std::span<const std::byte> bytes(layout_->layouts[*place], end);
  LayoutShards shards;
  FieldReader reader(bytes.first(record_bytes));
  const auto ids = read_ids<uint64_t>(reader);
  if (!ids.is_ok()) return ids.status();
  auto record = read_shards(reader, ids.value(), layout_->job_id);
  if (!record.is_ok()) return record.status();
  if (Status added = add_shards(record.value(), ids.value(), shards); !added.is_ok()) return added;
  contents.layout = std::move(record).value();
  for (FieldReader changes(bytes.subspan(record_bytes)); changes.remaining_bytes() != 0;) {
    const auto changed_sequence = changes.get<uint64_t>();
    const auto length_bytes = changes.get<uint64_t>();
    const auto checksum = changes.get<uint64_t>();
    const auto change = changes.get_bytes(length_bytes);
    if (changes.overrun() || changed_sequence != sequence || hash_record(change) != checksum) {
      return damaged("a change of its shards");
    }
    if (Status applied = apply_change(change, layout_->job_id, shards); !applied.is_ok())
      return applied;
  }
  shards.move_into(contents);
  if (Status status = check_shards_together(contents.layout); !status.is_ok()) return status;
  for (const uint32_t shard_id : contents.shard_ids) {
    ShardWords& words = layout_->shards[shard_id];
    const uint64_t reset_commit = words.reset_commit.load(kAcquire);
    ShardState state{.written = words.written.load(kAcquire) != 0,
                     .contributors = Contributors::from_word(words.contributors.load(kAcquire)),
                     .generation = std::nullopt,
                     .is_new = reset_commit == last_commit_ || reset_commit == kInCommit};
    if (reset_commit == kInCommit) words.reset_commit.store(last_commit_, kRelease);
    if (base_ != 0 && words.generation_commit.load(kAcquire) == last_commit_)
      state.generation = words.generation.load(kAcquire);
    contents.shards[shard_id] = state;
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

Status Ledger::read_loose(LedgerContents& contents) {
  const uint64_t end = layout_->loose_end.load(kAcquire);
  if (end > kLooseMax) return damaged("loose extents: ", end);
  std::map<LooseKey, uint64_t> sequences;
  for (uint32_t at = 0; at < end; ++at) {
    LooseWords& words = layout_->loose[at];
    const uint64_t sequence = words.sequence.load(kAcquire);
    const LooseKey key{.kind = static_cast<LooseKey::Kind>(words.kind_and_index >> 32),
                       .owner = static_cast<uint32_t>(words.owner),
                       .index = static_cast<uint32_t>(words.kind_and_index)};
    const bool gradient = key.kind == LooseKey::Kind::gradient;
    if (sequence != 0 && loose_checksum(words) != words.checksum) return damaged("a loose extent");
    // On an older catalogue: the one on disk names the right place. Older, of the same place:
    // replaced, and the daemon died before it could note that.
    if (sequence == 0 || words.base != (gradient ? 0 : base_) || sequence < sequences[key]) {
      words.sequence.store(0, kRelease);
      free_loose_places_.push_back(at);
      continue;
    }
    if (const auto older = loose_place_of_.find(key); older != loose_place_of_.end()) {
      layout_->loose[older->second].sequence.store(0, kRelease);
      free_loose_places_.push_back(older->second);
    }
    loose_place_of_[key] = at;
    sequences[key] = sequence;
    sequence_next_ = std::max(sequence_next_, sequence + 1);
    contents.loose[key] = {
        .address = {.device = static_cast<uint16_t>(words.device_and_length >> 32),
                    .offset_bytes = words.offset_bytes},
        .length_bytes = static_cast<uint32_t>(words.device_and_length),
        .checksum = words.extent_checksum};
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
  base_ = base;
  mark_commit();
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
    contents.grant =
        GrantRecord{.session_id = session_id,
                    .shard_id = layout_->grant_shard,
                    .pin_index = layout_->grant_pin,
                    .completion_tail = layout_->grant_tail,
                    .part = static_cast<Part>(layout_->grant_flags >> 1 & 1),
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
  if (Status status = read_loose(contents); !status.is_ok()) return status;
  if (Status status = read_steps(contents); !status.is_ok()) return status;
  for (const SlotRecord& slot : contents.slots)
    sequence_next_ = std::max(sequence_next_, slot.sequence + 1);
  return contents;
}

}  // namespace memd
