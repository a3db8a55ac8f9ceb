// The place of an entry's bytes, as the cache moves them and the journal records it.
#pragma once

#include <cstdint>
#include <string_view>

namespace memd {

/// absent → filling → clean ⇄ dirty → draining → clean → absent. An update in place goes clean →
/// filling → clean; a failed fetch goes back to absent; what is dropped (gradients after their
/// step, what a dead session half wrote) goes dirty → absent.
enum class Residency : uint8_t { absent, filling, clean, dirty, draining };
std::string_view residency_name(Residency residency);

enum class EntryKind : uint8_t { parameter, gradient, bytes };

}  // namespace memd
