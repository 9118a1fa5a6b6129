"""What all forks find imported."""

import os

# Threads of OpenMP do not live on in what is forked, and who waited for them would hang. A process makes its own later.
os.environ["OMP_NUM_THREADS"] = "1"

import alignkit.ops
import alignkit.testing

assert alignkit
