// Exports the hash of the sources that the CPU library was built from.
#include "../interface.h"

ALIGNKIT_IDENTITY
