// Memory that a session shares with the daemon: a request ring, a completion ring, pin counters, a
// log of uses and a few words, in one sealed memfd.
//
// The daemon reads these words and never trusts them: an entry is copied once to private memory and
// then validated. Nothing here is a pointer; everything has a fixed width.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/units.h"
#include "ring/resident_lease.h"
#include "ring/stalls.h"

namespace memd {

/// Sessions of another version end when their daemon is replaced, and what their clients held is
/// read from their pins. If the place or the meaning of pins changes, raise the ledger's version
/// too: a daemon that cannot read pins must not go on with the memory that they are on.
inline constexpr uint32_t kProtocolVersion = 4;
inline constexpr uint64_t kSessionMagic = 0x3130'6e73'646d'656d;  // "memdsn01"

inline constexpr uint32_t kRingEntries = 1024;
// One for each completion's place: a message is overwritten no earlier than its completion.
inline constexpr uint32_t kMessageCount = kRingEntries;
inline constexpr uint32_t kMessageBytes = 1024;
inline constexpr uint32_t kPinCount = 1u << 20;
inline constexpr uint32_t kUseLogEntries = 1u << 16;

/// Longer waits are shortened to this.
inline constexpr uint64_t kTimeoutNsMax = 3'600'000'000'000;
/// Takes any number, also one that is negative, too large or none.
constexpr uint64_t timeout_ns_of(double timeout_s) {
  if (!(timeout_s > 0)) return 0;
  if (timeout_s >= static_cast<double>(kTimeoutNsMax) * 1e-9) return kTimeoutNsMax;
  return static_cast<uint64_t>(timeout_s * 1e9);
}

/// `gradient_is_final`: it is written no more before the step that uses it. `gradient_unused`: what
/// was leased ahead for it is not, and was not written. `rank_sum_ended`: the rank's own sum is in
/// the sum of all. `scratch_ended`: nobody reads the bytes of a scratch blob any more. Hints, which
/// are not answered.
enum class Opcode : uint32_t {
  none = 0,
  lease = 1,
  prefetch = 2,
  gradient_is_final = 3,
  gradient_unused = 4,
  rank_sum_ended = 5,
  scratch_ended = 6
};

/// Which bytes of a shard. `rank_sum`: the sum of the gradients that this rank has accumulated and
/// not averaged with the other ranks yet.
enum class Part : uint8_t { value = 0, gradient = 1, rank_sum = 2 };

/// `read`: many at a time. `write` sees the old bytes; `overwrite` has undefined contents at first;
/// both are alone.
enum class LeaseMode : uint8_t { read = 0, write = 1, overwrite = 2 };

struct alignas(64) Request {
  uint64_t request_id;
  Opcode opcode;
  uint32_t shard_id;
  Part part;
  LeaseMode mode;
  uint16_t is_expected;  // 1: of a gradient that is expected, and may never come
  uint32_t reserved32;
  uint64_t timeout_ns;
  uint64_t after_call;  // the StepRequest::call that it follows; 0: none that is on its way
  uint8_t reserved[24];
};
static_assert(sizeof(Request) == 64 &&
              alignof(Request) == 64);  // one cache line, one store to publish

struct alignas(64) Completion {
  uint64_t request_id;
  uint32_t code;  // StatusCode
  int32_t error_number;
  uint32_t pin;           // which counter the client gives back
  uint32_t message;       // index into the messages, where code is not ok
  uint64_t offset_bytes;  // of the shard's bytes, from the arena's start
  uint64_t length_bytes;
  uint64_t generation;
  uint64_t wait_ns;      // in the daemon, also of a request that is refused
  uint32_t wait_reason;  // LeaseWait: what most of it was for
  uint32_t reserved32;
};
static_assert(sizeof(Completion) == 64 && alignof(Completion) == 64);

/// One entry of the use log, a word, so that it is there in full or not at all:
/// {lap: 16, mode: 8, part: 8, shard id: 32}. The lap says which of the uses that share its place
/// it is, and counts from 1.
constexpr uint16_t use_lap(uint64_t index) {
  return static_cast<uint16_t>(index / kUseLogEntries + 1);
}
constexpr uint64_t use_word(
    uint64_t index, uint32_t shard_id, Part part, LeaseMode mode, bool is_resident = false) {
  return (uint64_t{use_lap(index)} << 48) | (static_cast<uint64_t>(mode) << 40) |
         (static_cast<uint64_t>(part) << 36) | (uint64_t{is_resident} << 32) | shard_id;
}
/// 0: it is the use at `index`; below: that one is not written yet; above: it is overwritten.
constexpr int use_lap_distance(uint64_t word, uint64_t index) {
  return static_cast<int16_t>(static_cast<uint16_t>(word >> 48) - use_lap(index));
}

/// Free-running indices; an entry's place is its index modulo the number of entries. Each line is
/// written by one side, but for `use_wanted`, which the client takes away once.
struct SessionHeader {
  uint64_t magic;
  uint32_t protocol_version;
  uint32_t reserved;

