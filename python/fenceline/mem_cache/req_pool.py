"""ReqPool: one row of device state for each running request: its page table and its last token.

Rows, page tables and last tokens live on the device and are only written on FORWARD, in program order with
the steps that read them; that is what makes a row safe to hand to another request while its former
owner's last step is still in flight (F13).
"""

from __future__ import annotations

import torch

from fenceline.memory_order import LeasePool


class ReqPool:
    """``num_rows`` request rows; row 0 is the sink that padding names.

    ``page_table`` [num_rows, max_pages_per_req] int32 and ``last_tokens`` [num_rows] int64 are on the
    device. ``rows`` says who owns which row.
    """

    def __init__(self, num_rows: int, max_pages_per_req: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.max_pages_per_req = max_pages_per_req
        self.rows = LeasePool("request rows", num_rows, reserved=1)
        # Zeros name the sink page, so an entry that nobody wrote can never reach live KV.
        self.page_table = torch.zeros((num_rows, max_pages_per_req), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def write_pages(self, rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
        """``page_table[rows, columns] = pages``; all [N], int64 but pages int32. Call on FORWARD only."""
        self.page_table.index_put_((rows, columns), pages)
