# A CMake toolchain: the clang, libc++ and glibc 2.28 of PyPI's ziglang, for MEMD_ARCHITECTURE.
#
#   MEMD_ZIG           the program
#   MEMD_ARCHITECTURE  x86_64 or aarch64
#   MEMD_SYSROOT       a folder with the target's liburing-dev and libxxhash-dev, unpacked
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MEMD_ZIG MEMD_ARCHITECTURE MEMD_SYSROOT)
foreach(name IN ITEMS MEMD_ZIG MEMD_ARCHITECTURE MEMD_SYSROOT)
  if(NOT ${name})
    message(FATAL_ERROR "zig.cmake needs -D${name}=…; deploy/wheels/build.sh gives it")
  endif()
endforeach()

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${MEMD_ARCHITECTURE})
set(triple ${MEMD_ARCHITECTURE}-linux-gnu)
set(CMAKE_CXX_COMPILER ${MEMD_ZIG} c++ -target ${triple}.2.28)
set(CMAKE_C_COMPILER ${MEMD_ZIG} cc -target ${triple}.2.28)
foreach(language IN ITEMS C CXX)
  # CMake takes an archiver of one word.
  set(CMAKE_${language}_ARCHIVE_CREATE "${MEMD_ZIG} ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_APPEND "${MEMD_ZIG} ar q <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "${MEMD_ZIG} ranlib <TARGET>")
endforeach()

# Debian's Python.h includes the target's pyconfig.h by its path below here.
# -g0: zig writes debug information unless told otherwise, 140 MB of it.
set(CMAKE_CXX_FLAGS_INIT "-g0 -isystem ${MEMD_SYSROOT}/usr/include")
set(URING_INCLUDE ${MEMD_SYSROOT}/usr/include CACHE PATH "")
set(URING_LIBRARY ${MEMD_SYSROOT}/usr/lib/${triple}/liburing.a CACHE FILEPATH "")
set(XXHASH_INCLUDE ${MEMD_SYSROOT}/usr/include CACHE PATH "")
set(XXHASH_LIBRARY ${MEMD_SYSROOT}/usr/lib/${triple}/libxxhash.a CACHE FILEPATH "")
