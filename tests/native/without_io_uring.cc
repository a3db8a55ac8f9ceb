// Runs a command as on a machine that forbids io_uring: without_io_uring EPERM|ENOSYS command...
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "forbid_io_uring.h"

int main(int argc, char** argv) {
  int error_number = 0;
  if (argc >= 3 && std::strcmp(argv[1], "EPERM") == 0) error_number = EPERM;
  if (argc >= 3 && std::strcmp(argv[1], "ENOSYS") == 0) error_number = ENOSYS;
  if (error_number == 0) {
    std::fprintf(stderr, "usage: %s EPERM|ENOSYS command [argument...]\n", argv[0]);
    return 2;
  }
  if (!memd::testing::forbid_io_uring(error_number)) {
    std::perror("installing the seccomp filter");
    return 126;
  }
  execvp(argv[2], argv + 2);
  std::perror(argv[2]);
  return 127;
}
