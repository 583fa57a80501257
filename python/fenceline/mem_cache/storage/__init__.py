"""The storage tier: pages of the host tier kept by content hash, beyond the life of a server.

The backend (backend, file_backend, directory, page_file) is pure CPU: no torch, no threads. The controller and its
workers bring pages there.
"""
