#include "bench/io_rate.h"

#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arena/segment.h"
#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

using Clock = std::chrono::steady_clock;

double cpu_seconds() {
  rusage usage{};
  MEMD_CHECK_EQ(getrusage(RUSAGE_SELF, &usage), 0);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Chooses each next transfer, in the order of the file and round again. A measurement begins when
/// the first request is made and ends with the last completion.
class Measurement {
 public:
  Measurement(const IoRateOptions& options, uint64_t file_bytes)
      : options_(options), file_bytes_(file_bytes), cpu_began_(cpu_seconds()) {}

  bool is_over() const { return Clock::now() >= end_; }
  std::pair<IoKind, uint64_t> next() {
    const uint64_t offset_bytes = offset_bytes_;
    offset_bytes_ += options_.block_bytes;
    if (offset_bytes_ + options_.block_bytes > file_bytes_) offset_bytes_ = 0;
    const bool writes =
        options_.mix == IoMix::write || (options_.mix == IoMix::mixed && is_write_due());
    return {writes ? IoKind::write : IoKind::read, offset_bytes};
  }
  void done(IoKind kind) {
    (kind == IoKind::write ? rate_.written_bytes : rate_.read_bytes) += options_.block_bytes;
  }
  IoRate finish() {
    rate_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    rate_.cpu_seconds = cpu_seconds() - cpu_began_;
    return rate_;
  }

 private:
  bool is_write_due() {
    write_due_ += options_.write_share;
    if (write_due_ < 1) return false;
    write_due_ -= 1;
    return true;
  }

  const IoRateOptions options_;
  const uint64_t file_bytes_;
  const Clock::time_point began_ = Clock::now();
  const Clock::time_point end_ = began_ + std::chrono::duration_cast<Clock::duration>(
                                              std::chrono::duration<double>(options_.seconds));
  const double cpu_began_;
  uint64_t offset_bytes_ = 0;
  double write_due_ = 0;
  IoRate rate_;
};

/// liburing's objects, ended in their order.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (is_open_) io_uring_queue_exit(&ring_);
  }
  Status open(uint32_t depth, int file, std::span<std::byte> buffers) {
    if (const int result = io_uring_queue_init(depth, &ring_, 0); result < 0) {
      return error(StatusCode::unavailable, "io_uring_setup: ", std::strerror(-result));
    }
    is_open_ = true;
    const iovec all{.iov_base = buffers.data(), .iov_len = buffers.size()};
    if (const int result = io_uring_register_buffers(&ring_, &all, 1); result < 0) {
      return error(StatusCode::unavailable, "io_uring_register_buffers: ", std::strerror(-result));
    }
    if (const int result = io_uring_register_files(&ring_, &file, 1); result < 0) {
      return error(StatusCode::unavailable, "io_uring_register_files: ", std::strerror(-result));
    }
    return Status::ok();
  }
  io_uring& get() { return ring_; }

 private:
  io_uring ring_{};
  bool is_open_ = false;
};

}  // namespace

/// One buffer for each request in flight, in memory like that of the daemon's pool, of random
/// bytes: some devices compress.
class IoBench::Buffers {
 public:
  static Result<std::unique_ptr<Buffers>> make(uint64_t bytes, bool gathered) {
    auto memory = Segment::create(
        {.bytes = align_up(bytes, uint64_t{2_MiB}), .huge_pages = false, .gathered = gathered});
    if (!memory.is_ok()) return memory.status();
    std::unique_ptr<Buffers> buffers(new Buffers(std::move(memory).value(), gathered));
    std::mt19937_64 random(1);
    for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
      *reinterpret_cast<uint64_t*>(buffers->memory_.data() + i) = random();
    }
    return buffers;
  }
  bool serves(uint64_t bytes, bool gathered) const {
    return memory_.bytes() >= bytes && gathered_ == gathered;
  }
  std::span<std::byte> first(uint64_t bytes) const { return {memory_.data(), bytes}; }
  std::string path() const { return concat("/proc/", getpid(), "/fd/", memory_.fd()); }

 private:
  Buffers(Segment memory, bool gathered) : memory_(std::move(memory)), gathered_(gathered) {}

  Segment memory_;
  bool gathered_;
};

std::string IoBench::memory_path() const { return buffers_ == nullptr ? "" : buffers_->path(); }

