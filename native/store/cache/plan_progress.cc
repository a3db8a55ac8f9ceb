#include "store/cache/plan_progress.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "plan/simulation.h"

namespace memd {
namespace {

// A longer plan is not simulated: the server thread has other work.
constexpr size_t kSimulatedUsesMax = 16'384;

}  // namespace

// Nothing for what makes no plan: blobs and buffers are replaced as a whole, and staged ones change
// places with others at every commit. Scratch is written and read in each step, as gradients are.
std::optional<UseKind> PlanProgress::kind_of(const Entry& entry, LeaseMode mode) const {
  if (mode == LeaseMode::read) return UseKind::read;
  if (entry.kind() == EntryKind::bytes) {
    const bool is_planned = is_scratch(entry) && mode == LeaseMode::overwrite;
    return is_planned ? std::optional(UseKind::overwrite) : std::nullopt;
  }
  if (entry.kind() == EntryKind::parameter) return UseKind::change;
  return mode == LeaseMode::overwrite && parts_.shards.shard_count(entry) == 1 ? UseKind::overwrite
                                                                               : UseKind::add;
}

void PlanProgress::begin(Session& session) {
  session.plan = std::make_unique<SessionPlan>(plans_);
  parts_.policy.add(session.plan.get());
  want_uses(session);
}

void PlanProgress::end(Session& session) {
  if (session.plan != nullptr) parts_.policy.remove(session.plan.get());
  session.plan.reset();
}

Session* PlanProgress::planned(uint64_t session_id) const {
  const auto found =
      std::find_if(parts_.sessions.begin(), parts_.sessions.end(), [&](const auto& session) {
        return session->session_id == session_id && session->plan != nullptr;
      });
  return found == parts_.sessions.end() ? nullptr : found->get();
}

uint64_t PlanProgress::distance(uint64_t session_id, uint32_t entry_id) const {
  const Session* const session = planned(session_id);
  return session == nullptr ? kNeverUsed : session->plan->distance(entry_id);
}

bool PlanProgress::follow_uses(Session& session, TurnBudget& turn) {
  SessionPlan* const plan = session.plan.get();
  uint64_t left = kFollowedATurn;
  bool progress = false;
  while (left > 0) {
    const PlanCut* const cut = plan == nullptr ? nullptr : plan->next_cut();
    uint64_t wanted = std::min(left, kFollowedTogether);
    if (cut != nullptr) {
      const uint64_t head = session.ring.use_head();
      wanted = std::min(wanted, cut->use_tail > head ? cut->use_tail - head : 0);
    }
    uses_.clear();
    // If some are missing, the plan finds its place again, and counters are short of them.
    session.ring.take_uses(&uses_, wanted);
    if (!uses_.empty() && plan != nullptr) {
      follow(session, uses_);
      progress = true;
    }
    left -= uses_.size();
    // A shard that the client says it has written may not be there.
    const bool is_dry = uses_.size() < wanted;
    if (cut != nullptr && (is_dry || session.ring.use_head() >= cut->use_tail)) {
      end_period(*plan);
      progress = true;
      continue;
    }
    if (is_dry || turn.is_spent()) break;
  }
  return progress;
}

void PlanProgress::follow(Session& session, std::span<const Use> uses) {
  SessionPlan& plan = *session.plan;
  JobCounters& counters = parts_.counters;
  std::vector<uint32_t> used_ids;
  const uint32_t rank = parts_.group.ranks().rank_of(session.session_id).value_or(0);
  for (const Use& use : uses) {
    if (use.is_resident) ++counters.lease_hits;  // that of others was counted when granted
    // The client's word.
    Entry* const entry = use.shard_id < parts_.shards.size()
                             ? parts_.shards.find_entry(use.shard_id, use.part, rank)
                             : nullptr;
    if (entry == nullptr) continue;
    if (use.is_resident && entry->is_resident() && entry->pending() == nullptr) {
      parts_.policy.used(entry->id(), price_of(*entry));
    }
    parts_.window.note_used(*entry);
    const auto kind = kind_of(*entry, use.mode);
    if (!kind) continue;
    const PlanCursor::Seen seen = plan.use(entry->id(), *kind);
    ++(seen == PlanCursor::Seen::foreseen ? counters.uses_foreseen : counters.uses_unforeseen);
    used_ids.push_back(entry->id());
  }
  // Once: a client that jumps in its plan at each use has all that is resident put in order anew.
  note_followed(plan, used_ids);
  parts_.policy.want_look_ahead();
  want_uses(session);
}

void PlanProgress::note_followed(SessionPlan& plan, std::span<const uint32_t> used_ids) {
  // Bytes brought up for uses that did not come take no place in the window any more.
  for (const uint32_t passed : parts_.policy.followed(plan, used_ids))
    parts_.window.end(*parts_.shards.entry(passed));
}

std::vector<uint32_t> PlanProgress::in_order_of_use(uint64_t session_id,
                                                    const std::set<uint32_t>& buckets) const {
  std::vector<uint32_t> ordered(buckets.begin(), buckets.end());
  const Session* const session = planned(session_id);
  if (session == nullptr) return ordered;
  std::unordered_map<uint32_t, size_t> first_use;
  const auto& made = session->plan->cursor().period();
  for (size_t i = 0; i < made.size(); ++i) first_use.try_emplace(made[i].item, i);
  const auto rank = [&](uint32_t index) {
    const auto found = first_use.find(parts_.shards.bucket(index).value->id());
    return found == first_use.end() ? std::numeric_limits<size_t>::max() : found->second;
  };
  std::stable_sort(
      ordered.begin(), ordered.end(), [&](uint32_t a, uint32_t b) { return rank(a) < rank(b); });
  return ordered;
}

void PlanProgress::close_step(uint64_t session_id,
                              uint64_t step,
                              const std::vector<uint32_t>& buckets) {
  Session* const session = planned(session_id);
  if (session == nullptr) return;
  PlanCut cut{.step = step, .use_tail = session->ring.use_tail(), .updates = {}, .is_made = false};
  const auto update = [&](uint32_t index) {
    cut.updates.push_back(
        {.item = parts_.shards.bucket(index).value->id(), .kind = UseKind::change});
  };
  const auto let_gradient_go = [&](uint32_t index) {
    cut.updates.push_back(
        {.item = parts_.shards.bucket(index).gradient->id(), .kind = UseKind::last});
  };
  if (parts_.durability.is_in_memory()) {
    for (const uint32_t index : buckets) {
      update(index);
      let_gradient_go(index);
    }
  } else {
    // A step that fails is made again with them: they are held until its commit.
    for (const uint32_t index : buckets) update(index);
    for (const uint32_t index : buckets) let_gradient_go(index);
  }
  // Not known before the period is cut; nothing of the step waits for that.
  necessary_bytes_ = 0;
  session->plan->cut(std::move(cut));
  TurnBudget without_bound;
  follow_uses(*session, without_bound);
  const uint64_t fetched_bytes = parts_.counters.fetched_bytes;
  period_fetched_bytes_ = fetched_bytes - std::exchange(period_begin_fetched_bytes_, fetched_bytes);
}

void PlanProgress::end_period(SessionPlan& session_plan) {
  const auto is_of_step = [this](const PlanUse& use) {
    const Entry* const entry = parts_.shards.entry(use.item);
    return entry != nullptr && entry->kind() == EntryKind::gradient;
  };
  session_plan.end_period(is_of_step);
  note_followed(session_plan, {});
  // For a plan that was there before: a first period moves more.
  const auto ended = session_plan.cursor().last_period();
  const auto plan = ended ? plans_->find(*ended) : nullptr;
  share_memory(ended, plan.get());
  if (plan == nullptr || plan->size() > kSimulatedUsesMax || !plans_->is_repeated(*ended)) {
    necessary_bytes_ = 0;
    necessary_of_.reset();
    return;
  }
  if (necessary_of_ != ended) {
    necessary_of_ = ended;
    necessary_of_bytes_ = necessary_bytes(*plan);
  }
  necessary_bytes_ = necessary_of_bytes_;
}

void PlanProgress::share_memory(std::optional<PlanBook::PlanId> ended, const Plan* plan) {
  if (parts_.memory == nullptr) return;
  // With several sessions nobody knows how often a value is used.
  if (parts_.sessions.size() > 1) return parts_.memory->keep_values(true);
  if (plan == nullptr || plan->size() > kSimulatedUsesMax) {
    one_pass_of_.reset();
    is_one_pass_ = false;
  } else if (one_pass_of_ != ended) {
    one_pass_of_ = ended;
    is_one_pass_ = !uses_values_again(*plan);
  }
  parts_.memory->keep_values(!is_one_pass_);
}

// A value that goes while gradients come is read once more, by its update, and twice more where
// another micro-batch follows. A tied parameter alone does not decide for all.
bool PlanProgress::uses_values_again(const Plan& plan) const {
  std::unordered_set<uint32_t> with_gradient;  // buckets
  std::unordered_set<uint32_t> again;
  uint64_t with_gradient_bytes = 0;
  uint64_t again_bytes = 0;
  for (const PlanUse& use : plan.uses()) {
    const Entry* const entry = parts_.shards.entry(use.item);
    if (use.by_daemon || entry == nullptr || entry->kind() == EntryKind::bytes) continue;
    // Others of its bucket have other gradients.
    if (parts_.shards.shard_count(*entry) != 1) continue;
    const uint32_t bucket = entry->owner();
    if (entry->kind() == EntryKind::gradient) {
      if (with_gradient.insert(bucket).second) with_gradient_bytes += entry->bytes();
    } else if (with_gradient.contains(bucket) && again.insert(bucket).second) {
      again_bytes += entry->bytes();
    }
  }
  return 2 * again_bytes > with_gradient_bytes;
}

uint64_t PlanProgress::necessary_bytes(const Plan& plan) const {
  std::vector<PlanUse> uses;
  std::vector<uint64_t> item_bytes(parts_.shards.entries().size(), 0);
  for (const PlanUse& use : plan.uses()) {
    const Entry* const entry = parts_.shards.entry(use.item);
    if (entry == nullptr) continue;
    item_bytes[use.item] = entry->bytes();
    uses.push_back(use);
    if (!use.by_daemon || entry->kind() != EntryKind::parameter) continue;
    // Beside the parameter an update uses the rest of each tile.
    const Bucket& bucket = parts_.shards.bucket(entry->owner());
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
               {.cache_bytes = parts_.memory->shared_bytes() - parts_.memory->working_bytes(),
                .writes_changes = !parts_.durability.is_in_memory(),
                .warm_count = 1,
                .measured_count = 1});
  return static_cast<uint64_t>(moved.read_bytes + moved.written_bytes);
}

void PlanProgress::count_moved(uint64_t step_bytes) {
  JobCounters& counters = parts_.counters;
  const uint64_t all_bytes = counters.fetched_bytes + counters.spilled_bytes;
  const uint64_t moved_bytes = all_bytes - std::exchange(counted_moved_bytes_, all_bytes);
  if (necessary_bytes_ == 0) return;
  counters.plan_necessary_bytes += necessary_bytes_;
  counters.plan_moved_bytes += moved_bytes + step_bytes;
}

void PlanProgress::end_updates(uint64_t session_id, uint64_t step) {
  if (Session* const session = planned(session_id); session != nullptr) {
    SessionPlan& plan = *session->plan;
    if (plan.end_updates(step)) note_followed(plan, {});
  }
  // Gradients are gone, and parameters are on disk that were not.
  parts_.policy.look_again();
  parts_.policy.want_look_ahead();
}

}  // namespace memd
