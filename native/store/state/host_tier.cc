#include "store/state/host_tier.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "base/failpoint.h"

namespace memd {

struct HostTier::Pass {
  std::vector<uint32_t> buckets;
  /// Whether there is something to do, and where the tile lies.
  std::function<std::optional<uint64_t>(const Bucket& bucket, size_t tile)> look;
  std::function<TileTask(Bucket& bucket, size_t tile)> make_task;
  std::shared_ptr<StepReport> report;
  std::shared_ptr<Join> all;
  size_t at = 0;  // into buckets, and then into found
  size_t tile = 0;
  std::vector<std::pair<uint64_t, uint64_t>> found{};  // where the tile lies, its key
};

void HostTier::look(const std::shared_ptr<Pass>& pass) {
  for (size_t count = 0; count < kLookedAtMax; ++count) {
    if (pass->at == pass->buckets.size()) {
      // Freed places come together in one piece.
      std::sort(pass->found.begin(), pass->found.end());
      pass->at = 0;
      return submit(pass);
    }
    const Bucket& bucket = parts_.shards.bucket(pass->buckets[pass->at]);
    if (!bucket.is_host() || pass->tile == bucket.tile_count()) {
      ++pass->at;
      pass->tile = 0;
      continue;
    }
    if (const auto offset_bytes = pass->look(bucket, pass->tile))
      pass->found.emplace_back(*offset_bytes, tile_key(bucket.value->owner(), pass->tile));
    ++pass->tile;
  }
  parts_.conditions.go_on([this, pass] { look(pass); });
}

void HostTier::submit(const std::shared_ptr<Pass>& pass) {
  for (size_t count = 0; count < Writeback::kSubmittedMax; ++count) {
    if (pass->at == pass->found.size()) return pass->all->finish(Status::ok());
    const uint64_t key = pass->found[pass->at++].second;
    Bucket& bucket = parts_.shards.bucket(bucket_of(key));
    TileTask task = pass->make_task(bucket, tile_of(key));
    task.entry = bucket.value;
    task.bucket = &bucket;
    task.index = tile_of(key);
    task.work = [](const TileBytes&) {};
    task.report = pass->report;
    task.done = pass->all->branch();
    tasks_.submit(std::move(task));
  }
  parts_.conditions.go_on([this, pass] { submit(pass); });
}

uint64_t HostTier::bytes_held(const Bucket& bucket, size_t tile) const {
  const HostTiles::Place* const held =
      parts_.host_tiles.find(tile_key(bucket.value->owner(), tile));
  return held == nullptr ? 0 : held->bytes;
}

void HostTier::copy_to_disk(const std::shared_ptr<StepReport>& report, Done done) {
  if (!parts_.shards.declared().has_host_tier()) return done(Status::ok());
  std::vector<uint32_t> buckets(parts_.shards.buckets().size());
  std::iota(buckets.begin(), buckets.end(), 0U);
  MEMD_FAILPOINT("host.before_copies");
  const Done copied = [this, done = std::move(done)](const Status& status) {
    MEMD_FAILPOINT("host.copied");
    if (status.is_ok()) parts_.durable.note_change();
    done(status);
  };
  look(std::make_shared<Pass>(
      Pass{.buckets = std::move(buckets),
           .look = [this](const Bucket& bucket, size_t tile) -> std::optional<uint64_t> {
             // A tile that is not in memory is on disk, or was never written.
             const auto* const held = parts_.host_tiles.find(tile_key(bucket.value->owner(), tile));
             if (held == nullptr || bucket.value->replicas()[tile].exists()) return std::nullopt;
             return held->offset_bytes;
           },
           .make_task =
               [this](Bucket& bucket, size_t tile) {
                 TileTask task;
                 task.writes_value = true;
                 task.writes_rest = bytes_held(bucket, tile) > bucket.value->replica_bytes(tile);
                 task.copies_to_disk = true;
                 return task;
               },
           .report = report,
           .all = Join::start(copied)}));
}

void HostTier::give_places(const std::set<uint32_t>& buckets,
                           const std::shared_ptr<StepReport>& report,
                           Done done) {
  if (!parts_.shards.declared().has_host_tier()) return done(Status::ok());
  look(std::make_shared<Pass>(Pass{
      .buckets = {buckets.begin(), buckets.end()},
      .look = [this](const Bucket& bucket, size_t tile) -> std::optional<uint64_t> {
        const auto* const held = parts_.host_tiles.find(tile_key(bucket.value->owner(), tile));
        if (held == nullptr) return ~uint64_t{0};
        const uint64_t wanted_bytes = bucket.value->replica_bytes(tile) + bucket.rest_bytes(tile);
        if (held->bytes >= wanted_bytes) return std::nullopt;
        return held->offset_bytes;
      },
      .make_task = [](Bucket&, size_t) { return TileTask{}; },
      .report = report,
      .all = Join::start(std::move(done))}));
}

}  // namespace memd
