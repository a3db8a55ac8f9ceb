#include "access_log.h"

#include <c10/util/Exception.h>

namespace sim {
namespace {

std::string text_of(Actor actor) {
  if (actor < 0) return c10::str("host thread ", -actor);
  return c10::str("stream ", id_of(actor), " of sim:", device_of(actor));
}

bool conflict(const Span& one, const Span& other) {
  return one.begin < other.end && other.begin < one.end && (one.is_written || other.is_written);
}

/// Any access that races with `past` races with `access` too, or knows of both.
bool replaces(const Span& access, const Span& past) {
  return access.begin <= past.begin && past.end <= access.end &&
         (access.is_written || !past.is_written);
}

[[noreturn]] void raise(const Access& access, const Access& past) {
  TORCH_CHECK(false,
              "race: ",
              access.name,
              " (",
              text_of(access.actor),
              access.span.is_written ? ") writes" : ") reads",
              " bytes that ",
              past.name,
              " (",
              text_of(past.actor),
              past.span.is_written ? ") writes" : ") reads",
              ", and nothing orders the two");
}

}  // namespace

void AccessLog::note(const char* region, Access access, const VectorClock& seen) {
  if (access.span.begin == access.span.end) return;
  auto& past = regions_[region];
  auto is_ordered = [&](const Access& each) {
    return each.actor == access.actor || seen.knows(each.actor, each.tick);
  };
  // The newest of them says most about the program.
  auto found = std::find_if(past.rbegin(), past.rend(), [&](const Access& each) {
    return conflict(each.span, access.span) && !is_ordered(each);
  });
  if (checks_races_ && found != past.rend()) raise(access, *found);
  auto is_replaced = [&](const Access& each) {
    return replaces(access.span, each.span) && is_ordered(each);
  };
  past.erase(std::remove_if(past.begin(), past.end(), is_replaced), past.end());
  past.push_back(std::move(access));
}

bool AccessLog::all_over(const char* region,
                         const std::function<bool(const Access&)>& is_over) const {
  auto found = regions_.find(region);
  return found == regions_.end() ||
         std::all_of(found->second.begin(), found->second.end(), is_over);
}

void AccessLog::forget(const char* begin,
                       const char* end,
                       const std::function<bool(const Access&)>& is_over) {
  auto region = regions_.upper_bound(begin);
  if (region != regions_.begin()) --region;
  auto is_inside = [&](const Access& each) {
    return begin <= each.span.begin && each.span.end <= end && is_over(each);
  };
  for (; region != regions_.end() && region->first < end; ++region)
    std::erase_if(region->second, is_inside);
}

}  // namespace sim
