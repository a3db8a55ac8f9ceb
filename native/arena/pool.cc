#include "arena/pool.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include "arena/memory_limits.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {
namespace {

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

constexpr std::string_view kSegmentPrefix = "segment.";

bool is_segment(const KeptDescriptor& kept) { return kept.name.starts_with(kSegmentPrefix); }

/// 0 where the name says none.
uint64_t segment_id_of(const std::string& name) {
  uint64_t id = 0;
  const char* end = name.data() + name.size();
  const auto [stopped, failure] = std::from_chars(name.data() + kSegmentPrefix.size(), end, id);
  return failure == std::errc() && stopped == end ? id : 0;
}

/// 0 where it can't be told.
uint64_t size_of(const OwnedFd& fd) {
  struct stat status{};
  return ::fstat(fd.get(), &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
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

Result<std::unique_ptr<Pool>> Pool::create(const PoolOptions& options,
                                           DescriptorKeeper* keeper,
                                           KeptDescriptors* kept) {
  if (kept != nullptr && std::any_of(kept->begin(), kept->end(), is_segment)) {
    std::unique_ptr<Pool> pool(new Pool(options, keeper));
    if (Status adopted = pool->adopt(*kept); !adopted.is_ok()) return adopted;
    if (!pool->kept_.empty()) return pool;
  }
  if (Status checked = check(options); !checked.is_ok()) return checked;
  const uint64_t segment_bytes = segment_bytes_of(options);
  const uint64_t segment_count = divide_up(options.bytes, segment_bytes);
  const Status lockable = check_lockable(segment_count * segment_bytes);

  std::unique_ptr<Pool> pool(new Pool(options, keeper));
  pool->report_.segment_bytes = segment_bytes;
  pool->report_.page_bytes = options.huge_pages ? kHugePageBytes : 4_KiB;
  pool->report_.locked = lockable.is_ok();
  if (!lockable.is_ok()) add_note(pool->report_.note, lockable.message());
  MEMD_FAILPOINT("pool.before_filled");
  if (Status filled = pool->fill(segment_count); !filled.is_ok()) return filled;
  MEMD_FAILPOINT("pool.filled");
  return pool;
}

Status Pool::adopt(KeptDescriptors& kept) {
  std::map<uint64_t, uint64_t> counts;
  for (const KeptDescriptor& each : kept) {
    if (is_segment(each)) ++counts[size_of(each.fd)];
  }
  // All have one size but for an error of an earlier daemon: then what most have is the pool's.
  const uint64_t segment_bytes =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      })->first;
  if (segment_bytes == 0 || !is_aligned(segment_bytes, kHugePageBytes)) {
    add_note(report_.note, concat("segments of ", segment_bytes, " bytes were not adopted"));
    return Status::ok();
  }
  const Status lockable = check_lockable(counts[segment_bytes] * segment_bytes);
  if (!lockable.is_ok() && lock_ == LockMode::required) return lockable;
  report_.segment_bytes = segment_bytes;
  report_.page_bytes = kHugePageBytes;
  report_.locked = lockable.is_ok();
  if (!lockable.is_ok()) add_note(report_.note, lockable.message());
  KeptDescriptors others;
  for (KeptDescriptor& each : kept) {
    if (!is_segment(each)) {
      others.push_back(std::move(each));
      continue;
    }
    auto segment = Segment::adopt(std::move(each.fd), segment_id_of(each.name), segment_bytes);
    if (!segment.is_ok()) {
      if (segment.status().code() != StatusCode::not_found)
        add_note(report_.note, segment.status().message());
      if (keeper_ != nullptr) keeper_->forget(each.name);
      continue;
    }
    if (report_.locked) {
      const Status locked = note_lock(segment.value(), segment.value().lock());
      if (!locked.is_ok()) return locked;
    }
    if (!segment.value().has_huge_pages()) report_.page_bytes = 4_KiB;
    const uint64_t id = segment.value().id();
    kept_.emplace(id, std::move(segment).value());
    report_.bytes += segment_bytes;
    report_.kept_bytes += segment_bytes;
  }
  kept = std::move(others);
  return Status::ok();
}

std::optional<Segment> Pool::take_kept(uint64_t id) {
  const auto found = kept_.find(id);
  if (found == kept_.end()) return std::nullopt;
  Segment segment = std::move(found->second);
  kept_.erase(found);
  some_kept_were_taken_ = true;
  return segment;
}

std::vector<uint64_t> Pool::kept_ids() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, segment] : kept_) ids.push_back(id);
  return ids;
}

