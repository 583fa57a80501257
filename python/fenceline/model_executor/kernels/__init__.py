"""The Triton kernel before the model's forward, which computes the inputs of a decode step on the device.

It is imported when it is first used. Its reference in torch operators (cpu, vgpu) is in ``decode_runner``.
"""
