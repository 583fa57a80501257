"""One benchmark run from arguments to result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import aiohttp

from fenceline.benchmarking import report, server
from fenceline.benchmarking.args import BenchArgs
from fenceline.benchmarking.client import Client, open_session, raise_file_limit
from fenceline.benchmarking.conversation import Conversation, check_template, prompt_style
from fenceline.benchmarking.datasets import build_requests
from fenceline.benchmarking.determinism import check_determinism
from fenceline.benchmarking.endpoints import Endpoint, backend_kind, is_sampled, server_url
from fenceline.benchmarking.load import LoadPlan, LoadResult, run_load
from fenceline.benchmarking.metrics import calculate_metrics
from fenceline.benchmarking.records import BenchRequest, Call
from fenceline.benchmarking.tokenizer import Tokenizer, load_tokenizer

_WARMUP_OUTPUT_LEN = 32


def run_benchmark(args: object) -> dict[str, Any]:
    """Run a benchmark, print its report, append the JSONL line; return that line with per-request details.

    Args:
        args: BenchArgs, or any object with its attributes (argparse.Namespace, SimpleNamespace); what is missing
            takes its default.

    Raises:
        ValueError: arguments, server or files that cannot work, with the remedy.
    """
    bench = args if isinstance(args, BenchArgs) else BenchArgs.from_namespace(args)
    print(f"benchmark_args={bench}")
    raise_file_limit()
    return run_async(_run(bench))


def run_async(main: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run a coroutine on uvloop, or on asyncio's own loop where there is none."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def _run(args: BenchArgs) -> dict[str, Any]:
    root = server_url(args.backend, args.base_url, args.host, args.port)
    async with open_session(args.headers) as session:
        model = await server.resolve_model(session, root, args)
        tokenizer = _tokenizer(args, model)
        check_template(args, tokenizer)
        requests = build_requests(args, tokenizer)
        _print_sizes(requests)
        client = Client(session, _endpoint(args, root, model.name))
        load = await _measure(session, client, args, requests, tokenizer)
        info, accept_length = await server.get_server_info(session, root, args)
        metrics = calculate_metrics(load, tokenizer)
        print(report.format_report(args, metrics, accept_length), flush=True)
        result = report.result_dict(args, metrics, accept_length, info)
        if args.check_determinism:
            found = await check_determinism(client, load.outputs, args.check_determinism, args.seed)
            print(report.format_determinism(found), flush=True)
            result["determinism"] = found.as_dict()
    details = report.result_details(load.outputs)
    report.append_line(report.output_path(args), result | details if args.output_details else result)
    return result | details


def _endpoint(args: BenchArgs, root: str, model: str) -> Endpoint:
    return Endpoint(
        backend=args.backend,
        root=root,
        model=model,
        stream=not args.disable_stream,
        ignore_eos=not args.disable_ignore_eos,
        return_logprob=args.return_logprob,
        extra_body=args.extra_body,
    )


def _tokenizer(args: BenchArgs, model: server.Model) -> Tokenizer | None:
    """The tokenizer; none for random token ids below --vocab-size, which need none."""
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
    """Warm up, flush, profile and send the load."""
    root = client.endpoint.root
    style = prompt_style(args)
    await _warm_up(client, args, requests[0], Conversation(style, tokenizer))
    if args.flush_cache:
        await server.post_control(session, root + "/flush_cache")
    if args.profile:
        await server.post_control(session, root + "/start_profile", server.profile_body(args))
        print("Profiler started", flush=True)
    plan = LoadPlan(
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        seed=args.seed,
        # A replay can only repeat a random draw whose seed it knows.
        sampling_seed=args.seed if args.check_determinism and is_sampled(args.extra_body) else None,
        lora_names=args.lora_name,
        show_progress=not args.disable_tqdm,
    )
    load = await run_load(client, requests, plan, lambda: Conversation(style, tokenizer))
    if args.profile and args.profile_num_steps is None:  # with a number of steps the server stops by itself
        await server.post_control(session, root + "/stop_profile")
        print("Profiler stopped", flush=True)
    return load


async def _warm_up(
    client: Client, args: BenchArgs, request: BenchRequest, conversation: Conversation
) -> None:
    """Send the first prompt --warmup-requests times with a short answer.

    Raises:
        ValueError: none of them succeeds.
    """
    if args.warmup_requests == 0:
        return
    print(f"Starting warmup with {args.warmup_requests} sequences...", flush=True)
    turn = request.turns[0]
    lora = args.lora_name[0] if args.lora_name else None
    call = Call(conversation.ask(turn.content), min(turn.output_len, _WARMUP_OUTPUT_LEN), lora_name=lora)
    replies = await asyncio.gather(*(client.send(call) for _ in range(args.warmup_requests)))
    if not any(reply.success for reply in replies):
        raise ValueError(
            f"the warm-up failed ({replies[0].error}): check --backend, --base-url and the server, "
            "or pass --warmup-requests 0 to go on regardless"
        )
    print(
        f"Warmup completed with {args.warmup_requests} sequences. Starting main benchmark run...", flush=True
    )


def exit_status(result: dict[str, Any]) -> int:
    """0 fine; 1 every request failed; 3 a replay differed or failed. (2 is argparse's.)"""
    if result["completed"] == 0:
        return 1
    determinism = result.get("determinism")
    if determinism and (determinism["differ"] or determinism["failed"]):
        return 3
    return 0
