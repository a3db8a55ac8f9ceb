#include "io/transfer_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {
namespace {

constexpr uint32_t kRetryCountMax = 64;
constexpr uint32_t kEmptyCountMax = 3;
// Some 50 µs in the kernel. A chunk of light memory takes less, however long, and the doorbell of
// the device as much again: two of 1 MiB together would take too long for a turn.
constexpr uint64_t kStartedBytes = 1_MiB;

}  // namespace

TransferQueue::TransferQueue(uint32_t depth, int wake_fd, const Clock& clock, TurnBudget* turn)
    : clock_(clock), wake_fd_(wake_fd), turn_(turn), ops_(depth) {
  MEMD_CHECK_GT(depth, 0U);
  for (IoOp& op : ops_) ops_free_.push_back(&op);
}

TransferQueue::~TransferQueue() { MEMD_CHECK_EQ(request_count_, uint64_t{0}); }

uint16_t TransferQueue::add_device_path(std::string path) {
  MEMD_CHECK_LT(devices_.size(), size_t{UINT16_MAX});
  devices_.push_back({.path = std::move(path), .statistics = {}});
  return scheduler_.add_path({.depth = static_cast<uint32_t>(ops_.size())});
}

void TransferQueue::set_limits(uint16_t device, const IoPathLimits& limits) {
  const Status usable = check_limits(limits);
  MEMD_CHECK(usable.is_ok());
  scheduler_.set_limits(device, limits);
}

TransferQueue::Stretch TransferQueue::stretch(const std::byte*, uint64_t length_bytes) const {
  return {.length_bytes = length_bytes};
}

void TransferQueue::submit(IoRequest request) {
  MEMD_CHECK_LT(size_t{request.device}, devices_.size());
  MEMD_CHECK(request.complete != nullptr);
  if (request.kind == IoKind::sync) {
    MEMD_CHECK_EQ(request.data.size(), size_t{0});
  } else {
    MEMD_CHECK(is_aligned(request.offset_bytes, kBlockBytes));
    MEMD_CHECK(is_aligned(request.data.size(), kBlockBytes));
    MEMD_CHECK(is_aligned(reinterpret_cast<uintptr_t>(request.data.data()), kBlockBytes));
  }
  ++request_count_;
  auto transfer = std::make_shared<Transfer>();
  transfer->request = std::move(request);
  transfer->sequence = next_sequence();
  transfer->submit_ns = clock_.now_ns();
  if (is_refused(transfer->request)) transfer->error = refusal();
  if (!transfer->error.is_ok() ||
      (transfer->request.kind != IoKind::sync && transfer->request.data.empty())) {
    done_.push_back(std::move(transfer));
    wake();
    return;
  }
  scheduler_.add(std::move(transfer));
  // reap() and end_batch() start once for all that was submitted meanwhile.
  if (!reaping_ && !is_gathering_) start_waiting();
}

bool TransferQueue::end_batch() {
  is_gathering_ = false;
  return start_waiting();
}

size_t TransferQueue::reap() {
  MEMD_CHECK(!reaping_);
  reaping_ = true;
  collect();
  if (!is_gathering_) start_waiting();  // the device works while the completions run
  const size_t done_count = done_.size();
  size_t count = 0;
  while (count < done_count) {
    const std::shared_ptr<Transfer> transfer = std::move(done_.front());
    done_.pop_front();
    complete(*transfer);
    if (++count < done_count && is_turn_spent()) break;
  }
  reaping_ = false;
  if (!is_gathering_) start_waiting();
  return count;
}

void TransferQueue::complete(Transfer& transfer) {
  const IoRequest& request = transfer.request;
  IoKindStatistics& statistics = devices_[request.device].statistics.of(request.kind);
  statistics.seconds.add(static_cast<double>(clock_.now_ns() - transfer.submit_ns) * 1e-9);
  if (transfer.error.is_ok()) {
    statistics.bytes += request.data.size();
  } else if (transfer.started) {
    ++statistics.error_count_by_errno[transfer.error.error_number()];
  }
  --request_count_;
  before_complete(transfer);
  transfer.request.complete(transfer.error);
}

bool TransferQueue::start_waiting() {
  const auto refuse = [this](const std::shared_ptr<Transfer>& transfer) {
    // A chunk failed while others of its request waited: they are not worth starting.
    if (!transfer->error.is_ok()) return true;
    if (!is_refused(transfer->request)) return false;
    transfer->error = refusal();
    if (transfer->op_count == 0) done_.push_back(transfer);
    return true;
  };
  bool any = false;
  uint64_t bytes = 0;
  while (!ops_free_.empty()) {
    const std::shared_ptr<Transfer> transfer = scheduler_.next(refuse);
    if (transfer == nullptr) break;
    any = true;
    bytes += std::max(start_next_chunk(transfer), kChunkBytesMin);
    if (bytes < kStartedBytes) continue;
    flush();
    if (is_turn_spent()) return any;  // the next reap() starts the rest
    bytes = 0;
  }
  flush();
  return any;
}

uint64_t TransferQueue::start_next_chunk(const std::shared_ptr<Transfer>& transfer) {
  const IoRequest& request = transfer->request;
  const auto rest = request.data.subspan(transfer->started_bytes);
  IoOp& op = *ops_free_.back();
  ops_free_.pop_back();
  op = {.transfer = transfer,
        .kind = request.kind,
        .device = request.device,
        .offset_bytes = request.offset_bytes + transfer->started_bytes,
        .data = rest.data(),
        .length_bytes = 0};
  if (!rest.empty()) {
    const Stretch first = stretch(rest.data(), rest.size());
    op.length_bytes =
        std::min(first.length_bytes, scheduler_.chunk_bytes(*transfer, first.is_light));
  }
  op.chunk_bytes = op.length_bytes;
  transfer->started_bytes += op.length_bytes;
  ++transfer->op_count;
  transfer->started = true;
  scheduler_.started(transfer, op.length_bytes);
  start(op);
  return op.length_bytes;
}

