// Which shard has a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace memd {

/// Ids alone, hashed by the names that their shards have: a map of its own strings would keep each
/// name once more, in 120 bytes. Open addressing, at most three places of four in use. Owned by the
/// Job, on its thread.
class ShardNames {
 public:
  /// `name_of` is asked for ids that are in here, and answers the same as long as they are.
  explicit ShardNames(std::function<std::string_view(uint32_t)> name_of)
      : name_of_(std::move(name_of)) {}

  std::optional<uint32_t> find(std::string_view name) const;
  bool contains(std::string_view name) const { return find(name).has_value(); }
  /// The shard is in here.
  uint32_t at(std::string_view name) const;
  size_t size() const { return count_; }
  /// No other shard has its name.
  void insert(uint32_t shard_id);
  /// The shard is in here.
  void erase(uint32_t shard_id);

 private:
  static constexpr uint32_t kEmpty = UINT32_MAX;

  /// The first place to look for a shard of that name.
  size_t home(std::string_view name) const;
  size_t after(size_t place) const { return place + 1 == places_.size() ? 0 : place + 1; }
  void put(uint32_t shard_id);
  void grow();

  std::function<std::string_view(uint32_t)> name_of_;
  std::vector<uint32_t> places_;
  size_t count_ = 0;
};

}  // namespace memd
