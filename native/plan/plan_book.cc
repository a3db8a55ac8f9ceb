#include "plan/plan_book.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace memd {
namespace {

bool is_same(const PlanUse& planned, const PlanUse& made) {
  return !planned.by_daemon && planned.item == made.item && planned.kind == made.kind;
}

/// How many of the last uses the plan has before `end`, that one included. One that follows itself
/// goes on at its own end.
size_t match_length(const Plan& plan,
                    size_t end,
                    bool follows_itself,
                    std::span<const PlanUse> recent) {
  size_t length = 0;
  while (length < recent.size()) {
    end = plan.session_until(end);
    if (end == 0 && follows_itself && length > 0) {
      end = plan.size();
      continue;
    }
    if (end == 0 || !is_same(plan[end - 1], recent[recent.size() - 1 - length])) break;
    --end;
    ++length;
  }
  return length;
}

/// The first `count_max` of the ascending `places` at `from` or later; if there are fewer, the last
/// ones before it as well.
std::span<const uint32_t> nearest(std::span<const uint32_t> places,
                                  uint32_t from,
                                  size_t count_max) {
  const auto ahead =
      static_cast<size_t>(std::lower_bound(places.begin(), places.end(), from) - places.begin());
  const size_t count = std::min(count_max, places.size());
  return places.subspan(std::min(ahead, places.size() - count), count);
}

}  // namespace

// ---- PlanBook -----------------------------------------------------------------------------------

PlanBook::PlanId PlanBook::learn(std::vector<PlanUse> uses, std::optional<PlanId> before) {
  for (const auto& [plan_id, known] : plans_) {
    const std::span<const PlanUse> held = known.plan->uses();
    if (std::equal(held.begin(), held.end(), uses.begin(), uses.end())) {
      completed(plan_id, before);
      return plan_id;
    }
  }
  const PlanId plan_id = plan_id_next_++;
  use_count_ += uses.size();
  plans_[plan_id].plan = std::make_shared<const Plan>(std::move(uses));
  completed(plan_id, before);
  drop_what_is_too_much(plan_id);
  return plan_id;
}

void PlanBook::completed(PlanId plan_id, std::optional<PlanId> before) {
  const auto found = plans_.find(plan_id);
  if (found == plans_.end()) return;
  ++found->second.completed_count;
  found->second.completed_last = ++period_count_;
  if (!before) return;
  const auto earlier = plans_.find(*before);
  if (earlier != plans_.end()) ++earlier->second.followers[plan_id];
}

void PlanBook::drop_what_is_too_much(PlanId kept) {
  while (plans_.size() > 1 && (plans_.size() > kPlanCountMax || use_count_ > kUseCountMax)) {
    auto worst = plans_.end();
    const auto worth = [](const Known& known) {
      return std::pair(known.completed_count > 1, known.completed_last);
    };
    for (auto it = plans_.begin(); it != plans_.end(); ++it) {
      if (it->first == kept) continue;
      if (worst == plans_.end() || worth(it->second) < worth(worst->second)) worst = it;
    }
    const PlanId gone = worst->first;
    use_count_ -= worst->second.plan->size();
    plans_.erase(worst);
    for (auto& [plan_id, known] : plans_) known.followers.erase(gone);
  }
}

std::shared_ptr<const Plan> PlanBook::find(PlanId plan_id) const {
  const auto found = plans_.find(plan_id);
  return found == plans_.end() ? nullptr : found->second.plan;
}

bool PlanBook::is_repeated(PlanId plan_id) const {
  const auto found = plans_.find(plan_id);
  return found != plans_.end() && found->second.completed_count > 1;
}

PlanBook::PlanId PlanBook::successor(PlanId plan_id) const {
  const auto found = plans_.find(plan_id);
  if (found == plans_.end()) return plan_id;
  const auto& followers = found->second.followers;
  if (!followers.empty()) {
    return std::max_element(followers.begin(),
                            followers.end(),
                            [](const auto& a, const auto& b) { return a.second < b.second; })
        ->first;
  }
  return std::max_element(plans_.begin(),
                          plans_.end(),
                          [](const auto& a, const auto& b) {
                            return std::pair(a.second.completed_count, a.second.completed_last) <
                                   std::pair(b.second.completed_count, b.second.completed_last);
                          })
      ->first;
}

