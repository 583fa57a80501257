"""The back ends of memory_order's Communicator, which carry out collective operations of ranks."""
