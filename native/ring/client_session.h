// A trainer's end: rings, pins, and the arena mapped back to back.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/client_stalls.h"
#include "ring/fork_watch.h"
#include "ring/layout.h"
#include "ring/mapped_arena.h"
#include "ring/read_leases.h"
#include "ring/shared_memory.h"

namespace memd {

struct ClientSessionOptions {
  OwnedFd session;
  OwnedFd table;
  OwnedFd doorbell;
  /// The attach connection: its other end closes when the daemon dies. A forked worker that
  /// inherits this end keeps only this end open.
  OwnedFd connection;
  uint64_t segment_bytes = 0;
  uint64_t arena_reserved_bytes = 0;
  /// Called while a lease waits for a segment that is not mapped.
  MoreSegments more_segments;
};

struct ClientStatistics {
  uint64_t lease_count = 0;
  uint64_t hits = 0;  // of them without a request
  /// The part of them that waited for nothing: the shard was there.
  uint64_t resident_count = 0;
  uint64_t lease_wait_ns = 0;
  /// By what it was for; what the daemon made a lease wait by what most of that was. Also of what
  /// ClientStalls::note() was told of.
  Stalls stalls;
  int64_t leases_held = 0;
};

/// One of the leases that are asked for together.
struct WantedLease {
  uint32_t shard_id = 0;
  Part part = Part::value;
  LeaseMode mode = LeaseMode::read;
  uint32_t stall_group = 0;
  bool follows = true;  // false: it comes before the step of `follow`, which is not sent yet
};

/// Any thread may call it. In a forked child every call is refused and release() does nothing:
/// rings and counters are not mapped there, while the arena is, so that tensors a DataLoader worker
/// inherited can be read.
class ClientSession {
 public:
  static Result<std::shared_ptr<ClientSession>> create(ClientSessionOptions options);
  ~ClientSession();

  /// The value of a shard, to read it, where that takes neither a request nor a system call: it is
  /// resident and nobody writes it. Never blocks.
  std::optional<LeasedBytes> lease_resident(uint32_t shard_id) noexcept;
  /// The same, or a request; waits for a short spin, then on a futex, at most `timeout_ns`.
  Result<LeasedBytes> lease(
      uint32_t shard_id, Part part, LeaseMode mode, uint64_t timeout_ns, StallPlace place = {});
  /// By request, also where that is not needed.
  Result<LeasedBytes> lease_by_request(
      uint32_t shard_id, Part part, LeaseMode mode, uint64_t timeout_ns, StallPlace place = {});
  /// By request, each with an answer of its own. Up to kLeasesTogether are in the ring before the
  /// first is waited for, so that the daemon wakes once and reads them side by side.
  std::vector<Result<LeasedBytes>> lease_together(const std::vector<WantedLease>& wanted,
                                                  uint64_t timeout_ns,
                                                  StallPhase phase);
  /// A lease for reading that was written may live on: see ReadLeases::end().
  void release(const LeasedBytes& lease) noexcept;
  /// Leases for reading values, and what was written through them.
  ReadLeases& reads() { return reads_; }
  /// The mapping that the daemon shares, and that all other leases show.
  const MappedArena& arena() const { return *arena_; }
  /// By request: leases the slot of a gradient to overwrite it, copies `bytes` there and gives it
  /// back.
  Status overwrite_gradient(const WantedLease& wanted,
                            std::span<const std::byte> bytes,
                            uint64_t timeout_ns,
                            StallPhase phase);
  /// Asks for the slots of gradients that there are none of yet, and that will be overwritten soon,
  /// so that the answers are there by then: returns at once, and does nothing for those that cannot
  /// be asked for now. Until then its outcome, even an error, changes nothing.
  void ask_ahead(std::span<const uint32_t> shard_ids);
  /// Nobody leases what was asked for ahead: pins that were granted for it are given back. Whether
  /// there was any.
  bool forget_asked();
  /// May be dropped where the ring is full.
  Status prefetch(uint32_t shard_id);
  /// The session has given its lease of the gradient back, and writes it no more before its step.
  Status gradient_is_final(uint32_t shard_id);
  /// Tells the daemon something that it need not answer, and that may be lost.
  Status hint(Opcode opcode, uint32_t shard_id);
  /// Requests from now on come after the step of this call, whichever of them reaches the daemon
  /// first; 0: after none that is on its way.
  void follow(uint64_t call) { after_call_.store(call, std::memory_order_relaxed); }

  /// Whether the attach connection's other end is closed: the daemon has ended. Also between
  /// suspend() and reconnect().
  bool daemon_is_gone() const;
  /// Before the process asks the next daemon for its session: whoever waits gets `unavailable`, and
  /// so does everybody until reconnect(). Leases that are held stay valid.
  void suspend();
  /// The next daemon has taken the session over, and this is the connection to it. Pins of grants
  /// that no completion told of are given back.
  void reconnect(OwnedFd connection);

