// Export the hash of the sources that the CPU library was built from. setup.py passes the hash as ALIGNKIT_SOURCES to
// the file named identity.* (found by its stem), so a new hash recompiles this file alone; keep nothing else here.
#include "../interface.h"

ALIGNKIT_IDENTITY
