"""The kernels of a speculative step between its forwards.

Each one has a reference implementation in torch operators (cpu, vgpu) and a Triton kernel (cuda), which is imported
when it is first used.
"""
