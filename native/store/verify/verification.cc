#include "store/verify/verification.h"

#include <span>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

constexpr IoClass kScrub{.job = kDaemonJob, .priority = IoPriority::scrub};

}  // namespace

void Verification::begin(const ExtentWalk::Found& found, uint32_t pass, Told told) {
  MEMD_CHECK(!is_running());
  found_ = found;
  pass_ = pass;
  told_ = std::move(told);
  const ExtentRecord extent = found.extent;
  if (buffer_ == nullptr || buffer_->span().size() < extent.length_bytes) {
    buffer_ = std::make_unique<BlockBytes>(uint64_t{extent.length_bytes});
  }
  const std::span<std::byte> into = buffer_->span().first(extent.length_bytes);
  parts_.extents.read_unverified(extent, into, kScrub, [this, extent, into](const Status& status) {
    if (!status.is_ok()) return unread(status);
    parts_.workers.submit(
        {.job = kDaemonJob, .bytes = extent.length_bytes},
        [this, extent, into] { matches_ = ExtentStore::matches(extent, into); },
        [this] { compared(matches_); });
  });
}

void Verification::unread(const Status& status) {
  const ExtentPlace& place = found_.place;
  if (!parts_.places.names(place, found_.extent)) return finish(Verdict::released, Status::ok());
  // Bytes that memory has as well need no further try.
  if (is_in_memory()) parts_.write_anew(place.job_id);
  finish(Verdict::unread,
         parts_.extents.unreadable(found_.extent, parts_.places.describe(place), status));
}

void Verification::compared(bool is_whole) {
  if (is_whole) return finish(Verdict::whole, Status::ok());
  if (!parts_.places.names(found_.place, found_.extent)) {
    return finish(Verdict::released, Status::ok());
  }
  parts_.extents.count_checksum_failure(found_.extent);
  parts_.extents.read_again(found_.extent,
                            buffer_->span().first(found_.extent.length_bytes),
                            kScrub,
                            parts_.places.describe(found_.place),
                            [this](const Status& status) { read_twice(status); });
}

void Verification::read_twice(const Status& status) {
  const ExtentPlace& place = found_.place;
  if (status.is_ok()) return finish(Verdict::whole, status);
  if (!parts_.places.names(place, found_.extent)) return finish(Verdict::released, Status::ok());
  if (is_in_memory()) parts_.write_anew(place.job_id);
  if (status.code() != StatusCode::integrity) return finish(Verdict::unread, status);
  if (is_in_memory()) return finish(Verdict::damaged, status);
  if (parts_.places.is_being_replaced(place)) return finish(Verdict::damaged, status);
  parts_.places.lose(place, status);
  finish(Verdict::lost, status);
}

void Verification::finish(Verdict verdict, const Status& status) {
  // One that is not whole is read for everybody who names it, and told to each.
  if (verdict == Verdict::whole) parts_.extents.note_whole(found_.extent, pass_);
  const Told told = std::exchange(told_, nullptr);
  told(verdict, status);
}

}  // namespace memd
