"""What runs the ops: the device families (families.py), who computes an op (dispatch.py), how kernels are launched
(launch.py), and the libraries they lie in (native.py, cuda.py, built.py), with the proof that bits hold here (shown.py)."""
