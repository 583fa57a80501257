"""What a speculative step computes between its forwards, in a few launches.

Each kernel has a reference of torch operators (cpu, vgpu) and a Triton kernel (cuda) that is imported when first used.
"""
