#include "io/uring_queue.h"

#include <sys/uio.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

// A piece is registered in one turn: 16 MiB of small pages that lie anywhere take 1 to 4 ms.
constexpr uint64_t kPieceBytes = 4_MiB;
constexpr unsigned kPieceCountMax = 16'384;  // the kernel's limit, and a table of 128 KiB
// Pools of more than 32 GiB: their turns take longer where pages are small, and 288 GiB have room.
constexpr unsigned kSmallPieceCountMax = kPieceCountMax / 2;
constexpr uint64_t kLargePieceBytes = 32_MiB;
// To register a huge page, the kernel looks through its list of all that is registered: 0.15 ms for
// a piece of 4 MiB where the list has so many entries. They are 16 GiB of huge pages.
constexpr uint64_t kEntryCountMax = 8192;
constexpr unsigned kFileCountMax = 64;
// The pages of a removed piece are lost to the machine meanwhile.
constexpr uint64_t kHeldRetryNs = 100'000'000;

/// Since Linux 6.12 the kernel notes a huge page once, and before that each of its 512 small ones.
bool joins_huge_pages() {
  utsname system{};
  MEMD_CHECK_EQ(::uname(&system), 0);
  int major = 0;
  int minor = 0;
  if (std::sscanf(system.release, "%d.%d", &major, &minor) != 2) return false;
  return std::pair(major, minor) >= std::pair(6, 12);
}

Status check_operations(io_uring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) return error(StatusCode::unavailable, "io_uring: older than Linux 5.6");
  bool all_supported = true;
  for (const int op : {IORING_OP_READ,
                       IORING_OP_WRITE,
                       IORING_OP_READ_FIXED,
                       IORING_OP_WRITE_FIXED,
                       IORING_OP_FSYNC}) {
    all_supported = all_supported && io_uring_opcode_supported(probe, op) != 0;
  }
  io_uring_free_probe(probe);
  if (all_supported) return Status::ok();
  return error(StatusCode::unavailable, "io_uring: reads, writes or syncs are not supported");
}

}  // namespace

Result<std::unique_ptr<UringQueue>> UringQueue::create(const IoQueueOptions& options) {
  io_uring ring{};
  const int setup = io_uring_queue_init(options.depth, &ring, 0);
  if (setup < 0) return device_error(-setup, "io_uring_setup");
  Status status = check_operations(ring);
  if (status.is_ok() && options.wake_fd >= 0) {
    const int result = io_uring_register_eventfd(&ring, options.wake_fd);
    if (result < 0) status = device_error(-result, "io_uring_register_eventfd");
  }
  if (!status.is_ok()) {
    io_uring_queue_exit(&ring);
    return status;
  }
  return std::unique_ptr<UringQueue>(new UringQueue(options, ring));
}

UringQueue::UringQueue(const IoQueueOptions& options, io_uring ring)
    : TransferQueue(options.depth, options.wake_fd, steady_clock(), options.turn),
      ring_(ring),
      joins_huge_pages_(joins_huge_pages()),
      fail_unregister_(options.fail_unregister) {
  has_file_table_ = io_uring_register_files_sparse(&ring_, kFileCountMax) == 0;
  if (io_uring_register_buffers_sparse(&ring_, kPieceCountMax) == 0) {
    for (int slot = int{kPieceCountMax} - 1; slot >= 0; --slot) slots_free_.push_back(slot);
  }
}

UringQueue::~UringQueue() {
  drain();
  io_uring_queue_exit(&ring_);
}

uint16_t UringQueue::add_device(OwnedFd file, std::string path) {
  const uint16_t device = add_device_path(std::move(path));
  int fd = file.get();
  const bool registered = has_file_table_ && file.is_open() && device < kFileCountMax &&
                          io_uring_register_files_update(&ring_, device, &fd, 1) == 1;
  devices_.push_back({.file = std::move(file), .registered = registered});
  return device;
}

void UringQueue::add_memory(std::span<std::byte> memory, PageKind pages) {
  while (!memory.empty()) {
    const uint64_t piece_bytes =
        pieces_.size() < kSmallPieceCountMax ? kPieceBytes : kLargePieceBytes;
    const auto bytes = memory.first(std::min<uint64_t>(piece_bytes, memory.size()));
    memory = memory.subspan(bytes.size());
    const bool is_new =
        pieces_.emplace(bytes.data(), Piece{.length_bytes = bytes.size(), .pages = pages}).second;
    MEMD_CHECK(is_new);
    ++unregistered_count_;
    waiting_.push_back(bytes.data());
  }
  wake();
}

void UringQueue::remove_memory(std::span<std::byte> memory) {
  std::byte* const end = memory.data() + memory.size();
  auto piece = pieces_.lower_bound(memory.data());
  while (piece != pieces_.end() && piece->first < end) {
    MEMD_CHECK(piece->first + piece->second.length_bytes <= end);
    if (piece->second.slot == kUnregistered) {
      --unregistered_count_;
    } else {
      entry_count_ -= entry_count(piece->second);
      unregister_piece(piece->second.slot);
    }
    piece = pieces_.erase(piece);
  }
}

uint64_t UringQueue::entry_count(const Piece& piece) const {
  const bool is_joined = piece.pages == PageKind::huge && joins_huge_pages_;
  return divide_up(piece.length_bytes, is_joined ? uint64_t{2_MiB} : uint64_t{4_KiB});
}

bool UringQueue::is_worth_registering(const Piece& piece) const {
  if (piece.slot != kUnregistered) return false;
  return piece.pages == PageKind::small || entry_count_ <= kEntryCountMax;
}

