// A trainer reads its arena through views that only its own process can change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/private_mapping.h"
#include "ring/written_pages.h"

namespace memd {

/// The arena mapped a second time, privately. A write to it stays in this process: a page that is
/// written becomes this process's own copy, and hides what others write to the arena later. So a
/// page that no living view touches has no copy, and a view whose bytes another one's page would
/// hide gets memory of its own. So does a small view: to ask the kernel what was written in it
/// costs more than to copy and to compare it.
///
/// A view is the bytes of one shard under a pin, so nobody changes the arena's bytes below it.
/// Living views are equal or apart, but may share a page at their ends. Any thread may call.
class ReadViews {
 public:
  /// The largest small view. A copy of 256 bytes and its comparison take 0.2 µs, of 4 KiB 0.3; the
  /// kernel's answer takes 0.8 to 1.2 in a virtual machine, at the end and once for each neighbour.
  static constexpr uint64_t kSmallBytes = 4096;

  /// `shared` is the arena's own mapping, of which `reserved_bytes` are reserved.
  static Result<std::unique_ptr<ReadViews>> reserve(std::byte* shared,
                                                    uint64_t reserved_bytes,
                                                    WrittenPages pages = WrittenPages(),
                                                    uint64_t small_bytes = kSmallBytes);
  ~ReadViews();
  ReadViews(const ReadViews&) = delete;
  ReadViews& operator=(const ReadViews&) = delete;

  /// A segment of the arena. Views of reserved huge pages are the arena's own bytes: to write a
  /// private one takes another page of the reserve, and without one the process dies.
  Status map_segment(uint64_t offset_bytes, uint64_t length_bytes, const OwnedFd& segment);

  /// Whether all views are this process's own so far: see map_segment().
  bool is_private() const { return is_private_.load(std::memory_order_relaxed); }

  /// A view of pinned bytes, until end() or end_unless_written(). Null without memory for one of
  /// its own.
  std::byte* begin(uint64_t offset_bytes, uint64_t length_bytes);
  /// The place in the arena of a part of a living view, or of the arena's own mapping.
  /// Nothing for other addresses.
  std::optional<uint64_t> place(const std::byte* data, uint64_t length_bytes);
  /// A living view has these bytes because memd has put them there. From now on it is written if
  /// they change.
  void note_shown(std::byte* data, uint64_t length_bytes);
  /// Whether a living view differs from the arena, or from what was noted last. False for other
  /// addresses.
  bool is_written(std::byte* data, uint64_t length_bytes);
  /// Ends a living view, or returns false if it is written.
  bool end_unless_written(std::byte* data, uint64_t length_bytes);
  /// Ends it with what was written there, unless an equal view lives.
  void end(std::byte* data, uint64_t length_bytes);

 private:
  struct Living {
    uint64_t end_bytes = 0;
    uint32_t count = 0;
    std::optional<uint64_t> shown;  // checksum of what was noted
  };
  /// Views with memory of their own, which equal small ones share.
  struct Copy {
    uint64_t offset_bytes = 0;
    uint64_t length_bytes = 0;
    uint32_t count = 1;
    std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, &std::free};
    std::optional<uint64_t> shown;
  };
  using Pages = std::vector<std::span<std::byte>>;

  ReadViews(std::byte* shared,
            std::byte* base,
            uint64_t reserved_bytes,
            WrittenPages pages,
            uint64_t small_bytes,
            std::unique_ptr<MlockWatch> mlocks);
  bool is_in_mapping(const std::byte* data) const;
  /// A view that is the arena's own bytes.
  bool is_in_arena(const std::byte* data) const;
  // Called with `mutex_` held:
  bool has_huge_pages(uint64_t begin_bytes, uint64_t end_bytes) const;
  /// If mlockall() has copied all pages, those that no living view touches are the arena's again.
  void drop_mlocked();
  /// Null without memory.
  std::byte* begin_small(uint64_t offset_bytes, uint64_t length_bytes);
  std::byte* copy(uint64_t offset_bytes, uint64_t length_bytes);
  /// The place of what was noted of a living view; null for other addresses.
  std::optional<uint64_t>* shown(const std::byte* data);
  /// `written` are its pages in the mapping that are.
  bool is_changed(const Pages& written, std::byte* data, uint64_t length_bytes);
  /// Whether a view in the mapping differs from the arena, which only its pages in `written` can.
  bool differs(const Pages& written, std::byte* data, uint64_t length_bytes) const;
  bool differs(const std::byte* data, const Copy& copy) const;
  void end_copy(const std::byte* data);
  /// Ends a view in the mapping; `written` are its pages that are.
  void end_in_mapping(const Pages& written, const std::byte* data);

  std::byte* shared_;
  std::byte* base_;
  uint64_t reserved_bytes_;
  WrittenPages pages_;
  uint64_t small_bytes_;
  std::atomic<bool> is_private_{true};

  std::mutex mutex_;
  std::unique_ptr<MlockWatch> mlocks_;
  struct Range {
    uint64_t begin_bytes = 0;
    uint64_t end_bytes = 0;
  };
  std::vector<Range> huge_;            // segments of reserved huge pages, joined, in their order
  std::map<uint64_t, Living> living_;  // by offset
  std::map<const std::byte*, Copy> copies_;
  std::map<uint64_t, std::byte*> small_;  // of these, those that the next equal view joins
};

}  // namespace memd
