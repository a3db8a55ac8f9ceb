// Descriptors that outlive the daemon's process.
#pragma once

#include <string>
#include <vector>

#include "base/owned_fd.h"

namespace memd {

/// Somebody beside this process, systemd or a holder of ours, who keeps a copy of a descriptor
/// until it is told to forget it, and hands all copies to the next daemon. Names are unique:
/// `segment.<id>`, `ledger.<job id>`, `table.<job id>`, `tiles.<job id>`, `session.<session id>`,
/// `doorbell.<session id>`, `volumes.<uuid of the set>`. Called by the server thread, and before
/// there is one by whoever starts; does not wait for the other side, unless that reads nothing any
/// more, and then for seconds once.
class DescriptorKeeper {
 public:
  virtual ~DescriptorKeeper() = default;
  virtual void keep(const std::string& name, int fd) = 0;
  virtual void forget(const std::string& name) = 0;
  /// Something could not be handed over: what the daemon has in memory may not outlive it. Any
  /// thread.
  virtual bool has_failed() const { return false; }
};

/// Descriptors that the last daemon left.
struct KeptDescriptor {
  std::string name;
  OwnedFd fd;
};
using KeptDescriptors = std::vector<KeptDescriptor>;

}  // namespace memd
