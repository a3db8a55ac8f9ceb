#include "store/step/activity.h"

#include <algorithm>
#include <cstdio>

#include "base/status.h"

namespace memd {

std::string describe(const std::vector<Activity>& activities, size_t count) {
  std::string text;
  const size_t shown_count = std::min(count, activities.size());
  for (size_t i = 0; i < shown_count; ++i) {
    const Activity& activity = activities[i];
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.1f", static_cast<double>(activity.age_ns) * 1e-9);
    text += concat(i == 0 ? "" : ", ", activity.kind);
    if (!activity.job.empty()) text += concat(" of job ", activity.job);
    if (!activity.what.empty()) text += concat(" (", activity.what, ")");
    if (!activity.waits_on.empty()) text += concat(" waits on ", activity.waits_on);
    text += concat(" for ", seconds, " s");
  }
  if (activities.size() > shown_count) {
    text += concat(" and ", activities.size() - shown_count, " more");
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace memd
