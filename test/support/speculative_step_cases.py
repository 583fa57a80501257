"""Compares the kernels of a speculative step with their references, for random requests and bit by bit, on a GPU or in
Triton's interpreter. Importing this module needs Triton."""

from __future__ import annotations

import numpy as np
import torch

from fenceline.layers.kernels.speculative_operands import AcceptOutputs, BeginOutputs, NextRow, Pieces
from fenceline.layers.kernels.triton import sample as sample_triton
from fenceline.layers.kernels.triton import speculative_step as step_triton
from fenceline.layers.kernels.triton import token_lookup as lookup_triton
from fenceline.sampling.draw_kernels import whole_vocabulary
from fenceline.sampling.gumbel import mix_seeds
from fenceline.speculative import step_kernels as step
from fenceline.speculative import token_lookup as lookup
from fenceline.speculative.draws import drawn_tokens

Tensors = list[torch.Tensor]


def _ids(*shape: int, most: int = 99) -> torch.Tensor:
    return torch.randint(0, most, shape)


def _rows(size: int) -> torch.Tensor:
    """Rows of ``size`` requests; the last two may be padding."""
    rows = torch.randperm(size + 2)[:size] + 1
    rows[max(size - 2, 1) :] = 0
    return rows


def _equal(device: str, reference: Tensors, computed: Tensors, but_sink: Tensors) -> None:
    """``but_sink``: tensors of ``reference`` whose row 0 is not compared. It is the sink's, and padded requests write
    it in any order."""
    for number, (left, right) in enumerate(zip(reference, computed, strict=True)):
        first = int(any(left is one for one in but_sink))
        assert right.device.type == device
        assert torch.equal(left[first:], right.cpu()[first:]), number


def _there(device: str, tensors: Tensors) -> Tensors:
    return [tensor.to(device, copy=True) for tensor in tensors]


