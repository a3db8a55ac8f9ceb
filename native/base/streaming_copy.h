// Copies that leave the caches to what is computed with.
#pragma once

#include <cstddef>
#include <span>

namespace memd {

/// As memcpy(). Large copies are written around the caches: their destination is read much later,
/// by another process, while the loop that made the source goes on with what is cached. A reader
/// sees all of it after a release by the calling thread.
void copy_past_caches(std::byte* into, std::span<const std::byte> from) noexcept;

}  // namespace memd
