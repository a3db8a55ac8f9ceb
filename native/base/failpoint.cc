#include "base/failpoint.h"

#ifdef MEMD_FAULTS

#include <cstdlib>
#include <utility>

namespace memd::failpoint {
namespace {

std::string from_environment() {
  const char* const name = std::getenv("MEMD_PLANT");
  return name == nullptr ? "" : name;
}

// Set while nothing runs, read by any thread.
std::function<void(std::string_view)> observer;

std::string& planted() {
  static std::string name = from_environment();
  return name;
}

}  // namespace

void set_observer(std::function<void(std::string_view name)> new_observer) {
  observer = std::move(new_observer);
}

void reach(std::string_view name) {
  if (observer) observer(name);
}

void plant(std::string name) { planted() = std::move(name); }

bool is_planted(std::string_view name) { return !planted().empty() && planted() == name; }

}  // namespace memd::failpoint

#endif
