#include "store/encoding.h"

#include <bit>

#include "store/volume.h"

namespace memd {

Status check_format(uint16_t major,
                    uint16_t minor,
                    uint64_t incompatible,
                    uint64_t read_only_compatible) {
  if (major > kFormatMajor) {
    return error(StatusCode::not_yet,
                 "written by a newer memd; install that one: format ",
                 major,
                 ".",
                 minor,
                 ", this one reads up to ",
                 kFormatMajor,
                 ".x");
  }
  if (major == 0) return error(StatusCode::integrity, "format version 0 never existed");
  // A daemon always writes, so what may only be read is as closed to it as what may not be read.
  if (const uint64_t unknown = incompatible | read_only_compatible; unknown != 0) {
    return error(StatusCode::not_yet,
                 "written by a newer memd; install that one: unknown ",
                 incompatible != 0 ? "incompatible" : "read-only compatible",
                 " feature, bit ",
                 std::countr_zero(incompatible != 0 ? incompatible : read_only_compatible));
  }
  return Status::ok();
}

}  // namespace memd