std::optional<PlanBook::PlanId> PlanBook::beginning_with(const PlanUse& use,
                                                         std::optional<PlanId> before) const {
  const auto begins = [&](const Plan& plan) {
    const uint32_t first = plan.session_from(0);
    return first < plan.size() && is_same(plan[first], use);
  };
  if (before) {
    const PlanId likely = successor(*before);
    const auto plan = find(likely);
    if (plan != nullptr && begins(*plan)) return likely;
  }
  std::optional<PlanId> best;
  uint64_t best_count = 0;
  for (const auto& [plan_id, known] : plans_) {
    if (known.completed_count <= best_count || !begins(*known.plan)) continue;
    best = plan_id;
    best_count = known.completed_count;
  }
  return best;
}

std::optional<PlanBook::Place> PlanBook::locate(std::span<const PlanUse> recent,
                                                size_t match_min,
                                                std::optional<Place> near) {
  if (recent.empty()) return std::nullopt;
  std::optional<Place> best;
  // The longest match; of equals the plan that the session is in, then the place that is ahead by
  // the least, then the plan that was followed most.
  using Worth = std::tuple<size_t, bool, int64_t, uint64_t>;
  Worth best_worth{};
  for (const auto& [plan_id, known] : plans_) {
    const bool follows_itself = successor(plan_id) == plan_id;
    const bool is_near = near && near->plan_id == plan_id;
    const uint32_t from = is_near && near->position > 0 ? near->position - 1 : 0;
    const auto places = nearest(known.plan->positions(recent.back().item),
                                from,
                                is_near ? kPlacesNearMax : kPlacesElsewhereMax);
    compared_count_ += places.size();
    for (const uint32_t position : places) {
      const size_t length = match_length(*known.plan, position + 1, follows_itself, recent);
      if (length < match_min) continue;
      int64_t nearness = 0;
      if (is_near) {
        const int64_t ahead = int64_t{position} + 1 - near->position;
        nearness = -(ahead >= 0 ? ahead : -ahead + static_cast<int64_t>(known.plan->size()));
      }
      const Worth worth{length, is_near, nearness, known.completed_count};
      if (best && worth <= best_worth) continue;
      best = Place{.plan_id = plan_id, .position = position + 1};
      best_worth = worth;
    }
  }
  return best;
}

// ---- PlanCursor ---------------------------------------------------------------------------------

PlanCursor::Seen PlanCursor::use(uint32_t item, UseKind kind) {
  const PlanUse made{.item = item, .kind = kind, .by_daemon = false};
  note(made);
  const uint64_t epoch_before = epoch_;
  Seen seen = Seen::foreseen;
  if (plan_ == nullptr) {
    std::optional<PlanBook::Place> place;
    if (segment_.size() == 1) {
      if (const auto plan_id = book_->beginning_with(made, before_)) {
        const auto plan = book_->find(*plan_id);
        place = {.plan_id = *plan_id, .position = plan->session_from(0) + 1};
        is_exact_ = true;
      }
    } else {
      place = book_->locate(recent_, 2, std::nullopt);
    }
    if (place) enter(place->plan_id, place->position);
    seen = place ? Seen::moved : Seen::unknown;
  } else if (!follow(made)) {
    is_exact_ = false;
    seen = Seen::moved;
    const auto place = book_->locate(recent_, 2, place_);
    if (place) {
      place->plan_id == place_.plan_id ? move_to(place->position)
                                       : enter(place->plan_id, place->position);
    } else if (!find_near(made)) {
      seen = Seen::stranger;
    }
  }
  if (!is_exact_) cut_where_it_repeats();
  return epoch_ != epoch_before && seen == Seen::foreseen ? Seen::moved : seen;
}

