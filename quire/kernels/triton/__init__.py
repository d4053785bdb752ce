"""Triton kernels for NVIDIA GPUs, made for Hopper; each has its oracle in kernels/reference. Loaded only where they are used.

Every operation has a function that returns its launches, with every constant chosen, and one that runs them. What is launched
can so be compiled without a GPU (compiling.py), and run without one in Triton's interpreter (TRITON_INTERPRET=1), whose lack of
bfloat16 arithmetic arithmetic.py hides.

Device functions get all they use as arguments, since Triton has no structures that hold both tensors and constants, and are as
long as the loop that must stay in one piece.
"""
