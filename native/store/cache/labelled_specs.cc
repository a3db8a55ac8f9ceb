#include "store/cache/labelled_specs.h"

#include <utility>

#include "base/check.h"

namespace memd {

LabelledSpecs::LabelledSpecs(std::vector<ShardSpec> specs) : specs_(std::move(specs)) {
  labels_.reserve(specs_.size());
  for (const ShardSpec& spec : specs_) {
    const bool fits = ShardLabel::fits(spec.name, spec.shape);
    labels_.push_back(fits ? ShardLabel(spec.name, spec.shape) : ShardLabel());
  }
}

LabelledSpecs::LabelledSpecs(std::initializer_list<ShardSpec> specs)
    : LabelledSpecs(std::vector<ShardSpec>(specs)) {}

ShardLabel LabelledSpecs::take_label(const ShardSpec& spec) {
  const auto index = static_cast<size_t>(&spec - specs_.data());
  MEMD_CHECK_LT(index, labels_.size());
  return std::move(labels_[index]);
}

}  // namespace memd
