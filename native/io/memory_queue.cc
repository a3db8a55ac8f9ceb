#include "io/memory_queue.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

void copy_into(std::span<std::byte> bytes, const UnsyncedWrite& write) {
  std::ranges::copy(write.bytes, bytes.subspan(write.offset_bytes, write.bytes.size()).begin());
}

void flip_bit(std::span<std::byte> bytes, uint64_t bit) {
  MEMD_CHECK_LT(bit / 8, bytes.size());
  bytes[bit / 8] ^= std::byte{1} << (bit % 8);
}

/// O_DIRECT's demands on an operation.
bool is_direct(const IoOp& op) {
  return is_aligned(op.offset_bytes, kBlockBytes) && is_aligned(op.length_bytes, kBlockBytes) &&
         is_aligned(reinterpret_cast<uintptr_t>(op.data), kBlockBytes);
}

bool touches(const IoOp& op, uint64_t offset_bytes) {
  return op.offset_bytes <= offset_bytes && offset_bytes < op.offset_bytes + op.length_bytes;
}

}  // namespace

void MemoryDisk::write(UnsyncedWrite write) {
  copy_into(bytes(), write);
  unsynced_.push_back(std::move(write));
}

void MemoryDisk::completed(uint64_t transfer_sequence, uint64_t complete_sequence) {
  for (UnsyncedWrite& write : unsynced_) {
    if (write.transfer_sequence == transfer_sequence) write.complete_sequence = complete_sequence;
  }
}

void MemoryDisk::sync(uint64_t submit_sequence) {
  std::vector<UnsyncedWrite> rest;
  for (UnsyncedWrite& write : unsynced_) {
    if (write.complete_sequence != 0 && write.complete_sequence < submit_sequence) {
      copy_into(durable_bytes(), write);
    } else {
      rest.push_back(std::move(write));
    }
  }
  unsynced_ = std::move(rest);
}

void MemoryDisk::crash(const std::function<bool(const UnsyncedWrite&)>& keep) {
  for (const UnsyncedWrite& write : unsynced_) {
    if (keep(write)) copy_into(durable_bytes(), write);
  }
  unsynced_.clear();
  bytes_.become(durable_);
}

MemoryQueue::MemoryQueue(const MemoryQueueOptions& options)
    : MemoryQueue(options, options.clock == nullptr ? std::make_unique<ManualClock>() : nullptr) {}

MemoryQueue::MemoryQueue(const MemoryQueueOptions& options, std::unique_ptr<ManualClock> own_clock)
    : TransferQueue(
          options.depth, options.wake_fd, own_clock ? *own_clock : *options.clock, options.turn),
      own_clock_(std::move(own_clock)),
      clock_(own_clock_ ? *own_clock_ : *options.clock),
      options_(options),
      order_(options.order_seed.value_or(0)) {}

MemoryQueue::~MemoryQueue() {
  // Operations that completions submit may stall as well.
  clear_faults();
  release_stalled();
  drain();
}

uint16_t MemoryQueue::add_device(OwnedFd file, std::string path) {
  if (!file.is_open()) return add_disk(nullptr, std::move(path));
  struct stat info{};
  MEMD_CHECK_EQ(::fstat(file.get(), &info), 0);
  return add_disk(std::make_shared<MemoryDisk>(static_cast<uint64_t>(info.st_size)),
                  std::move(path));
}

uint16_t MemoryQueue::add_disk(std::shared_ptr<MemoryDisk> disk, std::string path) {
  disks_.push_back(std::move(disk));
  busy_until_ns_.push_back(0);
  return add_device_path(std::move(path));
}

MemoryDisk& MemoryQueue::disk(uint16_t device) {
  MEMD_CHECK(disks_.at(device) != nullptr);
  return *disks_[device];
}

std::optional<MemoryFault> MemoryQueue::next_fault(const IoOp& op) {
  std::optional<MemoryFault> hit;
  for (auto& [fault, seen_count] : faults_) {
    if (fault.io_kind && *fault.io_kind != op.kind) continue;
    if (fault.device && *fault.device != op.device) continue;
    if (fault.offset_bytes && !touches(op, *fault.offset_bytes)) continue;
    const uint64_t index = seen_count++;
    if (hit || index < fault.skip_count || index - fault.skip_count >= fault.count) continue;
    hit = fault;
  }
  return hit;
}

