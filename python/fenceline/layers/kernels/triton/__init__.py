"""All our kernels in Triton, and how they are launched. Only a machine with Triton can import them."""
