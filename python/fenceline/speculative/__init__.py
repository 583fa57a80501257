"""Speculative decoding on the device: trees of draft tokens, which of them the target accepts, and their KV rows."""
