// A ledger's memory. Only the journal's own files include this.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/units.h"
#include "ring/layout.h"
#include "store/journal/ledger_contents.h"
#include "store/journal/ledger_records.h"

namespace memd {

inline constexpr uint64_t kLedgerMagic = 0x3130'676c'646d'656d;  // "memdlg01"
inline constexpr uint32_t kLedgerVersion = 7;

// Sparse: pages that nobody touched cost nothing.
inline constexpr uint32_t kClaimsMax = 1u << 16;
inline constexpr uint32_t kSessionsMax = 1u << 12;
inline constexpr uint32_t kShardsMax = 1u << 20;
inline constexpr uint32_t kLooseMax = 1u << 21;
inline constexpr uint32_t kStepsMax = 16;
inline constexpr uint64_t kStepBytesMax = 16_MiB;
inline constexpr uint64_t kRecordBytesMax = 256_MiB;

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

struct StepPlace {
  RecordPlace record;
  std::atomic<uint64_t> number;
};

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
  uint32_t grant_flags;  // part, from bit 1 on; bit 0: was written
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

}  // namespace memd
