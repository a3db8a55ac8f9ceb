#include "arena/pool.h"

#include <algorithm>
#include <utility>

#include "arena/memory_limits.h"
#include "base/clock.h"
#include "base/units.h"

namespace memd {
namespace {

constexpr uint64_t kHugePageBytes = 2_MiB;

std::string in_mebibytes(uint64_t bytes) { return concat(bytes >> 20, " MiB (", bytes, " bytes)"); }

/// Shared memory that the kernel can't back ends in its out-of-memory killer and not in an error,
/// so it is asked beforehand.
Status check_available(uint64_t bytes) {
  const auto available = available_memory();
  if (!available || bytes <= available->bytes) return Status::ok();
  return error(StatusCode::capacity,
               "a pool of ",
               in_mebibytes(bytes),
               " does not fit in the ",
               in_mebibytes(available->bytes),
               " of memory that is available (",
               available->source,
               "); choose a smaller pool or give the machine or the cgroup more memory");
}

std::string memlock_message(uint64_t pool_bytes) {
  const auto allowance = memlock_allowance();
  const std::string limit =
      allowance ? concat("the memlock limit (RLIMIT_MEMLOCK) is ",
                         in_mebibytes(allowance->limit_bytes),
                         ", of which ",
                         in_mebibytes(allowance->locked_bytes),
                         " are in use")
                : std::string(
                      "the kernel refused although RLIMIT_MEMLOCK is no obstacle to this process");
  return concat("a pool of ",
                in_mebibytes(pool_bytes),
                " can't be locked in memory: ",
                limit,
                "; set LimitMEMLOCK=infinity in the systemd unit, raise `ulimit -l`, or choose a "
                "smaller pool");
}

Status check_lockable(uint64_t bytes) {
  const auto allowance = memlock_allowance();
  if (!allowance || bytes <= allowance->bytes_left()) return Status::ok();
  return error(StatusCode::capacity, memlock_message(bytes));
}

void add_note(std::string& note, const std::string& sentence) {
  note += (note.empty() ? "" : "; ") + sentence;
}

}  // namespace

uint64_t segment_bytes_for(uint64_t pool_bytes) {
  return std::clamp<uint64_t>(align_down(pool_bytes / 16, kHugePageBytes), kHugePageBytes, 64_MiB);
}

namespace {

uint64_t segment_bytes_of(const PoolOptions& options) {
  return options.segment_bytes != 0 ? options.segment_bytes : segment_bytes_for(options.bytes);
}

}  // namespace

Status Pool::check(const PoolOptions& options) {
  const uint64_t segment_bytes = segment_bytes_of(options);
  if (options.bytes == 0)
    return error(StatusCode::invalid_argument, "a pool needs memory: its size is 0 bytes");
  if (!is_aligned(segment_bytes, kHugePageBytes)) {
    return error(StatusCode::invalid_argument,
                 "a segment must be a multiple of 2 MiB: ",
                 segment_bytes,
                 " bytes");
  }
  const uint64_t bytes = align_up(options.bytes, segment_bytes);
  if (Status available = check_available(bytes); !available.is_ok()) return available;
  return options.lock == LockMode::required ? check_lockable(bytes) : Status::ok();
}

Result<std::unique_ptr<Pool>> Pool::create(const PoolOptions& options) {
  if (Status checked = check(options); !checked.is_ok()) return checked;
  const uint64_t segment_bytes = segment_bytes_of(options);
  const uint64_t segment_count = divide_up(options.bytes, segment_bytes);
  const Status lockable = check_lockable(segment_count * segment_bytes);

  std::unique_ptr<Pool> pool(new Pool(options));
  pool->report_.segment_bytes = segment_bytes;
  pool->report_.page_bytes = options.huge_pages ? kHugePageBytes : 4_KiB;
  pool->report_.locked = lockable.is_ok();
  if (!lockable.is_ok()) add_note(pool->report_.note, lockable.message());
  if (Status filled = pool->fill(segment_count); !filled.is_ok()) return filled;
  return pool;
}

Status Pool::fill(uint64_t segment_count) {
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  const uint64_t pool_bytes = segment_count * report_.segment_bytes;
  for (uint64_t i = 0; i < segment_count; ++i) {
    Result<Segment> segment = create_segment();
    if (!segment.is_ok()) {
      const Status& refusal = segment.status();
      return Status(refusal.code(),
                    concat("a pool of ",
                           in_mebibytes(pool_bytes),
                           " could not be had, only ",
                           in_mebibytes(report_.bytes),
                           ": ",
                           refusal.message()),
                    refusal.error_number());
    }
    free_.push_back(std::move(segment).value());
    report_.bytes += report_.segment_bytes;
  }
  report_.prefault_seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  return Status::ok();
}

Result<Segment> Pool::create_segment() {
  const uint64_t bytes = report_.segment_bytes;
  Result<Segment> segment = Segment::create({.bytes = bytes, .huge_pages = huge_pages_});
  if (!segment.is_ok() && huge_pages_) {
    huge_pages_ = false;
    report_.page_bytes = 4_KiB;
    add_note(report_.note,
             concat("4 KiB pages after ",
                    report_.bytes / kHugePageBytes,
                    " huge pages of 2 MiB, because no more are reserved (",
                    segment.status().message(),
                    "); reserve them with vm.nr_hugepages"));
    segment = Segment::create({.bytes = bytes, .huge_pages = false});
  }
  if (!segment.is_ok() || !report_.locked) return segment;
  const Status locked = segment.value().lock();
  if (locked.is_ok()) return segment;
  const std::string message = concat(memlock_message(bytes), " (", locked.message(), ")");
  if (lock_ == LockMode::required)
    return Status(StatusCode::capacity, message, locked.error_number());
  report_.locked = false;
  add_note(report_.note, message);
  return segment;
}

std::optional<Segment> Pool::take() {
  if (free_.empty()) return std::nullopt;
  Segment segment = std::move(free_.back());
  free_.pop_back();
  return segment;
}

Status Pool::give_back(Segment segment) {
  MEMD_CHECK_EQ(segment.bytes(), report_.segment_bytes);
  {
    const Segment destroyed = std::move(segment);
  }
  Status available = check_available(report_.segment_bytes);
  if (available.is_ok()) {
    Result<Segment> fresh = create_segment();
    if (fresh.is_ok()) {
      free_.push_back(std::move(fresh).value());
      return Status::ok();
    }
    available = fresh.status();
  }
  report_.bytes -= report_.segment_bytes;
  return Status(available.code(),
                concat("the pool shrank by one segment to ",
                       in_mebibytes(report_.bytes),
                       ": ",
                       available.message()),
                available.error_number());
}

}  // namespace memd
