"""The demo model with a draft that it brings, as a user starts it: what an answer says of its drafts."""

from __future__ import annotations

import pytest

import fenceline


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_what_a_user_sees_of_drafts(algorithm: str) -> None:
    prompt = "Q: Copy these words: apple river stone lamp cloud\nA: apple river stone lamp cloud\n\n" * 2 + "Q:"
    with fenceline.Engine(
        model_path="demo", device="cpu", speculative_algorithm=algorithm, speculative_adaptive=False
    ) as engine:
        sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
        meta = engine.generate(prompt, sampling)["meta_info"]
        info = engine.get_server_info()
    state, num_steps = info["internal_states"][0], info["speculative_num_steps"]
    steps, length, rate = (meta[f"spec_{name}"] for name in ("verify_ct", "accept_length", "accept_rate"))
    assert meta["completion_tokens"] == 40
    # The first token comes with the prompt; what the last step yields beyond the last token is dropped.
    assert 39 <= steps * length + 0.01 < 39 + num_steps + 1 and length > 1.0
    assert rate == pytest.approx((length - 1) / num_steps, abs=1e-3)
    assert state["avg_spec_accept_length"] == pytest.approx(length, abs=1e-3)
    assert list(state["spec_steps_by_depth"]) == [str(num_steps)]
    assert steps <= state["spec_steps_by_depth"][str(num_steps)] <= steps + 1  # one may have been in flight
