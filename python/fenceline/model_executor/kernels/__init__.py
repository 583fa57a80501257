"""Kernels around the model's forward: what a decode step derives before it, and how it samples after it.

Each has a reference of torch operators (cpu, vgpu) and a Triton kernel (cuda) that is imported when first used.
"""
