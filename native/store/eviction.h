// Which entry goes first when memory is short.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>

namespace memd {

/// Advice only: the store skips what is pinned or in use. Called by the server thread.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  /// The entry became resident, or was leased.
  virtual void used(uint32_t entry_id) = 0;
  /// The entry is no longer resident.
  virtual void forget(uint32_t entry_id) = 0;
  /// Resident entries in the order in which they should go, until `visit` returns false. `visit`
  /// must not change the policy.
  virtual void in_order(const std::function<bool(uint32_t entry_id)>& visit) const = 0;
};

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  void used(uint32_t entry_id) override;
  void forget(uint32_t entry_id) override;
  void in_order(const std::function<bool(uint32_t entry_id)>& visit) const override;

 private:
  std::list<uint32_t> order_;  // front: longest unused
  std::unordered_map<uint32_t, std::list<uint32_t>::iterator> places_;
};

}  // namespace memd
