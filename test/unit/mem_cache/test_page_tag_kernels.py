"""The kernels of --memory-check full in Triton's interpreter. Run as a script this file is the checks themselves."""

from __future__ import annotations

from functools import partial

import pytest
from page_tag_cases import cases
from triton_interpreter import outcomes_of, print_outcomes, set_up_interpreter

results = outcomes_of(__file__)


@pytest.mark.parametrize("name", cases("cpu"))
def test_interpreted(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


if __name__ == "__main__":
    set_up_interpreter()
    print_outcomes({name: partial(*check) for name, check in cases("cpu").items()})  # type: ignore[arg-type]
