// Moments at which a test may kill the daemon or let it fail, and bugs that a test may plant to see
// that it would be found. What is compiled without MEMD_FAULTS, as all of the Python module is,
// has none of it: not even the names.
#pragma once

#ifdef MEMD_NO_FAILPOINTS
#error "CMake has listed this file as one without failpoints: run it again"
#endif

#ifdef MEMD_FAULTS

#include <functional>
#include <string>
#include <string_view>

namespace memd::failpoint {

/// Called at each failpoint with its name, on the thread that reached it; nothing: no call.
void set_observer(std::function<void(std::string_view name)> observer);
void reach(std::string_view name);

/// Plants one bug, or none where `name` is empty. Before the first call it is the one that the
/// environment variable MEMD_PLANT names, so that a whole program can be run with it.
void plant(std::string name);
bool is_planted(std::string_view name);

}  // namespace memd::failpoint

/// `name` says the moment: "commit.before_first_flush". A statement.
#define MEMD_FAILPOINT(name) ::memd::failpoint::reach(name)
/// A condition that is false except in a test that planted this bug.
#define MEMD_PLANTED(name) ::memd::failpoint::is_planted(name)

#else

#define MEMD_FAILPOINT(name) static_cast<void>(0)
#define MEMD_PLANTED(name) false

#endif
