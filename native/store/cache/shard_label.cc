#include "store/cache/shard_label.h"

#include "base/bulk_bytes.h"
#include "base/check.h"

namespace memd {

ShardLabel::ShardLabel(std::string_view name, const std::vector<uint64_t>& shape) {
  MEMD_CHECK(fits(name, shape));
  const Head head{.name_bytes = static_cast<uint16_t>(name.size()),
                  .dimension_count = static_cast<uint16_t>(shape.size())};
  const size_t shape_bytes = shape.size() * sizeof(uint64_t);
  text_ = std::make_unique<char[]>(sizeof(Head) + shape_bytes + name.size());
  copy_bytes(text_.get(), &head, sizeof(Head));
  if (!shape.empty()) copy_bytes(text_.get() + sizeof(Head), shape.data(), shape_bytes);
  if (!name.empty()) {
    copy_bytes(text_.get() + sizeof(Head) + shape_bytes, name.data(), name.size());
  }
}

ShardLabel::Head ShardLabel::head() const {
  Head head;
  if (text_ != nullptr) head = field_at<Head>(text_.get());
  return head;
}

std::string_view ShardLabel::name() const {
  if (text_ == nullptr) return {};
  const Head it = head();
  return {text_.get() + sizeof(Head) + it.dimension_count * sizeof(uint64_t), it.name_bytes};
}

std::vector<uint64_t> ShardLabel::shape() const {
  std::vector<uint64_t> sizes(head().dimension_count);
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = field_at<uint64_t>(text_.get() + sizeof(Head) + i * sizeof(uint64_t));
  }
  return sizes;
}

}  // namespace memd