Status Pool::settle() {
  const uint64_t segment_bytes_wanted = segment_bytes_of(options_);
  if (report_.kept_bytes != 0 && !some_kept_were_taken_ &&
      report_.segment_bytes != segment_bytes_wanted) {
    // Nobody's offsets depend on the size of these.
    while (!kept_.empty()) destroy(std::move(kept_.extract(kept_.begin()).mapped()));
    report_ = PoolReport{};
    auto fresh = create(options_, keeper_);
    if (!fresh.is_ok()) return fresh.status();
    *this = std::move(*fresh.value());
    return Status::ok();
  }
  for (auto& [id, segment] : kept_) {
    if (!segment.is_used()) {
      free_.push_back(std::move(segment));
      continue;
    }
    // It was a job's that is gone: another user may have read and written it.
    destroy(std::move(segment));
    report_.bytes -= report_.segment_bytes;
    report_.kept_bytes -= report_.segment_bytes;
  }
  kept_.clear();
  const uint64_t count_wanted = divide_up(options_.bytes, report_.segment_bytes);
  while (report_.bytes / report_.segment_bytes > count_wanted && !free_.empty()) {
    destroy(std::move(free_.back()));
    free_.pop_back();
    report_.bytes -= report_.segment_bytes;
    report_.kept_bytes -= report_.segment_bytes;
  }
  const uint64_t count = report_.bytes / report_.segment_bytes;
  if (count > count_wanted) {
    add_note(report_.note,
             concat("larger than asked for, because jobs that were taken over use ",
                    in_mebibytes(report_.bytes)));
  }
  if (count >= count_wanted) return Status::ok();
  Status grown = check_available((count_wanted - count) * report_.segment_bytes);
  if (grown.is_ok()) grown = fill(count_wanted - count);
  if (grown.is_ok() || !some_kept_were_taken_) return grown;
  add_note(report_.note,
           concat("no larger than ", in_mebibytes(report_.bytes), ": ", grown.message()));
  return Status::ok();
}

Status Pool::fill(uint64_t segment_count) {
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  const uint64_t pool_bytes = report_.bytes + segment_count * report_.segment_bytes;
  for (uint64_t i = 0; i < segment_count; ++i) {
    const double seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
    Result<Segment> segment = create_segment(seconds < options_.gather_seconds_max);
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
    if (segment.value().is_gathered()) report_.gathered_bytes += report_.segment_bytes;
    free_.push_back(std::move(segment).value());
    report_.bytes += report_.segment_bytes;
  }
  // Those that are taken first: from the end.
  std::stable_partition(
      free_.begin(), free_.end(), [](const Segment& each) { return !each.is_gathered(); });
  report_.prefault_seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  return Status::ok();
}

Pool::Wish Pool::wish(bool gathered) const {
  return {.bytes = report_.segment_bytes,
          .huge_pages = huge_pages_,
          .gathered = gathered,
          .locked = report_.locked};
}

Pool::Made Pool::make(const Wish& wish) {
  const auto create = [&wish](bool huge_pages) {
    return Segment::create(
        {.bytes = wish.bytes, .huge_pages = huge_pages, .gathered = wish.gathered});
  };
  Made made{.segment = create(wish.huge_pages)};
  if (!made.segment.is_ok() && wish.huge_pages) {
    made.small_pages = made.segment.status();
    made.segment = create(false);
  }
  if (made.segment.is_ok() && wish.locked) made.unlocked = made.segment.value().lock();
  return made;
}

Result<Segment> Pool::admit(Made made) {
  if (!made.small_pages.is_ok() && huge_pages_) {
    huge_pages_ = false;
    report_.page_bytes = 4_KiB;
    add_note(report_.note,
             concat("4 KiB pages after ",
                    report_.bytes / kHugePageBytes,
                    " huge pages of 2 MiB, because no more are reserved (",
                    made.small_pages.message(),
                    "); reserve them with vm.nr_hugepages"));
  }
  if (!made.segment.is_ok()) return made.segment.status();
  const Segment& segment = made.segment.value();
  if (Status kept = note_lock(segment, made.unlocked); !kept.is_ok()) return kept;
  if (keeper_ != nullptr) keeper_->keep(segment.kept_name(), segment.fd());
  return std::move(made.segment);
}

Status Pool::note_lock(const Segment& segment, const Status& locked) {
  if (locked.is_ok()) return Status::ok();
  const std::string message = concat(memlock_message(segment.bytes()), " (", locked.message(), ")");
  if (lock_ == LockMode::required)
    return Status(StatusCode::capacity, message, locked.error_number());
  report_.locked = false;
  add_note(report_.note, message);
  return Status::ok();
}

void Pool::give_up(Segment& segment) {
  // Before the keeper is told: a trainer may still map it, and no later daemon may take it for a
  // clean one, whether the keeper hears of this or not.
  segment.mark_given_up();
  if (keeper_ != nullptr) keeper_->forget(segment.kept_name());
}

std::optional<Segment> Pool::take() {
  if (free_.empty()) return std::nullopt;
  Segment segment = std::move(free_.back());
  free_.pop_back();
  segment.mark_used();
  return segment;
}

Status Pool::give_back(Segment segment) {
  Replacement replacement = begin_replacement(std::move(segment));
  replacement.make();
  return end_replacement(std::move(replacement));
}

Pool::Replacement Pool::begin_replacement(Segment segment) {
  MEMD_CHECK_EQ(segment.bytes(), report_.segment_bytes);
  give_up(segment);
  // While trainers wait: touching takes a third of the time without gathering.
  return Replacement(std::move(segment), wish(false));
}

void Pool::Replacement::make() {
  old_.reset();
  Status available = check_available(wish_.bytes);
  made_ = available.is_ok() ? Pool::make(wish_) : Made{.segment = std::move(available)};
}

Status Pool::end_replacement(Replacement replacement) {
  Result<Segment> fresh = admit(std::move(*replacement.made_));
  if (fresh.is_ok()) {
    free_.push_back(std::move(fresh).value());
    return Status::ok();
  }
  report_.bytes -= report_.segment_bytes;
  return Status(fresh.status().code(),
                concat("the pool shrank by one segment to ",
                       in_mebibytes(report_.bytes),
                       ": ",
                       fresh.status().message()),
                fresh.status().error_number());
}

}  // namespace memd
