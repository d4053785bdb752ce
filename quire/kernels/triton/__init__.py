"""Triton kernels for NVIDIA GPUs, tuned for Hopper; kernels/reference has the reference of each. Imported only when used.

Every operation has a function that returns its launches, with all constants, and one that runs them. So launches can be
compiled without a GPU (compiling.py), and run without one in Triton's interpreter (TRITON_INTERPRET=1); arithmetic.py works
around the interpreter's missing bfloat16 arithmetic.

Device functions get everything as arguments, because Triton has no structures that hold both tensors and constants. They are
long where a loop cannot be split.
"""
