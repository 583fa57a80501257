"""The storage tier: pages of the host tier kept by content hash, beyond the life of a server.

The backend (backend, file_backend, directory, page_file) needs neither torch nor threads of its own. The controller and
its workers bring pages there.
"""