void TransferQueue::start_again(IoOp& op) {
  ++resubmit_count_;
  start(op);
}

void TransferQueue::on_result(IoOp& op, int64_t result) {
  // A sync that failed may have dropped the pages it was to write: asking again would say "ok".
  const bool may_retry = op.kind != IoKind::sync && op.retry_count < kRetryCountMax;
  if ((result == -EAGAIN || result == -EINTR) && may_retry) {
    if (is_refused(op.transfer->request)) return finish_op(op, refusal());
    ++op.retry_count;
    return start_again(op);
  }
  if (MEMD_PLANTED("sync.failure_retried") && op.kind == IoKind::sync && result < 0 &&
      op.retry_count++ < kRetryCountMax)
    return start_again(op);
  if (MEMD_PLANTED("write.failure_ignored") && op.kind == IoKind::write && result < 0)
    return finish_op(op, Status::ok());
  if (result < 0) return finish_op(op, op_error(op, static_cast<int>(-result), ""));
  if (op.kind == IoKind::sync) return finish_op(op, Status::ok());

  MEMD_CHECK_LE(static_cast<uint64_t>(result), op.length_bytes);
  const uint64_t moved_bytes = align_down(static_cast<uint64_t>(result), kBlockBytes);
  if (moved_bytes == op.length_bytes) return finish_op(op, Status::ok());
  op.empty_count = moved_bytes == 0 ? op.empty_count + 1 : 0;
  if (op.empty_count == kEmptyCountMax) {
    return finish_op(op, op_error(op, EIO, " (past the end? nothing moved, 3 times on end)"));
  }
  op.offset_bytes += moved_bytes;
  op.data += moved_bytes;
  op.length_bytes -= moved_bytes;
  if (is_refused(op.transfer->request)) return finish_op(op, refusal());
  start_again(op);
}

Status TransferQueue::refusal() const {
  return Status(StatusCode::device,
                concat("not written, because an earlier write or sync failed: ", fence_.message()),
                fence_.error_number());
}

Status TransferQueue::op_error(const IoOp& op, int error_number, const char* detail) const {
  const std::string& path = devices_[op.device].path;
  if (op.kind == IoKind::sync) return device_error(error_number, concat("sync of ", path));
  return device_error(error_number,
                      concat(io_kind_name(op.kind),
                             " of ",
                             op.length_bytes,
                             " bytes at offset ",
                             op.offset_bytes,
                             " of ",
                             path,
                             detail));
}

void TransferQueue::finish_op(IoOp& op, Status status) {
  const std::shared_ptr<Transfer> transfer = std::move(op.transfer);
  op.transfer = nullptr;
  ops_free_.push_back(&op);
  scheduler_.finished(transfer->request, op.chunk_bytes);
  --transfer->op_count;
  // Here, not when the request completes: until then others that wait would be started.
  if (op.kind != IoKind::read && !status.is_ok() && fence_.is_ok() &&
      !MEMD_PLANTED("write.failure_not_fenced"))
    fence_ = status;
  if (transfer->error.is_ok() && !status.is_ok()) transfer->error = std::move(status);
  const bool all_started = transfer->started_bytes == transfer->request.data.size();
  if (transfer->op_count == 0 && (all_started || !transfer->error.is_ok())) {
    done_.push_back(transfer);
  }
}

void TransferQueue::drain() {
  while (request_count_ > 0) {
    if (done_.empty() && ops_free_.size() < ops_.size()) wait_for_result();
    reap();
  }
}

void TransferQueue::wake() const {
  if (wake_fd_ < 0) return;
  const uint64_t one = 1;
  // EAGAIN: the counter is at its maximum, so the owner is woken already.
  ssize_t written = 0;
  do {
    written = ::write(wake_fd_, &one, sizeof one);
  } while (written < 0 && errno == EINTR);
  MEMD_CHECK(written == ssize_t{sizeof one} || errno == EAGAIN);
}

IoQueueStatistics TransferQueue::statistics() const {
  return {.in_flight_count = request_count_,
          .resubmit_count = resubmit_count_,
          .registered_buffers = false};
}

std::vector<IoInFlight> TransferQueue::in_flight() const {
  std::map<uint64_t, const Transfer*> by_sequence;
  const auto add = [&by_sequence](const std::shared_ptr<Transfer>& transfer) {
    if (transfer != nullptr) by_sequence[transfer->sequence] = transfer.get();
  };
  scheduler_.for_each_waiting(add);
  for (const IoOp& op : ops_) add(op.transfer);
  std::for_each(done_.begin(), done_.end(), add);
  std::vector<IoInFlight> all;
  for (const auto& [sequence, transfer] : by_sequence) {
    const IoRequest& request = transfer->request;
    all.push_back({.kind = request.kind,
                   .priority = request.priority,
                   .device = request.device,
                   .offset_bytes = request.offset_bytes,
                   .length_bytes = request.data.size(),
                   .age_ns = clock_.now_ns() - transfer->submit_ns,
                   .started = transfer->started});
  }
  return all;
}

IoDeviceStatistics TransferQueue::device_statistics(uint16_t device) const {
  MEMD_CHECK_LT(size_t{device}, devices_.size());
  return devices_[device].statistics;
}

}  // namespace memd
