"""The kernels of a speculative step in Triton's interpreter, bit by bit as by torch's operators. ``test/gpu/
test_speculative_gpu.py`` does the same on a GPU.

Run as a script this file is the interpreted checks, for the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import interpreted_logarithms, outcomes_of, print_outcomes, set_up_interpreter

INTERPRETED = ("begins", "places", "drafts", "proposals", "ends", "hidden_states", "draws", "look_ups")

interpreted = outcomes_of(__file__)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted[name] == ""


# --- the interpreted checks, run in the script -------------------------------------------------------------------


def check_begins() -> None:
    from speculative_step_cases import check_begin

    for case in ((1, 4, 64, False), (5, 4, 16, True), (9, 1, 1, False), (40, 33, 4, True)):
        check_begin("cpu", *case)


def check_places() -> None:
    from speculative_step_cases import check_place

    for case in ((1, 4, 64, -1, True), (5, 6, 16, -3, True), (9, 1, 1, 7, False), (40, 33, 4, -4, False)):
        check_place("cpu", *case)


def check_proposals() -> None:
    from speculative_step_cases import check_proposal

    for case in ((1, 1, 4, 0, True), (8, 5, 4, 1, True), (6, 126, 5, 2, False)):
        check_proposal("cpu", *case)


def check_drafts() -> None:
    from speculative_step_cases import check_keep

    for case in ((1, 1, 2, True), (8, 5, 4, True), (6, 126, 4, False)):
        check_keep("cpu", *case)


def check_ends() -> None:
    from speculative_step_cases import check_accept

    for accept_length in (None, 1.0, 2.6, 3.0, 9.5):
        for size, num_rows, has_all in ((1, 4, True), (7, 4, False), (9, 1, True), (5, 2, True), (60, 17, False)):
            check_accept("cpu", size, num_rows, accept_length, has_all)


def check_hidden_states() -> None:
    from speculative_step_cases import check_hidden

    for size, num_rows, features in ((1, 4, 64), (5, 1, 40), (3, 5, 2500)):
        check_hidden("cpu", size, num_rows, features, torch.float32)


def check_draws() -> None:
    from speculative_step_cases import check_draws

    with interpreted_logarithms():
        for size, num_known, vocab_size in ((4, 40, 60), (3, 1100, 3000)):
            check_draws("cpu", size, num_known, vocab_size, torch.float32)


def check_look_ups() -> None:
    from speculative_step_cases import check_kept_tokens, check_look_up

    for size, num_rows, longest, window in ((1, 4, 40, (1, 3)), (5, 8, 1300, (1, 12)), (9, 2, 9000, (2, 5))):
        check_look_up("cpu", size, num_rows, longest, *window)
    for size, num_rows in ((1, 4), (7, 1), (40, 9)):
        check_kept_tokens("cpu", size, num_rows)


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: globals()[f"check_{name}"] for name in INTERPRETED})
