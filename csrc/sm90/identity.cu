// Exports the hash of the sources that the sm90 library was built from.
#include "../interface.h"

ALIGNKIT_IDENTITY
