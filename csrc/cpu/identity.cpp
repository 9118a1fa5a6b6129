#include "../interface.h"

ALIGNKIT_IDENTITY
