#include "store/state/tile_update.h"

#include <algorithm>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/tile_rest.h"
#include "store/state/tile_words.h"

namespace memd {
namespace {

/// Elements `begin` to `end` of what the spans cover.
void update_part(DType dtype,
                 Isa isa,
                 const std::vector<TileSpan>& spans,
                 const TileBytes& bytes,
                 uint64_t begin,
                 uint64_t end) {
  const uint64_t n = bytes.elements;
  auto* const exp_avg = reinterpret_cast<float*>(bytes.rest);
  float* const exp_avg_sq = exp_avg + n;
  auto* const maxima = reinterpret_cast<float*>(bytes.rest + maxima_offset_bytes(dtype, n));
  for (const TileSpan& whole : spans) {
    const TileSpan span{.begin = std::max(whole.begin, begin),
                        .end = std::min(whole.end, end),
                        .scalars = whole.scalars};
    if (span.begin >= span.end) continue;
    const uint64_t count = span.end - span.begin;
    MEMD_CHECK(!span.scalars.amsgrad || bytes.keeps_maxima);
    float* const maximum = span.scalars.amsgrad ? maxima + span.begin : nullptr;
    if (dtype == DType::float32) {
      adam_update(isa,
                  span.scalars,
                  count,
                  reinterpret_cast<float*>(bytes.value) + span.begin,
                  exp_avg + span.begin,
                  exp_avg_sq + span.begin,
                  reinterpret_cast<const float*>(bytes.gradient) + span.begin,
                  maximum);
    } else {
      adam_update(isa,
                  span.scalars,
                  count,
                  reinterpret_cast<uint16_t*>(bytes.value) + span.begin,
                  reinterpret_cast<int16_t*>(exp_avg_sq + n) + span.begin,
                  exp_avg + span.begin,
                  exp_avg_sq + span.begin,
                  reinterpret_cast<const uint16_t*>(bytes.gradient) + span.begin,
                  maximum);
    }
  }
}

void update_tile(DType dtype, Isa isa, const std::vector<TileSpan>& spans, const TileBytes& bytes) {
  if (bytes.begin_piece) {
    const uint64_t elements_max = piece_elements(bytes.keeps_maxima);
    for (uint64_t at = bytes.element_first; at < bytes.elements; at += elements_max) {
      const uint64_t end = std::min(at + elements_max, bytes.elements);
      bytes.begin_piece(at / elements_max);
      update_part(dtype, isa, spans, bytes, at, (at + end) / 2);
      MEMD_FAILPOINT("ledger.piece_half_updated");
      update_part(dtype, isa, spans, bytes, (at + end) / 2, end);
    }
  } else {
    update_part(dtype, isa, spans, bytes, bytes.element_first, bytes.elements);
  }
  if (bytes.arena_value != nullptr) copy_bytes(bytes.arena_value, bytes.value, bytes.value_bytes);
}

}  // namespace

void add_span(const Shard& shard,
              const Bucket& bucket,
              size_t tile,
              const AdamSettings& settings,
              std::vector<TileSpan>& spans) {
  const uint64_t tile_begin = tile * kTileElements;
  const uint64_t tile_end = tile_begin + bucket.tile_elements(tile);
  const uint64_t shard_begin = shard.element_offset;
  const uint64_t shard_end = shard_begin + shard.element_count();
  if (shard_end <= tile_begin || tile_end <= shard_begin) return;
  const uint64_t tail_begin = shard_begin + elements_before_tail(shard.element_count());
  AdamScalars scalars = adam_scalars(settings, shard.generation + 1);
  const auto add = [&](uint64_t from, uint64_t to) {
    const uint64_t begin = std::max(from, tile_begin);
    const uint64_t end = std::min(to, tile_end);
    if (begin >= end) return;
    spans.push_back({.begin = begin - tile_begin, .end = end - tile_begin, .scalars = scalars});
  };
  add(shard_begin, tail_begin);
  scalars.in_tail = true;
  add(tail_begin, shard_end);
}

std::function<void(const TileBytes&)> update_work(DType dtype, std::vector<TileSpan> spans) {
  return [dtype, isa = isa_best(), spans = std::move(spans)](const TileBytes& bytes) {
    update_tile(dtype, isa, spans, bytes);
  };
}

}  // namespace memd
