"""The storage tier: pages of the host tier kept by content hash, beyond the life of a server.

The backend (base to file_backend) is pure CPU: no torch, no threads. The controller and its workers bring pages there.
"""
