#include "host_waits.h"

namespace sim {
namespace {

std::map<std::string, int64_t> counts;  // the machine's lock guards it

}  // namespace

void wait_for_stream(Actor stream, Work work) {
  auto locked = machine().lock();
  ++counts[work.name];
  machine().queue(stream, std::move(work));
  machine().finish(stream);
}

std::vector<std::string> take_host_waits() {
  auto locked = machine().lock();
  std::vector<std::string> names;
  for (const auto& [name, count] : std::exchange(counts, {}))
    names.push_back(name + " " + std::to_string(count));
  return names;
}

}  // namespace sim
