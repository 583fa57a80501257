"""The kernel before the model's forward, which computes the inputs of a decode step on the device.

It has a reference implementation in torch operators (cpu, vgpu) and a Triton kernel (cuda), which is imported when it
is first used.
"""
