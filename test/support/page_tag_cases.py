"""The kernels of page tags against their references on random operands: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import torch

from fenceline.mem_cache import page_tags
from fenceline.mem_cache.page_tag_operands import BegunTags, MovedPages, Visit
from fenceline.mem_cache.page_tags import FIELDS, MAX_FINDINGS, When

Tensor = torch.Tensor
NUM_PAGES, NUM_LAYERS = 600, 3


def numbers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, shape).to(dtype)


def visits(when: When, device: str, page_size: int, num_wrong: int) -> None:
    """Rows of 0 to 300 pages, some of which share pages, and the sink; ``num_wrong`` entries or tags are wrong."""
    rows = torch.tensor([3, 1, 0, 2, 5])
    starts = torch.tensor([300 * page_size - 1, 5 * page_size, 9, page_size, 130 * page_size + 1])
    ends = starts + torch.tensor([1, 2 * page_size, 1, 1, page_size])
    columns = torch.arange(304).int()
    table = torch.zeros((6, 304), dtype=torch.int32)
    for row, first in ((3, 1), (1, 310), (2, 1), (5, 320)):  # row 2 begins as row 3 does
        num = min(int(-(-ends[rows == row] // page_size)), 270 if row == 5 else 304)
        table[row, :num] = first + columns[:num]
    table[2, 1] = NUM_PAGES - 1  # which it writes: no row writes to a page that another one has
    expected = torch.where(table > 0, 1000 + table, 0)
    tags = torch.stack([1000 + torch.arange(NUM_PAGES), torch.zeros(NUM_PAGES), numbers(-9, 9, NUM_PAGES)], 1).int()
    tags[table[rows].long(), 1] = columns.expand(len(rows), -1)
    tags[310, 1] = page_tags.ANY_POSITION
    arrived = tags[:, 0].repeat(NUM_LAYERS, 1)
    layer = 1 if when is When.LAYER else NUM_LAYERS - 1
    wrong = ((3, 0), (3, 299), (1, 3), (5, 129), (5, 7), (3, 150), (3, 151), (1, 4), (5, 64), (5, 2))
    for number, (row, column) in enumerate(wrong[:num_wrong]):
        page = int(table[row, column])
        if number % 5 == 0:
            arrived[layer, page] += 1
        elif number % 5 == 1:
            table[row, column] = (0, NUM_PAGES, -1)[number % 3]
        elif when is When.LAYER:
            arrived[layer, page] = page_tags.SPOILED
        else:
            tags[page, number % 2] += 7
    findings = torch.zeros((1 + MAX_FINDINGS, FIELDS), dtype=torch.int32)
    starts_of = table[rows].clone(), starts, ends if page_size > 1 else starts + 2  # with pages of 1, two for each
    slots = torch.cat([slots_of(*each, page_size) for each in zip(*starts_of, strict=True)])
    bounds = torch.tensor([0, *(ends - starts).tolist()]).cumsum(0).int() if page_size > 1 else None
    if num_wrong:  # the second row's first slot is of a page that nobody writes
        slots[2 if bounds is None else bounds[1]] = (NUM_PAGES - 2) * page_size
    operands = [
        *(rows, starts + 1, starts if when is When.LAYER else ends, slots, bounds),
        *(table, expected, tags, arrived, torch.tensor([76, 78]).int(), findings),
    ]
    scalars = (1, page_size, int(when), layer)
    ours = [None if operand is None else operand.clone().to(device) for operand in operands]
    page_tags._visit_pages(*operands, *scalars)  # type: ignore[arg-type]
    from fenceline.mem_cache.page_tag_kernels import launch_visit

    launch_visit(Visit(*ours, *scalars))  # type: ignore[arg-type]
    for name, mine, theirs in zip(("tags", "arrived", "clock"), ours[7:10], operands[7:10], strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine.cpu(), theirs), name
    assert ours[10] is not None and operands[10] is not None
    found, expected_findings = ours[10].cpu(), operands[10]
    assert found[0, 0] == expected_findings[0, 0] >= num_wrong
    if int(found[0, 0]) <= MAX_FINDINGS:  # the order of programs is free
        assert sorted(found[1:].tolist()) == sorted(expected_findings[1:].tolist())
    else:
        assert (found[1:, 0] == int(when)).all(), "the first findings are kept"


def slots_of(table: Tensor, start: Tensor, end: Tensor, page_size: int) -> Tensor:
    """Of the tokens ``start`` to ``end`` - 1."""
    positions = torch.arange(int(start), int(end))
    return table[(positions // page_size).clamp(max=len(table) - 1)].long() * page_size + positions % page_size


def begins(device: str, num_written: int, num_retired: int) -> None:
    tags, expected = numbers(-50, 50, NUM_PAGES, 3), numbers(-50, 50, 7, 300)
    places, leases = torch.randperm(expected.numel())[:num_written], 1 + torch.randperm(num_written)
    retired = torch.stack([torch.randperm(NUM_PAGES)[:num_retired], 1 + torch.randperm(num_retired)])
    operands = BegunTags(expected, tags, places // 300, places % 300, leases, retired)
    ours = BegunTags(*[operand.to(device, copy=True) for operand in operands])
    page_tags._begin_tags(*operands)
    from fenceline.mem_cache.page_tag_kernels import launch_begin

    launch_begin(ours)
    assert torch.equal(ours.tags.cpu(), tags) and bool((tags[retired[0], 0] < 0).all())
    assert torch.equal(ours.expected.cpu(), expected) and torch.equal(expected.view(-1)[places], leases.int())


def transfers(device: str, by_bytes: bool) -> None:
    """Pages that are backed up and loaded, with every bit of a few of them changed in between, alone."""
    sizes = [520, 8, 1032, 3] if by_bytes else [520, 8, 1032, 1300]
    dtype = torch.int8 if by_bytes else torch.int32
    parts = [numbers(-128, 128, NUM_PAGES, size, dtype=dtype) for size in sizes]
    parts.append(numbers(-128, 128, NUM_PAGES, 2 * 16, dtype=dtype)[:, 16:])  # a share of a row
    tags, arrived = numbers(1, 60, NUM_PAGES, 3), numbers(1, 60, NUM_LAYERS, NUM_PAGES)
    pages, others = torch.randperm(NUM_PAGES)[:12].split(6)
    host_pages, host = torch.randperm(50)[:6], torch.zeros((50, 2), dtype=torch.int64)
    leases = arrived[-1, pages].long()
    tags[pages[1:], 0] = leases[1:].int()  # the first page is another's by then
    words = torch.tensor(
        [
            [0] * len(parts),
            [part.shape[1] for part in parts],
            [sum(p.shape[1] for p in parts[:i]) for i in range(len(parts))],
            [part.stride(0) for part in parts],
        ]
    )
    known, sums = torch.tensor([1, 1, 1, 1, 0, 1]), torch.zeros(6, dtype=torch.int64)
    given = MovedPages(pages, host_pages, leases, known, sums, host, tags, arrived)
    mine = MovedPages(*[tensor.to(device, copy=True) for tensor in given])
    on_device = [_copied(part, device) for part in parts]
    words[0] = torch.tensor([part.data_ptr() for part in on_device])
    from fenceline.mem_cache.page_tag_kernels import launch_arrive, launch_seal

    page_tags._seal_pages(*given, *parts)
    launch_seal(mine, words.to(device), by_bytes)
    assert torch.equal(mine.host.cpu(), host)
    assert int(host[host_pages[0], 1]) == page_tags.NO_POSITION and (host[host_pages[1:], 1] > 0).all()
    for part, copy in zip(parts, on_device, strict=True):
        part[others] = part[pages]
        part[others[2], -1] ^= 1  # the last word of each part, and the first of another page
        part[others[3], 0] ^= 1 << (dtype.itemsize * 8 - 2)
        copy.copy_(part)
    given = given._replace(pages=others, leases=100 + torch.arange(6))
    mine = mine._replace(pages=others.to(device), leases=given.leases.to(device))
    for layer, first, last in ((0, 0, 2), (1, 2, 3), (2, 3, 5)):
        page_tags._arrive_pages(*given, -9, layer, int(words[2, first]), *parts[first:last])
        launch_arrive(mine, words[:, first:last].contiguous().to(device), -9, layer, by_bytes)
        for name in ("sums", "tags", "arrived"):
            assert torch.equal(getattr(mine, name).cpu(), getattr(given, name)), (layer, name)
    spoiled = arrived[-1, others] == page_tags.SPOILED
    assert spoiled.tolist() == [True, False, True, True, False, False]
    assert int(tags[others[4], 1]) == page_tags.ANY_POSITION and (tags[others, 2] == -9).all()


def _copied(part: Tensor, device: str) -> Tensor:
    whole = torch.zeros((len(part), part.stride(0)), dtype=part.dtype, device=device)
    copy = whole[:, -part.shape[1] :]
    copy.copy_(part)
    return copy


def cases(device: str) -> dict[str, tuple[object, ...]]:
    """The checks by name: a function and its arguments."""
    found: dict[str, tuple[object, ...]] = {
        f"begins {num_written} {num_retired}": (begins, device, num_written, num_retired)
        for num_written, num_retired in ((300, 0), (0, 300), (129, 5))
    }
    for when in When:
        for page_size in (1, 16):
            for num_wrong in (0, 4, 10):
                found[f"visits {when.name} {page_size} {num_wrong}"] = (visits, when, device, page_size, num_wrong)
    return found | {f"transfers {by_bytes}": (transfers, device, by_bytes) for by_bytes in (False, True)}
