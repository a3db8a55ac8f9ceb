#include "store/journal/ledger_records.h"

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/memory_orders.h"

namespace memd {

bool is_whole(const RecordPlace& place, const std::byte* bytes, uint64_t bytes_max) {
  const uint64_t length_bytes = place.length_bytes;
  return place.sequence.load(kAcquire) != 0 && length_bytes <= bytes_max &&
         hash_record({bytes, length_bytes}) == place.checksum;
}

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

void open(RecordPlace& place) {
  place.sequence.store(0, kRelease);
  // Stores that follow stay behind that one: the next daemon finds no half record that seems whole.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

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

size_t older_of(const RecordPlace (&places)[2]) {
  return places[0].sequence.load(std::memory_order_relaxed) <=
                 places[1].sequence.load(std::memory_order_relaxed)
             ? 0
             : 1;
}

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

}  // namespace memd
