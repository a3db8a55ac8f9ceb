#include "store/journal/job_ledger.h"

#include <utility>

#include "base/check.h"
#include "store/journal/ledger.h"

namespace memd {

JobLedger::JobLedger() = default;
JobLedger::JobLedger(JobLedger&& other) noexcept = default;
JobLedger& JobLedger::operator=(JobLedger&& other) noexcept = default;
JobLedger::~JobLedger() = default;

JobLedger::JobLedger(std::unique_ptr<Ledger> ledger) : ledger_(std::move(ledger)) {}

Ledger& JobLedger::get() const {
  MEMD_CHECK(ledger_ != nullptr);
  return *ledger_;
}

// ---- It comes and goes --------------------------------------------------------------------------

Status JobLedger::create(uint64_t job_id, uint64_t segment_bytes) {
  auto created = Ledger::create(job_id, segment_bytes);
  if (!created.is_ok()) return created.status();
  ledger_ = std::move(created).value();
  return Status::ok();
}

Result<JobLedger> JobLedger::adopt(OwnedFd fd, uint64_t job_id) {
  auto adopted = Ledger::adopt(std::move(fd), job_id);
  if (!adopted.is_ok()) return adopted.status();
  const auto claims = adopted.value()->claims();
  if (!claims.is_ok()) return claims.status();
  return JobLedger(std::move(adopted).value());
}

void JobLedger::close() { ledger_.reset(); }

int JobLedger::fd() const { return get().fd(); }

void JobLedger::give_up() {
  if (is_open()) ledger_->give_up();
}

// ---- Memory -------------------------------------------------------------------------------------

void JobLedger::note_tile_words() {
  if (is_open()) ledger_->note_tile_words();
}

Status JobLedger::claim(uint64_t segment_id, Side side, uint32_t index) {
  return is_open() ? ledger_->claim(segment_id, side, index) : Status::ok();
}

void JobLedger::note_slot(const SlotRecord& slot) {
  if (is_open()) ledger_->note_slot(slot);
}

// ---- Shards -------------------------------------------------------------------------------------

Status JobLedger::write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids) {
  return get().write_layout(record, shard_ids);
}

bool JobLedger::change_layout(const LayoutChange& change) { return get().change_layout(change); }

bool JobLedger::change_facts(const LayoutFacts& facts) { return get().change_facts(facts); }

void JobLedger::note_shard(uint32_t shard_id, bool written, Contributors contributors) {
  if (is_open()) ledger_->note_shard(shard_id, written, contributors);
}

void JobLedger::note_generation(uint32_t shard_id, uint64_t generation) {
  if (is_open()) ledger_->note_generation(shard_id, generation);
}

void JobLedger::reset_shard(uint32_t shard_id) {
  if (is_open()) ledger_->reset_shard(shard_id);
}

// ---- Extents ------------------------------------------------------------------------------------

void JobLedger::note_loose(const LooseKey& key, const ExtentRecord& extent) {
  if (is_open()) ledger_->note_loose(key, extent);
}

uint64_t JobLedger::base() const { return get().base(); }

// ---- Commits ------------------------------------------------------------------------------------

void JobLedger::begin_commit() {
  if (is_open()) ledger_->begin_commit();
}

void JobLedger::committed_on_disk(uint64_t tag) {
  if (is_open()) ledger_->rebase(tag);
}

bool JobLedger::forget_old_extents(size_t count_max) {
  return !is_open() || ledger_->empty_old_places(count_max);
}

Result<std::span<std::byte>> JobLedger::open_record(size_t bytes) {
  return get().open_record(bytes);
}

void JobLedger::publish_record(size_t bytes, uint64_t checksum, uint64_t base) {
  get().publish_record(bytes, checksum, base);
}

// ---- Sessions -----------------------------------------------------------------------------------

Status JobLedger::note_session(const SessionRecord& session) {
  return is_open() ? ledger_->note_session(session) : Status::ok();
}

void JobLedger::forget_session(uint64_t session_id) {
  if (is_open()) ledger_->forget_session(session_id);
}

void JobLedger::note_seat(size_t seat, const SeatRecord& record) {
  if (is_open()) ledger_->note_seat(seat, record);
}

void JobLedger::begin_grant(const GrantRecord& grant) {
  if (is_open()) ledger_->begin_grant(grant);
}

void JobLedger::end_grant() {
  if (is_open()) ledger_->end_grant();
}

// ---- Steps --------------------------------------------------------------------------------------

Result<std::optional<size_t>> JobLedger::close_step(const StepRequest& request) {
  if (!is_open()) return std::optional<size_t>();
  const auto place = ledger_->close_step(request);
  if (!place.is_ok()) return place.status();
  return std::optional(place.value());
}

void JobLedger::note_committing(size_t place, uint64_t number) {
  if (is_open()) ledger_->note_committing(place, number);
}

void JobLedger::forget_step(size_t place) {
  if (is_open()) ledger_->forget_step(place);
}

// ---- The next daemon ----------------------------------------------------------------------------

bool JobLedger::is_given_up() const { return get().is_given_up(); }

bool JobLedger::has_tile_words() const { return get().has_tile_words(); }

Result<std::vector<SegmentClaim>> JobLedger::claims() const { return get().claims(); }

Result<LedgerContents> JobLedger::read(uint64_t base) { return get().read(base); }

Result<std::optional<JobRecord>> JobLedger::read_record(uint64_t base) const {
  return get().read_record(base);
}

uint32_t JobLedger::given_ids_end(uint32_t from) const { return get().given_ids_end(from); }

uint64_t JobLedger::record_bytes_written() const {
  return is_open() ? ledger_->record_bytes_written() : 0;
}

}  // namespace memd
