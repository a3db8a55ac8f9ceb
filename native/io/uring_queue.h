// The queue over io_uring, with registered files and memory where the kernel allows them.
#pragma once

#include <liburing.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "io/transfer_queue.h"

namespace memd {

class UringQueue final : public TransferQueue {
 public:
  /// The error's message is the reason why the machine has no usable io_uring.
  static Result<std::unique_ptr<UringQueue>> create(const IoQueueOptions& options);
  ~UringQueue() override;

  std::string_view name() const override { return "io_uring"; }
  uint16_t add_device(OwnedFd file, std::string path) override;
  void add_memory(std::span<std::byte> memory, PageKind pages) override;
  void remove_memory(std::span<std::byte> memory) override;
  IoQueueStatistics statistics() const override;

 private:
  static constexpr int kUnregistered = -1;

  struct Device {
    OwnedFd file;
    bool registered = false;  // its number in the kernel's table is the device's index
  };
  struct Piece {
    uint64_t length_bytes = 0;
    PageKind pages = PageKind::small;
    int slot = kUnregistered;  // number in the kernel's table
  };
  using Pieces = std::map<std::byte*, Piece>;

  UringQueue(const IoQueueOptions& options, io_uring ring);

  void start(IoOp& op) override;
  void flush() override;
  void collect() override;
  void wait_for_result() override;
  Stretch stretch(const std::byte* data, uint64_t length_bytes) const override;

  Pieces::const_iterator piece_at(const std::byte* data) const;
  /// Entries of the kernel's list that a registered one takes.
  uint64_t entry_count(const Piece& piece) const;
  bool is_worth_registering(const Piece& piece) const;
  void register_next();
  int register_piece(std::span<std::byte> memory);
  void unregister_piece(int slot);
  /// False where the kernel has no memory for that.
  bool try_unregister(int slot);
  void unregister_what_is_held();

  io_uring ring_;
  bool has_file_table_ = false;
  std::vector<Device> devices_;
  Pieces pieces_;                    // by address
  uint64_t unregistered_count_ = 0;  // of pieces_: they wait, or were refused
  const bool joins_huge_pages_;
  uint64_t entry_count_ = 0;        // of all that is registered
  std::deque<std::byte*> waiting_;  // to be registered
  std::vector<int> slots_held_;  // of removed pieces: no transfer uses them, the kernel keeps them
  uint64_t held_retry_ns_ = 0;   // when it is asked again
  const std::function<int()> fail_unregister_;
  std::vector<int> slots_free_;  // empty as well where the kernel has no sparse tables
};

}  // namespace memd
