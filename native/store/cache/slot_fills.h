// Bytes of one job's slots that workers copy or zero before a writer may have them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>

#include "store/cache/cache_parts.h"

namespace memd {

/// While workers are at it, the entry counts a task: nobody writes, updates, evicts or removes it,
/// and readers go on. What is ready is there for the leases that wait for it; after give_up_rest()
/// it is as if it had not been asked for, but for a slot that took another one's place. A daemon
/// that dies meanwhile leaves the entry's slot as the ledger knows it, and made ones that the next
/// daemon frees. Owned by the Job; the server thread calls everything; nothing blocks.
class SlotFills {
 public:
  explicit SlotFills(const CacheParts& parts) : parts_(parts) {}
  SlotFills(const SlotFills&) = delete;
  SlotFills& operator=(const SlotFills&) = delete;

  /// `copy` becomes the entry's slot, with its bytes; leases on the old one stay valid. Until
  /// give_up_rest() no reader gets the new one: see is_for_writer().
  void replace(Entry& entry, std::unique_ptr<Slot> copy);
  bool is_for_writer(const Entry& entry) const;

  /// Makes a pending slot ready: a copy of the entry's bytes, or zeros.
  void prepare_pending(Entry& entry, std::unique_ptr<Slot> slot, bool copies);
  /// nullptr where none is ready.
  std::unique_ptr<Slot> take_pending(const Entry& entry);

  /// Zeroes `shard`'s part of the entry's slot.
  void zero(Entry& entry, uint32_t shard_id);
  /// True once it is zeroed; whoever asked writes there now.
  bool take_zeroed(const Entry& entry, uint32_t shard_id);

  /// Something is ready for the leases that wait for it.
  bool has_ready() const { return !ready_.empty(); }
  /// Everybody who waits was tried.
  void give_up_rest();

 private:
  struct Ready {
    std::unique_ptr<Slot> pending;
    bool is_replaced = false;
    std::optional<uint32_t> zeroed_shard;
  };
  using Piece = std::function<void(uint64_t offset, uint64_t bytes)>;

  void submit(Entry& entry, uint64_t bytes, Piece piece, std::function<void(Ready&)> done);
  std::byte* at(const Slot& slot) const;
  void take_place(Entry& entry, std::unique_ptr<Slot> copy);

  const CacheParts parts_;
  std::unordered_map<uint32_t, Ready> ready_;  // by entry id
};

}  // namespace memd
