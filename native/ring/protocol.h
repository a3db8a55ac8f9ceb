#pragma once

#include <cstdint>

#include "ring/layout.h"

namespace memd {

/// The oldest version of the session protocol that this build still serves and joins.
inline constexpr uint32_t kProtocolOldest = 4;

/// Sessions keep the version that they began with, also under a newer daemon.
constexpr bool is_protocol_spoken(uint32_t version) {
  return version >= kProtocolOldest && version <= kProtocolVersion;
}

static_assert(kProtocolOldest == kProtocolVersion,
              "a new session's header says kProtocolVersion: write there what was agreed on");

}  // namespace memd
