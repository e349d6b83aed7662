// Reports whether this build runs here, and asks the operating system's kernel for the features that it needs.
#ifdef QUIRE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "exports.h"
#include "gemm_kernel.h"
#include "team.h"

// 0: ready. Else the operating system does not give tile registers to this process.
EXPORT int quire_init() {
#ifdef QUIRE_AMX
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return (int)syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
  return 0;
#endif
}

EXPORT int quire_threads() { return (int)quire::team_size(); }
