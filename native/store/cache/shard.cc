#include "store/cache/shard.h"

namespace memd {

std::optional<uint64_t> tensor_bytes(const std::vector<uint64_t>& shape, DType dtype) {
  uint64_t bytes = dtype_bytes(dtype);
  for (const uint64_t size : shape) {
    if (size != 0 && bytes > (uint64_t{1} << 48) / size) return std::nullopt;
    bytes *= size;
  }
  return bytes;
}

std::string shape_text(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += concat(i == 0 ? "" : ", ", shape[i]);
  return text + "]";
}

ShardRecord Shard::label_record() const {
  return {.name = std::string(name()),
          .kind = kind,
          .dtype = dtype,
          .tier = tier,
          .shape = label.shape(),
          .generation = 0,
          .bucket = bucket,
          .element_offset = element_offset,
          .written = false,
          .extents = {}};
}

bool Shard::has_extents() const {
  return kind != ShardKind::parameter && written && value->has_replica() && !is_scratch(*value);
}

ShardRecord Shard::record_without_extents() const {
  ShardRecord out = label_record();
  out.generation = generation;
  out.keeps_maximum = keeps_maximum;
  out.written = written && !is_scratch(*value) && (value->bytes() == 0 || value->has_replica());
  return out;
}

ShardRecord Shard::record() const {
  ShardRecord out = record_without_extents();
  if (!has_extents()) return out;
  for (const Replica& replica : value->replicas()) out.extents.push_back(replica.extent());
  return out;
}

}  // namespace memd
