"""The stages that the scheduler tells of a request where requests are traced."""

from __future__ import annotations

import time
from pathlib import Path

from scheduler_driver import Driver, make_driver, make_model_driver, request

from fenceline.ipc.io_struct import FlushCacheReq, Stage, StagesReport

PAGE = 16


class Stages:
    """Gathers what a driver's scheduler tells, by request."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.of: dict[str, list[Stage]] = {}
        driver.scheduler.stats._trace = self.tell

    def tell(self, report: StagesReport) -> None:
        assert not self.driver.answers or self.driver.answers.get(report.rid) is None or self.retracted(report)
        self.of.setdefault(report.rid, []).extend(report.stages)

    def retracted(self, report: StagesReport) -> bool:
        return all(stage.name == "retraction" for stage in report.stages)

    def answer(self, rid: str, prompt: list[int]) -> dict[str, Stage]:
        self.driver.send(request(rid, prompt, max_new_tokens=4, temperature=0.0, ignore_eos=True))
        self.driver.run(max_steps=100_000)
        while self.driver.scheduler.memory.num_outstanding:
            self.driver.step()
        return {stage.name: stage for stage in self.of[rid]}


def test_loads_from_host_and_storage_are_told(tmp_path: Path) -> None:
    begin = time.perf_counter()
    driver = make_model_driver(
        max_total_tokens=60 * PAGE,
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_ratio=4.0,
        hicache_storage_backend="file",
        hicache_storage_dir=str(tmp_path),
        hicache_storage_prefetch_policy="wait_complete",
    )
    stages = Stages(driver)
    try:
        prompt = [5 + token % 190 for token in range(400)]
        assert list(stages.answer("new", prompt)) == ["queue"]
        for number in (1, 2):  # which take the place of the first
            stages.answer(f"other-{number}", [5 + (number + 2) * token % 190 for token in range(400)])
        again = stages.answer("again", prompt)
        assert (again["load_host"].num_tokens, set(again)) == (24 * PAGE, {"queue", "load_host"})
        driver.send(FlushCacheReq(id="flush"))
        driver.step()
        stored = stages.answer("stored", prompt)
        assert stored["load_storage"].num_tokens == stored["load_host"].num_tokens == 24 * PAGE
        assert stored["load_storage"].end <= stored["queue"].end
        for told in stages.of.values():
            for stage in told:
                assert begin < stage.start <= stage.end < time.perf_counter(), stage
    finally:
        driver.scheduler.close()


def test_a_retraction_lasts_until_the_request_runs_again() -> None:
    driver = make_driver(num_pages=20, page_size=4, schedule_conservativeness=0.01)
    stages = Stages(driver)
    for rid in ("a", "b", "c"):
        driver.send(request(rid, list(range(5, 17)), max_new_tokens=30, ignore_eos=True))
    driver.run()
    retracted = {rid: answer.last for rid, answer in driver.answers.items() if answer.last is not None}
    assert sum(last.num_retractions for last in retracted.values()) > 0
    for rid, last in retracted.items():
        names = [stage.name for stage in stages.of[rid]]
        assert names == ["queue"] + ["retraction"] * last.num_retractions
        assert all(stage.start < stage.end for stage in stages.of[rid])


def test_the_configuration_says_whether_they_are_told() -> None:
    for flags, told in (({}, []), ({"otlp_traces_endpoint": "http://localhost:4318"}, ["queue"])):
        driver = make_driver(**flags)
        driver.send(request("a", list(range(5, 17)), max_new_tokens=4))
        driver.run()
        reports = [message for message in driver.replies if isinstance(message, StagesReport)]
        assert [stage.name for report in reports for stage in report.stages] == told