  /// Counts the waits of its leases; the caller adds what it waited for by other means.
  ClientStalls& stalls() { return stalls_; }

  ClientStatistics statistics() const;
  /// Refuses further calls, and closes the connection, of which the daemon gives a process few. The
  /// mappings live until the last lease is released (shared ownership).
  void close();

 private:
  struct Waiting {
    uint32_t pin = 0;  // what a grant adds
    bool done = false;
    bool is_given_up = false;  // by suspend()
    Completion completion{};
    std::string message;
  };

  ClientSession(SharedMemory memory,
                SharedMemory table,
                ClientSessionOptions options,
                std::unique_ptr<MappedArena> arena,
                std::unique_ptr<ReadViews> views);
  struct Asked {
    Waiting waiting;
    uint64_t request_id = 0;
    Status status;  // why it is not in the ring, or has no answer
    bool is_expected = false;
  };
  /// A lease of a gradient that was asked for and that nobody waits for yet.
  struct Ahead {
    uint32_t shard_id = 0;
    uint64_t after_call = 0;
    Asked asked;
  };
  Status refuse_if_unusable() const;
  Status submit(std::span<const Request> requests);
  /// Into the ring, or nothing of them. Waits for places until `start_ns` + `timeout_ns`.
  Status ask(std::span<const WantedLease> wanted,
             std::span<Asked> asked,
             uint64_t start_ns,
             uint64_t timeout_ns);
  void ask_and_wait(std::span<const WantedLease> wanted,
                    std::span<Asked> asked,
                    uint64_t timeout_ns,
                    StallPhase phase);
  Result<LeasedBytes> finish(const WantedLease& wanted, Asked& asked);
  // Called with `mutex_` held:
  bool has_places(size_t count) const;
  /// From here on in `waiting_`, for an answer to `asked`.
  Request request(const WantedLease& wanted, uint64_t timeout_ns, Asked* asked);
  /// Whether it was asked for ahead, and is still good.
  bool take_ahead(const WantedLease& wanted, Asked* asked);
  void forget(Asked& asked);
  void forget_told(Ahead& ahead);
  Status send_hint(Opcode opcode, uint32_t shard_id);
  /// Takes what has completed and wakes those who wait for it. Called with `mutex_` held.
  void take_completions();
  Status wait_for(uint64_t request_id, uint64_t timeout_ns, Waiting* result);
  void give_back(uint32_t pin_index, uint32_t pin) noexcept;
  /// Tells the daemon's plans.
  void note_use(uint32_t shard_id, Part part, LeaseMode mode, bool is_resident) noexcept;
  /// Until they are over, reconnect() does not compare pins.
  bool begin_resident_lease() noexcept;
  void end_resident_lease() noexcept { resident_leases_.fetch_sub(1, std::memory_order_release); }
  void give_back_untold_pins();
  void ring_doorbell() noexcept;

  SharedMemory memory_;
  SharedMemory table_;
  SessionLayout* layout_;
  const TableLayout* rows_;
  OwnedFd doorbell_;
  mutable std::mutex connection_mutex_;
  OwnedFd connection_;
  std::unique_ptr<MappedArena> arena_;
  ForkWatch forks_;
  ReadLeases reads_;

  std::mutex mutex_;  // request producer, completion consumer, waiting_
  std::condition_variable completed_;
  bool someone_waits_in_kernel_ = false;
  uint32_t request_tail_ = 0;
  uint32_t completion_head_ = 0;
  uint64_t request_id_next_ = 1;
  std::unordered_map<uint64_t, Waiting*> waiting_;
  std::vector<std::unique_ptr<Ahead>> ahead_;  // a few
  std::atomic<bool> is_suspended_{false};      // changes with the mutex
  std::atomic<uint32_t> resident_leases_{0};   // that are being had this moment
  // The part of each pin counter that is held here: the shared one may hold more, if the daemon
  // counted a grant and died before it told. Only reconnect() compares. Pages that no pin touched
  // cost nothing.
  std::unique_ptr<std::atomic<uint32_t>, decltype(&std::free)> held_;
  // Given up at their deadline: when their completion comes, the pin it carries is given back.
  std::unordered_map<uint64_t, uint32_t> abandoned_;

  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> after_call_{0};
  std::atomic<uint64_t> lease_count_{0};      // by request
  std::atomic<uint64_t> granted_at_once_{0};  // of them
  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> lease_wait_ns_{0};
  ClientStalls stalls_;
  std::atomic<int64_t> leases_held_{0};
};

}  // namespace memd
