// The daemon's end of one session's rings.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/layout.h"
#include "ring/shared_memory.h"

namespace memd {

/// A lease that the client took.
struct Use {
  uint32_t shard_id;  // the client's word: the job may have no such shard
  Part part;
  LeaseMode mode;
  bool is_resident = false;  // leased without a request

  bool operator==(const Use&) const = default;
};

/// Owned by the server thread, which is the only one that calls it. Nothing here blocks.
class ServerRing {
 public:
  static Result<ServerRing> create();
  /// Goes on with the rings of a session whose daemon died: completions that it published stand,
  /// and so do the client's pins. Requests are left alone until discard_requests(). The client may
  /// have written anything: where the words at the front are not this version's any more the ring
  /// is broken(), and its pins say who writes what, as for any that breaks the protocol. Refused
  /// where the descriptors are not a session's, which no client can bring about, or the session was
  /// ended.
  static Result<ServerRing> adopt(OwnedFd session, OwnedFd doorbell);

  /// The client is back, and takes everything that it asked for before as unanswered: nothing of
  /// that is served. It asks for nothing between its call to attach and the answer.
  void discard_requests();

  /// The next request, copied to private memory; nothing where the ring is empty. A client that
  /// claims more entries than the ring has breaks the protocol: `broken()` is true from then on,
  /// and nothing more is taken.
  std::optional<Request> poll();
  /// Whether poll() would find something new.
  bool has_request() const {
    return layout_->header.request_tail.load(std::memory_order_relaxed) != request_head_;
  }
  bool broken() const { return broken_; }
  /// The client broke the protocol in a way that only its requests show.
  void refuse_client() { broken_ = true; }

  /// `code`, `error_number` and `message` come from `status`; the rest from `fields`. False where
  /// the client left no room, which only one that breaks the protocol does.
  bool publish(const Completion& fields, const Status& status);

  /// Appends what the client has leased since the last call, in order, and leaves what is more than
  /// `count_max`. False where it wrote more meanwhile than the log holds: what is appended then
  /// does not follow what came before.
  bool take_uses(std::vector<Use>* uses, uint64_t count_max = kUseLogEntries);
  /// Uses that were taken or lost so far, and those that the client says to have written, of which
  /// no more than the log holds count.
  uint64_t use_head() const { return use_head_; }
  uint64_t use_tail() const;
  /// The client rings the doorbell once it has made `count` more uses (0: never) than take_uses()
  /// took. Once: then it has to be wanted again.
  void want_use_after(uint64_t count);

  /// Before the server thread sleeps: tells the client to ring. Returns whether a request or the
  /// wanted use came meanwhile, in which case don't sleep.
  bool prepare_to_sleep();
  void wake() { header().server_sleeping.store(0, std::memory_order_relaxed); }
  void want_release(bool wanted);
  /// Whether the session may lease what the rows of its job's table show the training group alone.
  bool in_group() const { return in_group_; }
  void set_in_group(bool in_group);
  /// See PinWords. 0: none, so that whatever follows a step is leased by request.
  void set_resident_call(uint64_t call) {
    header().resident_call.store(call, std::memory_order_seq_cst);
  }
  /// Before the daemon stops looking at the session's pins: nothing is leased without a request any
  /// more.
  void end_resident_leases() { header().requests_only.store(1, std::memory_order_seq_cst); }
  /// The session is given up: its client is told, and nothing more is answered.
  void end();

  /// A sample of one counter; the client may change it at any time.
  uint32_t pins(uint32_t index) const {
    return layout_->pins[index].load(std::memory_order_seq_cst);
  }
  /// On behalf of the client, before the completion that tells it so is published.
  void add_pin(uint32_t index, uint32_t pin) {
    layout_->pins[index].fetch_add(pin, std::memory_order_seq_cst);
  }

  /// Waits as the client tells them.
  Stalls stalls() const {
    const StallBoard& board = layout_->header.stalls;
    // Pairs with the release store in ClientSession::stall_group(): the names are there.
    const uint32_t group_count = board.group_count.load(std::memory_order_acquire);
    return read_stalls(board.counters, board.group_names, group_count);
  }

  /// Completions published so far, modulo 2^32.
  uint32_t completion_tail() const { return completion_tail_; }

  int session_fd() const { return memory_.fd(); }
  /// Watched for edges, never read: what its open file description says belongs to the client too.
  int doorbell_fd() const { return doorbell_.get(); }

 private:
  ServerRing(SharedMemory memory, OwnedFd doorbell)
      : memory_(std::move(memory)),
        layout_(reinterpret_cast<SessionLayout*>(memory_.data())),
        doorbell_(std::move(doorbell)) {}
  SessionHeader& header() { return layout_->header; }
  bool wanted_use_came();

  SharedMemory memory_;
  SessionLayout* layout_;
  OwnedFd doorbell_;
  // The daemon's own copies: what the shared words say of its own side is never read back.
  uint32_t request_head_ = 0;
  uint32_t completion_tail_ = 0;
  uint64_t use_head_ = 0;
  uint64_t use_wanted_ = 0;
  bool in_group_ = false;
  bool broken_ = false;
  bool is_paused_ = false;  // adopted, and its client has not come back
};

}  // namespace memd