  alignas(64) std::atomic<uint32_t> request_tail;  // client: entries published
  alignas(64) std::atomic<uint32_t> request_head;  // server: entries taken
  std::atomic<uint64_t> use_head;                  // server: uses taken
  alignas(64)
      std::atomic<uint32_t> completion_tail;  // server: entries published; the client's futex word
  alignas(64) std::atomic<uint32_t> completion_head;  // client: entries taken

  // Server: 1 while it sleeps, so that a client rings the doorbell only then.
  alignas(64) std::atomic<uint32_t> server_sleeping;
  // Server: 1 while somebody waits for pins to be given back, so that a release rings only then.
  std::atomic<uint32_t> release_wanted;
  // Server: 1 once it gave the session up; no further request is answered.
  std::atomic<uint32_t> ended;
  // Server: 1 once it is about to: what is leased without a request from here on is nobody's.
  std::atomic<uint32_t> requests_only;
  // Server: 1 while the session is a member of the job's training group.
  std::atomic<uint32_t> in_group;
  // Server: see PinWords.
  std::atomic<uint64_t> resident_call;
  // Client: 1 while it sleeps on completion_tail.
  alignas(64) std::atomic<uint32_t> client_sleeping;
  // Client: places of the use log that its threads have taken; a word may follow a little later.
  alignas(64) std::atomic<uint64_t> use_tail;
  // Server: rings the doorbell once use_tail is here; 0: never. The client's thread that rings puts
  // 0 there first.
  alignas(64) std::atomic<uint64_t> use_wanted;
  // Client: what its threads waited for.
  alignas(64) StallBoard stalls;
};

struct SessionLayout {
  SessionHeader header;
  alignas(4096) Request requests[kRingEntries];
  alignas(4096) Completion completions[kRingEntries];
  alignas(4096) char messages[kMessageCount][kMessageBytes];
  // Sparse: pages that no pin ever touched cost nothing.
  alignas(4096) std::atomic<uint32_t> pins[kPinCount];
  // The client's leases, by request or without one; see use_word().
  alignas(4096) std::atomic<uint64_t> uses[kUseLogEntries];
};
static_assert(offsetof(SessionLayout, requests) == 4096);
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

/// The job's shard table, by shard id: where values lie that can be leased without a request.
/// Written by the daemon, read by clients. A shard beyond it is leased by request alone.
inline constexpr uint32_t kTableRows = 1u << 20;

/// Shards of a job. Each may have four counters at once, one a slot: for its value, for its value
/// as of the step to come, for its gradient, and for a slot that was replaced while it was leased.
inline constexpr uint32_t kShardCountMax = kPinCount / 4;
using ShardRow = BasicShardRow<std::atomic>;
static_assert(sizeof(ShardRow) == 32);
struct TableLayout {
  alignas(4096) ShardRow rows[kTableRows];
};

}  // namespace memd
