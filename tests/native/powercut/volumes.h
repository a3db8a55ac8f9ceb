// A volume set in an image instead of files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "powercut/state.h"
#include "store/format/volume.h"

namespace memd::powercut {

/// The image of a set that was just formatted.
std::vector<std::byte> format_image(const Geometry& geometry);

/// What VolumeSet::open would find in files of these bytes; `flush` stands for fdatasync(2).
Result<VolumeSet> volumes_of(std::span<const std::byte> image,
                             const Geometry& geometry,
                             const std::function<void(uint16_t device)>& flush = {});

}  // namespace memd::powercut
