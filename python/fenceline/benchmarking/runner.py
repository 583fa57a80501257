"""Runs one benchmark: asks the server for its model, warms it up, sends the load, and reports the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp
import uvloop

from fenceline.benchmarking import report
from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.client import Client, open_session, raise_file_limit
from fenceline.benchmarking.datasets import build_requests, build_warm_up
from fenceline.benchmarking.determinism import check_determinism
from fenceline.benchmarking.endpoints import Endpoint, backend_kind, is_sampled, server_url
from fenceline.benchmarking.goodput import Trial, best_of, find_max_goodput
from fenceline.benchmarking.load import (
    Conversation,
    LoadPlan,
    LoadResult,
    check_template,
    prompt_style,
    ramp_of,
    run_load,
)
from fenceline.benchmarking.metrics import BenchmarkMetrics, calculate_metrics
from fenceline.benchmarking.plot import charts, write_plot
from fenceline.benchmarking.records import BenchRequest, Call
from fenceline.benchmarking.tokenizer import Tokenizer, load_tokenizer

_SECRET_KEYS = ("api_key", "admin_api_key")
_TIMEOUT = aiohttp.ClientTimeout(total=30)


@dataclass(frozen=True, slots=True)
class Model:
    """``name`` is the model's name in requests; ``tokenizer`` is a directory or hub id."""

    name: str
    tokenizer: str


