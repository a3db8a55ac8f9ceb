// Extents that only memory knows, in a job's ledger.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/status.h"
#include "store/journal/ledger_contents.h"

namespace memd {

struct LedgerLayout;

/// Each has a place with the tag of the catalogue that it builds on, its base. A commit makes all
/// of them old at once, but for gradients: their places are emptied a few at a time, and until then
/// their base tells the next daemon that they are old. Owned by its Ledger, whose docstrings hold.
class LooseExtents {
 public:
  LooseExtents(LedgerLayout& layout, uint64_t& sequence_next)
      : layout_(layout), sequence_next_(sequence_next) {}
  LooseExtents(const LooseExtents&) = delete;
  LooseExtents& operator=(const LooseExtents&) = delete;

  /// An extent that does not exist: there is none any more. False: no place is left.
  [[nodiscard]] bool note(const LooseKey& key, const ExtentRecord& extent, uint64_t base);
  /// The catalogue `tag` is on disk and names what was loose on `base`.
  void rebase(uint64_t base, uint64_t tag);
  /// Empties places of old ones, `count_max` at most; true where none is left. To be called until
  /// then before the next catalogue is on disk: its tag may be that of an earlier one.
  bool empty_old(size_t count_max);

  /// Those that another daemon left.
  Result<std::map<LooseKey, ExtentRecord>> read(uint64_t base);

 private:
  using Places = std::map<LooseKey, uint32_t>;

  Places& places_of(const LooseKey& key) {
    return key.kind == LooseKey::Kind::gradient ? gradients_ : others_;
  }
  /// Nothing where there is none left.
  std::optional<uint32_t> take_place();
  void empty(uint32_t place);

  LedgerLayout& layout_;
  uint64_t& sequence_next_;  // of the ledger
  Places gradients_;
  Places others_;
  Places old_;
  std::vector<uint32_t> free_places_;
};

}  // namespace memd