void MemoryQueue::start(IoOp& op) {
  const auto fault = next_fault(op);
  ++started_count_;
  if (fault) ++fault_hit_count_;
  in_flight_.push_back({.op = &op,
                        .ready_ns = ready_ns(op),
                        .fault = fault,
                        .stalled = fault && fault->kind == MemoryFaultKind::stall});
  if (options_.automatic) wake();
}

uint64_t MemoryQueue::ready_ns(const IoOp& op) {
  const uint64_t now_ns = clock_.now_ns();
  if (options_.bytes_per_second == 0) return now_ns + options_.latency_ns;
  uint64_t& until_ns = busy_until_ns_[op.device];
  until_ns =
      std::max(until_ns, now_ns) + op.length_bytes * 1'000'000'000 / options_.bytes_per_second;
  return until_ns + options_.latency_ns;
}

std::optional<uint64_t> MemoryQueue::next_ready_ns() const {
  std::optional<uint64_t> first;
  for (const InFlight& entry : in_flight_) {
    if (!entry.stalled) first = std::min(first.value_or(entry.ready_ns), entry.ready_ns);
  }
  return first;
}

void MemoryQueue::release_stalled(std::optional<uint64_t> offset_bytes) {
  for (InFlight& entry : in_flight_) {
    if (!offset_bytes || touches(*entry.op, *offset_bytes)) entry.stalled = false;
  }
  if (options_.automatic) wake();
}

bool MemoryQueue::has_stalled() const {
  return std::any_of(
      in_flight_.begin(), in_flight_.end(), [](const InFlight& entry) { return entry.stalled; });
}

std::vector<size_t> MemoryQueue::ready_indices() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < in_flight_.size(); ++i) {
    if (!in_flight_[i].stalled) indices.push_back(i);
  }
  return indices;
}

size_t MemoryQueue::ready_count() const { return ready_indices().size(); }

// One of `indices` into in_flight_, by its place among them.
size_t MemoryQueue::choose(const std::vector<size_t>& indices) {
  if (options_.order_seed) return static_cast<size_t>(order_() % indices.size());
  const auto first = std::min_element(indices.begin(), indices.end(), [this](size_t a, size_t b) {
    return in_flight_[a].ready_ns < in_flight_[b].ready_ns;
  });
  return static_cast<size_t>(first - indices.begin());
}

bool MemoryQueue::complete_next() {
  const std::vector<size_t> indices = ready_indices();
  if (indices.empty()) return false;
  complete_at(choose(indices));
  return true;
}

void MemoryQueue::complete_at(size_t index) {
  const size_t chosen = ready_indices().at(index);
  const uint64_t ready_ns = in_flight_[chosen].ready_ns;
  if (ready_ns > clock_.now_ns()) clock_.advance(ready_ns - clock_.now_ns());
  run(chosen);
  reap();
}

void MemoryQueue::complete_all() {
  reap();
  while (complete_next()) {
  }
}

void MemoryQueue::wait_for_result() {
  if (!results_.empty()) return;
  release_stalled();
  const std::vector<size_t> indices = ready_indices();
  const size_t chosen = indices.at(choose(indices));
  const uint64_t ready_ns = in_flight_.at(chosen).ready_ns;
  if (ready_ns > clock_.now_ns()) clock_.advance(ready_ns - clock_.now_ns());
  run(chosen);
}

void MemoryQueue::collect() {
  if (options_.automatic) {
    std::vector<size_t> due = ready_indices();
    std::erase_if(due, [this](size_t i) { return in_flight_[i].ready_ns > clock_.now_ns(); });
    if (options_.order_seed) std::shuffle(due.begin(), due.end(), order_);
    std::vector<IoOp*> ops;
    for (const size_t i : due) ops.push_back(in_flight_[i].op);
    for (const IoOp* op : ops) {
      const auto entry = std::find_if(in_flight_.begin(),
                                      in_flight_.end(),
                                      [op](const InFlight& other) { return other.op == op; });
      run(static_cast<size_t>(entry - in_flight_.begin()));
    }
  }
  const auto results = std::exchange(results_, {});
  for (const auto& [op, result] : results) on_result(*op, result);
}

