#include "store/state/extent_log.h"

namespace memd {

void ExtentLog::note_value(const Entry& entry, size_t index) {
  using Kind = LooseKey::Kind;
  if (is_rank_sum(entry)) return;  // the next daemon has no use for it
  if (space_.is_updating() && space_use_of(entry) == SpaceUse::state) return;
  const Kind kind = entry.kind() == EntryKind::gradient    ? Kind::gradient
                    : entry.kind() == EntryKind::parameter ? Kind::value
                                                           : Kind::bytes;
  ledger_.note_loose(
      {.kind = kind, .owner = entry.kept_owner(), .index = static_cast<uint32_t>(index)},
      entry.replicas()[index].extent());
}

void ExtentLog::note_rest(const Bucket& bucket, size_t tile) {
  if (space_.is_updating()) return;
  ledger_.note_loose({.kind = LooseKey::Kind::rest,
                      .owner = bucket.value->owner(),
                      .index = static_cast<uint32_t>(tile)},
                     bucket.rest[tile].extent());
}

std::optional<uint32_t> ExtentLog::tile_record(uint64_t key) {
  if (tiles_.words() == nullptr) return std::nullopt;
  const auto record = tiles_.words()->record_of(key);
  // The job would be wrong without it: the next daemon starts it from disk.
  if (!record) ledger_.give_up();
  return record;
}

void ExtentLog::note_tile(const Bucket& bucket,
                          size_t tile,
                          uint64_t step,
                          std::optional<uint64_t> piece_next) {
  if (space_.is_updating()) return;
  const auto record = tile_record(tile_key(bucket.value->owner(), tile));
  if (!record) return;
  tiles_.words()->publish(*record,
                          {.step = step,
                           .private_offset_bytes = std::nullopt,
                           .value = bucket.value->replicas()[tile].extent(),
                           .rest = bucket.rest[tile].extent()},
                          ledger_.base(),
                          piece_next);
}

}  // namespace memd