def check_begin(device: str, size: int, num_rows: int, page_size: int, has_paths: bool) -> None:
    num_table_rows, most = size + 3, 40
    lens, last_tokens = _ids(num_table_rows, most=most) + 1, _ids(num_table_rows)
    table = _ids(num_table_rows, (most + num_rows) // page_size + 2, most=10_000).int()
    operands = [_rows(size), lens, table, last_tokens]
    outputs = [torch.full((size,), -1) for _ in range(3)]
    outputs += [torch.full((size, num_rows), -1) for _ in range(3)] + [torch.ones(size, dtype=torch.bool)]
    on_device = _there(device, outputs)
    for begun, of_kernel, given in ((outputs, False, operands), (on_device, True, _there(device, operands))):
        where = BeginOutputs(*begun[:2], begun[2] if has_paths else None, *begun[3:])
        if of_kernel:
            step_triton.launch_begin(*given, page_size, num_rows - 1, where)
        else:
            step._begin(*given, page_size, num_rows - 1, *where)
    _equal(device, outputs, on_device, [])


def check_place(device: str, size: int, num_rows: int, page_size: int, first: int, has_positions: bool) -> None:
    most = 40
    lens = _ids(size, most=most) + 1
    table = _ids(size + 3, (most + num_rows + max(first, 0)) // page_size + 2, most=10_000).int()
    operands = [_rows(size), lens, table]
    outputs = [torch.full((size, num_rows), -1) for _ in range(2)]
    on_device = _there(device, outputs)
    rows, lens, table = operands
    step._place(rows, lens, first, table, page_size, outputs[0] if has_positions else None, outputs[1])
    rows, lens, table = _there(device, operands)
    positions = on_device[0] if has_positions else None
    step_triton.launch_place(rows, lens, first, table, page_size, positions, on_device[1])
    _equal(device, outputs, on_device, [])


def check_proposal(device: str, size: int, num_pieces: int, num_rows: int, ahead: int, has_ids: bool) -> None:
    largest = torch.randn(size, num_pieces)
    for value in (torch.inf, -torch.inf):
        largest[_ids(1, most=size), _ids(1, most=num_pieces)] = value
    largest[_ids(1, most=size)] = -torch.inf
    pieces = [_ids(size, num_pieces, most=3).float(), _ids(size, num_pieces, most=60).int(), largest]
    operands = [*pieces, _rows(size), _ids(size, most=num_rows - ahead)]
    outputs = [_ids(size + 3, 2), _ids(size, num_rows)]
    on_device = _there(device, outputs)
    step._keep_proposal(*operands, outputs[0][:, 1], outputs[1] if has_ids else None, ahead)
    *pieces, rows, counts = _there(device, operands)
    ids = on_device[1] if has_ids else None
    step_triton.launch_proposal(Pieces(*pieces), rows, counts, on_device[0][:, 1], ids, ahead)
    _equal(device, outputs, on_device, outputs[:1])


def check_keep(device: str, size: int, num_pieces: int, num_rows: int, has_next: bool) -> None:
    # There are few different scores, so that there are ties. Some requests are bad already, and some tokens are outside
    # the vocabulary.
    scores = _ids(size, num_pieces, most=3).float()
    largest = torch.randn(size, num_pieces)
    for value in (torch.inf, -torch.inf):
        largest[_ids(1, most=size), _ids(1, most=num_pieces)] = value
    largest[_ids(1, most=size)] = -torch.inf
    pieces = Pieces(scores, (_ids(size, num_pieces, most=60) - 1).int(), largest)
    operands = [*pieces, torch.rand(size) < 0.2, _ids(size, num_rows)]
    following = [_ids(size), _ids(size, num_rows), _ids(size, num_rows)]
    following += [torch.full((size,), -1) for _ in range(4)]
    column, at, vocab_size = num_rows - 1, num_rows - 2, 50
    on_device = _there(device, operands), _there(device, following)
    step._keep(*operands, column, vocab_size, at, *(following if has_next else [None] * 7))
    scores, ids, largest, is_bad, input_ids = on_device[0]
    step_triton.launch_keep(
        Pieces(scores, ids, largest),
        is_bad,
        input_ids,
        column,
        vocab_size,
        NextRow(at, *on_device[1]) if has_next else None,
    )
    _equal(device, [*operands, *following], [*on_device[0], *on_device[1]], [])


def check_accept(device: str, size: int, num_rows: int, accept_length: float | None, has_all: bool) -> None:
    drawn = _ids(size, num_rows, most=4)
    input_ids = torch.where(torch.rand(size, num_rows) < 0.3, _ids(size, num_rows, most=4), drawn.roll(1, 1))
    flags = [torch.rand(size) < 0.2, torch.rand(size) < 0.8]
    operands = [input_ids, drawn, *flags, _rows(size), _ids(size, most=5000) + 2]
    outputs = [torch.full((size,), -1) for _ in range(2)] + [_ids(size + 3) for _ in range(3)]
    outputs.append(torch.rand(size + 3) < 0.5)
    on_device = _there(device, outputs)
    of_rows = outputs[2:]

    def kept(tensors: Tensors) -> AcceptOutputs:
        return AcceptOutputs(*tensors[:4], *(tensors[4:] if has_all else (None, None)))

    step._accept(*operands, accept_length, *kept(outputs))
    step_triton.launch_accept(*_there(device, operands), accept_length, kept(on_device))
    _equal(device, outputs, on_device, [one for one in of_rows if one is not outputs[3]])


def check_hidden(device: str, size: int, num_rows: int, features: int, dtype: torch.dtype) -> None:
    hidden, kept = (torch.randn(size * num_rows, features).to(dtype), torch.randn(size + 3, 2, features).to(dtype))
    counts, rows = _ids(size, most=num_rows) + 1, _rows(size)
    on_device = kept.to(device, copy=True)
    step._keep_hidden(hidden, counts, rows, kept[:, 1])
    step_triton.launch_hidden(*_there(device, [hidden, counts, rows]), on_device[:, 1])
    _equal(device, [kept], [on_device], [kept])


def check_draws(device: str, size: int, num_known: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Draws from a part of the vocabulary in any order must equal draws from the whole one, draws for several rows of a
    request must equal those for each row alone, and logits that are not finite must be reported."""
    logits = (torch.randn(size, num_known) * 8).round().div(4).to(dtype).to(device)
    token_ids = torch.randperm(vocab_size)[:num_known].to(device)
    draws = [
        torch.rand(size).to(device) + 0.5,
        torch.from_numpy(np.arange(size) % 2).float().to(device),
        torch.from_numpy(mix_seeds(range(size))).to(device),
        torch.arange(size, device=device) * 1001,
    ]
    expected = torch.full((size,), -1, device=device)
    later = sample_triton.DrawInputs(*draws[:3], draws[3] + 5, None, None)
    whole = whole_vocabulary(logits, token_ids, vocab_size)
    sample_triton.launch(whole, later, None, None, expected, None)
    inputs = sample_triton.DrawInputs(*draws, None, None, token_ids, 1, 5)
    assert torch.equal(drawn_tokens(Pieces(*sample_triton.launch_pieces(logits, inputs))), expected)

    each = 3
    rows, positions = logits.repeat_interleave(each, 0), torch.arange(size * each, device=device)
    rows += torch.arange(size * each, device=device)[:, None] % 5 * torch.arange(num_known, device=device) / 64
    together, apart = (torch.full((size * each,), -1, device=device) for _ in range(2))
    inputs = sample_triton.DrawInputs(*draws[:3], positions, None, None, None, each, 1)
    sample_triton.launch(rows, inputs, None, None, together, None)
    spread = [values.repeat_interleave(each) for values in draws[:3]]
    sample_triton.launch(rows, sample_triton.DrawInputs(*spread, positions + 1, None, None), None, None, apart, None)
    assert torch.equal(together, apart) and len(together.unique()) > 1

    for value in (torch.nan, torch.inf, -torch.inf):
        bad = logits.clone()
        bad[0] = value if value == -torch.inf else bad[0]
        bad[0, num_known // 2] = value
        inputs = sample_triton.DrawInputs(*draws, None, None, token_ids, 1, 5)
        tokens = drawn_tokens(Pieces(*sample_triton.launch_pieces(bad, inputs)))
        assert tokens[0] == -1 and torch.equal(tokens[1:], expected[1:]), value


def check_look_up(device: str, size: int, num_rows: int, longest: int, least: int, most: int) -> None:
    """Few different tokens, so that there are matches of all lengths, and some of images."""
    tokens = _ids(size + 3, longest, most=5).int() - (torch.rand(size + 3, longest) < 0.02).int() * 9
    tokens = tokens.clamp(min=-1)
    lens = _ids(size, most=longest - 1) + 2
    lens[0] = longest
    operands, input_ids = [_rows(size), lens, tokens], _ids(size, num_rows)
    on_device = input_ids.to(device, copy=True)
    lookup._look_up(*operands, least, most, input_ids)
    lookup_triton.launch_look_up(*_there(device, operands), least, most, on_device)
    _equal(device, [input_ids], [on_device], [])


def check_kept_tokens(device: str, size: int, num_rows: int) -> None:
    tokens = _ids(size + 3, 30 + num_rows).int()
    tokens[0] = 0
    operands, on_device = [_rows(size), _ids(size, most=30), _ids(size, num_rows)], tokens.to(device, copy=True)
    lookup._keep(*operands, tokens)
    lookup_triton.launch_keep(*_there(device, operands), on_device)
    _equal(device, [tokens], [on_device], [])
