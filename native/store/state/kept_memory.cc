#include "store/state/kept_memory.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "store/state/tile_words.h"

namespace memd {
namespace {

// One is leased, one is brought up, and as much again since free memory lies in pieces: with three
// and a half, six leases of ten steps wait (step_bytes_test, cache 1/2).
constexpr uint64_t kLargestEntriesInUse = 4;

}  // namespace

void KeptMemory::expect_shards() {
  if (memory_ == nullptr) return;
  const ShardSums& sums = parts_.shards.sums();
  JobMemory::Expected expected{.arena_bytes = sums.entry_bytes(),
                               .arena_bytes_min = sums.entry_bytes(),
                               .tile_bytes = divide_up(sums.element_count(), kTileElements) *
                                             parts_.shards.declared().tile_bytes_max()};
  if (parts_.durability.is_in_memory() && !parts_.shards.declared().has_host_tier()) {
    // A value is fetched from its tile where that stays. A gradient, which is as large, would have
    // to be spilled.
    const uint64_t gradient_and_blob_bytes = sums.entry_bytes() - sums.gradient_bytes();
    expected.arena_bytes_min =
        std::min(sums.entry_bytes(),
                 gradient_and_blob_bytes + kLargestEntriesInUse * sums.largest_entry_bytes());
  }
  memory_->expect(expected);
}

Status KeptMemory::open_ledger(const Keepsakes& keepsakes, uint64_t segment_bytes, uint64_t tag) {
  if (!keepsakes.has_keeper()) return Status::ok();
  if (Status created = parts_.ledger.create(parts_.job_id, segment_bytes); !created.is_ok())
    return created;
  parts_.ledger.committed_on_disk(tag);
  if (Status opened = open_tile_words(); !opened.is_ok()) return opened;
  parts_.journal.note_shards();
  parts_.cache.slots().note_all();
  return Status::ok();
}

Status KeptMemory::give(std::vector<Segment>& segments, uint64_t segment_bytes, IoQueue& io) {
  auto memory = JobMemory::create(segments, segment_bytes, io, &parts_.ledger);
  if (!memory.is_ok()) {
    parts_.ledger.close();
    parts_.tiles.set_words(nullptr);
    return memory.status();
  }
  memory_ = std::move(memory).value();
  return Status::ok();
}

void KeptMemory::keep(Keepsakes& keepsakes) {
  if (!parts_.ledger.is_open()) return;
  MEMD_FAILPOINT("ledger.before_kept");
  keep_tile_words(keepsakes);
  keepsakes.keep_job(parts_.job_id, parts_.cache.table().memory().fd(), parts_.ledger.fd());
}

Status KeptMemory::open_tile_words() {
  expect_shards();
  return parts_.durability.is_in_memory() ? open_host_words() : Status::ok();
}

Status KeptMemory::open_host_words() {
  if (!parts_.ledger.is_open() || parts_.tiles.words() != nullptr) return Status::ok();
  auto words = TileWords::create(parts_.job_id);
  if (!words.is_ok()) return words.status();
  parts_.tiles.set_words(std::move(words).value());
  return Status::ok();
}

void KeptMemory::keep_tile_words(Keepsakes& keepsakes) {
  if (!parts_.ledger.is_open() || parts_.tiles.words() == nullptr) return;
  keepsakes.keep_tiles(parts_.job_id, parts_.tiles.words()->fd());
  parts_.ledger.note_tile_words();
}

Status KeptMemory::take_over(KeptMemory& before,
                             Keepsakes& keepsakes,
                             uint64_t segment_bytes,
                             uint64_t tag) {
  memory_ = std::move(before.memory_);
  parts_.cache.table().take_memory(before.parts_.cache.table());
  if (memory_ == nullptr) return Status::ok();
  memory_->end_claims();
  memory_->release_host();
  Status opened;
  if (keepsakes.has_keeper()) {
    // Until the new ledger is kept the segments are nobody's, and destroyed by the next daemon.
    keepsakes.forget_ledger(parts_.job_id);
    keepsakes.forget_tiles(parts_.job_id);
    opened = open_ledger(keepsakes, segment_bytes, tag);
    if (opened.is_ok()) {
      memory_->claim_in(parts_.ledger);
      keep(keepsakes);
    }
  }
  expect_shards();
  return opened;
}

void KeptMemory::free_all() {
  if (memory_ == nullptr) return;
  parts_.tiles.drop_all(memory_->private_side());
  host_tiles_.drop_all(memory_->host_side());
  parts_.cache.table().withdraw_all();
  parts_.cache.slots().free_all();
}

void KeptMemory::end() {
  if (memory_ != nullptr) memory_->end_claims();
  parts_.ledger.close();
}

KeptMemory::Left KeptMemory::take() {
  parts_.ledger.give_up();
  if (memory_ == nullptr) return {};
  free_all();
  memory_->end_claims();
  return {.ledger = std::move(parts_.ledger), .memory = std::move(memory_)};
}

}  // namespace memd