void UringQueue::register_next() {
  if (waiting_.empty()) return;
  const auto at = pieces_.find(waiting_.front());
  waiting_.pop_front();
  if (!waiting_.empty()) wake();
  // It may have been removed, and added once more.
  if (at == pieces_.end() || !is_worth_registering(at->second)) return;
  auto& [first, piece] = *at;
  piece.slot = register_piece({first, piece.length_bytes});
  if (piece.slot == kUnregistered) return;
  --unregistered_count_;
  entry_count_ += entry_count(piece);
}

int UringQueue::register_piece(std::span<std::byte> memory) {
  if (slots_free_.empty()) return kUnregistered;
  const int slot = slots_free_.back();
  const iovec piece{.iov_base = memory.data(), .iov_len = memory.size()};
  const __u64 tag = 0;
  const int result =
      io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(slot), &piece, &tag, 1);
  if (result != 1) return kUnregistered;
  slots_free_.pop_back();
  return slot;
}

void UringQueue::unregister_piece(int slot) {
  if (try_unregister(slot)) return slots_free_.push_back(slot);
  // The pages stay pinned meanwhile, and nothing else does: a transfer finds its slot by the piece,
  // which is gone.
  slots_held_.push_back(slot);
  held_retry_ns_ = steady_clock().now_ns() + kHeldRetryNs;
}

bool UringQueue::try_unregister(int slot) {
  const iovec nothing{.iov_base = nullptr, .iov_len = 0};
  const __u64 tag = 0;
  const int failure = fail_unregister_ ? fail_unregister_() : 0;
  const int result = failure != 0 ? -failure
                                  : io_uring_register_buffers_update_tag(
                                        &ring_, static_cast<unsigned>(slot), &nothing, &tag, 1);
  if (result == 1) return true;
  // The kernel notes what transfers in flight may still use; that takes memory, and a signal may
  // come in between.
  MEMD_CHECK(result == -ENOMEM || result == -EAGAIN || result == -EINTR);
  return false;
}

void UringQueue::unregister_what_is_held() {
  if (slots_held_.empty() || steady_clock().now_ns() < held_retry_ns_) return;
  for (const int slot : std::exchange(slots_held_, {})) unregister_piece(slot);
}

UringQueue::Pieces::const_iterator UringQueue::piece_at(const std::byte* data) const {
  auto piece = pieces_.upper_bound(const_cast<std::byte*>(data));
  if (piece == pieces_.begin()) return pieces_.end();
  --piece;
  return data < piece->first + piece->second.length_bytes ? piece : pieces_.end();
}

TransferQueue::Stretch UringQueue::stretch(const std::byte* data, uint64_t length_bytes) const {
  const auto at = piece_at(data);
  if (at == pieces_.end()) return {.length_bytes = length_bytes};
  const auto& [first, piece] = *at;
  const auto rest_bytes = static_cast<uint64_t>(first + piece.length_bytes - data);
  return {.length_bytes = std::min(length_bytes, rest_bytes),
          .is_light = piece.pages == PageKind::huge || piece.slot != kUnregistered};
}

void UringQueue::start(IoOp& op) {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  MEMD_CHECK(sqe != nullptr);  // the ring has an entry for each op that may be in flight
  const Device& device = devices_[op.device];
  const int fd = device.registered ? int{op.device} : device.file.get();
  const auto length_bytes = static_cast<unsigned>(op.length_bytes);
  const auto piece = op.kind == IoKind::sync ? pieces_.end() : piece_at(op.data);
  // The piece may have been removed and another one added since the chunk was cut.
  const bool fixed = piece != pieces_.end() && piece->second.slot != kUnregistered &&
                     op.data + op.length_bytes <= piece->first + piece->second.length_bytes;
  switch (op.kind) {
    case IoKind::read:
      if (fixed) {
        io_uring_prep_read_fixed(
            sqe, fd, op.data, length_bytes, op.offset_bytes, piece->second.slot);
      } else {
        io_uring_prep_read(sqe, fd, op.data, length_bytes, op.offset_bytes);
      }
      break;
    case IoKind::write:
      if (fixed) {
        io_uring_prep_write_fixed(
            sqe, fd, op.data, length_bytes, op.offset_bytes, piece->second.slot);
      } else {
        io_uring_prep_write(sqe, fd, op.data, length_bytes, op.offset_bytes);
      }
      break;
    case IoKind::sync:
      io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
      break;
  }
  if (device.registered) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(sqe, &op);
}

void UringQueue::flush() {
  if (io_uring_sq_ready(&ring_) == 0) return;
  const int result = io_uring_submit(&ring_);
  // Out of kernel memory for the moment, or interrupted: the entries stay and the next reap()
  // submits them.
  MEMD_CHECK(result >= 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR);
  if (io_uring_sq_ready(&ring_) > 0) wake();
}

void UringQueue::collect() {
  unregister_what_is_held();
  register_next();
  std::array<io_uring_cqe*, 64> cqes;
  while (const unsigned count = io_uring_peek_batch_cqe(&ring_, cqes.data(), cqes.size())) {
    std::array<std::pair<IoOp*, int32_t>, 64> results;
    for (unsigned i = 0; i < count; ++i) {
      results[i] = {static_cast<IoOp*>(io_uring_cqe_get_data(cqes[i])), cqes[i]->res};
    }
    io_uring_cq_advance(&ring_, count);
    for (unsigned i = 0; i < count; ++i) on_result(*results[i].first, results[i].second);
  }
}

void UringQueue::wait_for_result() {
  const int result = io_uring_submit_and_wait(&ring_, 1);
  MEMD_CHECK(result >= 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR);
}

IoQueueStatistics UringQueue::statistics() const {
  IoQueueStatistics statistics = TransferQueue::statistics();
  statistics.removed_and_held_count = slots_held_.size();
  statistics.registered_buffers = !pieces_.empty() && unregistered_count_ == 0;
  return statistics;
}

}  // namespace memd
