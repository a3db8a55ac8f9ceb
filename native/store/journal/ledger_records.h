// Records of any length in a ledger. Two places take turns: one is whole while the other is
// written.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/status.h"

namespace memd {

template <typename... Parts>
Status damaged(const Parts&... parts) {
  return error(StatusCode::integrity, "the ledger is damaged: ", parts...);
}

/// A record of any length. `sequence` is stored last, and 0 while the bytes change.
struct RecordPlace {
  std::atomic<uint64_t> sequence;
  uint64_t tag;
  uint64_t length_bytes;
  uint64_t checksum;  // of the bytes
};

struct RecordHead {
  uint64_t tag;
  uint64_t length_bytes;
  uint64_t checksum;
  uint64_t sequence;
};

bool is_whole(const RecordPlace& place, const std::byte* bytes, uint64_t bytes_max);

/// The place of the newest record, or nothing. A write that was cut off has left no sequence
/// number: a record that has one and is not whole was damaged, and the one before it is not what
/// the rest of the ledger goes with.
Result<std::optional<size_t>> newest(const RecordPlace (&places)[2],
                                     const std::byte* bytes,
                                     uint64_t bytes_max);
size_t older_of(const RecordPlace (&places)[2]);
/// For the record that takes the older one's place.
uint64_t next_sequence(const RecordPlace (&places)[2]);

/// CAPACITY where a record is too long.
Status check_fits(size_t bytes, uint64_t bytes_max);
/// Its bytes may change from here on.
void open(RecordPlace& place);
void publish(RecordPlace& place, const RecordHead& head);
Status write_at(RecordPlace& place,
                std::byte* into,
                uint64_t bytes_max,
                std::span<const std::byte> record,
                uint64_t tag,
                uint64_t sequence);
Status write_older(RecordPlace (&places)[2],
                   std::byte* bytes,
                   uint64_t bytes_max,
                   std::span<const std::byte> record,
                   uint64_t tag);

}  // namespace memd
