"""Triton kernels for NVIDIA GPUs, tuned for Hopper; kernels/reference has the reference of each. Imported only when used.

Every operation has a function that returns its launches, and one that runs them. So launches can be compiled without a GPU
(compiling.py), and run in Triton's interpreter (TRITON_INTERPRET=1), whose missing bfloat16 arithmetic arithmetic.py replaces.
Modules *_kernels.py import no torch, so that compile_server.py starts fast.

Device functions have many arguments, as no structure of Triton holds both tensors and constants, and are long where a loop
cannot be split.
"""
