#include "store/format/encoding.h"

#include <bit>

#include "store/format/volume.h"

namespace memd {

Status check_format(const FormatHeader& header, FormatUse use) {
  if (header.major > kFormatMajor) {
    return error(StatusCode::not_yet,
                 "written by a newer memd; install that one: format ",
                 header.major,
                 ".",
                 header.minor,
                 ", this one reads up to ",
                 kFormatMajor,
                 ".x");
  }
  if (header.major == 0) return error(StatusCode::integrity, "format version 0 never existed");
  if (const uint64_t unknown = header.incompatible & ~kIncompatibleFeatures; unknown != 0) {
    return error(StatusCode::not_yet,
                 "written by a newer memd; install that one: unknown incompatible feature, bit ",
                 std::countr_zero(unknown));
  }
  const uint64_t unknown = header.read_only_compatible & ~kReadOnlyCompatibleFeatures;
  if (use == FormatUse::write && unknown != 0) {
    return error(
        StatusCode::not_yet,
        "written by a newer memd; install that one (`memd check` and `memd volume list` of "
        "this one can read it): unknown read-only compatible feature, bit ",
        std::countr_zero(unknown));
  }
  return Status::ok();
}

}  // namespace memd