void PlanCursor::note(const PlanUse& use) {
  recent_.push_back(use);
  if (recent_.size() > kRecentMax) recent_.erase(recent_.begin());
  add_to_segment(use);
}

void PlanCursor::add_to_segment(const PlanUse& use) {
  if (segment_.size() >= kSegmentUsesMax) forget_segment();
  segment_.push_back(use);
  has_steps_ = has_steps_ || use.kind != UseKind::read;
  // As Knuth, Morris and Pratt do: amortised O(1).
  uint32_t border = borders_.empty() ? 0 : borders_.back();
  if (segment_.size() == 1) {
    borders_.push_back(0);
    return;
  }
  while (border > 0 && segment_[border] != use) border = borders_[border - 1];
  if (segment_[border] == use) ++border;
  borders_.push_back(border);
}

bool PlanCursor::follow(const PlanUse& use) {
  const uint32_t position = plan_->session_from(place_.position);
  if (position == plan_->size()) return begins_next_period(use);
  if (!is_same((*plan_)[position], use)) return false;
  place_.position = position + 1;
  return true;
}

bool PlanCursor::begins_next_period(const PlanUse& use) {
  const PlanBook::PlanId ended = place_.plan_id;
  const auto next_id = book_->beginning_with(use, ended);
  if (!next_id) return false;
  // Held: what is learned now may take its place in the book.
  const auto next = book_->find(*next_id);
  const PlanBook::PlanId foreseen_id = book_->successor(ended);
  const bool is_cut_by_step = has_steps_ || segment_.size() == 1;
  if (!is_cut_by_step) {
    segment_.pop_back();
    if (is_exact_) {
      book_->completed(ended, before_);
      before_ = ended;
    } else {
      before_ = book_->learn(segment_, before_);
    }
    forget_segment();
    segment_.push_back(use);
    borders_.push_back(0);
  }
  is_exact_ = segment_.size() == 1;
  base_ += plan_->size();
  plan_ = next;
  place_ = {.plan_id = *next_id, .position = next->session_from(0) + 1};
  if (*next_id != foreseen_id) ++epoch_;
  return true;
}

bool PlanCursor::find_near(const PlanUse& use) {
  uint32_t i = plan_->session_from(place_.position);
  for (uint32_t count = 0; i < plan_->size() && count < kNearUses; ++count) {
    if (is_same((*plan_)[i], use)) {
      move_to(i + 1);
      return true;
    }
    i = plan_->session_from(i + 1);
  }
  i = plan_->session_until(place_.position);
  for (uint32_t count = 0; i > 0 && count < kNearUses; ++count) {
    if (is_same((*plan_)[i - 1], use)) {
      move_to(i);
      return true;
    }
    i = plan_->session_until(i - 1);
  }
  return false;
}

void PlanCursor::enter(PlanBook::PlanId plan_id, uint32_t position) {
  // Time goes up by one, whatever the position.
  const uint64_t time = now() + 1;
  plan_ = book_->find(plan_id);
  place_ = {.plan_id = plan_id, .position = position};
  base_ = time - position;
  ++epoch_;
}

void PlanCursor::move_to(uint32_t position) {
  if (position < place_.position) {
    // Time goes on: what lies between is used again, sooner than was said.
    base_ += place_.position - position;
    ++epoch_;
  }
  place_.position = position;
}

void PlanCursor::forget_segment() {
  segment_.clear();
  borders_.clear();
  has_steps_ = false;
}

void PlanCursor::cut_where_it_repeats() {
  // A period with steps ends with them. A few uses that repeat as a step begins are no period.
  constexpr size_t kPlainUses = 16;
  if (has_steps_ || segment_.empty()) return;
  const size_t count = segment_.size();
  const size_t length = count - borders_.back();
  if (length < 2 || count < 2 * length || count % length != 0) return;
  if (count < kPlainUses && count < 4 * length) return;
  segment_.resize(length);
  const PlanBook::PlanId plan_id = book_->learn(segment_, before_);
  book_->completed(plan_id, plan_id);
  before_ = plan_id;
  forget_segment();
  if (!is_at_end_of(plan_id)) enter(plan_id, static_cast<uint32_t>(length));
}

