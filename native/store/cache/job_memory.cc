#include "store/cache/job_memory.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

uint64_t JobMemory::segment_count_min(uint64_t segment_bytes) {
  return divide_up(kPrivateFloorBytes, segment_bytes) + 1;
}

Result<std::unique_ptr<JobMemory>> JobMemory::create(std::vector<Segment>& segments,
                                                     uint64_t segment_bytes,
                                                     IoQueue& io,
                                                     JobLedger* ledger) {
  MEMD_CHECK_GE(segments.size(), segment_count_min(segment_bytes));
  if (ledger != nullptr) {
    for (const Segment& segment : segments) {
      if (Status claimed = ledger->claim(segment.id(), Side::unassigned, 0); !claimed.is_ok())
        return claimed;
    }
  }
  std::unique_ptr<JobMemory> memory(new JobMemory(std::move(segments), segment_bytes, io, ledger));
  if (Status reserved = memory->reserve(); !reserved.is_ok()) {
    segments = memory->take_segments();
    return reserved;
  }
  return memory;
}

Result<std::unique_ptr<JobMemory>> JobMemory::adopt(Sides& sides,
                                                    uint64_t segment_bytes,
                                                    IoQueue& io,
                                                    JobLedger* ledger) {
  std::unique_ptr<JobMemory> memory(
      new JobMemory(std::move(sides.unassigned), segment_bytes, io, ledger));
  memory->segment_count_ += sides.arena.size() + sides.private_side.size() + sides.host_side.size();
  if (Status reserved = memory->reserve(); !reserved.is_ok()) {
    sides.unassigned = memory->take_segments();
    return reserved;
  }
  for (auto [segments, side] : {std::pair{&sides.arena, memory->arena_.get()},
                                std::pair{&sides.private_side, memory->private_.get()},
                                std::pair{&sides.host_side, memory->host_.get()}}) {
    for (Segment& segment : *segments) {
      memory->unassigned_.push_back(std::move(segment));
      memory->grow(*side);
    }
  }
  return memory;
}

JobMemory::JobMemory(std::vector<Segment> segments,
                     uint64_t segment_bytes,
                     IoQueue& io,
                     JobLedger* ledger)
    : io_(io),
      ledger_(ledger),
      segment_bytes_(segment_bytes),
      segment_count_(segments.size()),
      private_floor_segments_(divide_up(kPrivateFloorBytes, segment_bytes)),
      unassigned_(std::move(segments)) {}

JobMemory::~JobMemory() { take_segments(); }

Status JobMemory::reserve() {
  const uint64_t reserved_bytes = segment_count_ * segment_bytes_;
  for (std::unique_ptr<Arena>* side : {&arena_, &private_, &host_}) {
    auto made = Arena::create(reserved_bytes, segment_bytes_);
    if (!made.is_ok()) return made.status();
    *side = std::move(made).value();
  }
  return Status::ok();
}

void JobMemory::claim(uint64_t segment_id, Side side, uint64_t index) {
  if (ledger_ == nullptr) return;
  const Status claimed = ledger_->claim(segment_id, side, static_cast<uint32_t>(index));
  MEMD_CHECK(claimed.is_ok());  // it was claimed when the job got it
}

void JobMemory::claim_in(JobLedger& ledger) {
  ledger_ = &ledger;
  for (const Segment& segment : unassigned_) claim(segment.id(), Side::unassigned, 0);
  for (uint64_t i = 0; i < arena_->segment_count(); ++i)
    claim(arena_->segment(i).id(), Side::arena, i);
  for (uint64_t i = 0; i < private_->segment_count(); ++i)
    claim(private_->segment(i).id(), Side::private_side, i);
  for (uint64_t i = 0; i < host_->segment_count(); ++i)
    claim(host_->segment(i).id(), Side::host_side, i);
}

Side JobMemory::side_of(const Arena& side) const {
  if (&side == arena_.get()) return Side::arena;
  return &side == private_.get() ? Side::private_side : Side::host_side;
}

bool JobMemory::grow(Arena& side) {
  Segment segment = std::move(unassigned_.back());
  unassigned_.pop_back();
  const uint64_t offset_bytes = side.capacity_bytes();
  if (!MEMD_PLANTED("ledger.segment_used_unclaimed")) {
    claim(segment.id(), side_of(side), side.segment_count());
  }
  MEMD_FAILPOINT("ledger.segment_claimed");
  const PageKind pages =
      segment.is_gathered() || segment.has_huge_pages() ? PageKind::huge : PageKind::small;
  const Status status = side.add(std::move(segment));
  MEMD_CHECK(status.is_ok());  // moves a mapping inside a range reserved for it
  io_.add_memory(std::span(side.at(offset_bytes), segment_bytes_), pages);
  return true;
}