void MemoryQueue::run(size_t in_flight_index) {
  const InFlight entry = in_flight_.at(in_flight_index);
  in_flight_.erase(in_flight_.begin() + static_cast<ptrdiff_t>(in_flight_index));
  int64_t result = -EIO;
  if (!crashed_) {
    const bool has_error = entry.fault && entry.fault->kind == MemoryFaultKind::error;
    result = has_error ? -entry.fault->error_number : transfer_bytes(*entry.op, entry.fault);
  }
  results_.emplace_back(entry.op, result);
}

int64_t MemoryQueue::transfer_bytes(const IoOp& op, const std::optional<MemoryFault>& fault) {
  MemoryDisk* const disk = disks_[op.device].get();
  if (disk == nullptr) return -EBADF;
  const auto is_fault = [&fault](MemoryFaultKind kind) { return fault && fault->kind == kind; };
  const bool lost = is_fault(MemoryFaultKind::lost_write);
  if (op.kind == IoKind::sync) {
    if (!lost) disk->sync(op.transfer->sequence);
    return 0;
  }
  if (!is_direct(op)) return -EINVAL;

  const uint64_t offset_bytes =
      is_fault(MemoryFaultKind::misdirected) ? fault->redirect_offset_bytes : op.offset_bytes;
  uint64_t length_bytes = op.length_bytes;
  if (is_fault(MemoryFaultKind::zero_progress)) length_bytes = 0;
  if (is_fault(MemoryFaultKind::short_transfer)) {
    length_bytes = std::min(length_bytes, fault->transferred_bytes);
  }
  const uint64_t size_bytes = disk->bytes().size();
  const uint64_t rest_bytes = offset_bytes < size_bytes ? size_bytes - offset_bytes : 0;
  if (op.kind == IoKind::write && rest_bytes == 0 && length_bytes > 0) return -ENOSPC;
  length_bytes = std::min(length_bytes, rest_bytes);
  if (length_bytes == 0) return 0;

  const std::span<std::byte> data(op.data, length_bytes);
  if (op.kind == IoKind::read) {
    std::memcpy(data.data(), disk->bytes().data() + offset_bytes, length_bytes);
    if (is_fault(MemoryFaultKind::flipped_bit)) flip_bit(data, fault->bit);
  } else if (!lost) {
    UnsyncedWrite write{.offset_bytes = offset_bytes,
                        .bytes = {data.begin(), data.end()},
                        .transfer_sequence = op.transfer->sequence,
                        .complete_sequence = 0};
    if (is_fault(MemoryFaultKind::flipped_bit)) flip_bit(write.bytes, fault->bit);
    disk->write(std::move(write));
  }
  return static_cast<int64_t>(length_bytes);
}

TransferQueue::Stretch MemoryQueue::stretch(const std::byte*, uint64_t length_bytes) const {
  return {.length_bytes = length_bytes, .is_light = options_.pages == PageKind::huge};
}

void MemoryQueue::before_complete(const Transfer& transfer) {
  if (transfer.request.kind != IoKind::write || !transfer.error.is_ok()) return;
  MemoryDisk* const disk = disks_[transfer.request.device].get();
  if (disk != nullptr) disk->completed(transfer.sequence, next_sequence());
}

void MemoryQueue::crash(const std::function<bool(uint16_t, const UnsyncedWrite&)>& keep) {
  for (const InFlight& entry : in_flight_) {
    // In flight means that the device may have done it already.
    if (entry.op->kind == IoKind::write) transfer_bytes(*entry.op, entry.fault);
  }
  for (uint16_t device = 0; device < disks_.size(); ++device) {
    if (disks_[device] == nullptr) continue;
    disks_[device]->crash([&](const UnsyncedWrite& write) { return keep(device, write); });
  }
  for (auto& [op, result] : results_) result = -EIO;
  crashed_ = true;
}

}  // namespace memd