bool PlanCursor::is_at_end_of(PlanBook::PlanId plan_id) const {
  return plan_ != nullptr && place_.plan_id == plan_id &&
         plan_->session_from(place_.position) == plan_->size();
}

void PlanCursor::end_step(const std::function<bool(const PlanUse&)>& is_of_step,
                          std::span<const PlanUse> updates) {
  size_t cut = segment_.size();
  while (cut > 0 && !is_of_step(segment_[cut - 1])) --cut;
  if (cut == 0) return;  // of another session, or of uses that were not seen
  const std::vector<PlanUse> tail(segment_.begin() + static_cast<ptrdiff_t>(cut), segment_.end());
  std::vector<PlanUse> period(segment_.begin(), segment_.begin() + static_cast<ptrdiff_t>(cut));
  for (PlanUse update : updates) {
    update.by_daemon = true;
    period.push_back(update);
  }
  const PlanBook::PlanId plan_id = book_->learn(std::move(period), before_);
  before_ = plan_id;
  forget_segment();
  if (tail.empty() ? is_at_end_of(plan_id) : has_begun_with(tail)) {
    for (const PlanUse& later : tail) add_to_segment(later);
    is_exact_ = true;
    return;
  }
  enter(plan_id, static_cast<uint32_t>(cut));
  // Uses after the step, again.
  recent_.resize(recent_.size() - std::min(tail.size(), recent_.size()));
  const size_t noted_count = tail.size() - std::min(tail.size(), kFollowedAgainMax);
  for (const PlanUse& later : std::span(tail).first(noted_count)) note(later);
  if (noted_count > 0) {
    // The next use tells its place; at the plan's end it has none.
    is_exact_ = false;
    plan_ = nullptr;
  }
  for (const PlanUse& later : std::span(tail).subspan(noted_count)) use(later.item, later.kind);
}

bool PlanCursor::has_begun_with(std::span<const PlanUse> uses) const {
  if (plan_ == nullptr) return false;
  uint32_t position = 0;
  for (const PlanUse& use : uses) {
    position = plan_->session_from(position);
    if (position == plan_->size() || !is_same((*plan_)[position], use)) return false;
    ++position;
  }
  return position == place_.position;
}

void PlanCursor::end_updates() {
  if (plan_ == nullptr) return;
  const uint32_t position = plan_->session_from(place_.position);
  if (position == plan_->size()) place_.position = position;
}

std::optional<uint64_t> PlanCursor::next_use(uint32_t item) const {
  if (plan_ == nullptr) return std::nullopt;
  std::shared_ptr<const Plan> plan = plan_;
  PlanBook::PlanId plan_id = place_.plan_id;
  uint64_t base = base_;
  size_t position = place_.position;
  for (int period = 0; period < kPeriodsAhead && plan != nullptr; ++period) {
    if (const auto found = plan->first_from(item, position)) return base + *found;
    base += plan->size();
    plan_id = book_->successor(plan_id);
    plan = book_->find(plan_id);
    position = 0;
  }
  return std::nullopt;
}

void PlanCursor::for_coming(
    uint64_t from, const std::function<bool(const PlanUse& use, uint64_t time)>& visit) const {
  std::shared_ptr<const Plan> plan = plan_;
  PlanBook::PlanId plan_id = place_.plan_id;
  uint64_t base = base_;
  from = std::max(from, now());
  for (int period = 0; period < kPeriodsAhead && plan != nullptr; ++period) {
    for (size_t position = from > base ? from - base : 0; position < plan->size(); ++position) {
      if (!visit((*plan)[position], base + position)) return;
    }
    base += plan->size();
    plan_id = book_->successor(plan_id);
    plan = book_->find(plan_id);
  }
}

}  // namespace memd