bool JobMemory::grow_arena() {
  if (leaves_room_to_tiles() && arena_->capacity_bytes() + segment_bytes_ > arena_bytes_wanted())
    return false;
  return grow_arena_further();
}

bool JobMemory::grow_arena_further() {
  const uint64_t held = private_->segment_count();
  const uint64_t owed = held < private_floor_segments_ ? private_floor_segments_ - held : 0;
  if (unassigned_.size() <= owed) {
    const bool has_too_much = private_->capacity_bytes() > private_bytes_max();
    if (!has_too_much || !shrink_private()) return false;
  }
  return grow(*arena_);
}

bool JobMemory::grow_private() {
  if (unassigned_.empty() || private_->capacity_bytes() + segment_bytes_ > private_bytes_max()) {
    return false;
  }
  return grow(*private_);
}

uint64_t JobMemory::arena_bytes_wanted() const {
  const uint64_t all_bytes = align_up(expected_.arena_bytes, segment_bytes_);
  if (!leaves_room_to_tiles()) return all_bytes;
  const uint64_t beside_bytes = align_up(expected_.tile_bytes + working_bytes(), segment_bytes_);
  const uint64_t left_bytes = shared_bytes() - std::min(shared_bytes(), beside_bytes);
  return std::clamp(left_bytes, align_up(expected_.arena_bytes_min, segment_bytes_), all_bytes);
}

uint64_t JobMemory::private_bytes_max() const {
  const uint64_t arena_bytes = std::max(arena_->capacity_bytes(), arena_bytes_wanted());
  const uint64_t left = shared_bytes() > arena_bytes ? shared_bytes() - arena_bytes : 0;
  return std::max(left, private_floor_bytes());
}

bool JobMemory::shrink_private() { return can_shrink_private() && take_last(*private_); }

bool JobMemory::take_last(Arena& side) {
  if (side.segment_count() == 0 || side.tail_free_bytes() < segment_bytes_) return false;
  const uint64_t from_bytes = (side.segment_count() - 1) * segment_bytes_;
  io_.remove_memory(std::span<std::byte>(side.at(from_bytes), segment_bytes_));
  auto segment = side.remove_last();
  MEMD_CHECK(segment.has_value());
  claim(segment->id(), Side::unassigned, 0);
  unassigned_.push_back(std::move(*segment));
  return true;
}

void JobMemory::release_host() {
  while (host_->segment_count() > 0) MEMD_CHECK(take_last(*host_));
}

uint64_t JobMemory::host_bytes_max() const {
  const uint64_t taken = arena_->segment_count() + private_floor_segments_;
  return segment_count_ > taken ? (segment_count_ - taken) * segment_bytes_ : 0;
}

bool JobMemory::reserve_host(uint64_t bytes) {
  if (bytes > host_bytes_max()) return false;
  const uint64_t count_before = host_->segment_count();
  while (host_->capacity_bytes() < bytes) {
    const uint64_t held = private_->segment_count();
    const uint64_t owed = held < private_floor_segments_ ? private_floor_segments_ - held : 0;
    if (unassigned_.size() > owed) {
      grow(*host_);
    } else if (!shrink_private()) {
      while (host_->segment_count() > count_before) take_last(*host_);
      return false;
    }
  }
  return true;
}

std::vector<uint64_t> JobMemory::segment_ids() const {
  std::vector<uint64_t> ids;
  for (const Segment& segment : unassigned_) ids.push_back(segment.id());
  for (const Arena* side : {arena_.get(), private_.get(), host_.get()}) {
    for (uint64_t i = 0; i < side->segment_count(); ++i) ids.push_back(side->segment(i).id());
  }
  return ids;
}

std::optional<Segment> JobMemory::take_segment() {
  for (Arena* side : {arena_.get(), private_.get(), host_.get()}) {
    if (side == nullptr || side->segment_count() == 0) continue;
    const uint64_t offset_bytes = side->capacity_bytes() - segment_bytes_;
    io_.remove_memory(std::span<std::byte>(side->at(offset_bytes), segment_bytes_));
    auto segment = side->remove_last();
    MEMD_CHECK(segment.has_value());  // whoever drops a job frees its slots first
    return segment;
  }
  if (unassigned_.empty()) return std::nullopt;
  Segment segment = std::move(unassigned_.back());
  unassigned_.pop_back();
  return segment;
}

std::vector<Segment> JobMemory::take_segments() {
  std::vector<Segment> segments;
  while (auto segment = take_segment()) segments.push_back(std::move(*segment));
  return segments;
}

}  // namespace memd
