#include "store/format/block_bytes.h"

#include <cstdlib>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/units.h"

namespace memd {

BlockBytes::BlockBytes(uint64_t bytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, align_up(bytes, kBlockBytes)))),
      bytes_(align_up(bytes, kBlockBytes)) {
  MEMD_CHECK(data_ != nullptr);
}

BlockBytes::BlockBytes(std::span<const std::byte> bytes) : BlockBytes(bytes.size()) {
  copy_bytes(data_.get(), bytes.data(), bytes.size());
  zero_bytes(data_.get() + bytes.size(), bytes_ - bytes.size());
}

void BlockBytes::Free::operator()(std::byte* data) const { std::free(data); }

}  // namespace memd
