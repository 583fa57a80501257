"""Speculative decoding on the device: trees of draft tokens, what the target accepts of them, and their KV rows."""
