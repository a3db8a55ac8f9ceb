#include "powercut/volumes.h"

#include <algorithm>
#include <cstring>

#include "base/units.h"

namespace memd::powercut {

std::vector<std::byte> format_image(const Geometry& geometry) {
  std::vector<std::byte> image(geometry.image_bytes());
  for (uint16_t device = 0; device < geometry.device_count; ++device) {
    Superblock superblock;
    superblock.set_uuid.fill(7);
    superblock.volume_index = device;
    superblock.volume_count = geometry.device_count;
    superblock.volume_bytes = geometry.device_bytes;
    for (const uint64_t offset_bytes : superblock_pair_offsets(0, geometry.device_bytes)) {
      const auto block = encode_superblock(superblock, offset_bytes);
      const uint64_t begin = device * geometry.device_bytes + offset_bytes;
      std::copy(block.begin(), block.end(), image.begin() + static_cast<ptrdiff_t>(begin));
    }
  }
  return image;
}

Result<VolumeSet> volumes_of(std::span<const std::byte> image,
                             const Geometry& geometry,
                             const std::function<void(uint16_t device)>& flush) {
  VolumeSet set;
  for (uint16_t device = 0; device < geometry.device_count; ++device) {
    const auto bytes = image.subspan(device * geometry.device_bytes, geometry.device_bytes);
    Volume volume;
    volume.path = concat("volume ", device);
    volume.bytes = geometry.device_bytes;
    volume.data_begin_bytes = 2_MiB;
    volume.data_end_bytes = 2_MiB + geometry.data_bytes;
    const auto found = durable_superblock(
        geometry.device_bytes,
        volume.path,
        [&flush, device] {
          if (flush) flush(device);
          return Status::ok();
        },
        [bytes](std::span<std::byte> block, uint64_t offset_bytes) {
          std::memcpy(block.data(), bytes.data() + offset_bytes, block.size());
          return Status::ok();
        });
    if (!found.is_ok()) return found.status();
    const Superblock& superblock = found.value();
    if (superblock.volume_index != device || superblock.volume_count != geometry.device_count ||
        superblock.volume_bytes != geometry.device_bytes) {
      return error(StatusCode::integrity, volume.path, " belongs to another set");
    }
    if (device == 0) set.superblock = superblock;
    set.volumes.push_back(std::move(volume));
  }
  return set;
}

}  // namespace memd::powercut
