// The daemon's memory: segments that belong to nobody yet.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena/segment.h"
#include "base/descriptor_keeper.h"
#include "base/status.h"

namespace memd {

enum class LockMode : uint8_t {
  required,  // the service: refuses to start where the pool can't be locked
  wanted,    // an embedded daemon: goes on unlocked and reports it
};

struct PoolOptions {
  uint64_t bytes = 0;          // rounded up to whole segments
  uint64_t segment_bytes = 0;  // 0: segment_bytes_for(bytes)
  bool huge_pages = true;      // tried first, 4 KiB pages where none are reserved
  LockMode lock = LockMode::required;
  /// How long the start may take for gathering pages (Segment): what was not reached has small
  /// ones.
  double gather_seconds_max = 0;
};

/// The memory that the pool got, as opposed to what was asked for.
struct PoolReport {
  uint64_t bytes = 0;
  uint64_t segment_bytes = 0;
  uint64_t page_bytes = 0;
  bool locked = false;
  std::string note;  // why pages are small or memory is unlocked; empty where all was granted
  double prefault_seconds = 0;
  uint64_t kept_bytes = 0;      // of these, what an earlier daemon had touched already
  uint64_t gathered_bytes = 0;  // of these, with pages that lie together: see Segment
};

/// 64 MiB; less for small pools, so that a job has segments for both of its sides: a sixteenth, in
/// whole 2 MiB, at least 2 MiB.
uint64_t segment_bytes_for(uint64_t pool_bytes);

/// Created once at start, all of it touched (and locked) before the daemon says it is ready. One
/// thread (the server thread) calls it.
///
/// With a keeper every segment outlives the daemon's process. Segments of an earlier daemon are
/// taken over as they are: the owner of one that is in use takes it by its id, and settle() then
/// makes the rest free and the pool as large as was asked for.
class Pool {
 public:
  /// Refuses a pool larger than the memory that is available, and, with LockMode::required, larger
  /// than the memlock limit allows: the message names both sizes and what to change.
  ///
  /// `kept`: descriptors named `segment.<id>` of an earlier daemon; others are left where they are.
  /// If there are any, the pool keeps their segment size for its life and takes no other memory
  /// before settle().
  static Result<std::unique_ptr<Pool>> create(const PoolOptions& options,
                                              DescriptorKeeper* keeper = nullptr,
                                              KeptDescriptors* kept = nullptr);
  /// The error that create() would give before it takes any memory: for callers that decide first.
  static Status check(const PoolOptions& options);

  /// A segment that a job of an earlier daemon used, as it was left; nothing where it is not there.
  std::optional<Segment> take_kept(uint64_t id);
  /// Those that take_kept() would give.
  std::vector<uint64_t> kept_ids() const;
  /// Ends the adoption. A segment that nobody took becomes free if no job ever had it, and goes
  /// back to the kernel otherwise. A pool that is now larger than was asked for gives free segments
  /// to the kernel, a smaller one grows; what can't be had of that is said in the report's note,
  /// and is no reason to lose what was taken.
  Status settle();

  /// A segment of zeros, or nothing where all are taken.
  std::optional<Segment> take();
  /// Destroys the segment, whose memory goes back to the kernel, and puts a fresh one in its place.
  /// If the kernel refuses memory for it, the pool is smaller from then on, and the status says
  /// so.
  Status give_back(Segment segment);
  /// The same in three parts, the second on any thread: Replacement::make(). Meanwhile the segment
  /// counts for the pool's bytes and is not free.
  class Replacement;
  Replacement begin_replacement(Segment segment);
  Status end_replacement(Replacement replacement);

  uint64_t segment_bytes() const { return report_.segment_bytes; }
  uint64_t segment_count_free() const { return free_.size(); }
  const PoolReport& report() const { return report_; }

 private:
  /// A segment that is wanted.
  struct Wish {
    uint64_t bytes = 0;
    bool huge_pages = false;
    bool gathered = false;
    bool locked = false;
  };
  struct Made {
    Result<Segment> segment;
    Status small_pages{};  // not ok: why it has no huge ones
    Status unlocked{};     // not ok: why it is not locked
  };
  static Made make(const Wish& wish);
  Wish wish(bool gathered) const;
  /// It becomes the pool's, which notes what the kernel refused.
  Result<Segment> admit(Made made);

  Pool(const PoolOptions& options, DescriptorKeeper* keeper)
      : options_(options), huge_pages_(options.huge_pages), lock_(options.lock), keeper_(keeper) {}
  Status fill(uint64_t segment_count);
  Status adopt(KeptDescriptors& kept);
  Result<Segment> create_segment(bool gathered) { return admit(make(wish(gathered))); }
  /// `locked`: of its mlock. An error where that is required.
  Status note_lock(const Segment& segment, const Status& locked);
  /// Before it is destroyed.
  void give_up(Segment& segment);
  void destroy(Segment segment) { give_up(segment); }

  PoolOptions options_;
  bool huge_pages_;  // until they are refused for the first time
  LockMode lock_;
  DescriptorKeeper* keeper_;
  PoolReport report_;
  std::vector<Segment> free_;
  std::unordered_map<uint64_t, Segment> kept_;
  bool some_kept_were_taken_ = false;
};

/// One segment that takes the place of another.
class Pool::Replacement {
 public:
  /// Once, on any thread: the old segment's memory goes back to the kernel, and as much is taken
  /// and touched, in tens of milliseconds.
  void make();
  /// The old segment's id.
  uint64_t segment_id() const { return segment_id_; }

 private:
  friend Pool;
  Replacement(Segment old, const Wish& wish)
      : segment_id_(old.id()), old_(std::move(old)), wish_(wish) {}

  uint64_t segment_id_;
  std::optional<Segment> old_;
  Wish wish_;
  std::optional<Made> made_;
};

}  // namespace memd
