#include "store/space/snapshots.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "store/space/declared_space.h"

namespace memd {

SnapshotSpace space_of(const Snapshot& snapshot) {
  SnapshotSpace space{.count = 1};
  for (const ExtentRecord& extent : *snapshot.extents) space.bytes += extent.length_bytes;
  if (is_load_name(snapshot.entry.name)) space.load_bytes = space.bytes;
  if (snapshot.record == nullptr) return space;
  space.steps.push_back({.name = snapshot.entry.name, .step = snapshot.entry.step});
  DeclaredSpace declared;
  for (const ShardRecord& shard : snapshot.record->shards) {
    declared.add_label({.name_bytes = shard.name.size(),
                        .dimension_count = shard.shape.size(),
                        .is_parameter = shard.kind == ShardKind::parameter,
                        .extent_count = shard.extents.size()});
  }
  space.memory_bytes = declared.memory_bytes();
  return space;
}

const Snapshot& Snapshots::add(Snapshot snapshot) {
  snapshot.id = id_next_++;
  snapshot.turn = turn_next_++;
  const uint64_t id = snapshot.id;
  return all_.emplace(id, std::move(snapshot)).first->second;
}

const Snapshot* Snapshots::find(uint64_t id) const {
  const auto found = all_.find(id);
  return found == all_.end() ? nullptr : &found->second;
}

const Snapshot* Snapshots::find(uint64_t job_id, const std::string& name) const {
  for (const auto& [id, snapshot] : all_) {
    if (snapshot.entry.job.job_id == job_id && snapshot.entry.name == name) return &snapshot;
  }
  return nullptr;
}

std::vector<const Snapshot*> Snapshots::of_job(uint64_t job_id) const {
  std::vector<const Snapshot*> found;
  for (const auto& [id, snapshot] : all_) {
    if (snapshot.entry.job.job_id == job_id) found.push_back(&snapshot);
  }
  return found;
}

const Snapshot* Snapshots::of_load(uint64_t job_id) const {
  for (const auto& [id, snapshot] : all_) {
    if (snapshot.entry.job.job_id == job_id && is_load_name(snapshot.entry.name)) return &snapshot;
  }
  return nullptr;
}

const Snapshot* Snapshots::last_before(uint64_t job_id, uint64_t step) const {
  const Snapshot* last = nullptr;
  for (const Snapshot* const each : of_job(job_id)) {
    const bool is_whole = !each->is_catalogue_lost && each->lost_shards.empty();
    if (!is_whole || each->entry.step >= step) continue;
    if (last == nullptr || each->turn > last->turn) last = each;
  }
  return last;
}

std::string Snapshots::names_text(uint64_t job_id) const {
  std::string text;
  for (const Snapshot* const each : of_job(job_id)) {
    if (!text.empty()) text += ", ";
    text += each->entry.name;
  }
  return text;
}

std::vector<const Snapshot*> Snapshots::list_last(uint64_t id) {
  const Snapshot& last = all_.at(id);
  std::vector<const Snapshot*> moved = of_job(last.entry.job.job_id);
  std::erase_if(moved, [&](const Snapshot* each) { return each->turn > last.turn; });
  std::ranges::sort(moved, {}, &Snapshot::turn);
  for (const Snapshot* const each : moved) all_.at(each->id).turn = turn_next_++;
  return moved;
}

Snapshot Snapshots::take(uint64_t id) {
  auto node = all_.extract(id);
  MEMD_CHECK(!node.empty());
  return std::move(node.mapped());
}

std::vector<Snapshot> Snapshots::take_all(uint64_t job_id) {
  std::vector<Snapshot> taken;
  for (const Snapshot* const each : of_job(job_id)) taken.push_back(take(each->id));
  return taken;
}

void Snapshots::lose(uint64_t id, const std::vector<std::string>& shards) {
  const auto found = all_.find(id);
  if (found == all_.end()) return;
  Snapshot& snapshot = found->second;
  snapshot.lost_shards.insert(shards.begin(), shards.end());
  if (shards.empty()) snapshot.is_catalogue_lost = true;
  const std::vector<KeptStep> steps = std::exchange(snapshot.space.steps, {});
  for (const KeptStep& step : steps) step_lost_(snapshot.entry.job.job_id, step);
}

}  // namespace memd