Result<std::unique_ptr<IoBench>> IoBench::create(const std::string& directory, uint64_t bytes) {
  if (bytes == 0 || !is_aligned(bytes, uint64_t{1_MiB})) {
    return error(StatusCode::invalid_argument, "the file has whole MiB: ", bytes, " bytes");
  }
  const std::string path = directory + "/memd.bench";
  OwnedFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    const int reason = errno;
    if (reason == EEXIST) {
      return error(StatusCode::already_exists,
                   path,
                   " exists: another benchmark runs, or one was killed; then remove it");
    }
    if (reason == EINVAL) {
      ::unlink(path.c_str());  // some file systems make the file before they refuse O_DIRECT
      return error(StatusCode::invalid_argument,
                   directory,
                   " lies on a file system without O_DIRECT; name a folder on a disk");
    }
    return device_error(reason, "open " + path);
  }
  std::unique_ptr<IoBench> bench(new IoBench(path, std::move(file), bytes));
  if (Status status = bench->fill(); !status.is_ok()) return status;
  return bench;
}

IoBench::IoBench(std::string path, OwnedFd file, uint64_t bytes)
    : path_(std::move(path)), file_(std::move(file)), bytes_(bytes) {}

IoBench::~IoBench() { ::unlink(path_.c_str()); }

Result<std::span<std::byte>> IoBench::buffers(uint64_t bytes, bool gathered) {
  if (buffers_ == nullptr || !buffers_->serves(bytes, gathered)) {
    buffers_.reset();
    auto made = Buffers::make(bytes, gathered);
    if (!made.is_ok()) return made.status();
    buffers_ = std::move(made).value();
  }
  return buffers_->first(bytes);
}

Status IoBench::fill() {
  constexpr uint64_t kBytes = 4_MiB;
  const auto made = buffers(kBytes, false);
  if (!made.is_ok()) return made.status();
  std::byte* const data = made.value().data();
  if (const int result = posix_fallocate(file_.get(), 0, static_cast<off_t>(bytes_)); result != 0) {
    return device_error(result, concat("reserving ", bytes_, " bytes for ", path_));
  }
  for (uint64_t at = 0; at < bytes_;) {
    // Each place differs from the others.
    for (uint64_t i = 0; i < kBytes; i += kBlockBytes) {
      *reinterpret_cast<uint64_t*>(data + i) = at + i;
    }
    const ssize_t moved =
        ::pwrite(file_.get(), data, std::min(kBytes, bytes_ - at), static_cast<off_t>(at));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return device_error(moved < 0 ? errno : EIO, "writing " + path_);
    at += static_cast<uint64_t>(moved);
  }
  if (::fdatasync(file_.get()) != 0) return device_error(errno, "fdatasync of " + path_);
  return Status::ok();
}

Status IoBench::check(const IoRateOptions& options) const {
  if (options.block_bytes == 0 || !is_aligned(options.block_bytes, kBlockBytes) ||
      options.block_bytes > bytes_) {
    return error(StatusCode::invalid_argument,
                 "a block is whole blocks of 4096 bytes, and no larger than the file: ",
                 options.block_bytes);
  }
  constexpr uint64_t kBufferBytesMax = 4ull << 30;
  if (options.depth == 0 || options.depth > 4096 ||
      options.depth * options.block_bytes > kBufferBytesMax) {
    return error(StatusCode::invalid_argument,
                 "1 to 4096 requests are in flight, with at most 4 GiB together: ",
                 options.depth,
                 " of ",
                 options.block_bytes,
                 " bytes");
  }
  if (!(options.seconds > 0 && options.seconds <= 3600)) {
    return error(
        StatusCode::invalid_argument, "a run takes up to an hour: ", options.seconds, " seconds");
  }
  if (!(options.write_share >= 0 && options.write_share <= 1)) {
    return error(StatusCode::invalid_argument,
                 "the share of writes is from 0 to 1: ",
                 std::to_string(options.write_share));
  }
  return Status::ok();
}

