#include "powercut/read_all.h"

#include <sys/eventfd.h>

#include <utility>
#include <vector>

#include "powercut/image_queue.h"
#include "powercut/runner.h"
#include "powercut/volumes.h"

namespace memd::powercut {

Status read_all_is(std::span<const std::byte> image,
                   const Geometry& geometry,
                   const SetState& expected,
                   bool goes_back) {
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::vector<std::byte> copy;
  if (goes_back) copy.assign(image.begin(), image.end());
  ImageQueue io = goes_back ? ImageQueue(std::span(copy), geometry.device_bytes)
                            : ImageQueue(image, geometry.device_bytes);
  auto set = volumes_of(image, geometry);
  if (!set.is_ok()) return set.status();
  Runner runner(io, wake.get(), std::move(set).value());
  if (!runner.loaded().is_ok()) return runner.loaded();
  SetState found = runner.read_all();
  SetState wanted = expected;
  // Nobody leases what a snapshot keeps.
  std::erase_if(wanted, is_snapshot);
  if (found.size() != wanted.size()) return error(StatusCode::integrity, "other jobs");
  bool any_lost = false;
  for (const JobState& job : wanted) {
    for (const ShardState& shard : job.shards) any_lost |= !shard.lost.is_ok();
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (found[i].shards.size() != wanted[i].shards.size()) {
      return error(StatusCode::integrity, "job ", found[i].name, ": other shards");
    }
    for (size_t j = 0; j < wanted[i].shards.size(); ++j) {
      ShardState& to = wanted[i].shards[j];
      const ShardState& from = found[i].shards[j];
      to.remainder.clear();
      if (!to.lost.is_ok() && from.lost.is_ok()) {
        return error(StatusCode::integrity, "shard ", from.name, " is lost and was read");
      }
      if (any_lost && !from.lost.is_ok()) found[i].shards[j] = to = {};
    }
  }
  const std::string text = difference(wanted, found);
  return text.empty() ? Status::ok() : error(StatusCode::integrity, text);
}

}  // namespace memd::powercut
