"""The kernel before the model's forward: what a decode step derives on the device.

It has a reference of torch operators (cpu, vgpu) and a Triton kernel (cuda) that is imported when first used.
"""