Result<IoRate> IoBench::through_queue(const IoRateOptions& options) {
  if (Status status = check(options); !status.is_ok()) return status;
  const auto memory = buffers(options.depth * options.block_bytes, options.gathered);
  if (!memory.is_ok()) return memory.status();
  // A request that the queue splits counts once: the depth is that of requests.
  const auto chunks =
      static_cast<uint32_t>(divide_up(options.block_bytes, IoPathLimits().chunk_bytes));
  const OwnedFd wake(::eventfd(0, EFD_CLOEXEC));
  if (!wake.is_open()) return device_error(errno, "eventfd");
  auto made = make_io_queue({.depth = options.depth * chunks, .wake_fd = wake.get()});
  if (!made.is_ok()) return made.status();
  IoQueue& queue = *made.value().queue;
  OwnedFd file(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0));
  if (!file.is_open()) return device_error(errno, "duplicating a descriptor");
  const uint16_t device = queue.add_device(std::move(file), path_);
  queue.add_memory(memory.value(), options.gathered ? PageKind::huge : PageKind::small);
  // As the daemon does before its first transfer, and raw() before its own.
  pollfd registers{.fd = wake.get(), .events = POLLIN, .revents = 0};
  while (::poll(&registers, 1, 0) > 0) {
    uint64_t count = 0;
    MEMD_CHECK_EQ(::read(wake.get(), &count, sizeof(count)), ssize_t{sizeof(count)});
    queue.reap();
  }

  Measurement measurement(options, bytes_);
  Status failed;
  uint32_t in_flight = 0;
  const std::function<void(uint32_t)> begin = [&](uint32_t index) {
    const auto [kind, offset_bytes] = measurement.next();
    ++in_flight;
    queue.submit({.kind = kind,
                  .priority = IoPriority::demand,
                  .device = device,
                  .offset_bytes = offset_bytes,
                  .data = memory.value().subspan(index * options.block_bytes, options.block_bytes),
                  .complete = [&, index, kind = kind](const Status& status) {
                    --in_flight;
                    if (status.is_ok()) {
                      measurement.done(kind);
                    } else if (failed.is_ok()) {
                      failed = status;
                    }
                    if (!measurement.is_over() && failed.is_ok()) begin(index);
                  }});
  };
  for (uint32_t index = 0; index < options.depth; ++index) begin(index);
  while (in_flight > 0) {
    if (queue.reap() > 0) continue;
    uint64_t count = 0;  // blocks until there is something to reap, as the daemon's thread does
    if (::read(wake.get(), &count, sizeof(count)) < 0 && errno != EINTR) {
      return device_error(errno, "waiting for transfers");
    }
  }
  if (!failed.is_ok()) return failed;
  return measurement.finish();
}

Result<IoRate> IoBench::raw(const IoRateOptions& options) {
  if (Status status = check(options); !status.is_ok()) return status;
  const auto memory = buffers(options.depth * options.block_bytes, options.gathered);
  if (!memory.is_ok()) return memory.status();
  Ring owner;
  if (Status status = owner.open(options.depth, file_.get(), memory.value()); !status.is_ok()) {
    return status;
  }
  io_uring& ring = owner.get();
  Measurement measurement(options, bytes_);
  std::vector<IoKind> kinds(options.depth);
  const auto begin = [&](uint32_t index) {
    const auto [kind, offset_bytes] = measurement.next();
    kinds[index] = kind;
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring);
    MEMD_CHECK(sqe != nullptr);  // an entry for each request
    const auto data = memory.value().subspan(index * options.block_bytes, options.block_bytes);
    const auto length_bytes = static_cast<unsigned>(data.size());
    if (kind == IoKind::read) {
      io_uring_prep_read_fixed(sqe, 0, data.data(), length_bytes, offset_bytes, 0);
    } else {
      io_uring_prep_write_fixed(sqe, 0, data.data(), length_bytes, offset_bytes, 0);
    }
    io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, index);
  };
  for (uint32_t index = 0; index < options.depth; ++index) begin(index);
  uint32_t in_flight = options.depth;
  Status failed;
  while (in_flight > 0) {
    const int submitted = io_uring_submit_and_wait(&ring, 1);
    MEMD_CHECK(submitted >= 0 || submitted == -EAGAIN || submitted == -EBUSY ||
               submitted == -EINTR);
    std::array<io_uring_cqe*, 64> cqes;
    while (const unsigned count = io_uring_peek_batch_cqe(&ring, cqes.data(), cqes.size())) {
      std::array<std::pair<uint32_t, int>, 64> results;
      for (unsigned i = 0; i < count; ++i) {
        results[i] = {static_cast<uint32_t>(io_uring_cqe_get_data64(cqes[i])), cqes[i]->res};
      }
      io_uring_cq_advance(&ring, count);
      for (unsigned i = 0; i < count; ++i) {
        const auto [index, moved] = results[i];
        --in_flight;
        if (moved != static_cast<int>(options.block_bytes) && failed.is_ok()) {
          failed = device_error(moved < 0 ? -moved : EIO, "a transfer of " + path_);
        }
        measurement.done(kinds[index]);
        if (measurement.is_over() || !failed.is_ok()) continue;
        begin(index);
        ++in_flight;
      }
    }
  }
  if (!failed.is_ok()) return failed;
  return measurement.finish();
}

}  // namespace memd
