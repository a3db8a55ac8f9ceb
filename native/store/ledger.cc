#include "store/ledger.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "base/units.h"

namespace memd {
namespace {

constexpr uint64_t kLedgerMagic = 0x3130'676c'646d'656d;  // "memdlg01"
constexpr uint32_t kLedgerVersion = 1;

// Sparse: pages that nobody touched cost nothing.
constexpr uint64_t kRecordBytesMax = 256_MiB;

}  // namespace

/// A record of any length. `sequence` is stored last, and 0 while the bytes change.
struct RecordPlace {
  std::atomic<uint64_t> sequence;
  uint64_t tag;
  uint64_t length_bytes;
  uint64_t checksum;  // of the bytes
};

struct LedgerLayout {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t job_id;
  std::atomic<uint64_t> given_up;
  alignas(64) RecordPlace job_places[2];
  alignas(4096) std::byte job_records[2][kRecordBytesMax];
};

namespace {

/// The place of the newest whole record, or nothing.
std::optional<size_t> newest(const RecordPlace (&places)[2],
                             const std::byte* bytes,
                             uint64_t bytes_max) {
  std::optional<size_t> found;
  uint64_t sequence_found = 0;
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const RecordPlace& place = places[i];
    const uint64_t sequence = place.sequence.load(std::memory_order_acquire);
    const uint64_t length_bytes = place.length_bytes;
    if (sequence <= sequence_found || length_bytes > bytes_max) continue;
    if (record_checksum({bytes + i * bytes_max, length_bytes}) != place.checksum) continue;
    found = i;
    sequence_found = sequence;
  }
  return found;
}

Status write(RecordPlace (&places)[2],
             std::byte* bytes,
             uint64_t bytes_max,
             std::span<const std::byte> record,
             uint64_t tag) {
  if (record.size() > bytes_max) {
    return error(StatusCode::capacity,
                 "a job has more to remember than its ledger holds: ",
                 record.size(),
                 " > ",
                 bytes_max,
                 " bytes");
  }
  const uint64_t sequences[2] = {places[0].sequence.load(std::memory_order_relaxed),
                                 places[1].sequence.load(std::memory_order_relaxed)};
  const size_t older = sequences[0] <= sequences[1] ? 0 : 1;
  RecordPlace& place = places[older];
  // Both observed by the next daemon alone: no reader finds this place whole while it changes.
  place.sequence.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::memcpy(bytes + older * bytes_max, record.data(), record.size());
  place.tag = tag;
  place.length_bytes = record.size();
  place.checksum = record_checksum(record);
  place.sequence.store(std::max(sequences[0], sequences[1]) + 1, std::memory_order_release);
  return Status::ok();
}

}  // namespace

Ledger::Ledger(SharedMemory memory)
    : memory_(std::move(memory)), layout_(reinterpret_cast<LedgerLayout*>(memory_.data())) {}

Result<std::unique_ptr<Ledger>> Ledger::create(uint64_t job_id) {
  auto memory = SharedMemory::create("memd-ledger", sizeof(LedgerLayout));
  if (!memory.is_ok()) return memory.status();
  std::unique_ptr<Ledger> ledger(new Ledger(std::move(memory).value()));
  ledger->layout_->magic = kLedgerMagic;
  ledger->layout_->version = kLedgerVersion;
  ledger->layout_->job_id = job_id;
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
  if (layout.job_id != job_id) {
    return error(StatusCode::integrity,
                 "the ledger of job ",
                 job_id,
                 " is damaged: it says that it is of job ",
                 layout.job_id);
  }
  if (layout.given_up.load(std::memory_order_acquire) != 0) {
    return error(StatusCode::fenced, "the memory of job ", job_id, " was given up");
  }
  return ledger;
}

Status Ledger::write_record(const JobRecord& record, uint64_t base) {
  return write(layout_->job_places, layout_->job_records[0], kRecordBytesMax, encode(record), base);
}

std::optional<JobRecord> Ledger::read_record(uint64_t base) const {
  const auto place = newest(layout_->job_places, layout_->job_records[0], kRecordBytesMax);
  if (!place || layout_->job_places[*place].tag != base) return std::nullopt;
  auto record =
      decode_job({layout_->job_records[*place], layout_->job_places[*place].length_bytes});
  if (!record.is_ok()) return std::nullopt;
  return std::move(record).value();
}

}  // namespace memd
