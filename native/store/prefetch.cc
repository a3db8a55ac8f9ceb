// Plans of ShardStore's jobs: what their sessions use, what comes next, and what is brought up
// before anybody asks.
#include <algorithm>
#include <limits>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/units.h"
#include "plan/simulation.h"
#include "store/shard_store.h"

namespace memd {
namespace {

// In flight for plans: as much as a fast device needs to be busy, and what a lease that no plan
// foresaw has to wait behind at most.
constexpr uint64_t kPrefetchingBytesMax = 64_MiB;
// What is fetched early displaces something that is needed later, so that it costs bytes: a window
// of a sixteenth of what a period fetches costs at most that much more.
constexpr uint64_t kAheadPart = 16;
constexpr uint64_t kAheadArenaPart = 64;
constexpr uint64_t kAheadBytesMax = 64_MiB;
// Uses that are looked at in one go.
constexpr uint32_t kLookedAtMax = 4096;
// A longer plan is not simulated: the server thread has other work.
constexpr size_t kSimulatedUsesMax = 16'384;
// A session that needs nothing is heard of this often.
constexpr uint64_t kUsesUnheardMax = 256;

/// Nothing for what makes no plan: blobs and buffers are replaced as a whole, and staged ones
/// change places with others at every commit.
std::optional<UseKind> kind_of(const Job& job, const Entry& entry, LeaseMode mode) {
  if (mode == LeaseMode::read) return UseKind::read;
  if (entry.kind == EntryKind::bytes) return std::nullopt;
  if (entry.kind == EntryKind::parameter) return UseKind::change;
  return mode == LeaseMode::overwrite && job.shards().shard_count(entry) == 1 ? UseKind::overwrite
                                                                     : UseKind::add;
}

}  // namespace

void ShardStore::begin_plan(Job& job, Session& session) {
  session.plan = std::make_unique<SessionPlan>(job.plans);
  job.policy().add(session.plan.get());
  want_uses(session);
}

void ShardStore::want_uses(Session& session) { session.ring.want_use_after(kUsesUnheardMax); }

void ShardStore::end_plan(Job& job, Session& session) {
  if (session.plan != nullptr) job.policy().remove(session.plan.get());
  session.plan.reset();
}

bool ShardStore::follow_uses(Session& session) {
  Job& job = *find(session.job_id);
  SessionPlan* const plan = session.plan.get();
  uint64_t left = kFollowedATurn;
  bool progress = false;
  while (left > 0) {
    const PlanCut* const cut =
        plan == nullptr || plan->cuts.empty() ? nullptr : &plan->cuts.front();
    uint64_t wanted = left;
    if (cut != nullptr) {
      const uint64_t head = session.ring.use_head();
      wanted = std::min(left, cut->use_tail > head ? cut->use_tail - head : 0);
    }
    uses_.clear();
    // Where some are missing the plan finds its place again, and counters are short of them.
    session.ring.take_uses(&uses_, wanted);
    if (!uses_.empty() && plan != nullptr) {
      follow(job, session, uses_);
      progress = true;
    }
    left -= uses_.size();
    // What the client says to have written may not be there.
    const bool is_dry = uses_.size() < wanted;
    if (cut != nullptr && (is_dry || session.ring.use_head() >= cut->use_tail)) {
      const PlanCut ended = std::move(plan->cuts.front());
      plan->cuts.pop_front();
      end_period(job, *plan, ended);
      progress = true;
      continue;
    }
    if (is_dry) break;
  }
  return progress;
}

void ShardStore::follow(Job& job, Session& session, std::span<const Use> uses) {
  SessionPlan& plan = *session.plan;
  std::vector<uint32_t> used_ids;
  for (const Use& use : uses) {
    if (use.is_resident) ++job.counters.lease_hits;  // that of others was counted when granted
    // The client's word.
    Entry* const entry =
        use.shard_id < job.shards().size() ? job.shards().find_entry(use.shard_id, use.part) : nullptr;
    if (entry == nullptr) continue;
    if (use.is_resident && entry->is_resident() && entry->pending == nullptr) {
      job.policy().used(entry->id, entry->price());
    }
    job.prefetch_window().end(*entry, true);
    entry->prefetch_failed = false;
    const auto kind = kind_of(job, *entry, use.mode);
    if (!kind) continue;
    const PlanCursor::Seen seen = plan.cursor.use(entry->id, *kind);
    ++(seen == PlanCursor::Seen::foreseen ? job.counters.uses_foreseen
                                          : job.counters.uses_unforeseen);
    used_ids.push_back(entry->id);
  }
  // Once: a client that jumps in its plan at each use has all that is resident put in order anew.
  note_followed(job, plan, used_ids);
  job.policy().want_look_ahead();
  want_uses(session);
}

void ShardStore::note_followed(Job& job, SessionPlan& plan, std::span<const uint32_t> used_ids) {
  // What was brought up for uses that did not come takes no place in the window any more.
  for (const uint32_t passed : plan.followed(used_ids, job.policy().residents()))
    job.prefetch_window().end(*job.shards().entry(passed));
}

std::vector<uint32_t> ShardStore::in_order_of_use(const Job& job,
                                                  uint64_t session_id,
                                                  const std::set<uint32_t>& buckets) const {
  std::vector<uint32_t> ordered(buckets.begin(), buckets.end());
  const auto session = sessions_.find(session_id);
  if (session == sessions_.end() || session->second->plan == nullptr) return ordered;
  std::unordered_map<uint32_t, size_t> first_use;
  const auto& made = session->second->plan->cursor.period();
  for (size_t i = 0; i < made.size(); ++i) first_use.try_emplace(made[i].item, i);
  const auto rank = [&](uint32_t index) {
    const auto found = first_use.find(job.shards().bucket(index).value->id);
    return found == first_use.end() ? std::numeric_limits<size_t>::max() : found->second;
  };
  std::stable_sort(
      ordered.begin(), ordered.end(), [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
  return ordered;
}

void ShardStore::plan_step(Job& job,
                           uint64_t session_id,
                           uint64_t step,
                           const std::vector<uint32_t>& buckets) {
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end() || found->second->plan == nullptr) return;
  Session& session = *found->second;
  PlanCut cut{.step = step, .use_tail = session.ring.use_tail(), .updates = {}, .is_made = false};
  for (const uint32_t index : buckets)
    cut.updates.push_back({.item = job.shards().bucket(index).value->id, .kind = UseKind::change});
  // A step that fails is made again with them: they are held until its commit.
  for (const uint32_t index : buckets)
    cut.updates.push_back({.item = job.shards().bucket(index).gradient->id, .kind = UseKind::last});
  // Not known before the period is cut; nothing of the step waits for that.
  job.necessary_bytes = 0;
  session.plan->cuts.push_back(std::move(cut));
  follow_uses(session);
  const uint64_t fetched_bytes = job.counters.fetched_bytes;
  job.period_fetched_bytes =
      fetched_bytes - std::exchange(job.period_begin_fetched_bytes, fetched_bytes);
}

void ShardStore::end_period(Job& job, SessionPlan& session_plan, const PlanCut& cut) {
  PlanCursor& cursor = session_plan.cursor;
  const auto is_of_step = [&job](const PlanUse& use) {
    const Entry* const entry = use.item < job.shards().entries().size() ? job.shards().entry(use.item) : nullptr;
    return entry != nullptr && entry->kind == EntryKind::gradient;
  };
  cursor.end_step(is_of_step, cut.updates);
  if (cut.is_made) cursor.end_updates();
  note_followed(job, session_plan, {});
  // Of a plan that was there before: what is done for the first time moves more.
  const auto ended = cursor.last_period();
  const auto plan = ended ? job.plans->find(*ended) : nullptr;
  if (plan == nullptr || plan->size() > kSimulatedUsesMax || !job.plans->is_repeated(*ended)) {
    job.necessary_bytes = 0;
    job.necessary_of.reset();
    return;
  }
  if (job.necessary_of != ended) {
    job.necessary_of = ended;
    job.necessary_of_bytes = necessary_bytes(job, *plan);
  }
  job.necessary_bytes = job.necessary_of_bytes;
}

uint64_t ShardStore::necessary_bytes(const Job& job, const Plan& plan) {
  std::vector<PlanUse> uses;
  std::vector<uint64_t> item_bytes(job.shards().entries().size(), 0);
  for (const PlanUse& use : plan.uses()) {
    const Entry* const entry = use.item < job.shards().entries().size() ? job.shards().entry(use.item) : nullptr;
    if (entry == nullptr) continue;
    item_bytes[use.item] = entry->bytes;
    uses.push_back(use);
    if (!use.by_daemon || entry->kind != EntryKind::parameter) continue;
    // Beside the parameter an update uses the rest of each tile.
    const Bucket& bucket = job.shards().bucket(entry->owner);
    for (size_t tile = 0; tile < bucket.tile_count(); ++tile) {
      uses.push_back({.item = static_cast<uint32_t>(item_bytes.size()),
                      .kind = UseKind::change,
                      .by_daemon = true});
      item_bytes.push_back(bucket.rest_bytes(tile));
    }
    if (uses.size() > kSimulatedUsesMax) return 0;
  }
  const BytesMoved moved =
      simulate(Plan(std::move(uses)),
               item_bytes,
               {.cache_bytes = job.memory->bytes() - job.memory->working_bytes(),
                .writes_changes = !job.durability.is_in_memory(),
                .warm_count = 1,
                .measured_count = 1});
  return static_cast<uint64_t>(moved.read_bytes + moved.written_bytes);
}

void ShardStore::count_moved(Job& job, const StepReport& report) {
  const uint64_t all_bytes = job.counters.fetched_bytes + job.counters.spilled_bytes;
  const uint64_t moved_bytes = all_bytes - std::exchange(job.counted_moved_bytes, all_bytes);
  if (job.necessary_bytes == 0) return;
  job.counters.plan_necessary_bytes += job.necessary_bytes;
  job.counters.plan_moved_bytes += moved_bytes + report.read_bytes + report.written_bytes;
}

void ShardStore::plan_updates_made(Job& job, uint64_t session_id, uint64_t step) {
  const auto found = sessions_.find(session_id);
  if (found != sessions_.end() && found->second->plan != nullptr) {
    SessionPlan& plan = *found->second->plan;
    const auto cut = std::find_if(
        plan.cuts.begin(), plan.cuts.end(), [step](const PlanCut& it) { return it.step == step; });
    if (cut != plan.cuts.end()) {
      cut->is_made = true;
    } else {
      plan.cursor.end_updates();
      note_followed(job, plan, {});
    }
  }
  // Gradients are gone, and parameters are on disk that were not.
  job.policy().look_again();
  job.policy().want_look_ahead();
}

std::unique_ptr<Slot> ShardStore::make_room_ahead(Job& job, const Entry& entry, uint64_t distance) {
  const auto free_slot = [&] { return job.slots().make(entry.bytes, job.shards().shard_count(entry)); };
  if (auto slot = free_slot()) return slot;
  job.slots().free_retired();
  if (auto slot = free_slot()) return slot;
  while (job.memory->grow_arena()) {
    if (auto slot = free_slot()) return slot;
  }
  const uint64_t window_bytes =
      std::min(std::max(job.period_fetched_bytes / kAheadPart,
                        job.memory->arena().capacity_bytes() / kAheadArenaPart),
               kAheadBytesMax);
  if (job.prefetch_window().bytes() > 0 &&
      job.prefetch_window().bytes() + entry.bytes > window_bytes)
    return nullptr;
  // It is not worth more than twice what is fetched.
  const uint64_t evicted_bytes_max = job.counters.evicted_bytes + 2 * entry.bytes;
  while (job.counters.evicted_bytes < evicted_bytes_max) {
    const uint64_t left_bytes = evicted_bytes_max - job.counters.evicted_bytes;
    if (!evict_for(job, entry.bytes, distance + 1, left_bytes)) break;
    if (auto slot = free_slot()) return slot;
  }
  return nullptr;
}

bool ShardStore::look_ahead(Job& job, Session& session) {
  SessionPlan& plan = *session.plan;
  if (!plan.cursor.has_plan() || job.memory == nullptr || !job.progress.stopped().is_ok())
    return false;
  // Somebody who waits for room goes first.
  const bool is_short =
      job.waiters.any([](const LeaseWaiter& waiter) { return waiter.reason == LeaseWait::room; });
  if (is_short) return false;
  // Blobs and buffers have to stand still for a step or sync to begin.
  const bool is_operating = job.operations.is_running();
  bool progress = false;
  bool has_room = true;
  uint32_t looked_at_count = 0;
  const uint64_t now = plan.cursor.now();
  plan.cursor.for_coming(plan.looked_until, [&](const PlanUse& use, uint64_t time) {
    plan.looked_until = time;
    // What the step changes is not fetched before it did.
    if (use.by_daemon || ++looked_at_count > kLookedAtMax) return false;
    // Of a plan: its entry may be gone, or another's by now.
    Entry* const entry = use.item < job.shards().entries().size() ? job.shards().entry(use.item) : nullptr;
    const bool is_left = entry == nullptr || use.kind == UseKind::overwrite ||
                         (entry->kind == EntryKind::bytes && is_operating);
    if (is_left || !may_prefetch(job, *entry)) {
      plan.looked_until = time + 1;
      return true;
    }
    const bool is_too_much =
        job.prefetch_window().reading_bytes() > 0 &&
        job.prefetch_window().reading_bytes() + entry->bytes > kPrefetchingBytesMax;
    if (is_too_much) return false;
    auto slot = make_room_ahead(job, *entry, time - now);
    if (slot == nullptr) {
      has_room = false;
      return false;
    }
    prefetch(job, *entry, std::move(slot));
    plan.looked_until = time + 1;
    progress = true;
    return true;
  });
  if (!has_room) session.ring.want_use_after(uses_until_room(job, plan));
  return progress;
}

// There is room again when something that was brought up is used, or is not needed soon any more.
uint64_t ShardStore::uses_until_room(const Job& job, const SessionPlan& plan) {
  uint64_t count = 0;
  plan.cursor.for_coming(plan.cursor.now(), [&](const PlanUse& use, uint64_t) {
    if (use.by_daemon || ++count == kUsesUnheardMax) return false;
    const Entry* const entry = use.item < job.shards().entries().size() ? job.shards().entry(use.item) : nullptr;
    return entry == nullptr || entry->prefetched == Prefetched::no;
  });
  return std::max<uint64_t>(count, 1);
}

bool ShardStore::may_prefetch(const Job& job, const Entry& entry) {
  if (entry.kind != EntryKind::bytes) {
    // What a step is to begin with has to stand still for it. What it has updated does not.
    const ShardIds& held = job.shards().bucket(entry.owner).shards;
    const bool is_in_closed_step = std::any_of(held.begin(), held.end(), [&job](uint32_t id) {
      return job.shards()[id].gradient_session == kSealedGradient;
    });
    if (is_in_closed_step && !entry.is_ahead) return false;
  }
  if (entry.residency() != Residency::absent || entry.task_count != 0) return false;
  if (entry.bytes == 0 || entry.prefetch_failed || !entry.has_replica()) return false;
  return entry.pending == nullptr && entry.owner == entry.kept_owner && !job.is_lost(entry);
}

void ShardStore::prefetch(Job& job, Entry& entry, std::unique_ptr<Slot> slot) {
  entry.slot = std::move(slot);
  job.prefetch_window().begin(entry);
  job.residencies().move(entry, Residency::absent, Residency::filling);
  fetch(job, entry, IoPriority::prefetch, [this, &job, &entry](const Status& status) {
    job.prefetch_window().end_reading(entry);
    entry.prefetch_failed = !status.is_ok();
    job.policy().want_look_ahead();
  });
}

bool ShardStore::look_ahead() {
  bool progress = false;
  for (const auto& [job_id, job] : jobs_) {
    if (!job->policy().take_look_ahead()) continue;
    for (const auto& session : job->sessions) {
      if (session->plan != nullptr) progress |= look_ahead(*job, *session);
    }
  }
  return progress;
}

}  // namespace memd
