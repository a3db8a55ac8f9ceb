// The form of the line that a failed check prints.
#pragma once

#include <cstdint>

namespace memd {

enum class CheckFormat : uint8_t {
  plain,    // for a process whose log is not ours
  text,     // names and values, as memd/log.py writes them
  journal,  // text with the syslog priority in front
  json,
};

/// The whole process has it, whichever thread calls; `plain` as long as none has.
void set_check_format(CheckFormat format);

}  // namespace memd