async def get_json(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """The JSON object at ``url``; None if the server does not have this route, or answers with something else. Raises
    ValueError if no server answers, the URL is wrong, or the key is refused."""
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            if response.status in (401, 403):
                raise ValueError(f"{url} answers HTTP {response.status}: pass --api-key or set OPENAI_API_KEY")
            if response.status != 200:
                return None
            body = await response.json(content_type=None)
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise ValueError(
            f"no server answers at {url} ({error}): start it, or set --host and --port, or --base-url"
        ) from error
    except (aiohttp.ClientError, UnicodeDecodeError) as error:
        raise ValueError(f"{url} is not a URL of a server ({error}): check --base-url") from error
    except ValueError as error:
        if "answers HTTP" in str(error):
            raise
        return None
    return body if isinstance(body, dict) else None


async def resolve_model(session: aiohttp.ClientSession, root: str, args: BenchArgs) -> Model:
    """The model's name and tokenizer, from the flags, or else from /get_model_info and /v1/models. Raises ValueError if
    the server cannot be reached, or does not name a model."""
    if args.model:
        return Model(args.served_model_name or args.model, args.tokenizer or args.model)
    info = await get_json(session, root + "/get_model_info") or {}
    listed = await get_json(session, root + "/v1/models") or {}
    models = listed.get("data")
    first: dict[str, Any] = models[0] if isinstance(models, list) and models else {}
    names = (args.served_model_name, first.get("id"), info.get("model_path"))
    name = next((str(n) for n in names if n), None)
    if name is None:
        raise ValueError(f"{root} names no model at /get_model_info or /v1/models: pass --model")
    tokenizers = (args.tokenizer, info.get("tokenizer_path"), info.get("model_path"), first.get("root"), name)
    return Model(name, next(str(t) for t in tokenizers if t))


async def post_control(session: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> None:
    """Post to a control route. Raises ValueError with its answer if the server refuses or does not answer."""
    try:
        async with session.post(url, json=body or {}, timeout=_TIMEOUT) as response:
            if response.status != 200:
                text = (await response.text()).strip()[:300]
                raise ValueError(f"{url} answers HTTP {response.status}: {text}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{url} does not answer: {error}") from error


def profile_body(args: BenchArgs) -> dict[str, Any]:
    body: dict[str, Any] = {"activities": list(args.profile_activities)}
    if args.profile_num_steps is not None:
        body["num_steps"] = args.profile_num_steps
    if args.profile_output_dir is not None:
        body["output_dir"] = args.profile_output_dir
    return body


async def get_server_info(
    session: aiohttp.ClientSession, root: str, args: BenchArgs
) -> tuple[dict[str, Any] | None, float | None]:
    """The server's info without secrets, and the mean accept length of speculation. None for what it does not have."""
    if backend_kind(args.backend) != "generate" and not args.backend.startswith(("fenceline", "sglang")):
        return None, None
    try:
        info = await get_json(session, root + "/get_server_info")
    except ValueError:  # the run is over, so this is not an error; if the server has ended, requests have failed
        return None, None
    if info is None:
        return None, None
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    accept_length = state.get("avg_spec_accept_length")
    return (
        {key: value for key, value in info.items() if key not in _SECRET_KEYS},
        float(accept_length) if isinstance(accept_length, int | float) else None,
    )


_WARMUP_OUTPUT_LEN = 32


def run_benchmark(args: object) -> dict[str, Any]:
    """Run a benchmark, print its report and append its line to the output file. Returns the contents of that line,
    always with the details of each request. ``args``: BenchArgs, or any object with its attributes (argparse.Namespace,
    SimpleNamespace); missing attributes have their defaults. Raises ValueError, whose text names the remedy, if
    arguments, server or files are unusable."""
    bench = args if isinstance(args, BenchArgs) else BenchArgs.from_namespace(args)
    print(f"benchmark_args={bench}")
    raise_file_limit()
    return run_async(_run(bench))


def run_async(main: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over: the arguments it had, its replies and their figures."""

    args: BenchArgs
    load: LoadResult
    metrics: BenchmarkMetrics


async def _run(args: BenchArgs) -> dict[str, Any]:
    root = server_url(args.backend, args.base_url, args.host, args.port)
    async with open_session(args.headers) as session:
        model = await resolve_model(session, root, args)
        tokenizer = _tokenizer(args, model)
        check_template(args, tokenizer)
        client = Client(session, _endpoint(args, root, model.name))

        async def once(args: BenchArgs) -> Run:
            requests = build_requests(args, tokenizer)
            _print_sizes(requests)
            load = await _measure(session, client, args, requests, tokenizer)
            return Run(args, load, calculate_metrics(load, tokenizer, args.goodput_limits))

        run, trials = await _search(args, once) if args.find_max_goodput else (await once(args), [])
        args, load = run.args, run.load
        info, accept_length = await get_server_info(session, root, args)
        text = report.format_report(args, run.metrics, accept_length)
        result = report.result_dict(args, run.metrics, accept_length, info)
        if trials:
            text += "\n" + report.format_search(trials, args.find_max_goodput)
            result |= report.search_dict(trials, args.find_max_goodput)
        print(text, flush=True)
        if args.check_determinism:
            found = await check_determinism(client, load.outputs, args.check_determinism, args.seed)
            print(report.format_determinism(found), flush=True)
            result["determinism"] = asdict(found)
    details = report.result_details(load.outputs)
    report.append_line(report.output_path(args), result | details if args.output_details else result)
    if args.plot:
        title = " ".join(filter(None, [model.name, args.tag, args.backend, report.workload(args)]))
        write_plot(args.plot, title, text, charts(load, trials))
    return result | details


async def _search(args: BenchArgs, once: Callable[[BenchArgs], Awaitable[Run]]) -> tuple[Run, list[Trial]]:
    """The runs of --find-max-goodput, and the best of them: the last one if no rate met the limits."""
    runs: dict[int, Run] = {}

    async def probe(rate: float, seed: int) -> Trial:
        run = runs[seed] = await once(replace(args, request_rate=rate, seed=seed))
        goodput, fraction = run.metrics.request_goodput, run.metrics.good_fraction
        assert goodput is not None and fraction is not None, "--goodput is checked"
        trial = Trial(rate, seed, run.metrics.request_throughput, goodput, fraction)
        print(report.format_trial(trial), flush=True)
        return trial

    trials = await find_max_goodput(probe, args.find_max_goodput, args.seed)
    return runs[(best_of(trials, args.find_max_goodput) or trials[-1]).seed], trials


def _endpoint(args: BenchArgs, root: str, model: str) -> Endpoint:
    return Endpoint(
        backend=args.backend,
        root=root,
        model=model,
        stream=not args.disable_stream and backend_kind(args.backend) != "embeddings",
        ignore_eos=not args.disable_ignore_eos,
        return_logprob=args.return_logprob,
        extra_body=args.extra_body,
    )


def _tokenizer(args: BenchArgs, model: Model) -> Tokenizer | None:
    """The tokenizer; None if none is needed, since prompts are random token ids below --vocab-size."""
    ids_only = args.dataset_name == "random-ids" and backend_kind(args.backend) != "chat"
    if ids_only and args.vocab_size and not args.tokenizer and not args.apply_chat_template:
        return None
    return load_tokenizer(model.tokenizer, args.trust_remote_code)


def _print_sizes(requests: list[BenchRequest]) -> None:
    turns = [turn for request in requests for turn in request.turns]
    print(f"#Input tokens: {sum(turn.prompt_len for turn in turns)}")
    print(f"#Output tokens: {sum(turn.output_len for turn in turns)}", flush=True)


async def _measure(
    session: aiohttp.ClientSession,
    client: Client,
    args: BenchArgs,
    requests: list[BenchRequest],
    tokenizer: Tokenizer | None,
) -> LoadResult:
    """Warm up, flush the cache, start the profiler, and send the load."""
    root = client.endpoint.root
    style = prompt_style(args)
    await _warm_up(client, args, build_warm_up(args, tokenizer, requests), lambda: Conversation(style, tokenizer))
    if args.flush_cache:
        await post_control(session, root + "/flush_cache")
    if args.profile:
        await post_control(session, root + "/start_profile", profile_body(args))
        print("Profiler started", flush=True)
    plan = LoadPlan(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        ramp=ramp_of(args),
        max_concurrency=args.max_concurrency,
        seed=args.seed,
        # A request that is sampled at random can be repeated only with its seed.
        sampling_seed=args.seed if args.check_determinism and is_sampled(args.extra_body) else None,
        lora_names=args.lora_name,
        show_progress=not args.disable_tqdm,
    )
    load = await run_load(client, requests, plan, lambda: Conversation(style, tokenizer))
    if args.profile and args.profile_num_steps is None:  # with --profile-num-steps the server stops by itself
        await post_control(session, root + "/stop_profile")
        print("Profiler stopped", flush=True)
    return load


async def _warm_up(
    client: Client, args: BenchArgs, requests: Sequence[BenchRequest], new_conversation: Callable[[], Conversation]
) -> None:
    """Send the first turns of ``requests`` at once, with short answers. Raises ValueError if none succeeds."""
    if not requests:
        return
    print(f"Starting warmup with {len(requests)} sequences...", flush=True)
    lora = args.lora_name[0] if args.lora_name else None
    turns = [request.turns[0] for request in requests]
    calls = [
        Call(
            new_conversation().ask(turn.content, turn.images), min(turn.output_len, _WARMUP_OUTPUT_LEN), lora_name=lora
        )
        for turn in turns
    ]
    replies = await asyncio.gather(*map(client.send, calls))
    if not any(reply.success for reply in replies):
        raise ValueError(
            f"the warm-up failed ({replies[0].error}): check --backend, --base-url and the server, "
            "or pass --warmup-requests 0 to run without a warm-up"
        )
    print(f"Warmup completed with {len(requests)} sequences. Starting main benchmark run...", flush=True)


def exit_status(result: dict[str, Any]) -> int:
    """The exit status: 0 for success, 1 if every request failed, 3 if a replay differed or failed."""
    if result["completed"] == 0:
        return 1
    determinism = result.get("determinism")
    if determinism and (determinism["differ"] or determinism["failed"]):
        return 3
    return 0
