// XXH3-64 over an extent's bytes and its own address, so that misdirected and lost writes are seen
// as well as flipped bits.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

namespace memd {

/// A place on disk: `device` is the volume's index in its set, `offset_bytes` counts from
/// the file's start.
struct ExtentAddress {
  uint16_t device = 0;
  uint64_t offset_bytes = 0;

  auto operator<=>(const ExtentAddress&) const = default;
};

/// XXH3-64 of `bytes`, seeded with the address. The same on every instruction set; the widest one
/// present is used.
uint64_t extent_checksum(std::span<const std::byte> bytes, ExtentAddress address);

/// False in builds that measure what hashing costs (MEMD_WITHOUT_CHECKSUMS): there an extent's
/// checksum is that of its address alone. Neither build takes the other's extents for whole.
extern const bool kExtentsAreHashed;

/// XXH3-64 of `bytes` alone, for superblocks and records that carry their address inside.
uint64_t record_checksum(std::span<const std::byte> bytes);

}  // namespace memd
