"""Pure functions: the operations of layers with torch's operators, what kernels access, and the kernels in Triton."""
