#include "store/lost_shards.h"

namespace memd {
namespace {

constexpr size_t kNamed = 3;

}  // namespace

void LostShards::add(uint32_t shard_id, const std::string& name, const Status& why) {
  if (names_.empty()) first_ = why;
  names_.emplace(shard_id, name);
}

Status LostShards::check(const std::string& job_name) const {
  if (names_.empty()) return Status::ok();
  std::string some;
  size_t named_count = 0;
  for (const auto& [shard_id, name] : names_) {
    if (named_count == kNamed) break;
    some += concat(named_count++ == 0 ? "" : ", ", name);
  }
  if (names_.size() > named_count) some += concat(" and ", names_.size() - named_count, " more");
  return Status(StatusCode::integrity,
                concat("job ",
                       job_name,
                       " has lost shard ",
                       some,
                       " and stays at its last commit; save what can be read, and start the job "
                       "over with connect(fresh=True) from a checkpoint of yours: ",
                       first_.message()),
                first_.error_number());
}

std::vector<std::string> LostShards::names() const {
  std::vector<std::string> all;
  for (const auto& [shard_id, name] : names_) all.push_back(name);
  return all;
}

}  // namespace memd
