"""The configuration of speculation: what unset flags mean, and what is refused."""

from __future__ import annotations

import pytest

from fenceline.config import ConfigError
from fenceline.config.engine_config import EngineConfig, resolve
from fenceline.config.server_args import ServerArgs


def configure(**flags: object) -> EngineConfig:
    """For the demo model on a CPU."""
    return resolve(ServerArgs(model_path="demo", device="cpu", **flags))  # type: ignore[arg-type]


OWN = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "demo"}  # it drafts for itself
DUMMY = {**OWN, "load_format": "dummy"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_simulate_acceptance": 2.0}, "needs --speculative-algorithm"),
        ({**OWN, "speculative_simulate_acceptance": 2.0}, "which only --load-format dummy allows"),
        ({**DUMMY, "speculative_simulate_acceptance": 0.5}, "give at least 1"),
        ({**DUMMY, "speculative_simulate_acceptance": float("nan")}, "give at least 1"),
        (
            {**DUMMY, "speculative_simulate_acceptance": 3.5, "speculative_num_steps": 2},
            r"yields at most --speculative-num-steps \+ 1 = 3 tokens",
        ),
    ],
)
def test_impossible_values_are_refused_with_the_remedy(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        configure(**flags)
    assert "\n" not in str(caught.value)


def test_a_simulated_acceptance_may_be_as_long_as_the_step() -> None:
    config = configure(**DUMMY, speculative_simulate_acceptance=4.0).speculative
    assert config is not None and config.simulated_accept_length == 4.0 and config.num_steps == 3


def test_a_draft_that_no_folder_of_the_model_holds_must_be_named() -> None:
    with pytest.raises(ConfigError, match="needs a draft model: give --speculative-draft-model-path"):
        configure(speculative_algorithm="EAGLE")
