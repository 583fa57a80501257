"""What carries collective operations from rank to rank: the back ends of memory_order's Communicator."""
