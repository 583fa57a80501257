"""The storage tier: pages of the host tier kept by content hash, beyond the life of a server. Pure CPU, no torch."""
