#include "store/space/lost_shards.h"

namespace memd {
namespace {

constexpr size_t kNamed = 3;

}  // namespace

void LostShards::add(uint32_t shard_id, const std::string& name, const Status& why) {
  all_.try_emplace(shard_id, Lost{.name = name, .why = why});
}

void LostShards::remove(uint32_t shard_id) { all_.erase(shard_id); }

Status LostShards::check(const std::string& job_name) const {
  if (all_.empty()) return Status::ok();
  std::string some;
  size_t named_count = 0;
  for (const auto& [shard_id, lost] : all_) {
    if (named_count == kNamed) break;
    some += concat(named_count++ == 0 ? "" : ", ", lost.name);
  }
  if (all_.size() > named_count) some += concat(" and ", all_.size() - named_count, " more");
  const Status& why = all_.begin()->second.why;
  return Status(StatusCode::integrity,
                concat("job ",
                       job_name,
                       " has lost shard ",
                       some,
                       " and stays at its last commit; save what can be read, and start the job "
                       "over with connect(fresh=True) from a checkpoint of yours: ",
                       why.message()),
                why.error_number());
}

std::vector<std::string> LostShards::names() const {
  std::vector<std::string> all;
  for (const auto& [shard_id, lost] : all_) all.push_back(lost.name);
  return all;
}

}  // namespace memd
